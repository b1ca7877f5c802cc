"""Experts on ranks of their own inside a model on all ranks, against one process that has all experts."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import (
    ConfigError,
    DesyncError,
    HandleOptions,
    MixedPrecisionPolicy,
    accelerate_optimizer,
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    get_total_norm,
    load_checkpoint,
    load_full_state_dict,
    no_sync,
    register_comm_hook,
    replicate,
    save_checkpoint,
    step_in_backward,
    unannotate,
)
from tests.experts import Expert, Net, batch_of, local_net, mesh_of, reference_net, whole_batch
from tests.models import random_input
from tests.parity import full_params
from tests.world import on_ranks, run_threads

LR = 0.1
TOLERANCE = 1e-6
STYLES = ["list", "each", "bank", "policy", "parts"]
# By the ranks that have the same experts, and those among which tokens travel.
SHAPES = [(1, 2), (2, 1), (1, 3), (3, 1), (3, 2), (1, 1)]

Tensors = dict[str, torch.Tensor]


def experts_of(net: Net) -> Iterator[Any]:
    for mixture in net.mixtures():
        yield from mixture.experts.values()


def annotate_experts(net: Net, style: str, **options: Any) -> None:
    """Shard the experts of each block, and divide their gradients by the number of all ranks."""
    for mixture in net.mixtures():
        experts = list(mixture.experts.values())
        sharded: list[Any] = experts
        if style == "list":
            fully_shard(experts, **options)
        elif style == "each":
            for expert in experts:
                fully_shard(expert, **options)
        elif style == "bank":
            fully_shard(mixture.experts, **options)
            sharded = [mixture.experts]
        elif style == "policy":
            fully_shard(mixture.experts, policy={Expert}, **options)
        else:
            fully_shard(mixture.experts, policy={nn.Linear}, **options)
            sharded = [part for expert in experts for part in expert.children()]
        for one in sharded:
            one.set_gradient_divide_factor(dist.get_world_size())


def annotate(net: Net, mesh: Any, style: str = "each", **options: Any) -> None:
    """Shard experts over the ranks that have them, blocks and the rest over all."""
    # On all ranks, experts are what any other module is, unless told.
    follows = True if mesh["ep"].size() == 1 else None
    if next(experts_of(net), None) is not None:
        chosen = replace(options.get("options", HandleOptions()), follows_parent=follows)
        annotate_experts(net, style, mesh=mesh["edp"], **{**options, "options": chosen})
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)


def step_with(net: nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
    net(*batch).square().mean().backward()


def train(
    shape: tuple[int, int],
    experts: int,
    annotating: Callable[[Net, Any], None] = annotate,
    *,
    calls_all: bool = False,
    in_backward: bool = False,
    steps: int = 4,
) -> Tensors:
    mesh = mesh_of(shape)
    net = local_net(experts, mesh, calls_all=calls_all)
    annotating(net, mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    if in_backward:
        step_in_backward(optimizer)
    for step in range(steps):
        step_with(net, batch_of(experts, step, dist.get_rank()))
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return full_params(net)


@functools.cache
def reference(experts: int, world_size: int, *, calls_all: bool = False, steps: int = 4) -> Tensors:
    net = reference_net(experts, calls_all=calls_all)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    for step in range(steps):
        step_with(net, whole_batch(experts, step, world_size))
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: param.detach() for fqn, param in net.named_parameters()}


def assert_equal(found: list[Tensors], expected: Tensors, tolerance: float = TOLERANCE) -> None:
    assert set().union(*found) == set(expected)
    for params in found:
        for fqn, value in params.items():
            torch.testing.assert_close(value, expected[fqn], rtol=tolerance, atol=tolerance, msg=fqn)


# Numbers


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_may_have_any_number_of_experts(shape: tuple[int, int]) -> None:
    world_size = shape[0] * shape[1]
    for experts, style in ((1, "each"), (4, "list")):
        found = run_threads(train, world_size, shape, experts, functools.partial(annotate, style=style))
        assert_equal(found, reference(experts, world_size))


@pytest.mark.parametrize(("shape", "experts", "style"), [((1, 2), 1, "each"), ((3, 1), 3, "list"), ((3, 2), 3, "each")])
def test_an_optimizer_steps_experts_inside_backward(shape: tuple[int, int], experts: int, style: str) -> None:
    world_size = shape[0] * shape[1]
    annotating = functools.partial(annotate, style=style)
    found = run_threads(train, world_size, shape, experts, annotating, in_backward=True)
    assert_equal(found, reference(experts, world_size))


@on_ranks(4)
def test_ranks_without_a_difference_of_their_own_are_told_too() -> None:
    mesh = mesh_of((2, 2))
    net = local_net(4, mesh)
    annotate(net, mesh)
    make = torch.optim.Adam if dist.get_rank() == 3 else torch.optim.SGD
    with pytest.raises(DesyncError, match="the ranks let different optimizers step inside backward"):
        step_in_backward(make(net.parameters(), lr=LR))


def annotate_with_secondary_shards(net: Net, mesh: Any) -> None:
    annotate(net, mesh, reshard_after_forward=2)


def test_ranks_that_call_other_experts_keep_secondary_shards_alike() -> None:
    assert_equal(run_threads(train, 4, (4, 1), 4, annotate_with_secondary_shards), reference(4, 4))


class Recomputed(Net):
    """Runs its blocks without gradients first, and again in backward."""

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        for block, own in zip(self.blocks, routes.unbind(1), strict=True):
            x = torch_checkpoint(block, x, own, use_reentrant=True)
        return self.head(x)


def annotate_recomputed(net: Net, mesh: Any, unused: str) -> None:
    net.__class__ = Recomputed
    annotate(net, mesh, options=HandleOptions(unused_gradients=unused))


@pytest.mark.parametrize("unused", ["none", "zero"])
def test_experts_of_which_only_backward_knows_get_their_gradients(unused: str) -> None:
    annotating = functools.partial(annotate_recomputed, unused=unused)
    calls_all = unused == "zero"  # In one process there are zeros of what was called only.
    found = run_threads(train, 4, (2, 2), 4, annotating, calls_all=calls_all)
    assert_equal(found, reference(4, 4, calls_all=calls_all))


def annotate_hybrid(net: Net, mesh: Any, **options: Any) -> None:
    """Keep copies of shards of experts and of all else."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "ep", "shard"))
    annotate_experts(net, "each", mesh=mesh["copies", "shard"], **options)
    whole = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    for block in net.blocks:
        fully_shard(block, mesh=whole, **options)
    fully_shard(net, mesh=whole, **options)


