"""An optimizer that steps inside backward: the same parameters as one that steps after it, and few gradients alive."""

import copy
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as reentrant

from composable import (
    ComposableError,
    DesyncError,
    MixedPrecisionPolicy,
    UsageError,
    accelerate_optimizer,
    allreduce_hook,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reduce_gradients,
    register_comm_hook,
    replicate,
    step_in_backward,
    unannotate,
)
from composable.comm_hooks import DefaultState
from tests.live_bytes import LiveBytes
from tests.models import BLOCK_CLASSES, DIM, Block, MLPBlock, make_model, random_input, seeded
from tests.parity import assert_equal_params, full_params
from tests.programs import Build, Twins, loss_at
from tests.programs import train as train_twins
from tests.test_replicate_graphs import delay, looped, wide
from tests.world import on_ranks, run_threads

ANNOTATIONS = ("fully_shard", "replicate", "mixed")
BF16, FP32 = torch.bfloat16, torch.float32
# What gradients are computed in, travel in and rest in, in each way that the three can differ.
POLICIES = {
    "low": MixedPrecisionPolicy(BF16),
    "low, averaged in full": MixedPrecisionPolicy(BF16, FP32),
    "averaged in low": MixedPrecisionPolicy(None, BF16),
    "low, gradients too": MixedPrecisionPolicy(BF16, keep_low_precision_grads=True),
    "norms in full": MixedPrecisionPolicy(BF16, skipped_module_classes=(nn.LayerNorm,)),
}
Make = Callable[[Any], torch.optim.Optimizer]


def annotated(model: nn.Module, api: str) -> nn.Module:
    """Annotate with an API, or by ``replicate`` with the policy of that name."""
    if api == "replicate" or api in POLICIES:
        return replicate(model, bucket_cap_mb=0.001, mp_policy=POLICIES.get(api))
    if api == "mixed":
        replicate(next(module for module in model.modules() if isinstance(module, MLPBlock | Block)))
    picked = BLOCK_CLASSES & {type(module) for module in model.modules()}
    mesh = None
    if api == "hybrid":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, policy=set(picked) or None, mesh=mesh)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, eps=1e-3)


def foreach(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, eps=1e-3, foreach=True)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, eps=1e-3, fused=True)


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.05)


MAKES: dict[str, Make] = {
    "SGD": sgd,
    "AdamW": adam,
    "foreach AdamW": foreach,
    "fused Adam": fused,
    "Adafactor": adafactor,
}


def backward(model: nn.Module, number: int) -> None:
    """Run forward and backward on a batch of this rank."""
    loss_at(model, number, dist.get_rank()).backward()


def step_and_drop(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def all_equal(runs: Iterable[Any], expected: Any, *, tolerance: float) -> None:
    for params in runs:
        assert_equal_params(params, expected, tolerance=tolerance)


def train(name: str, api: str, make: Make, *, steps: int = 4, syncs: tuple[bool, ...] = (True,)) -> Any:
    """Train with an optimizer that steps in backward; ``syncs``: of each micro-batch, whether backward synchronises."""
    model = annotated(make_model(name), api)
    step_in_backward(make(model.parameters()))
    for number in range(steps):
        syncs_now = syncs[number % len(syncs)]
        with nullcontext() if syncs_now else no_sync(model):
            backward(model, number)
        assert not syncs_now or all(param.grad is None for param in model.parameters())
    return full_params(model)


def stepped_twins(build: Build, api: str | Callable[[Any], object], make: Make = sgd) -> Twins:
    """Return twins of which the one on ranks is stepped inside backward."""
    twins = Twins(build, api if callable(api) else lambda model: annotated(model, api), make=make)
    step_in_backward(twins.optimizers[0])
    return twins


# Numbers


@on_ranks(name=MAKES, api=ANNOTATIONS, world_size=[2, 1, 3])
def test_parameters_are_those_of_an_optimizer_that_steps_after_backward(name: str, api: str) -> None:
    train_twins(stepped_twins("mlp", api, MAKES[name]), 4, steps_inside=True, tolerance=1e-5)


@on_ranks(4, make=[foreach, adafactor])
def test_copies_of_shards_are_stepped_alike(make: Make) -> None:
    train_twins(stepped_twins("mlp", "hybrid", make), 4, steps_inside=True, tolerance=1e-5)


@on_ranks(2, is_first=[True, False])
def test_a_forward_that_runs_again_is_no_graph_of_backward(is_first: bool) -> None:
    """Train a sharded module inside a checkpointed one: backward begins with a forward that runs again."""

    def annotate(model: Any) -> None:
        if is_first:
            checkpoint(model)
        fully_shard(model[0], policy={nn.Linear})
        if not is_first:
            checkpoint(model)

    twins = Twins(lambda: nn.Sequential(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), nn.Linear(DIM, DIM)), annotate)
    twins.optimizers = [sgd(one[0].parameters()) for one in twins]
    step_in_backward(twins.optimizers[0])
    # Each rank has the same batch: nobody averages the layer that is not annotated.
    twins.backward(loss=lambda model, number, rank: loss_at(model, 0, 0))
    twins.optimizers[1].step()
    twins.check()


