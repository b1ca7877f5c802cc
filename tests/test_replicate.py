"""``replicate`` on real ranks: the numbers, what it refuses, and that no rank ever waits in vain."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from composable import no_sync, register_comm_hook, replicate
from composable.errors import ComposableError, UsageError
from tests.models import BATCH, DIM, MLPBlock, WithBuffers, make_model, random_input, seeded
from tests.parity import gradients_of
from tests.programs import Loss, Twins, loss_at
from tests.world import on_ranks, run_ranks, run_threads

TINY_CAP_MB = 600 / 2**20


def message(call: Callable[[], object]) -> str:
    """Return what ``call`` raises, as text."""
    with pytest.raises(ComposableError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


# -- ways to run forward and backward


def loss_of_a_block(model: Any, number: int, rank: int) -> torch.Tensor:
    return model.blocks[1](random_input(rank, BATCH, DIM)).square().mean()


def loss_with_slope(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    """Return a loss to which the gradient of the input adds, in every step but the first."""
    x = random_input(rank, BATCH, DIM).requires_grad_()
    before = gradients_of(model).keys()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=number == 1)
    assert gradients_of(model).keys() == before
    return loss_at(model, 0, rank) + number * slope.square().sum()


def evaluate(model: nn.Module) -> None:
    model.eval()
    if dist.get_rank() == 0:
        loss_at(model, 0, 0)
    model.train()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("loss", "between"), [(loss_of_a_block, None), (loss_at, evaluate), (loss_with_slope, None)])
@on_ranks()
def test_gradients_equal_those_of_one_process(loss: Loss, between: Callable[[nn.Module], None] | None) -> None:
    """Run a submodule alone, evaluate on one rank between steps, ask for gradients of inputs alone."""
    twins = Twins("mlp", lambda model: replicate(model, bucket_cap_mb=TINY_CAP_MB), loss=loss)
    for step in range(2):
        twins.backward(step)
        # Those of a submodule alone leave the others without a gradient, as they would without replicate.
        twins.check_gradients()
        twins.drop()
        if between is not None:
            between(twins.model)


# -- unused parameters


class Gated(nn.Module):
    """A layer always used, and two that each rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(DIM, DIM, bias=False)
        self.left = nn.Linear(DIM, DIM, bias=False)
        self.right = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        y = self.always(x)
        for name in used.split():
            y = y + getattr(self, name)(x)
        return y


def train_gated(used: list[str]) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Run a good step, one with what each rank uses of ``used``, and a good one; return errors and last gradients."""
    model = replicate(seeded(Gated, 0), bucket_cap_mb=TINY_CAP_MB)
    errors = []
    for names in ("left right", used[dist.get_rank()], "left right"):
        model.zero_grad()
        loss = model(random_input(dist.get_rank(), BATCH, DIM), names).square().mean()
        try:
            loss.backward()
            errors.append("")
        except UsageError as error:
            errors.append(str(error))
    return errors, gradients_of(model)


def test_parameters_unused_everywhere_are_named_on_every_rank_and_the_next_step_works() -> None:
    (errors, gradients), (others, same) = run_threads(train_gated, 2, ["", ""])
    assert_expected_inline(
        errors[1],
        """\
