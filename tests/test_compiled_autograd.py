"""Backwards that compiled autograd runs: replicated modules average in the graph, sharded ones refuse.

The compiler keeps its graphs for the process: the ranks are processes, but where no graph is made.
"""

import contextlib
import itertools
import operator
import random
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
    UsageError,
    as_ddp,
    bucketing_backend,
    fully_shard,
    no_sync,
    register_comm_hook,
    replicate,
    step_in_backward,
)
from composable.ground.torch_private import graph_collectives
from composable.replication import join_all_reduces
from tests.models import DIM, MLPBlock, random_input, seeded
from tests.world import run_ranks, run_threads

FORMS = ("concatenated", "coalesced")


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


class Graphs:
    """A backend that keeps what the graphs call, before and after the all-reduces are joined."""

    def __init__(self, name: str) -> None:
        from torch._dynamo import lookup_backend

        self.calls: list[Counter[str]] = []
        self._backend = lookup_backend(name)

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        self.calls.append(Counter(getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes))
        return self._backend(graph, inputs)

    @property
    def last_backward(self) -> dict[str, int]:
        """How many averages of each kind the last graph with averages has."""
        kinds = ("all_reduce", "_sum_of_concatenated", "_sums_of_coalesced")
        found = [{kind: calls[kind] for kind in kinds if calls[kind]} for calls in self.calls]
        return [one for one in found if one][-1]


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


def train(way: str, backend: str, form: str | None, cap_mb: float, *, by_block: bool = False) -> dict[str, int]:
    """Train in graphs, with and without synchronisation, and once without a graph: the numbers of one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain = (seeded(Net, 0) for _ in range(2))
    if by_block:
        replicate(model.blocks[0])
    replicate(model)
    graphs = Graphs(backend)
    chosen: Any = graphs if form is None else bucketing_backend(graphs, bucket_cap_mb=cap_mb, form=form)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    in_graph = compiled(step, way, chosen)
    for number, keeps in enumerate([False, True, False]):
        if keeps:
            with no_sync(model):
                in_graph(random_input(50 + rank, 4, DIM))
        (step if number == 2 else in_graph)(random_input(10 * number + rank, 4, DIM))
        for one in range(world_size):
            for seed in [50 + one] * keeps + [10 * number + one]:
                (plain(random_input(seed, 4, DIM)).square().mean() / world_size).backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
        if number == 0:  # Later gradients are added to averages.
            model.zero_grad()
            plain.zero_grad()
    return graphs.last_backward


def test_a_graph_of_backward_holds_an_all_reduce_for_each_gradient() -> None:
    count = len(list(seeded(Net, 0).parameters()))
    assert run_ranks(train, 2, "enable", "eager", None, 25.0) == [{"all_reduce": count}] * 2


def test_all_reduces_are_joined_by_dtype() -> None:
    assert run_ranks(train, 2, "config", "aot_eager", "concatenated", 25.0) == [{"_sum_of_concatenated": 2}] * 2


def test_all_reduces_are_joined_up_to_the_size_of_a_bucket_also_across_nested_annotations() -> None:
    (counts,) = {tuple(found.items()) for found in run_ranks(train_by_block, 3, 5000)}
    params = [param for param in seeded(Net, 0).parameters() if param.dtype == torch.float32]
    least = sum(param.numel() * 4 for param in params) / 5000 + 1
    ((kind, count),) = counts
    assert kind == "_sums_of_coalesced" and least <= count < len(params) + 1


def train_by_block(cap_bytes: int) -> dict[str, int]:
    return train("enable", "eager", "coalesced", cap_bytes / 2**20, by_block=True)


def test_inductor_compiles_joined_all_reduces() -> None:
    assert run_ranks(train, 2, "config", "inductor", "concatenated", 25.0) == [{"_sum_of_concatenated": 2}] * 2


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "fully_shard": lambda model: fully_shard(model, policy={MLPBlock}),
    "hook": lambda model: register_comm_hook(replicate(model), None, default_hooks.allreduce_hook),
    "unused": lambda model: replicate(model, find_unused_parameters=True),
    "join": replicate,
    "steps": lambda model: step_in_backward(torch.optim.SGD(replicate(model).parameters(), lr=0.1)),
    "static": lambda model: replicate(model, static_graph=True),
    "delayed": lambda model: replicate(
        model,
        delay_all_reduce_named_params=[("1.up.weight", model.get_parameter("1.up.weight"))],
        param_to_hook_all_reduce=model.get_parameter("0.weight"),
    ),
    "precision": lambda model: replicate(model, mp_policy=MixedPrecisionPolicy(torch.float32)),
    "copies": lambda model: replicate(model, mp_policy=MixedPrecisionPolicy(torch.float64)),
    "buffers": lambda model: replicate(model, mp_policy=MixedPrecisionPolicy(buffer_dtype=torch.float64)),
}


def refused(kind: str, way: str) -> str:
    """Return the error of a backward in a graph; the step after it, without, must be right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain = (seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), MLPBlock()), 0) for _ in range(2))
    annotated = REFUSED[kind](model)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    with Join([as_ddp(model)]) if kind == "join" else contextlib.nullcontext():
        with pytest.raises(UsageError) as caught:
            compiled(step, way, "eager")(random_input(rank, 4, DIM))
        if kind == "steps":
            annotated.remove()
        model.zero_grad()
        step(random_input(rank, 4, DIM))
    for one in range(world_size):
        (plain(random_input(one, 4, DIM)).square().mean() / world_size).backward()
    for name, expected in plain.named_parameters():
        grad: Any = model.get_parameter(name).grad
        torch.testing.assert_close(getattr(grad, "full_tensor", lambda grad=grad: grad)(), expected.grad)
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