class _Twice(nn.Module):
    """A block that runs twice, and whose backward a reentrant checkpoint runs inside of that of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = reentrant(self.block, self.first(x), use_reentrant=True)
        result: torch.Tensor = reentrant(self.block, x, use_reentrant=True)
        return result


@on_ranks(2)
def test_no_step_in_a_backward_inside_of_another_one_which_runs_a_forward_again_later() -> None:
    model = _Twice()
    replicate(model.block, static_graph=True)
    with step_in_backward(sgd(model.block.parameters())):
        before = full_params(model)["block.weight"]
        with pytest.raises(UsageError, match="a backward that runs inside of another one"):
            model(torch.ones(2, 4)).square().mean().backward()
        assert torch.equal(full_params(model)["block.weight"], before)
    model.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()


@on_ranks(2)
def test_a_sharded_block_is_stepped_when_all_backwards_of_its_checkpoints_have_run() -> None:
    models = [seeded(_Twice, 0) for _ in range(2)]
    optimizers = [sgd(fully_shard(model.block).parameters()) for model in models]
    step_in_backward(optimizers[0])
    for step in range(3):
        for model in models:
            model(torch.ones(2, 4) * (step + dist.get_rank())).square().mean().backward()
        step_and_drop(optimizers[1])
    assert_equal_params(full_params(models[0]), full_params(models[1]), tolerance=0)


def step_both_ways(name: str, api: str, make: Make, syncs: tuple[bool, ...]) -> None:
    """Train in both ways, and compare to the bit."""
    steps = 2 * len(syncs)
    stepped = train(name, api, make, steps=steps, syncs=syncs)
    model = annotated(make_model(name), api)
    optimizer = make(model.parameters())
    for number in range(steps):
        syncs_now = syncs[number % len(syncs)]
        with nullcontext() if syncs_now else no_sync(model):
            backward(model, number)
        if syncs_now:
            step_and_drop(optimizer)
    for fqn, param in full_params(model).items():
        assert torch.equal(stepped[fqn], param), fqn


NAMES = (
    "mlp",
    "gpt",
    "tied_across",
    "tied_within",
    "uneven",
    "called_twice",
    "mixed_dtypes",
    "frozen_mixed",
    "scalars",
)


@on_ranks(2)
def test_a_step_that_raises_leaves_the_optimizer_whole() -> None:
    model = annotated(make_model("mlp"), "fully_shard")
    optimizer = sgd(model.parameters())
    step_in_backward(optimizer)
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(TypeError):
        backward(model, 0)
    optimizer.zero_grad()
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    before = full_params(model)
    optimizer.param_groups[0]["lr"] = 0.1
    backward(model, 0)
    assert not torch.equal(full_params(model)["inp.weight"], before["inp.weight"])


@pytest.mark.parametrize("seed", range(int(os.environ.get("STEP_CASES", "14"))))
def test_random_models_optimizers_policies_and_accumulation_step_as_after_backward(seed: int) -> None:
    chance = random.Random(seed)
    syncs = (*(chance.random() < 0.5 for _ in range(chance.randrange(3))), True)
    api = ("fully_shard", "replicate", *POLICIES)[seed % (2 + len(POLICIES))]
    make, name = chance.choice([sgd, adam, foreach, fused]), chance.choice(NAMES)
    if api in POLICIES:
        # Fused kernels, and those of Adam, take no gradients in another dtype.
        make = sgd if POLICIES[api].keep_low_precision_grads else chance.choice([sgd, adam, fused])
        name = chance.choice([name for name in NAMES if name != "mixed_dtypes"])  # It asks for a dtype in forward.
    run_threads(step_both_ways, chance.choice([1, 2, 3]), name, api, make, syncs)


class _Branches(nn.Module):
    """A module of which each rank uses another part."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: torch.Tensor, part: int) -> torch.Tensor:
        return self.parts[part](self.common(x))