def unshard_ahead(net: Net, mesh: Any, **options: Any) -> None:
    """Let the first block unshard the experts of the second, and wait for them in an order of this rank's own."""
    annotate_hybrid(net, mesh, **options)
    first, second = net.blocks
    first.set_modules_to_forward_prefetch([])

    def unshard(*_: Any) -> None:
        pending = [expert.unshard(async_op=True) for expert in second.mixture.experts.values()]
        for one in pending[:: 1 if dist.get_rank() % 2 else -1]:
            one.wait()

    first.own.register_forward_pre_hook(unshard)


# One group has all gathers of what is unsharded by hand, which would otherwise be told apart by name.
@pytest.mark.parametrize(
    ("annotating", "options"),
    [
        (annotate_hybrid, {"strategy": "HYBRID_SHARD"}),
        (unshard_ahead, {"strategy": "HYBRID_SHARD", "options": HandleOptions(transport="process_group")}),
    ],
)
@on_ranks(8)
def test_experts_may_have_copies_of_shards_and_be_unsharded_by_hand_in_any_order(
    annotating: Callable[..., None], options: dict[str, Any]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "ep", "shard"))
    net, plain = local_net(4, mesh), reference_net(4)
    annotating(net, mesh, **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=LR) for one in (net, plain)]
    for step in range(3):
        step_with(net, batch_of(4, step, dist.get_rank()))
        step_with(plain, whole_batch(4, step, 8))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        torch.testing.assert_close(clip_grad_norm_(net.parameters(), 0.05), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for fqn, value in full_params(net).items():
        torch.testing.assert_close(value, plain.get_parameter(fqn).detach(), rtol=TOLERANCE, atol=TOLERANCE)


def annotate_copied(net: Net, mesh: Any) -> None:
    """Keep experts whole on each of their ranks, and average by all-reduce."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("edp", "ep", "one"))
    annotate_experts(net, "each", mesh=mesh["edp", "one"])
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)


def test_whole_copies_of_experts_need_not_be_called_on_each_rank() -> None:
    assert_equal(run_threads(train, 4, (2, 2), 4, annotate_copied), reference(4, 4))


class WithBuffer(nn.Module):
    """An expert with a buffer of its own, which counts its calls."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.expert = expert
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.expert(x)


@pytest.mark.parametrize(
    ("options", "has_buffers"),
    [({}, True), ({"find_unused_parameters": True}, False), ({"gradient_as_bucket_view": False}, True)],
)
@on_ranks(4)
def test_replicated_experts_follow_a_sharded_root_whether_they_are_called_or_not(
    options: dict[str, Any], *, has_buffers: bool
) -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    net, plain = local_net(4, mesh), reference_net(4)
    for one in (net, plain) if has_buffers else ():
        for mixture in one.mixtures():
            for name, expert in list(mixture.experts.items()):
                mixture.experts[name] = WithBuffer(expert)
    for expert in experts_of(net):
        replicate(expert, mesh=mesh["edp"], **options)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizers = [torch.optim.SGD(one.parameters(), lr=LR, momentum=0.9) for one in (net, plain)]
    for step in range(4):
        for model, batch in ((net, functools.partial(batch_of, 4)), (plain, functools.partial(whole_batch, 4))):
            model.zero_grad()
            last = rank if model is net else 4
            if step == 2:
                with no_sync(net) if model is net else nullcontext():
                    step_with(model, batch(9, last))
            step_with(model, batch(step, last))
        for param in (param for expert in experts_of(net) for param in expert.parameters()):
            if param.grad is not None:
                param.grad /= mesh["ep"].size()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        torch.testing.assert_close(clip_grad_norm_(net.parameters(), 0.05), norm)
        for fqn, param in net.named_parameters():
            expected = plain.get_parameter(fqn).grad
            assert (param.grad is None) is (expected is None), fqn
            if expected is not None:
                torch.testing.assert_close(param.grad if is_expert(fqn) else param.grad.full_tensor(), expected)
        for optimizer in optimizers:
            optimizer.step()
    unannotate(net)
    for fqn, param in net.named_parameters():
        torch.testing.assert_close(param, plain.get_parameter(fqn))


@on_ranks(4)
def test_replicated_experts_average_by_themselves_once_the_root_is_undone() -> None:
    mesh = mesh_of((2, 2))
    net = local_net(4, mesh)
    for expert in experts_of(net):
        replicate(expert, mesh=mesh["edp"])
    fully_shard(net)
    step_with(net, batch_of(4, 0, dist.get_rank()))
    unannotate(net, recurse=False)
    for expert in experts_of(net):
        expert.zero_grad()
        expert(torch.ones(1, 4) * dist.get_rank()).sum().backward()
        for param in expert.parameters():
            grads = [torch.empty_like(param) for _ in range(2)]
            dist.all_gather(grads, param.grad, group=mesh.get_group("edp"))
            torch.testing.assert_close(*grads)


@on_ranks(4)
def test_gradients_of_experts_are_divided_by_the_number_of_their_own_ranks_unless_told() -> None:
    mesh = mesh_of((2, 2))
    net, plain = local_net(4, mesh), reference_net(4)
    for expert in experts_of(net):
        fully_shard(expert, mesh=mesh["edp"])
    for block in net.blocks:
        fully_shard(block)
    step_with(fully_shard(net), batch_of(4, 0, dist.get_rank()))
    step_with(plain, whole_batch(4, 0, 4))
    for fqn, param in net.named_parameters():
        expected = plain.get_parameter(fqn).grad
        if expected is not None:
            factor = mesh["ep"].size() if ".experts." in fqn else 1
            torch.testing.assert_close(param.grad.full_tensor(), factor * expected)


@on_ranks(4, unused=["none", "zero"])
def test_an_expert_without_tokens_on_any_rank_has_no_gradient_or_zeros(unused: str) -> None:
    mesh = mesh_of((2, 2))
    net = local_net(4, mesh)
    annotate(net, mesh, options=HandleOptions(unused_gradients=unused))
    x, routes = batch_of(4, 0, dist.get_rank())
    step_with(net, (x, torch.zeros_like(routes)))
    for fqn, param in net.named_parameters():
        if is_expert(fqn):
            assert (param.grad is not None) == (unused == "zero" or ".experts.0." in fqn)


# Random cases


class Case:
    """One way to train."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.shape = rng.choice([(2, 2), (2, 2), (1, 2), (2, 1), (1, 3), (3, 2)])
        self.world_size = self.shape[0] * self.shape[1]
        self.experts = rng.randint(1, 5)
        self.calls_all = rng.random() < 0.2
        self.follows = True if self.shape[1] == 1 else rng.choice([None, True])
        self.style = rng.choice(STYLES)
        self.outer = rng.choice(["blocks", "blocks", "policy", "root", "own parts"])
        self.checkpoints = rng.random() < 0.3
        self.micro_batches = rng.choice([1, 1, 2, 3])
        self.defers = rng.random() < 0.5
        self.accelerates = rng.random() < 0.3
        self.max_norm = rng.choice([0.02, 1e9])
        self.evaluates = rng.random() < 0.3
        self.keeps = rng.random() < 0.3
        self.options: dict[str, Any] = {
            "reshard_after_forward": rng.choice([None, True, False]),
            "mp_policy": MixedPrecisionPolicy(param_dtype=rng.choice([None, None, torch.bfloat16])),
            "options": HandleOptions(
                unused_gradients=rng.choice(["none", "none", "zero"]), transport=rng.choice(["auto", "process_group"])
            ),
        }

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.options["mp_policy"].param_dtype is None else 5e-2

    def annotate(self, net: Net, mesh: Any) -> None:
        if next(experts_of(net), None) is not None:
            options = {**self.options, "options": replace(self.options["options"], follows_parent=self.follows)}
            annotate_experts(net, self.style, mesh=mesh["edp"], **options)
        for block in net.blocks:
            if self.checkpoints:
                checkpoint(block)
            if self.outer == "own parts":
                fully_shard(block.own, **self.options)
            if self.outer in ("blocks", "own parts"):
                fully_shard(block, **self.options)
        fully_shard(net, policy={type(net.blocks[0])} if self.outer == "policy" else None, **self.options)
        if self.keeps:
            net.set_reshard_after_backward(False)

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch_of(self.experts, 10 * self.seed + step, rank)

    def batch_of_all(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return whole_batch(self.experts, 10 * self.seed + step, self.world_size)


def train_case(seed: int) -> None:
    case = Case(seed)
    mesh, rank = mesh_of(case.shape), dist.get_rank()
    net, plain = local_net(case.experts, mesh, calls_all=case.calls_all), reference_net(case.experts)
    case.annotate(net, mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    if case.accelerates:
        accelerate_optimizer(optimizer, net)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        for micro in range(case.micro_batches):
            number = 10 * step + micro
            is_last = micro == case.micro_batches - 1
            with nullcontext() if is_last or not case.defers else no_sync(net):
                step_with(net, case.batch(number, rank))
            step_with(plain, case.batch_of_all(number))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), case.max_norm)
        found = clip_grad_norm_(optimizer if case.accelerates else net.parameters(), case.max_norm)
        torch.testing.assert_close(found.float(), norm.float(), rtol=case.tolerance, atol=case.tolerance)
        optimizer.step()
        plain_optimizer.step()
        if case.evaluates:
            with torch.no_grad():
                for again in range(2):
                    out = net(*case.batch(500 + step + again, rank)).float()
                    expected = plain(*case.batch(500 + step + again, rank))
                    torch.testing.assert_close(out, expected, rtol=case.tolerance, atol=case.tolerance)
    for fqn, value in full_params(net).items():
        expected = plain.get_parameter(fqn).detach()
        torch.testing.assert_close(value, expected, rtol=case.tolerance, atol=case.tolerance, msg=fqn)


# Each style twice, and what is kept unsharded over evaluations and backwards.
@pytest.mark.parametrize("seed", range(10))
def test_random_ways_to_train_experts_equal_one_process(seed: int) -> None:
    run_threads(train_case, Case(seed).world_size, seed)


# Clipping


@on_ranks(4, optimizing=[False, True])
def test_the_norm_is_that_of_all_experts_of_all_ranks(*, optimizing: bool) -> None:
    mesh = mesh_of((2, 2))
    net, plain = local_net(4, mesh), reference_net(4)
    annotate(net, mesh)
    step_with(net, batch_of(4, 0, dist.get_rank()))
    step_with(plain, whole_batch(4, 0, 4))
    expected = {fqn: param.grad for fqn, param in plain.named_parameters() if param.grad is not None}
    grads = [param.grad for param in net.parameters() if param.grad is not None]
    for order in (2.0, 1.0, float("inf")):
        total = torch.nn.utils.get_total_norm(list(expected.values()), order)
        torch.testing.assert_close(get_total_norm(grads, order), total)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    if optimizing:
        accelerate_optimizer(optimizer, net)
    before = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.testing.assert_close(clip_grad_norm_(optimizer if optimizing else net.parameters(), 0.05), before)
    for fqn, param in net.named_parameters():
        if fqn in expected:
            torch.testing.assert_close(param.grad.full_tensor(), expected[fqn])


@on_ranks(4)
def test_experts_on_the_shard_dim_of_a_hybrid_mesh_count_once_for_each_copy() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    whole = fully_shard(nn.Linear(3, 3), mesh=mesh)
    part = fully_shard(nn.Linear(3, 3), mesh=mesh["shard"])
    total = 0.0
    for model, gradient in ((whole, 1.0), (part, 2.0 + mesh.get_local_rank("replicate"))):
        for param in model.parameters():
            param.grad = torch.ones_like(param) * gradient
        total += 12 * gradient**2
    other = 12 * (5.0 - mesh.get_local_rank("replicate") - 2.0 + 0.0) ** 2
    found = clip_grad_norm_([*whole.parameters(), *part.parameters()], 1e9)
    assert found.item() == pytest.approx((total + other) ** 0.5)


@on_ranks(8, kind=["hybrid", "replicated", "sharded"])
def test_copies_of_an_expert_count_once_in_norms_of_every_order(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ep", "copies", "shards"))
    ours = mesh["copies", "shards"]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if kind == "replicated":
        replicate(model[1], mesh=ours._flatten("data"))
    else:
        fully_shard(model[1], mesh=ours if kind == "hybrid" else ours._flatten("data"))
    fully_shard(model)
    for param in model[0].parameters():
        param.grad = torch.ones_like(param)
    for param in model[1].parameters():
        param.grad = torch.full_like(param, 2.0 + mesh.get_local_rank("ep"))
    plain = [torch.full((12,), value) for value in (1.0, 2.0, 3.0)]
    for order in (0.5, 1.0, 2.0, 3.0, float("inf")):
        expected = nn.utils.get_total_norm(plain, order)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e9, order), expected)


@on_ranks(4, rest=["hybrid", "replicated", "sharded"])
def test_a_rank_without_experts_takes_part_in_the_norm_of_those_of_others(rest: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict())
    if mesh.get_local_rank("replicate") == 0:
        model[1]["0"] = fully_shard(nn.Linear(3, 3), mesh=mesh["shard"])
    if rest == "replicated":
        replicate(model)
    else:
        fully_shard(model, mesh=mesh if rest == "hybrid" else None)
        model[0].requires_grad_(True)
        with torch.no_grad():
            fully_shard.state(model).lazy_init()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    expected = pytest.approx(24**0.5)
    assert get_total_norm([param.grad for param in model.parameters()]).item() == expected or rest == "replicated"
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    assert clip_grad_norm_(optimizer, 1e9).item() == expected
    if rest != "replicated":
        accelerate_optimizer(optimizer, model)
    assert clip_grad_norm_(optimizer, 1e9).item() == expected


class Powers(nn.Module):
    """Adds half the square of a weight, whose gradient is that weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_input(seed, 6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.weight.square().sum() / 2
        return x + (added.full_tensor() if isinstance(added, DTensor) else added)

    def split(self, mesh: DeviceMesh) -> None:
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(0)]))