# Joining


def random_graph(seed: int, group_names: list[str]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Return a graph that averages gradients, reads some of them and talks otherwise too, and its inputs."""
    draw = random.Random(seed)
    graph = fx.Graph()
    numel = draw.randint(1, 9)
    values, grads = [], []
    for index in range(numel):
        shape = [draw.randint(0, 3) for _ in range(draw.randint(0, 2))]
        dtype = draw.choice([torch.float32, torch.float64])
        values.append(torch.arange(float(torch.Size(shape).numel())).view(shape).add(dist.get_rank() + index).to(dtype))
        grads.append(graph.placeholder(f"grad{index}"))
        grads[-1].meta["example_value"] = values[-1]
    results = []
    for grad in draw.sample(grads, numel):
        name = draw.choice(group_names)
        scaled = graph.call_function(operator.mul, (grad, 0.5))
        reduced = graph.call_function(graph_collectives.all_reduce, (scaled, "sum", name))
        copied = graph.call_method("copy_", (grad, graph.call_function(graph_collectives.wait_tensor, (reduced,))))
        if draw.random() < 0.3:
            read = draw.choice([grad, copied, draw.choice(grads)])
            results.append(graph.call_function(operator.add, (read, 1)))
        if draw.random() < 0.2:
            # Not an average of a gradient: nothing takes it for one.
            other = graph.call_function(graph_collectives.all_reduce, (grad, "sum", name))
            results.append(graph.call_function(graph_collectives.wait_tensor, (other,)))
    graph.output((*grads, *results))
    return fx.GraphModule(nn.Module(), graph), values


def join_at_random(seeds: range) -> int:
    group_names = [dist.new_group().group_name for _ in range(2)]
    fewer = 0
    for seed in seeds:
        module, values = random_graph(seed, group_names)
        expected = module(*(value.clone() for value in values))
        counts = []
        for form, cap in itertools.product(FORMS, (1, 24, 1 << 20)):
            joined, _ = random_graph(seed, group_names)
            counts.append(join_all_reduces(joined.graph, cap, form))
            joined.recompile()
            torch.testing.assert_close(joined(*(value.clone() for value in values)), expected, rtol=0, atol=0)
        assert sorted(counts[:3], reverse=True) == counts[:3] == counts[3:]
        fewer += counts[2] < counts[0]
    return fewer


def test_joining_changes_no_value_of_random_graphs() -> None:
    assert min(run_threads(join_at_random, 2, range(60))) > 20


def test_wrong_arguments_are_errors() -> None:
    for arguments, what in (
        ({"form": "joined"}, "form is 'joined'"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb is 0"),
        ({"backend": "no such"}, "backend is 'no such'"),
        ({"backend": 3}, "backend is 3"),
    ):
        with pytest.raises(Exception, match=what):
            bucketing_backend(**arguments)  # type: ignore[arg-type]  # the point