# Ranks step a sharded parameter together with the second optimizer.
@on_ranks(2, api=["fully_shard", "replicate", "low, averaged in full"], make=[adam, adafactor], way=["ours", "torch's"])
def test_parameters_without_a_gradient_are_stepped_where_another_rank_has_one_only(
    api: str, make: Make, way: str
) -> None:
    rank, found = dist.get_rank(), []
    for now in (way, "after"):
        model = seeded(_Branches, 0)
        if api == "fully_shard":
            fully_shard(model)
        else:
            replicate(model, find_unused_parameters=True, bucket_cap_mb=0.0001, mp_policy=POLICIES.get(api))
        optimizer = make(model.parameters())
        if now == "ours":
            step_in_backward(optimizer)
        elif now == "torch's":
            options = {key: optimizer.defaults[key] for key in ("lr", "eps")}
            in_backward_api()(type(optimizer), model.parameters(), options)
        for step in range(4):
            # In the first two steps the ranks use different parts; nobody ever uses the last one.
            part = rank if step < 2 else 2
            model(torch.ones(2, 4) * (1 + step + rank), part).square().mean().backward()
            if now == "after":
                step_and_drop(optimizer)
        assert optimizer.state.get(model.parts[3].weight) is None
        found.append(full_params(model))
    assert_equal_params(*found, tolerance=0)


# Ranks that go different ways


class _Parts(nn.Module):
    """Layers that run on their own, with a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return torch.tanh(self.layers[number](x))


class _Ways(nn.Module):
    """Two modules to replicate, of which each rank uses any parts in any order, and two to shard, which all use."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = nn.ModuleList([_Parts(), _Parts()])
        self.shards = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, way: Sequence[tuple[int, int] | int]) -> torch.Tensor:
        for place in way:
            x = self.shards[place](x) if isinstance(place, int) else self.copies[place[0]](x, place[1])
        return x


def loss_of_way(seed: int, model: nn.Module, step: int, rank: int) -> torch.Tensor:
    chance = random.Random(f"{seed}/{step}/{rank}")
    parts = [part for which in (0, 1) for part in chance.sample([(which, i) for i in range(4)], chance.randint(1, 4))]
    chance.shuffle(parts)
    first, second = sorted(chance.randint(0, len(parts)) for _ in range(2))
    result: torch.Tensor = model(
        random_input(10 * step + rank, 2, 4), [*parts[:first], 0, *parts[first:second], 1, *parts[second:]]
    )
    return result.square().mean()


@pytest.mark.parametrize(
    ("seed", "world_size"), [(seed, 2 + seed % 2) for seed in range(int(os.environ.get("STEP_CASES", "4")))]
)
@on_ranks()
def test_ranks_that_use_other_parameters_in_another_order_never_wait_in_vain(seed: int) -> None:
    chance = random.Random(seed)

    def annotate(model: Any) -> None:
        for copies in model.copies:
            replicate(copies, find_unused_parameters=True, bucket_cap_mb=chance.choice([1e-5, 1e-4]))
        for shards in model.shards:
            fully_shard(shards, reshard_after_forward=True)

    twins = stepped_twins(_Ways, annotate)
    for step in range(5):
        is_synchronised = step == 4 or chance.random() < 0.7
        twins.backward(step, keeps=not is_synchronised, loss=lambda *at: loss_of_way(seed, *at))
        if is_synchronised:
            assert all(param.grad is None for param in twins.model.parameters())
            twins.step(of_ranks=False)
    twins.check(1e-5)


# Options of replicate


def change_a_static_graph() -> Any:
    model: Any = replicate(looped(), static_graph=True, bucket_cap_mb=1e-3)
    step_in_backward(sgd(model.parameters()))
    for step in range(3):
        model.uses_branch = step == 2 and dist.get_rank() == 0
        with pytest.raises(UsageError, match="is not like the first") if step == 2 else nullcontext():
            backward(model, step)
    return full_params(model)


