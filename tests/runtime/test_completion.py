"""Programs in which autograd's order says too little: every gradient is that of one process all the same."""

import math
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composable import HandleOptions, UsageError, fully_shard, no_sync, replicate
from tests.counting import CountingTransport
from tests.models import random_input, seeded
from tests.parity import full
from tests.world import on_ranks, run_ranks, run_threads

WIDTH = 6

Gradients = dict[str, torch.Tensor | None]
# What one rank does in a step with a module and a scale: the loss of rank r is scaled by 1 in the annotated run, and
# by 1 / W in the plain one, which does all ranks' parts.
Step = Callable[[nn.Module, int, float], None]


def x_of(seed: int) -> torch.Tensor:
    return random_input(seed, 3, WIDTH)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def squares(model: nn.Module, seed: int, scale: float) -> None:
    (model(x_of(seed)).pow(2).mean() * scale).backward()


def each(*names: str, **options: Any) -> Callable[[nn.Module], object]:
    """Annotate submodules by name, then the whole."""

    def annotate(model: nn.Module) -> object:
        for name in names:
            fully_shard(model.get_submodule(name), **options)
        return fully_shard(model, **options)

    return annotate


def by_linear(model: nn.Module) -> object:
    return fully_shard(model, policy={nn.Linear})


def gradients_of(model: nn.Module) -> Gradients:
    return {fqn: None if p.grad is None else full(p.grad).clone() for fqn, p in model.named_parameters()}


def one_step(name: str) -> list[Gradients]:
    make, annotate, step = PROGRAMS[name]
    model = seeded(make, 0)
    annotate(model)
    found = []
    for number in range(2):
        model.zero_grad()
        step(model, dist.get_rank() + 10 * number, 1.0)
        found.append(gradients_of(model))
    return found


def plain_step(name: str, world_size: int) -> list[Gradients]:
    make, _, step = PROGRAMS[name]
    model = seeded(make, 0)
    found = []
    for number in range(2):
        model.zero_grad()
        for rank in range(world_size):
            step(model, rank + 10 * number, 1.0 / world_size)
        found.append(gradients_of(model))
    return found


def assert_equal_gradients(found: list[Gradients], expected: list[Gradients]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for fqn, grad in other.items():
            got = one[fqn]
            if got is None or grad is None:
                assert got is grad, f"step {number}, {fqn}: {got} instead of {grad}"
            else:
                torch.testing.assert_close(got, grad, atol=1e-6, rtol=1e-5, msg=f"step {number}, {fqn}")


# -- handles that ran before the last backward


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = linear()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(3)])

    def forward(self, x: torch.Tensor, head: int | None = None) -> torch.Tensor:
        return torch.tanh(self.enc(x)) if head is None else self.heads[head](x)


def one_backward_a_head(model: nn.Module, seed: int, scale: float) -> None:
    features = model(x_of(seed))
    for head in range(3):
        (model(features, head).pow(2).mean() * scale).backward(retain_graph=head < 2)


def two_losses_of_a_gan(model: nn.Module, seed: int, scale: float) -> None:
    """Let the generator's handle run before a backward that does not reach it."""
    fake = model(x_of(seed))
    ((model(fake.detach(), 0) - model(x_of(seed + 5), 0)).pow(2).mean() * scale).backward()
    (model(fake, 0).pow(2).mean() * scale).backward()


def two_models() -> nn.Module:
    trunk = linear()
    return nn.ModuleList([nn.Sequential(trunk, nn.Tanh(), linear()), nn.Sequential(trunk, nn.Tanh(), linear())])


def shard_two_models(models: nn.Module) -> None:
    for name in ("0.0", "0", "1"):
        fully_shard(models.get_submodule(name))


def shared_trunk(models: nn.Module, seed: int, scale: float) -> None:
    one, other = models.get_submodule("0"), models.get_submodule("1")
    ((one(x_of(seed)).pow(2).mean() + other(x_of(seed)).abs().mean()) * scale).backward()


# -- outputs that leave by another way