backward ended without a gradient for 2 parameters: 'left.weight', 'right.weight'
    so did rank 1, perhaps for other parameters
  at:  rank 0
  fix: let every parameter take part in the loss on every rank, freeze those that do not before replicate, or pass find_unused_parameters=True, which several backwards of one forward need""",
    )
    assert "2 parameters: 'left.weight', 'right.weight'" in others[1]
    assert errors[0] == errors[2] == others[0] == others[2] == ""
    torch.testing.assert_close(gradients, same, rtol=0, atol=0)
    assert len(gradients) == 3


@pytest.mark.parametrize("missing", ["right", "left right"])
def test_parameters_unused_on_one_rank_are_an_error_on_every_rank_and_the_next_step_works(missing: str) -> None:
    every = "left right"
    rest = " ".join(set(every.split()) - set(missing.split()))
    results = run_threads(train_gated, 3, [every, rest, every])
    names = ", ".join(f"'{name}.weight'" for name in missing.split())
    for rank, (errors, gradients) in enumerate(results):
        if rank == 1:
            assert errors[1].startswith("backward ended without a gradient for ")
        else:
            assert errors[1].startswith("rank 1 ended backward without a gradient for ")
        assert f"{names}\n" in errors[1] and f"at:  rank {rank}" in errors[1]
        assert errors[0] == errors[2] == ""
        torch.testing.assert_close(gradients, results[0][1], rtol=0, atol=0)


@on_ranks(3, accumulates=[False, True])
def test_parameters_unused_on_some_ranks_count_as_zero_if_allowed(*, accumulates: bool) -> None:
    used = ["left", "", "left"]
    twins = Twins(
        Gated,
        lambda model: replicate(model, bucket_cap_mb=TINY_CAP_MB, find_unused_parameters=True),
        loss=lambda model, _, rank: model(random_input(rank, BATCH, DIM), used[rank]).square().mean(),
    )
    for _ in range(3):
        if not accumulates:
            twins.drop()
        twins.backward()
        twins.check_gradients()


@on_ranks(2)
def test_parameters_unused_everywhere_keep_their_gradient_if_allowed() -> None:
    model = replicate(seeded(Gated, 0), find_unused_parameters=True)
    model.left.weight.grad = torch.full_like(model.left.weight, 3)
    model(random_input(dist.get_rank(), BATCH, DIM), "").sum().backward()
    assert model.left.weight.grad.unique().tolist() == [3]
    assert model.right.weight.grad is None


class Skippable(nn.Module):
    """Between layers that are not replicated, one that a rank may skip altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.block = MLPBlock()

    def forward(self, x: torch.Tensor, *, skip: bool) -> torch.Tensor:
        self.block.forward = (lambda y: y * 1) if skip else (lambda y: MLPBlock.forward(self.block, y))
        return self.block(self.inp(x))


def skip_on_one_rank(*, find_unused: bool) -> list[str]:
    model = seeded(Skippable, 0)
    replicate(model.block, find_unused_parameters=find_unused)
    errors = []
    for skip in (False, dist.get_rank() == 0, False):
        model.zero_grad()
        try:
            model(random_input(dist.get_rank(), BATCH, DIM), skip=skip).square().mean().backward()
            errors.append("")
        except UsageError as error:
            errors.append(str(error).splitlines()[0])
    return errors


def test_a_rank_whose_backward_reaches_no_parameter_keeps_nobody_waiting() -> None:
    assert run_ranks(skip_on_one_rank, 2, find_unused=True) == [["", "", ""]] * 2
    first, second = run_ranks(skip_on_one_rank, 2, find_unused=False)
    assert first[1].startswith("backward ended without a gradient for 4 parameters: 'up.weight'")
    assert second[1].startswith("rank 0 ended backward without a gradient for 'up.weight'")
    assert first[::2] == second[::2] == ["", ""]


@on_ranks(2, reentrant=[False, True])
def test_so_it_is_where_a_replicated_module_gives_the_loss(*, reentrant: bool) -> None:
    block, plain, rank = seeded(MLPBlock, 0), seeded(MLPBlock, 0), dist.get_rank()
    block.forward = lambda x: (x if rank == 0 else MLPBlock.forward(block, x)).square().mean()
    replicate(block, find_unused_parameters=True)
    x = random_input(rank, BATCH, DIM).requires_grad_()
    (checkpoint(block, x, use_reentrant=True) if reentrant else block(x)).backward()
    for other in range(1, dist.get_world_size()):
        (plain(random_input(other, BATCH, DIM)).square().mean() / dist.get_world_size()).backward()
    torch.testing.assert_close(gradients_of(block), gradients_of(plain))


# -- exceptions


class StopHereError(Exception):
    pass


def raise_stop(*_: object) -> None:
    raise StopHereError


def fail_in_backward(fqn: str, ranks: list[int], *, set_to_none: bool = True) -> str:
    twins = Twins("mlp", lambda model: replicate(model, bucket_cap_mb=TINY_CAP_MB))
    twins.backward(0)
    twins.drop()
    handle = twins.model.get_parameter(fqn).register_hook(raise_stop) if twins.rank in ranks else None
    with pytest.raises((StopHereError, UsageError)) as caught:
        twins.backward(1)
    if handle is not None:
        handle.remove()
    twins.drop(set_to_none=set_to_none)
    twins.backward(2)
    twins.check_gradients()
    return str(caught.value) or "stopped"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_exception_in_the_backward_of_one_rank_keeps_nobody_waiting(*, set_to_none: bool) -> None:
    first, second = run_ranks(fail_in_backward, 2, "blocks.1.up.weight", [1], set_to_none=set_to_none)
    assert second == "stopped"
    assert_expected_inline(
        first,
        """\
rank 1 did not finish backward: an exception stopped it there
  at:  rank 0
  fix: drop the gradients of this step, and read the error that was raised there""",
    )