def test_a_static_graph_that_changes_is_an_error_and_ranks_stay_equal() -> None:
    one, other = run_threads(change_a_static_graph, 2)
    assert_equal_params(one, other, tolerance=0)


# Memory

WIDTH, DEPTH = 256, 8


def peak_of_gradients(api: str, *, in_backward: bool, earlier: int) -> int:
    """Return what is alive at most in a backward that comes after ``earlier`` ones, beyond what was before it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    if api == "replicate" or api in POLICIES:
        bytes_each = 2 if api in ("low", "averaged in low") else 4
        replicate(model, bucket_cap_mb=WIDTH * WIDTH * bytes_each / 2**20, mp_policy=POLICIES.get(api))
    else:
        fully_shard(model, policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if in_backward:
        step_in_backward(optimizer)
    for _ in range(earlier):
        model(torch.ones(1, WIDTH)).sum().backward()
        if not in_backward:
            step_and_drop(optimizer)
    loss = model(torch.ones(1, WIDTH)).sum()
    with LiveBytes() as live:
        loss.backward()
    return live.peak


@pytest.mark.parametrize("earlier", [0, 2])
@pytest.mark.parametrize("api", ["fully_shard", "replicate", *list(POLICIES)[:3]])
def test_gradients_of_one_bucket_or_handle_and_the_next_are_alive(api: str, earlier: int) -> None:
    layer_bytes = WIDTH * WIDTH * 4
    stepped, _ = run_threads(peak_of_gradients, 2, api, in_backward=True, earlier=earlier)
    assert stepped < 5.5 * layer_bytes  # an unsharded layer or two, its gradient, and the bucket on its way
    if api == "fully_shard":
        # All shards of gradients, beside what both have.
        after, _ = run_threads(peak_of_gradients, 2, api, in_backward=False, earlier=earlier)
        assert after - stepped > (DEPTH / 2 - 2) * layer_bytes


# With what belongs to training


@on_ranks(2, api=["fully_shard", "replicate"])
def test_a_scheduler_changes_the_rate_of_the_next_backward(api: str) -> None:
    twins = stepped_twins("mlp", api)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in twins.optimizers]
    for number in range(3):
        twins.backward(number)
        twins.step(of_ranks=False)
        for schedule in schedules:
            schedule.step()
    twins.check()


def set_rate(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01


def replace_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    first, second, *others = [param for group in optimizer.param_groups for param in group["params"]]
    first.grad = None
    second.grad = second.grad * 2
    for param in others:
        param.grad.mul_(3)


@on_ranks(1, hook=[set_rate, replace_gradients])
def test_hooks_on_a_step_of_sharded_parameters_change_it_and_see_its_state(hook: Callable[..., None]) -> None:
    model, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(model.state_dict())
    fully_shard(model)
    optimizer, after = adam(model.parameters()), adam(twin.parameters())
    kept: list[list[list[str]]] = [[], []]
    for number, one in enumerate((optimizer, after)):

        def note(stepped: torch.optim.Optimizer, args: Any, kwargs: Any, kept: list[Any] = kept[number]) -> None:
            kept.append([sorted(entry) for entry in stepped.state.values()])

        # One hook after it is registered before what steps in backward is there, the other one after that.
        one.register_step_post_hook(note)
        if one is optimizer:
            step_in_backward(one)
        one.register_step_pre_hook(hook)
        one.register_step_post_hook(note)
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        twin(torch.ones(2, 4)).square().sum().backward()
        step_and_drop(after)
    assert_equal_params(full_params(model), dict(twin.named_parameters()), tolerance=1e-6)
    assert kept[0] == kept[1]


@on_ranks(4, api=["replicate", "hybrid"])
def test_what_waits_for_a_later_backward_is_stepped_there_in_all_groups(api: str) -> None:
    def in_groups(params: Any) -> torch.optim.Optimizer:
        params = [*params]
        return torch.optim.AdamW([{"params": params[:3], "lr": 0.1}, {"params": params[3:]}], eps=1e-3)

    twins = stepped_twins("mlp", api, in_groups)
    for number in range(4):
        is_last = number % 2 == 1
        if api == "hybrid":
            twins.model.set_requires_all_reduce(is_last)
        twins.backward(number, keeps=api != "hybrid")
        if is_last:
            if api != "hybrid":
                reduce_gradients(twins.model)
            assert all(param.grad is None for param in twins.model.parameters())
            twins.step(of_ranks=False)
    twins.check(1e-5)


# Ends


@on_ranks(2)
def test_remove_and_the_end_of_the_context_go_back_to_steps_by_hand() -> None:
    twins = Twins("mlp", lambda model: annotated(model, "mixed"), make=sgd)
    handle = step_in_backward(twins.optimizers[0])
    for number in range(4):
        if number == 1:
            handle.remove()
            handle.remove()
        with step_in_backward(twins.optimizers[0]) if number == 2 else nullcontext():
            twins.backward(number)
        if is_by_hand := number in (1, 3):
            assert any(param.grad is not None for param in twins.model.parameters())
        twins.step(of_ranks=is_by_hand)
    unannotate(twins.model)
    twins.check()


@on_ranks(2, api=["fully_shard", "replicate"])
def test_a_deep_copy_does_not_step(api: str) -> None:
    model = annotated(make_model("mlp"), api)
    step_in_backward(sgd(model.parameters()))
    twin = copy.deepcopy(model)
    before = full_params(twin)
    backward(twin, 0)
    assert all(param.grad is not None for param in twin.parameters())
    assert_equal_params(full_params(twin), before, tolerance=0)
    backward(model, 0)
    assert not torch.equal(full_params(model)["inp.weight"], before["inp.weight"])
    step_in_backward(sgd(twin.parameters()))


def stop_in_backward(
    api: str, ranks: list[int], stop: str = "blocks.1", *, before: bool = True, after: bool = True
) -> Any:
    """Stop the third of four backwards; ``before`` and ``after`` it, or not, an optimizer steps inside backward."""
    model = annotated(make_model("mlp"), api)
    optimizer = sgd(model.parameters())
    steps = step_in_backward(optimizer) if before else None
    first = next(model.parameters())
    for number in range(4):
        is_stopped = number == 2 and dist.get_rank() in ranks
        # In the middle: what comes after it in the forward has been stepped by then.
        hook = model.get_submodule(stop).register_forward_pre_hook(_stop) if is_stopped else None
        loss = loss_at(model, number, dist.get_rank())
        if hook is not None:
            hook.remove()
        if number == 2:
            error, text = (ZeroDivisionError, None) if is_stopped else (UsageError, "did not finish backward")
            with pytest.raises(error, match=text):
                loss.backward()
        else:
            loss.backward()
            if steps is None:
                optimizer.step()
        optimizer.zero_grad()
        if number == 2 and before != after:
            steps = step_in_backward(optimizer) if steps is None else steps.remove()
    assert first.isfinite().all()
    return full_params(model)


def _stop(_: nn.Module, args: tuple[Any, ...]) -> Any:
    return _Stop.apply(args[0])


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("api", "ranks"), [("fully_shard", [0, 1]), ("replicate", [0, 1]), ("replicate", [0]), ("replicate", [1])]
)
def test_after_an_exception_in_backward_ranks_are_equal_and_train_on(api: str, ranks: list[int]) -> None:
    one, other = run_threads(stop_in_backward, 2, api, ranks)
    assert_equal_params(one, other, tolerance=0)


@pytest.mark.parametrize("stop", ["blocks.1", "blocks.0"])
@pytest.mark.parametrize(
    ("api", "ranks", "before"),
    [
        *(("replicate", [0, 1], before) for before in (False, True)),
        *(("mixed", [0, 1], before) for before in (False, True)),
        ("replicate", [1], True),
    ],
)
def test_steps_begin_or_end_after_a_backward_that_was_stopped(
    api: str, ranks: list[int], before: bool, stop: str
) -> None:
    """What the stopped backward began with holds for it: ranks are equal, and without steps it has changed nothing."""
    one, other = run_threads(stop_in_backward, 2, api, ranks, stop, before=before, after=not before)
    assert_equal_params(one, other, tolerance=0)
    if not before and len(ranks) == 2:
        model = make_model("mlp")
        optimizer = sgd(model.parameters())
        for number in (0, 1, 3):
            for rank in range(2):
                (loss_at(model, number, rank) / 2).backward()
            step_and_drop(optimizer)
        assert_equal_params(one, full_params(model), tolerance=1e-6)


class _OnPieces(torch.optim.SGD):
    """Writes to the elements of this rank, and to nothing where it has none."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            piece = param.detach().to_local()
            if piece.numel():
                piece.sub_(param.grad.to_local())


