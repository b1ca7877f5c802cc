"""Backwards that compiled autograd runs: replicated modules average in the graph, sharded ones refuse.

The compiler keeps its graphs for the process: the ranks are processes, but where no graph is made.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

from composable import (
    MixedPrecisionPolicy,
    ReplicateOptions,
    UsageError,
    as_ddp,
    fully_shard,
    no_sync,
    register_comm_hook,
    replicate,
    step_in_backward,
)
from composable.ground.torch_private import started_in
from tests.models import DIM, MLPBlock, random_input, seeded
from tests.programs import Twins
from tests.world import on_ranks, run_ranks


class Net(nn.Module):
    """A block, a tied weight, and a weight in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(1))
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.again = nn.Linear(DIM, DIM, bias=False)
        self.again.weight = self.out.weight
        self.scale = nn.Parameter(torch.ones(DIM, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.again(self.out(x)).double() * self.scale


def x_of(number: int, rank: int) -> torch.Tensor:
    return random_input(10 * number + rank, 4, DIM)


def loss_at(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(x_of(number, rank)).square().mean()


class Graphs:
    """A backend that keeps what the graphs call."""

    def __init__(self, name: str) -> None:
        from torch._dynamo import lookup_backend

        self.calls: list[Counter[str]] = []
        self._backend = lookup_backend(name)

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        self.calls.append(Counter(getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes))
        return self._backend(graph, inputs)

    @property
    def last_backward(self) -> int:
        """How many averages the last graph with averages has."""
        return [calls["all_reduce"] for calls in self.calls if calls["all_reduce"]][-1]


def compiled(step: Callable[..., None], way: str, backend: Any) -> Callable[..., None]:
    """Return ``step`` with backwards that compiled autograd runs."""
    import torch._dynamo.compiled_autograd as compiled_autograd

    # The compiler asks every tensor for its gradient, and calls what torch has deprecated.
    warnings.simplefilter("ignore")
    torch.compiler.reset()
    whole = step
    if way == "config":
        with torch._dynamo.config.patch(compiled_autograd=True):
            whole = torch.compile(step, backend=backend)

    def context() -> AbstractContextManager[Any]:
        if way == "config":
            return torch._dynamo.config.patch(compiled_autograd=True)
        enabled: AbstractContextManager[Any] = compiled_autograd._enable(torch.compile(backend=backend))
        return enabled

    def run(*args: Any) -> None:
        with context():
            whole(*args)

    return run


@pytest.mark.parametrize(("way", "backend", "by_block"), [("enable", "eager", True), ("config", "aot_eager", False)])
@on_ranks(2, run=run_ranks)
def test_a_graph_of_backward_holds_an_all_reduce_for_each_gradient(way: str, backend: str, by_block: bool) -> None:
    """Train in graphs, with and without synchronisation, and once without a graph: the numbers of one process."""
    count = len(list(seeded(Net, 0).parameters()))
    twins = Twins(Net, lambda model: [replicate(model.blocks[0]) if by_block else None, replicate(model)], loss=loss_at)
    graphs = Graphs(backend)

    def step(x: torch.Tensor) -> None:
        twins.model(x).square().mean().backward()

    in_graph = compiled(step, way, graphs)
    for number, keeps in enumerate([False, True, False]):
        if keeps:
            with no_sync(twins.model):
                in_graph(x_of(5, twins.rank))
            twins.backward_alone(5)
        (step if number == 2 else in_graph)(x_of(number, twins.rank))
        twins.backward_alone(number)
        twins.check_gradients(1e-5)
        if number == 0:  # Later gradients are added to averages.
            twins.drop()
    assert graphs.last_backward == count


def join_by_inductor() -> int:
    """Return how many collectives a compiled step runs; its gradients are those of one process on all batches."""
    twins = Twins(Net, replicate, loss=loss_at)

    def step(x: torch.Tensor) -> None:
        twins.model(x).square().mean().backward()

    with torch._inductor.config.patch(bucket_all_reduces_fx="all", force_disable_caches=True):
        in_graph = compiled(step, "config", "inductor")
        in_graph(x_of(0, twins.rank))
        twins.drop()
        before = started_in(dist.group.WORLD)
        in_graph(x_of(0, twins.rank))
        count = started_in(dist.group.WORLD) - before
    twins.backward_alone()
    twins.check_gradients(1e-5)
    return count


def test_inductor_joins_all_reduces_where_it_is_asked_to() -> None:
    first, second = run_ranks(join_by_inductor, 2)
    # One for each dtype at least. Inductor decides, by what depends on what: torch 2.13 takes three for these six.
    assert first == second and 2 <= first < len(list(seeded(Net, 0).parameters()))


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "fully_shard": lambda model: fully_shard(model, policy={MLPBlock}),
    "hook": lambda model: register_comm_hook(replicate(model), None, default_hooks.allreduce_hook),
    "unused": lambda model: replicate(model, find_unused_parameters=True),
    "join": replicate,
    "steps": lambda model: step_in_backward(torch.optim.SGD(replicate(model).parameters(), lr=0.1)),
    "static": lambda model: replicate(model, static_graph=True),
    "delayed": lambda model: replicate(
        model,
        options=ReplicateOptions(
            delay_all_reduce_named_params=[("1.up.weight", model.get_parameter("1.up.weight"))],
            param_to_hook_all_reduce=model.get_parameter("0.weight"),
        ),
    ),
    "precision": lambda model: replicate(model, mp_policy=MixedPrecisionPolicy(torch.float32)),
    "copies": lambda model: replicate(model, mp_policy=MixedPrecisionPolicy(torch.float64)),
    "buffers": lambda model: replicate(model, mp_policy=MixedPrecisionPolicy(buffer_dtype=torch.float64)),
}


def refused(kind: str, way: str) -> str:
    """Return the error of a backward in a graph; the step after it, without, must be right."""
    twins = Twins(lambda: nn.Sequential(nn.Linear(DIM, DIM), MLPBlock()), REFUSED[kind], loss=loss_at)

    def step(x: torch.Tensor) -> None:
        twins.model(x).square().mean().backward()

    with Join([as_ddp(twins.model)]) if kind == "join" else contextlib.nullcontext():
        with pytest.raises(UsageError) as caught:
            compiled(step, way, "eager")(x_of(0, twins.rank))
        if kind == "steps":
            twins.answer.remove()
        twins.drop()
        twins.backward()
    twins.check_gradients(1e-5)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("fully_shard", "config"),
        ("hook", "enable"),
        ("unused", "config"),
        ("join", "enable"),
        ("steps", "config"),
        ("static", "config"),
        ("delayed", "enable"),
        ("precision", "enable"),
        ("copies", "config"),
        ("buffers", "enable"),
    ],
)
def test_what_a_graph_cannot_do_is_refused_on_every_rank_and_the_next_step_is_right(kind: str, way: str) -> None:
    for rank, error in enumerate(run_ranks(refused, 2, kind, way)):
        what, at, fix = error.split("\n")
        assert what.startswith("compiled autograd runs this backward, ")
        assert ("mp_policy" in what) == (kind in ("precision", "copies", "buffers"))
        assert at.startswith(f"  at:  rank {rank}")
        assert fix.startswith("  fix: leave compiled autograd off")