# -- what is made equal at annotation and before forward


@on_ranks(2)
def test_tensors_of_any_size_layout_and_dtype_are_broadcast() -> None:
    rank = dist.get_rank()
    model = nn.Module()
    model.forward = lambda: None
    model.large = nn.Parameter(torch.full((600, 1000), float(rank)))
    model.transposed = nn.Parameter(torch.full((600, 1000), float(rank)).t())
    for index in range(20):
        model.register_parameter(f"p{index}", nn.Parameter(torch.full((300, 300 + index), float(rank))))
    model.register_buffer("flags", torch.full((7,), rank == 0))
    model.register_buffer("complex", torch.full((2**18,), rank * 1j))
    replicate(model)
    assert (
        all(not tensor.any() for tensor in model.parameters()) and bool(model.flags.all()) and not model.complex.any()
    )


def run_with_buffers(*, broadcast_buffers: bool) -> list[list[float]]:
    model = seeded(WithBuffers, 0)
    model.steps.fill_(10 * dist.get_rank())
    replicate(model, broadcast_buffers=broadcast_buffers)
    x = random_input(dist.get_rank(), BATCH, DIM)
    seen = [[model.steps.item(), model.running.sum().item()]]
    model(x)
    # A module may put another tensor in the place of a buffer.
    model.steps = model.steps + 10 * dist.get_rank()
    model.running = model.running.clone()
    model.eval()(x)
    seen.append([model.steps.item(), model.running.sum().item()])
    handle = model.linear.register_forward_pre_hook(
        lambda *_: seen.append([model.steps.item(), model.running.sum().item()])
    )
    model.train()(x)
    handle.remove()
    return seen


def test_a_training_forward_starts_with_the_buffers_of_the_first_rank_unless_they_stay() -> None:
    first, second = run_threads(run_with_buffers, 2, broadcast_buffers=True)
    assert first[0] == second[0] == [0, 0]
    assert first[1][0] == 1 and second[1][0] == 11 and first[1][1] != second[1][1]
    assert first[2] == second[2] == first[1]
    first, second = run_threads(run_with_buffers, 2, broadcast_buffers=False)
    assert [steps for steps, _ in first] == [0, 1, 1]
    assert [steps for steps, _ in second] == [10, 21, 21]


@on_ranks(2)
def test_ranks_with_batch_norm_stay_equal() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, 1)), 0)
    replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        # Two forwards before a backward: the second broadcast must not spoil what the first saved.
        x = random_input(10 * step + dist.get_rank(), BATCH, DIM)
        (model(x) + model(2 * x)).square().mean().backward()
        optimizer.step()
    for param in model.parameters():
        first = param.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, param)


# -- ranks that disagree


def disagree(kind: str) -> tuple[str, bool]:
    rank = dist.get_rank()
    model = make_model("mlp", seed=rank)
    options: dict[str, Any] = {}
    if rank == 1:
        if kind == "name":
            model.head, model.out = model.out, nn.Identity()
        elif kind == "more":
            model.more = nn.Linear(2, 2)
        elif kind == "frozen":
            model.out.bias.requires_grad_(requires_grad=False)
        else:
            options["bucket_cap_mb"] = 5 if kind == "option" else -5
    before = {key: value.clone() for key, value in model.state_dict().items()}
    text = message(lambda: replicate(model, **options))
    is_unchanged = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    is_unchanged &= replicate.state(model) is None and not any(param._backward_hooks for param in model.parameters())
    return text, is_unchanged


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        (
            "name",
            "parameter 'out.weight' [8, 8] torch.float32, requires_grad=True",
            "parameter 'head.weight' [8, 8] torch.float32, requires_grad=True",
        ),
        ("more", "(nothing more)", "parameter 'more.weight' [2, 2] torch.float32, requires_grad=True"),
        (
            "frozen",
            "parameter 'out.bias' [8] torch.float32, requires_grad=True",
            "parameter 'out.bias' [8] torch.float32, requires_grad=False",
        ),
        ("option", "option bucket_cap_mb=25", "option bucket_cap_mb=5"),
    ],
)
def test_ranks_that_differ_get_the_first_difference_and_change_nothing(kind: str, own: str, other: str) -> None:
    for rank, (text, is_unchanged) in enumerate(run_threads(disagree, 2, kind)):
        assert text.splitlines() == [
            "DesyncError: the ranks call replicate on different modules or with different options",
            f"    rank 0: {own}",
            f"    rank 1: {other}",
            f"  at:  rank {rank}",
            "  fix: build the same model and call replicate with the same arguments on every rank",
        ]
        assert is_unchanged