@on_ranks(2)
def test_a_step_between_a_forward_and_its_backward_is_an_error_also_where_a_rank_has_no_elements() -> None:
    model = fully_shard(nn.Linear(1, 1, bias=False))
    step_in_backward(_OnPieces(model.parameters()))
    first, second = (model(torch.ones(1, 1)).sum() for _ in range(2))
    first.backward()
    with pytest.raises(UsageError, match="written to between a forward and its backward"):
        second.backward()


# What goes with it, and what not


def refusals() -> Iterator[tuple[Callable[[], Any], str]]:
    def built(api: str = "fully_shard", make: Make = sgd) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = annotated(make_model("mlp"), api)
        return model, make(model.parameters())

    def loss(model: nn.Module) -> torch.Tensor:
        return loss_at(model, 0, 0)

    for api in ("fully_shard", "replicate"):
        model, optimizer = built(api)
        handle = step_in_backward(optimizer)
        yield optimizer.step, "step\\(\\) of an optimizer that steps inside backward"
        yield lambda optimizer=optimizer: step_in_backward(optimizer), "steps inside backward on one of the parameters"
        yield lambda model=model: clip_grad_norm_(model.parameters(), 1.0), "clip_grad_norm_ of all gradients"
        yield lambda optimizer=optimizer: clip_grad_norm_(optimizer, 1.0), "clip_grad_norm_ of all gradients"
        state = DefaultState(dist.group.WORLD)
        hook = allreduce_hook if api == "replicate" else _hook
        yield lambda m=model, h=hook, s=state: register_comm_hook(m, s, h), "cannot have a communication hook"
        yield lambda model=model: unannotate(model), "unannotate while an optimizer steps inside backward"
        yield lambda model=model: loss(model).backward(create_graph=True), "create_graph=True"
        loss(model).backward()
        handle.remove()
        register_comm_hook(model, state, hook)
        yield lambda optimizer=optimizer: step_in_backward(optimizer), "a communication hook reduces these gradients"
    model, optimizer = built(make=lambda params: torch.optim.LBFGS(list(params)))
    yield lambda: step_in_backward(optimizer), "needs a closure"
    around = nn.Sequential(replicate(nn.Linear(4, 4)), nn.Linear(4, 4).requires_grad_(requires_grad=False))
    step_in_backward(sgd(replicate(around).parameters()))
    yield lambda: register_comm_hook(around, state, allreduce_hook), "cannot have a communication hook"
    plain = make_model("mlp")
    yield lambda: step_in_backward(sgd(plain.parameters())), "of the optimizer is not annotated"
    model, optimizer = built(make=lambda params: torch.optim.SGD(params, lr=0.1, differentiable=True))
    yield lambda: step_in_backward(optimizer), "is differentiable"
    model, optimizer = built()
    step_in_backward(optimizer)
    yield lambda: accelerate_optimizer(optimizer, model), "steps inside backward"
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    yield lambda: loss(model).backward(), "parameters, and had"
    model, optimizer = built()
    accelerate_optimizer(optimizer, model)
    yield lambda: step_in_backward(optimizer), "accelerated for steps on all"
    model, optimizer = built()
    step_in_backward(optimizer)
    model.set_is_last_backward(False)  # type: ignore[operator]
    yield lambda: loss(model).backward(), "wait for a later backward"