class SideChannel(nn.Module):
    """Leaves a loss in an attribute: before its output is made, or after."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.lin = linear()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.lin(x))
        self.aux = (y @ self.w @ self.w).pow(2).mean()
        return y * 2 if self.when == "before" else y


class WithSideChannel(nn.Module):
    """Uses what a block leaves in an attribute, beside its output or in place of it."""

    def __init__(self, when: str, *, uses_output: bool = True) -> None:
        super().__init__()
        self.uses_output = uses_output
        self.inp, self.block, self.head = linear(), SideChannel(when), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        y = self.block(h)
        return self.head(y if self.uses_output else h).pow(2).mean() + self.block.aux


class Hidden(nn.Module):
    """Returns its output in something that hooks may not look into."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.lin = kind, linear()

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.lin(x))
        if self.kind == "attribute":
            self.out = y
            return None
        return deque([y]) if self.kind == "deque" else lambda: y

    def read(self, out: Any) -> torch.Tensor:
        if self.kind == "attribute":
            return self.out
        return out[0] if self.kind == "deque" else out()


class AroundHidden(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inp, self.block, self.head = linear(), Hidden(kind), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block.read(self.block(self.inp(x))))


# -- the order of autograd


class Drop(nn.Module):
    """A dropped layer: its input is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linear(), linear()

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(z)) + x)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.middle = Drop(), Middle()

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.middle(z, self.drop(x))


def leaf_as_output(model: nn.Module, seed: int, scale: float) -> None:
    (model(x_of(seed).requires_grad_(), x_of(seed + 5)).pow(2).mean() * scale).backward()


class SometimesCheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.b = linear(), linear()

    def forward(self, x: torch.Tensor, is_checkpointed: bool) -> torch.Tensor:
        return self.lin(checkpoint(self.b, x, use_reentrant=True) if is_checkpointed else self.b(x))


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.wrap = linear(), SometimesCheckpointed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        return self.wrap(h, True) + self.wrap(2 * h, False)


class InThreads(nn.Module):
    """Runs a child, and half of its own work, in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), nn.Sequential(linear(), nn.Tanh(), linear())
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, out = self.a(x), []

        def run() -> None:
            out.append(torch.tanh(y @ self.w) @ self.w + self.b(y))

        worker = threading.Thread(target=run)
        worker.start()
        worker.join()
        return y + out[0] + y @ self.w


# -- parameters that no rank, or not every rank, uses