def test_an_error_that_one_rank_sees_reaches_the_others() -> None:
    (first, is_unchanged), (second, _) = run_threads(disagree, 2, "broken")
    assert is_unchanged
    told = "ConfigError: bucket_cap_mb is -5\n  at:  rank 1\n  fix: pass a number of MiB above zero"
    assert (first, second) == (told, told)


# -- bad input


REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: replicate(model.blocks), "ConfigError: ModuleList has no forward, so replicate cannot know when"),
    (lambda model: replicate(model.requires_grad_(requires_grad=False)), "ConfigError: no parameter requires a grad"),
    (
        lambda model: replicate(model.to("meta")),
        "ConfigError: parameter is on the meta device\n  at:  rank 0, parameter 'inp.weight' [8, 8] float32",
    ),
    (
        lambda model: replicate(nn.Sequential(nn.LazyLinear(3))),
        "ConfigError: parameter has no shape yet\n  at:  rank 0, parameter '0.weight'",
    ),
    (lambda model: replicate(model, bucket_cap_mb=0), "ConfigError: bucket_cap_mb is 0\n  at:  rank 0"),
    (lambda model: replicate(model, ignored_modules=["out"]), "ConfigError: ignored_modules holds a str\n"),
    (
        lambda model: replicate(model, ignored_modules=[nn.Linear(2, 2)]),
        "ConfigError: an ignored module is not in the module that ignores it\n",
    ),
    (
        lambda model: replicate(model, mesh=dist.init_device_mesh("cpu", (1,)), process_group=dist.group.WORLD),
        "ConfigError: both mesh and process_group are given\n",
    ),
    (
        lambda model: replicate(model, mesh=dist.init_device_mesh("cpu", (1, 1))),
        "ConfigError: mesh has 2 dims (1, 1)",
    ),
    (lambda model: no_sync(model).__enter__(), "UsageError: no_sync found no annotated module\n  at:  rank 0, module"),
    (
        lambda model: register_comm_hook(model, None, default_hooks.allreduce_hook),
        "UsageError: register_comm_hook found no annotated module\n  at:  rank 0, module",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[text for _, text in REFUSED])
@on_ranks(1)
def test_bad_input_is_refused(number: int) -> None:
    call, expected = REFUSED[number]
    text = message(lambda: call(make_model("mlp")))
    assert text.startswith(expected)
    assert "\n  at:  rank 0" in text and "\n  fix: " in text


def test_a_process_group_is_asked_for() -> None:
    assert message(lambda: replicate(make_model("mlp"))).startswith(
        "UsageError: replicate needs a process group, and none is initialised\n"
    )


@on_ranks(1)
def test_a_parameter_unfrozen_later_is_an_error() -> None:
    model = make_model("mlp")
    model.out.requires_grad_(requires_grad=False)
    replicate(model)
    model.out.requires_grad_()
    assert message(lambda: loss_at(model, 0, 0)) == (
        "UsageError: a parameter was frozen when replicate was called and requires a gradient now\n"
        "  at:  rank 0, parameter 'out.weight'\n"
        "  fix: unfreeze before replicate; or call unannotate(model), then replicate again"
    )


# -- groups, ignored modules, other annotations


@on_ranks(3)
def test_a_process_group_of_some_ranks_leaves_the_others_alone() -> None:
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    model, plain = make_model("mlp", seed=rank), make_model("mlp", seed=min(rank, 1))
    if rank > 0:
        replicate(model, process_group=group)
    loss_at(model, 0, rank).backward()
    for one in (1, 2) if rank else (0,):
        (loss_at(plain, 0, one) / (2 if rank else 1)).backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))


@on_ranks(2)
def test_an_ignored_module_keeps_its_own_parameters_and_gradients() -> None:
    rank = dist.get_rank()
    model = make_model("mlp", seed=rank)
    own = {key: value.clone() for key, value in model.blocks[1].state_dict().items()}
    replicate(model, ignored_modules=iter([model.blocks[1]]))
    torch.testing.assert_close(dict(model.blocks[1].state_dict()), own, rtol=0, atol=0)
    loss_at(model, 0, rank).backward()
    local = {fqn: grad for fqn, grad in gradients_of(model).items() if fqn.startswith("blocks.1.")}
    every: list[Any] = [None, None]
    dist.all_gather_object(every, (local, gradients_of(model)["inp.weight"]))
    assert torch.equal(every[0][1], every[1][1])
    assert not torch.equal(every[0][0]["blocks.1.up.weight"], every[1][0]["blocks.1.up.weight"])