def _hook(state: Any, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    raise AssertionError("never called")


@on_ranks(2)
def test_what_does_not_go_with_it_is_refused() -> None:
    for call, text in refusals():
        with pytest.raises(ComposableError, match=text):
            call()


@on_ranks(2)
def test_ranks_with_different_optimizers_are_told_on_every_rank() -> None:
    model = replicate(nn.Linear(2, 2))
    with pytest.raises(DesyncError, match="the ranks let different optimizers step inside backward"):
        step_in_backward((sgd if dist.get_rank() else adam)(model.parameters()))


@on_ranks(2)
def test_a_gradient_that_comes_by_way_of_the_inputs_is_in_the_step() -> None:
    models = [seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 0) for _ in range(2)]
    step_in_backward(sgd(fully_shard(models[0], policy={nn.Linear}).parameters()))
    after = sgd(models[1].parameters())
    for model in models:
        held: list[torch.Tensor] = []
        handle = model[1].register_forward_pre_hook(lambda module, _, held=held: held.append(module.weight.sum()))
        model(torch.ones(1, 2))
        handle.remove()
        model(torch.ones(1, 2) * held[0]).sum().backward()
    after.step()
    assert_equal_params(full_params(models[0]), full_params(models[1]), tolerance=1e-6)


# torch's own