def one_head_a_step(model: nn.Module, seed: int, scale: float) -> None:
    (model(model(x_of(seed)), seed // 10).pow(2).mean() * scale).backward()


def another_head(model: nn.Module, seed: int, scale: float) -> None:
    (model(model(x_of(seed)), seed % 2).pow(2).mean() * scale).backward()


class PassThrough(nn.Module):
    """Returns what its child returned, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()
        self.w = nn.Parameter(torch.randn(WIDTH))
        self.w2 = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        y: torch.Tensor = self.lin(x)
        return (y + self.w) @ self.w2 if uses else y


def pass_through(model: nn.Module, seed: int, scale: float) -> None:
    (model(x_of(seed).requires_grad_(), seed % 10 == 0).pow(2).mean() * scale).backward()


def nest_replicated(model: nn.Module) -> None:
    replicate(model.get_submodule("lin"))
    fully_shard(model)


# -- backward of backward


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def gradient_penalty(model: nn.Module, seed: int, scale: float) -> None:
    x = x_of(seed).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.pow(2).sum() * scale).backward()


class Force(nn.Module):
    """The output is a derivative through frozen parameters: a backward within the forward, and one of that later."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))
        self.teacher, self.head = linear().requires_grad_(requires_grad=False), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x * self.w
        energy = torch.tanh(self.teacher(at)).square().sum()
        (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return self.head(torch.tanh(force))


class LeavesSlope(nn.Module):
    """Leaves a derivative in a list before it makes its output, so that a backward gets there by no output."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.lin = linear().requires_grad_(requires_grad=False), linear()
        self.left: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = torch.tanh(self.lin(self.teacher(x))).square().sum()
        self.left += torch.autograd.grad(energy, x, create_graph=True)
        return x * 2


def only_what_is_left(model: nn.Module, seed: int, scale: float) -> None:
    model(x_of(seed))
    left: Any = model.get_submodule("1").left
    (left.pop().square().mean() * scale).backward()


def frozen_with_trainable(model: nn.Module) -> None:
    fully_shard([model.get_submodule("teacher"), model.get_submodule("head")])
    fully_shard(model)


# -- a module that returns parameters


class ReturnsParams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return self.pos, {"more": self.pos[1:], "x": x}


class AroundParams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = ReturnsParams(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, more = self.embed(x)
        return self.head(torch.cat([out, more["more"]])).sum() + self.head(x).sum()


def evaluate_first(model: nn.Module, seed: int, scale: float) -> None:
    with torch.no_grad():
        assert math.isfinite(model(x_of(seed)).item())
    squares(model, seed, scale)


PARTS = each("inp", "block", "head")
LATE = "reentrant checkpoint in one call of two"
HIDDEN = ("closure", "deque", "attribute")
# Of each program the model, how it is annotated, and the step.
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object], Step]] = {
    "features once, one backward a head": (Heads, by_linear, one_backward_a_head),
    "two losses of a GAN": (Heads, by_linear, two_losses_of_a_gan),
    "two models with one trunk": (two_models, shard_two_models, shared_trunk),
    "side channel before the output": (partial(WithSideChannel, "before"), PARTS, squares),
    "side channel after the output": (partial(WithSideChannel, "after"), PARTS, squares),
    "an attribute instead of the output": (partial(WithSideChannel, "before", uses_output=False), PARTS, squares),
    **{f"output in a {kind}": (partial(AroundHidden, kind), PARTS, squares) for kind in HIDDEN},
    "a leaf as output": (Dropped, each("drop", "middle"), leaf_as_output),
    LATE: (TwoCalls, each("inp", "wrap.b", "wrap"), squares),
    "another thread": (InThreads, each("a", "b"), squares),
    "a head that no rank uses": (Heads, fully_shard, one_head_a_step),
    "another head on each rank": (Heads, fully_shard, another_head),
    **{
        f"pass through, {transport}": (
            PassThrough,
            each("lin", options=HandleOptions(transport=transport), reshard_after_forward=True),
            pass_through,
        )
        for transport in ("process_group", "point_to_point")
    },
    "pass through, replicated in sharded": (PassThrough, nest_replicated, pass_through),
    "gradient penalty": (small, by_linear, gradient_penalty),
    "derivative through frozen parameters of a handle that has others": (Force, frozen_with_trainable, squares),
    "derivative that leaves by no output": (
        lambda: nn.Sequential(linear(), LeavesSlope()),
        each("0", "1.teacher", "1", reshard_after_forward=True),
        only_what_is_left,
    ),
    "forward returns a parameter and views": (AroundParams, each("embed", "head"), evaluate_first),
}
# Ranks that are threads know no thread that one of them starts.
IN_PROCESSES = ("another thread",)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 2) for name in PROGRAMS if name not in IN_PROCESSES),
        *((name, world_size) for name in ("another head on each rank", "two losses of a GAN") for world_size in (1, 3)),
    ],
)
def test_gradients_are_those_of_one_process(name: str, world_size: int) -> None:
    expected = plain_step(name, world_size)
    for found in run_threads(one_step, world_size, name):
        assert_equal_gradients(found, expected)


@pytest.mark.parametrize("name", [*IN_PROCESSES, "pass through, process_group", "pass through, point_to_point"])
def test_gradients_are_those_of_one_process_on_processes(name: str) -> None:
    expected = plain_step(name, 2)
    for found in run_ranks(one_step, 2, name):
        assert_equal_gradients(found, expected)


@on_ranks(2)
def test_a_handle_that_was_completed_too_early_is_reduced_once_more_in_that_backward_only() -> None:
    make, annotate, step = PROGRAMS[LATE]
    model = seeded(make, 0)
    annotate(model)
    step(model, 0, 1.0)
    counting = CountingTransport.install(fully_shard.state(model).lazy_init())
    model.get_submodule("inp")(x_of(0)).sum().backward()
    assert counting.counts()["reduce_scatter"] == 1


@on_ranks(2)
def test_a_backward_inside_of_the_first_forward_of_a_thread_leaves_the_forward_running() -> None:
    """In each thread autograd numbers its nodes from 0."""
    model = Force()
    model.head = nn.Identity()
    each("teacher")(model)
    model(x_of(0))
    # What a forward has unsharded is hidden at its end.
    assert isinstance(model.w, DTensor)


# -- gradients that no_sync kept


def zero_grads(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    if how == "by hand":
        for param in model.parameters():
            param.grad = None
    else:
        owner = model if how.startswith("model") else optimizer
        owner.zero_grad(set_to_none="in place" not in how)


class Leaking(nn.Module):
    """What it leaves in a list is younger than the output, so that backward gets there first."""

    def __init__(self, left: list[torch.Tensor]) -> None:
        super().__init__()
        self.lin, self.aux, self.left = linear(), nn.Linear(WIDTH, 1), left

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lin(x)
        self.left.append(self.aux(out).square().mean())
        return out


def accumulate(program: list[str], options: dict[str, Any], leaks: bool) -> list[Gradients]:
    """Run forwards and backwards, synchronising or not, and what drops gradients between them."""
    torch.manual_seed(0)
    left: list[torch.Tensor] = []
    model: nn.Module = nn.Sequential(linear(), nn.Tanh(), linear())
    if leaks:
        model = Leaking(left)
    is_sharded = dist.is_initialized()
    if is_sharded:
        fully_shard(model, policy=None if leaks else {nn.Linear})
    ranks = [dist.get_rank()] if is_sharded else [0, 1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    found = []
    for number, word in enumerate(program):
        if word in ("keep", "sync", "sync, zeroed before backward"):
            losses = [model(x_of(rank + 2 * number)).pow(2).mean() / len(ranks) for rank in ranks]
            losses = [loss + aux / len(ranks) for loss, aux in zip(losses, left or [0.0] * len(losses), strict=True)]
            left.clear()
            if word == "sync, zeroed before backward":
                optimizer.zero_grad()
            for loss in losses:
                if word == "keep" and is_sharded:
                    with no_sync(model):
                        loss.backward()
                else:
                    loss.backward()
        elif word == "step":
            optimizer.step()
        else:
            zero_grads(model, optimizer, word)
        if word.startswith("sync") or word == "step":
            grads = {fqn: p.grad if word.startswith("sync") else p.detach() for fqn, p in model.named_parameters()}
            found.append({fqn: None if grad is None else full(grad).clone() for fqn, grad in grads.items()})
    return found


WAYS = ["model", "model, in place", "optimizer", "optimizer, in place", "by hand"]


def random_program(seed: int) -> list[str]:
    numbers = torch.randint(0, 10, (10,), generator=torch.Generator().manual_seed(seed)).tolist()
    words = ["keep", "keep", "sync", *WAYS, "sync, zeroed before backward", "sync"]
    program = [words[number] for number in numbers]
    return [*program, "sync", "step", "keep", WAYS[seed % len(WAYS)], "sync", "step"]


@pytest.mark.parametrize(("seed", "leaks"), [(seed, bool(seed // 2 % 2)) for seed in range(20)])
def test_zero_grad_drops_what_no_sync_kept(seed: int, leaks: bool) -> None:
    program, options = random_program(seed), {"foreach": bool(seed % 2)}
    expected = accumulate(program, options, leaks)
    for found in run_threads(accumulate, 2, program, options, leaks):
        assert_equal_gradients(found, expected)


# -- hooks on sharded parameters


def hook_parameters(when: str, kind: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train with hooks on parameters: SGD in backward, or a hook that changes gradients."""
    torch.manual_seed(0)
    model: nn.Module = Heads()
    is_sharded = dist.is_initialized()
    ranks = [dist.get_rank()] if is_sharded else [0, 1]
    calls: list[str] = []

    def update(fqn: str, param: torch.Tensor) -> None:
        calls.append(fqn)
        assert param.grad is not None
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    def add_hooks() -> None:
        for fqn, param in model.named_parameters():
            if kind == "post":
                param.register_post_accumulate_grad_hook(lambda param, fqn=fqn: update(fqn, param))
            else:
                param.register_hook(lambda grad: grad * 2)

    if when == "before":
        add_hooks()
    if is_sharded:
        fully_shard(model, policy={nn.Linear})
    if when == "after":
        add_hooks()
    for number in range(3):
        losses = [model(model(x_of(rank + 2 * number)), number % 2).pow(2).mean() / len(ranks) for rank in ranks]
        sum(losses[1:], losses[0]).backward()
        if kind == "hook":
            for param in model.parameters():
                if param.grad is not None:
                    with torch.no_grad():
                        param.sub_(param.grad, alpha=0.1)
                param.grad = None
    return {fqn: full(param) for fqn, param in model.named_parameters()}, sorted(calls)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["post", "hook"])
def test_hooks_of_parameters_run_on_the_reduced_gradient(when: str, kind: str) -> None:
    expected, calls = hook_parameters(when, kind)
    for found, ran in run_threads(hook_parameters, 2, when, kind):
        assert ran == calls
        for fqn, param in expected.items():
            torch.testing.assert_close(found[fqn], param, atol=1e-6, rtol=1e-5)


@on_ranks(2)
def test_a_hook_that_returns_something_else_is_named() -> None:
    model, plain = (seeded(lambda: nn.Sequential(linear(), linear()), 0) for _ in range(2))
    fully_shard(model, policy={nn.Linear})
    hook = model[0].weight.register_hook(lambda grad: grad.full_tensor())
    # The gradients of this one wait meanwhile, and are forgotten.
    model[1].weight.register_hook(lambda grad: grad)
    with pytest.raises(UsageError) as caught:
        model(x_of(0)).sum().backward()
    hook.remove()
    model.zero_grad()
    for one in (model, plain):
        one(x_of(0)).sum().backward()
    assert_equal_gradients([gradients_of(model)], [gradients_of(plain)])
    text = str(caught.value)
    assert "returned Tensor [6, 6]" in text and "fix:" in text
    assert f"rank {dist.get_rank()}, parameter 'weight'" in text


# -- what one rank cannot reduce, all hear of


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(WIDTH, WIDTH, sparse=True), linear()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(tokens))


def on_two_meshes(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    fully_shard(model.get_submodule("emb"), mesh=mesh["b"])
    fully_shard(model, policy={nn.Linear})


def in_one_handle(model: nn.Module) -> None:
    fully_shard([model.get_submodule("head"), model.get_submodule("emb")])
    fully_shard(model)


# Of each the ranks, those whose gradient is sparse, and the ranks that are named: each its own without a message.
SPARSE: dict[str, tuple[Callable[[nn.Module], object], int, list[int], list[int]]] = {
    "on one rank": (each("emb"), 3, [1], [1, 1, 1]),
    "on one rank of two meshes": (on_two_meshes, 4, [0], [0, 0, 0, 0]),
    "without a message": (each("emb", options=HandleOptions(unused_gradients="zero")), 2, [0, 1], [0, 1]),
    "beside a dense one of equal shape": (fully_shard, 1, [0], [0]),
    "where several modules share a handle": (in_one_handle, 1, [0], [0]),
}


def fail_on_a_sparse_gradient(kind: str) -> str:
    annotate, _, sparse, _ = SPARSE[kind]
    model, plain = seeded(Tokens, 0), seeded(Tokens, 0)
    annotate(model)
    model.emb.sparse = dist.get_rank() in sparse
    with pytest.raises(UsageError) as caught:
        model(torch.arange(3)).sum().backward()
    # The next step is right.
    for one in (model, plain):
        one.emb.sparse = False
        one.zero_grad()
        one(torch.arange(3)).sum().backward()
    assert_equal_gradients([gradients_of(model)], [gradients_of(plain)])
    return str(caught.value)


@pytest.mark.parametrize("kind", SPARSE)
def test_a_gradient_that_one_rank_cannot_reduce_is_an_error_on_all(kind: str) -> None:
    _, world_size, _, named = SPARSE[kind]
    for rank, text in enumerate(run_threads(fail_on_a_sparse_gradient, world_size, kind)):
        assert "a gradient is sparse" in text and f"rank {named[rank]}, parameter 'emb.weight'\n" in text


@on_ranks(2)
def test_ranks_exchange_one_message_in_a_backward_that_synchronises() -> None:
    model = nn.Sequential(*(linear() for _ in range(4)))
    fully_shard(model, policy={nn.Linear})
    model(x_of(0)).sum().backward()
    root = fully_shard.state(model).lazy_init()
    counts, transports = [], []
    for agreement in root.scheduler.step.finalizer.agreements:
        transports.append(CountingTransport(agreement.transport))
        agreement.transport = transports[-1]
    with no_sync(model):
        model(x_of(0)).sum().backward()
    counts.append(sum(len(one.records) for one in transports))
    model(x_of(0)).sum().backward()
    counts.append(sum(len(one.records) for one in transports))
    assert counts == [0, 1]