class Marked(nn.Module):
    """Has a tie, of which one name is marked, and another with both names marked; and two buffers."""

    names = ("first.bias", "first.weight", "scale", "also_scale", "table", "mask")

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(DIM))
        self.also_scale = self.scale
        self.register_buffer("table", torch.zeros(DIM))
        self.register_buffer("mask", torch.zeros(DIM, dtype=torch.bool))
        self.register_buffer("shared", torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.scale + self.table) * self.also_scale + self.shared


def train_marked(kind: str, prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    part = seeded(Marked, 0)
    with torch.no_grad():
        for tensor in (part.first.bias, part.scale, part.table, part.shared):
            tensor += 1 + dist.get_rank()
    model: nn.Module = nn.Sequential(part) if prefix else part
    names = [prefix + name for name in Marked.names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    module = model
    if kind == "DDP":
        module = DistributedDataParallel(model)
    elif kind == "copy":
        module = model = copy.deepcopy(replicate(model))
    else:
        replicate(model)
    for step in range(2):
        model.zero_grad()
        module(random_input(10 * step + dist.get_rank(), BATCH, DIM)).square().mean().backward()
    return gradients_of(model), {fqn: value.clone() for fqn, value in model.state_dict().items()}


@pytest.mark.parametrize(("kind", "prefix"), [("replicate", ""), ("copy", "0.")])
def test_what_torch_was_told_to_ignore_stays_as_it_is(kind: str, prefix: str) -> None:
    ours = run_threads(train_marked, 2, kind, prefix)
    (first, first_state), (second, second_state) = ours
    apart = {fqn for fqn in first if not torch.equal(first[fqn], second[fqn])}
    assert apart == {prefix + name for name in ("first.bias", "scale")}
    apart = {fqn for fqn in first_state if not torch.equal(first_state[fqn], second_state[fqn])}
    assert apart == {prefix + name for name in ("first.bias", "scale", "also_scale", "table")}


def test_what_torch_was_told_to_ignore_is_what_its_wrapper_ignores() -> None:
    # Of what the module itself holds, torch's wrapper ignores nothing.
    ours, theirs = (run_ranks(train_marked, 2, kind, "0.") for kind in ("replicate", "DDP"))
    torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_unused_parameters_are_an_error_on_every_rank_with_a_hook_too() -> None:
    model, rank = replicate(seeded(Gated, 0)), dist.get_rank()
    register_comm_hook(model, None, default_hooks.allreduce_hook)
    text = message(lambda: model(random_input(0, BATCH, DIM), "left right" if rank else "").sum().backward())
    said = "rank 0 ended backward without a gradient for" if rank else "a gradient for 2 parameters:"
    assert f"{said} 'left.weight', 'right.weight'" in text


def watch(model: Any) -> list[str]:
    """Put a hook of each kind on ``model``; return where they note their calls."""
    called: list[str] = []
    for name, module in (("root", model), ("out", model.out)):
        module.register_forward_pre_hook(lambda *_, name=name: called.append(f"pre-forward {name}"))
        module.register_forward_hook(lambda *_, name=name: called.append(f"forward {name}"))
        module.register_full_backward_pre_hook(lambda *_, name=name: called.append(f"pre-backward {name}"))
        module.register_full_backward_hook(lambda *_, name=name: called.append(f"backward {name}"))
    model.out.weight.register_hook(lambda grad: called.append("gradient") or 3 * grad)
    model.out.weight.register_post_accumulate_grad_hook(lambda param: called.append("accumulated"))
    return called


def loss_with_input_gradient(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(random_input(100 * step + rank, BATCH, DIM).requires_grad_()).square().mean()


@on_ranks(2, before=[False, True])
def test_hooks_of_users_run_as_on_the_plain_module(*, before: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain = make_model("mlp"), make_model("mlp")
    called = watch(model) if before else []
    replicate(model)
    called = called if before else watch(model)
    wanted = watch(plain)
    for step in range(3):
        for one in (model, plain):
            one.zero_grad()
        loss_with_input_gradient(model, step, rank).backward()
        for other in range(world_size):
            wanted.clear()
            (loss_with_input_gradient(plain, step, other) / world_size).backward()
        assert called == wanted and len(wanted) == 10
        called.clear()
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