def in_backward_api() -> Callable[..., None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit
        from torch.distributed.optim import _apply_optimizer_in_backward
    return _apply_optimizer_in_backward


def torch_twins(build: Build, annotate: Callable[[Any], object], *, before: bool) -> Twins:
    """Return twins of which torch's API steps the one on ranks."""

    def annotate_and_step(model: nn.Module) -> None:
        for is_now in (True, False):
            if is_now is before:
                in_backward_api()(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})
            if is_now:
                annotate(model)

    return Twins(build, annotate_and_step, make=sgd)


def step_by_torch(api: str, *, before: bool, is_low: bool = False) -> Any:
    """Train by torch's API as one process does, or, if ``is_low``, return the parameters that it leaves."""
    twins = torch_twins("mlp", lambda model: annotated(model, api), before=before)
    # Torch's API has imported it, without the warning.
    from torch.distributed.optim.apply_optimizer_in_backward import _get_in_backward_optimizers

    for number in range(4):
        twins.backward(number)
        is_kept = os.environ.get("DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE") == "0"
        assert all((param.grad is not None) == is_kept for param in twins.model.parameters())
        twins.model.zero_grad()
        twins.step(of_ranks=False)
    held = [group["params"][0] for one in _get_in_backward_optimizers(twins.model) for group in one.param_groups]
    assert all(one is param for one, param in zip(held, twins.model.parameters(), strict=True))
    if not is_low:
        twins.check()
    return full_params(twins.model)


@on_ranks(2, api=ANNOTATIONS, before=[True, False])
def test_torchs_optimizer_in_backward_steps_on_averages(api: str, before: bool) -> None:
    step_by_torch(api, before=before)


OPTIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], dict[str, Any]]]] = {
    "static_graph": (looped, lambda _: {"static_graph": True}),
    "static_graph and delay": (wide, lambda model: {"static_graph": True, **delay(model)}),
}


@on_ranks(2, name=list(OPTIONS), before=[True, False])
def test_torchs_optimizer_in_backward_goes_with_a_static_graph_and_delayed_gradients(name: str, before: bool) -> None:
    build, options = OPTIONS[name]
    twins = torch_twins(build, lambda model: replicate(model, bucket_cap_mb=1e-3, **options(model)), before=before)
    for step in range(5):
        twins.backward(step, keeps=step == 2)
        if step != 2:
            assert all(param.grad is None for param in twins.model.parameters())
            twins.step(of_ranks=False)
    twins.check(1e-5)


@pytest.mark.parametrize(("api", "before"), [("low", True), ("low, averaged in full", False)])
def test_torchs_optimizer_in_backward_steps_on_what_was_averaged_in_low_precision(api: str, before: bool) -> None:
    expected, _ = run_threads(train, 2, "mlp", api, sgd)
    all_equal(run_threads(step_by_torch, 2, api, before=before, is_low=True), expected, tolerance=0)


def test_torchs_switch_keeps_the_gradients() -> None:
    with mock.patch.dict(os.environ, {"DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE": "0"}):
        run_threads(step_by_torch, 2, "replicate", before=True)
        low = run_threads(step_by_torch, 2, "low", before=True, is_low=True)
    all_equal(low, run_threads(train, 2, "mlp", "low", sgd)[0], tolerance=0)


@on_ranks(2, api=["fully_shard", "replicate"])
def test_torchs_optimizer_in_backward_is_refused_beside_a_hook(api: str) -> None:
    model = annotated(make_model("mlp"), api)
    state, hook = DefaultState(dist.group.WORLD), allreduce_hook if api == "replicate" else _hook
    register_comm_hook(model, state, hook)
    in_backward_api()(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(UsageError, match="cannot have a communication hook"):
        loss_at(model, 0, 0)
    other = make_model("mlp")
    in_backward_api()(torch.optim.SGD, other.parameters(), {"lr": 0.1})
    annotated(other, api)
    with pytest.raises(UsageError, match="cannot have a communication hook"):
        register_comm_hook(other, state, hook)