@pytest.mark.parametrize(
    ("sizes", "rest", "world_size"),
    [((2, 2, 2), "split", 8), ((1, 2, 2), "on data ranks", 4), ((2, 2, 2), "on all ranks", 8)],
)
@on_ranks()
def test_split_experts_count_on_each_rank_that_has_a_part(sizes: tuple[int, int, int], rest: str) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("edp", "ep", "tp"))
    ranks, rank = mesh["ep"].size(), mesh.get_local_rank("ep")
    experts = [Powers(10 + expert) for expert in range(2 * ranks)]
    model = nn.Sequential(Powers(0), *experts[2 * rank : 2 * rank + 2])
    before = nn.utils.get_total_norm([one.weight for one in (model[0], *experts)])
    for expert in model[1:]:
        expert.split(mesh["tp"])
        fully_shard(expert, mesh=mesh["edp"])
    if rest == "split":
        model[0].split(mesh["tp"])
    fully_shard(model, mesh=None if rest == "on all ranks" else mesh["edp", "ep"]._flatten("dp"))
    model(torch.zeros(())).backward()
    torch.testing.assert_close(get_total_norm([param.grad for param in model.parameters()]), before)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e9), before)


# Hooks


def reduce_in_group_of_size(groups: dict[int, Any], grad: torch.Tensor, output: torch.Tensor) -> None:
    group = groups[grad.numel() // output.numel()]
    dist.all_reduce(grad.div_(dist.get_world_size()), group=group)
    output.copy_(grad.split(output.numel())[group.rank()])


@on_ranks(4)
def test_a_hook_reduces_different_experts() -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    net, plain = local_net(4, mesh), reference_net(4)
    for expert in experts_of(net):
        fully_shard(expert, mesh=mesh["edp"])
    fully_shard(net)
    with torch.no_grad():
        net(*batch_of(4, 0, rank))  # From here on experts go by their names in the whole.
    groups = {2: mesh.get_group("edp"), 4: dist.group.WORLD}
    register_comm_hook(net, groups, reduce_in_group_of_size)
    step_with(net, batch_of(4, 0, rank))
    step_with(plain, whole_batch(4, 0, 4))
    for fqn, param in net.named_parameters():
        expected = plain.get_parameter(fqn).grad
        assert (param.grad is None) is (expected is None)
        if expected is not None:
            torch.testing.assert_close(param.grad.full_tensor(), expected)


# Undoing


@on_ranks(4, style=["each", "bank"])
def test_annotations_are_undone_on_ranks_with_different_experts(style: str) -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    net, plain = local_net(4, mesh), reference_net(4)
    annotate(net, mesh, style)
    step_with(net, batch_of(4, 0, rank))
    step_with(plain, whole_batch(4, 0, 4))
    unannotate(net)
    for fqn, param in net.named_parameters():
        expected = plain.get_parameter(fqn)
        assert type(param) is nn.Parameter
        torch.testing.assert_close(param, expected)
        torch.testing.assert_close(param.grad, expected.grad)


@on_ranks(4)
def test_experts_that_cannot_be_undone_alike_are_an_error_on_every_rank() -> None:
    mesh = mesh_of((2, 2))
    net = local_net(4, mesh)
    annotate(net, mesh)
    if dist.get_rank() == 0:
        for param in next(experts_of(net)).parameters():
            param.grad = torch.ones_like(param)
    with pytest.raises(DesyncError, match="unannotate on different parameters or gradients"):
        unannotate(net)


# Checkpoints and full values


def is_expert(fqn: str) -> bool:
    return ".experts." in fqn


def is_other(fqn: str) -> bool:
    return not is_expert(fqn)


@on_ranks(4)
def test_full_values_come_from_each_set_of_ranks_by_name() -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    net, values = local_net(4, mesh), reference_net(4).state_dict()
    annotate(net, mesh)
    with pytest.raises(ConfigError, match="annotated on different ranks"):
        full_state_dict(net)
    others, experts = full_state_dict(net, names=is_other), full_state_dict(net, names=is_expert)
    # Those of all ranks are on the first one, those of each set of ranks on the first of the set.
    assert set(others) == (set(filter(is_other, values)) if rank == 0 else set())
    assert set(experts) == ({fqn for fqn, _ in net.named_parameters() if is_expert(fqn)} if rank < 2 else set())
    assert all(torch.equal(value, values[fqn]) for fqn, value in (others | experts).items())
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    load_full_state_dict(net, others, names=is_other)
    load_full_state_dict(net, experts, names=is_expert)
    assert all(torch.equal(value, values[fqn]) for fqn, value in full_params(net).items())


def continue_from(folder: Path, shape: tuple[int, int], steps: range) -> Tensors:
    mesh = mesh_of(shape)
    net = local_net(4, mesh)
    annotate(net, mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    if steps.start:
        assert load_checkpoint(folder, net, optimizer).step == steps.start
    for step in steps:
        # Every rank goes through the same batches, so that any number of ranks takes the same steps.
        for number in range(2):
            step_with(net, batch_of(4, step, number))
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, steps.stop, net, optimizer)
    return full_params(net)


def test_a_run_goes_on_with_experts_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    whole = run_threads(continue_from, 4, tmp_path / "whole", (2, 2), range(4))
    run_threads(continue_from, 4, tmp_path / "parts", (2, 2), range(2))
    parts = run_threads(continue_from, 3, tmp_path / "parts", (1, 3), range(2, 4))
    assert_equal(parts, functools.reduce(lambda all_, own: all_ | own, whole))


@on_ranks(4)
def test_experts_of_equal_names_are_refused_by_checkpoints(tmp_path: Path) -> None:
    mesh = mesh_of((2, 2))
    net = local_net(4, mesh)
    for mixture in net.mixtures():
        for index, name in enumerate(list(mixture.experts)):
            mixture.experts[f"own{index}"] = mixture.experts.pop(name)
    annotate(net, mesh)
    with pytest.raises(ConfigError, match=r"ranks \[0, 2\] and \[1, 3\] have parameters of their own") as caught:
        save_checkpoint(tmp_path / "run", 0, net)
    text = str(caught.value)
    assert "blocks.0.mixture.experts.own0.up.weight" in text and "fix: name experts by their number" in text


@on_ranks(4)
def test_experts_take_the_values_of_the_first_of_their_own_ranks() -> None:
    mesh = mesh_of((2, 2))
    net, expected = local_net(4, mesh), reference_net(4).state_dict()
    with torch.no_grad():
        for param in net.parameters():
            param += dist.get_rank()
    for expert in experts_of(net):
        fully_shard(expert, mesh=mesh["edp"], sync_module_states=True)
    for block in net.blocks:
        fully_shard(block, sync_module_states=True)
    fully_shard(net, sync_module_states=True)
    for fqn, value in full_params(net).items():
        torch.testing.assert_close(value, expected[fqn] + (dist.get_rank() % 2 if is_expert(fqn) else 0))


# Errors


@on_ranks(4)
def test_plans_of_experts_that_differ_are_an_error_on_every_rank() -> None:
    mesh = mesh_of((2, 2))
    net = local_net(4, mesh)
    options = HandleOptions(unused_gradients="zero" if dist.get_rank() == 3 else "none")
    for expert in experts_of(net):
        fully_shard(expert, mesh=mesh["edp"], options=options)
    for block in net.blocks:
        fully_shard(block)
    with pytest.raises(DesyncError, match="the ranks annotated different plans"):
        step_with(fully_shard(net), batch_of(4, 0, dist.get_rank()))


@on_ranks(4, inner=[fully_shard, replicate], outer=[fully_shard, replicate])
def test_an_annotation_around_another_has_all_of_its_ranks(inner: Any, outer: Any) -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner(model[0], mesh=mesh["edp"])
    with pytest.raises(ConfigError) as caught:
        outer(model, mesh=mesh["ep"])
    text = str(caught.value)
    own, around = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    assert f"annotated on ranks {own}, and this one, around it, on {around} only" in text
    assert f"rank {rank}, module '0' (Linear)" in text and "fix: annotate the inner module" in text
