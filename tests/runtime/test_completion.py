"""Programs in which autograd's order says too little: every gradient is that of one process all the same.

Random trees (``tools/fuzz``) have most such programs; here are those that no tree has, or not for certain.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composable import HandleOptions, UsageError, fully_shard, no_sync
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


# -- the order of autograd


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


# -- backward of backward


def by_linear(model: nn.Module) -> object:
    return fully_shard(model, policy={nn.Linear})


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def gradient_penalty(model: nn.Module, seed: int, scale: float) -> None:
    x = x_of(seed).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.pow(2).sum() * scale).backward()


def penalty_before_a_forward(model: nn.Module, seed: int, scale: float) -> None:
    x = x_of(seed).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = slope.pow(2).sum()
    for _ in range(70):  # More operations than are looked through to see where it leads.
        penalty = penalty * 1
    loss = model(x_of(seed + 5)).pow(2).mean()
    (penalty * scale).backward()
    (loss * scale).backward()


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


LATE = "reentrant checkpoint in one call of two"
# Of each program the model, how it is annotated, and the step.
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object], Step]] = {
    "two models with one trunk": (two_models, shard_two_models, shared_trunk),
    LATE: (TwoCalls, each("inp", "wrap.b", "wrap"), squares),
    "another thread": (InThreads, each("a", "b"), squares),
    **{
        f"pass through, {transport}": (
            PassThrough,
            each("lin", options=HandleOptions(transport=transport), reshard_after_forward=True),
            pass_through,
        )
        for transport in ("process_group", "shared_memory")
    },
    "gradient penalty before another forward": (small, by_linear, penalty_before_a_forward),
    "derivative through frozen parameters of a handle that has others": (Force, frozen_with_trainable, squares),
    "derivative that leaves by no output": (
        lambda: nn.Sequential(linear(), LeavesSlope()),
        each("0", "1.teacher", "1", reshard_after_forward=True),
        only_what_is_left,
    ),
    "forward returns a parameter and views": (AroundParams, each("embed", "head"), evaluate_first),
}
# Ranks that are threads know no thread that one of them starts, and share no memory.
IN_PROCESSES = ("another thread", "pass through, shared_memory")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in IN_PROCESSES])
def test_gradients_are_those_of_one_process(name: str) -> None:
    expected = plain_step(name, 2)
    for found in run_threads(one_step, 2, name):
        assert_equal_gradients(found, expected)


@pytest.mark.parametrize("name", [*IN_PROCESSES, "pass through, process_group"])
def test_gradients_are_those_of_one_process_on_processes(name: str) -> None:
    expected = plain_step(name, 2)
    for found in run_ranks(one_step, 2, name):
        assert_equal_gradients(found, expected)


@on_ranks(2)
def test_what_a_graph_of_backward_may_read_is_freed_by_the_next_forward() -> None:
    model = seeded(small, 0)
    by_linear(model)
    state = fully_shard.state(model)
    assert state is not None
    buffers = [flat for handle in state._handles for flat in handle.buffers]
    gradient_penalty(model, dist.get_rank(), 1.0)
    assert all(flat.is_allocated for flat in buffers)
    with torch.no_grad():
        model(x_of(0))
    assert not any(flat.is_allocated for flat in buffers)


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


# -- hooks on sharded parameters


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
