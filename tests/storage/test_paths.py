"""The gather and gradient paths carry what is to come: other bytes on the way, a second set of ranks, the host.

Nothing here is a feature yet. Each path is a dozen lines of a test, put in the place of a handle's own,
and trains like one process.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard
from composable.collectives import Grid, Pending, Ranks, Transport
from composable.collectives.choose import make_transport
from composable.storage.gather_path import GatherPath
from composable.storage.gradient_path import GradientPath, Reduction
from tests.counting import Collective, CountingTransport
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.parity import LR, Run, assert_equal_params, full_params, inputs_of, train_reference
from tests.world import run_threads


class HalfPrecision:
    """Sends gradients in bfloat16 and gives the mean back in the dtype they had, as a communication hook would."""

    def __init__(self, inner: GradientPath) -> None:
        self.inner = inner

    def begin(self, source: torch.Tensor) -> Reduction:
        return Cast(self.inner.begin(source.bfloat16()), source.dtype)


class Cast:
    def __init__(self, inner: Reduction, dtype: torch.dtype) -> None:
        self.inner = inner
        self.dtype = dtype

    def finish(self) -> torch.Tensor:
        return self.inner.finish().to(self.dtype)


class ThenAllReduce:
    """Adds up shards over the ranks that hold copies of them, as hybrid sharding would."""

    def __init__(self, inner: GradientPath, replicas: Transport) -> None:
        self.inner = inner
        self.replicas = replicas
        self.key = replicas.allocate_key()

    def begin(self, source: torch.Tensor) -> Reduction:
        return Second(self, self.inner.begin(source))


class Second:
    def __init__(self, path: ThenAllReduce, first: Reduction) -> None:
        self.path = path
        self.first = first

    def finish(self) -> torch.Tensor:
        shard = self.first.finish()
        self.path.replicas.begin_all_reduce(shard, self.path.key).finish()
        return shard


class FromAfar:
    """Keeps a copy of the shard elsewhere and fetches it for each gather, as offload would."""

    def __init__(self, inner: GatherPath) -> None:
        self.inner = inner
        # Read by the watch of ranks that wait, for as long as the model lives.
        self.transport, self.key = inner.transport, inner.key
        self.fetched = 0

    def begin(self, buffer: torch.Tensor, shard: torch.Tensor) -> Pending:
        self.fetched += 1
        return self.inner.begin(buffer, shard.clone())


def annotated(grid_of: Callable[[], tuple[dist.DeviceMesh, Grid] | None] = lambda: None) -> nn.Module:
    model = make_model("mlp")
    found = grid_of()
    fully_shard(model, policy=BLOCK_CLASSES, mesh=found[0] if found else None)
    if found:
        state = fully_shard.state(model)
        assert state is not None
        state.grid = found[1]
    return model


def train(model: nn.Module, steps: int = 3, optimizer: torch.optim.Optimizer | None = None) -> Run:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        args, kwargs = inputs_of(model, step, dist.get_rank())
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Run([], full_params(model))


def flats_of(model: nn.Module) -> list:
    state = fully_shard.state(model)
    assert state is not None
    return [flat for handle in state.lazy_init().handles for flat in handle.buffers]


# A hook that halves precision


def train_in_half_precision() -> tuple[Run, dict[str, int], dict[str, int]]:
    model = annotated()
    for flat in flats_of(model):
        flat.routes.gradient_path = HalfPrecision(flat.routes.gradient_path)
    records: list[Collective] = []
    for flat in flats_of(model):
        flat.routes.gradient_path.inner.transport = CountingTransport(
            flat.routes.gradient_path.inner.transport, records
        )
    run = train(model, steps=1)
    sent = {flat.routes.gradient_path.inner.key: flat.plan.buffer_bytes for flat in flats_of(model)}
    return run, {record.key: record.bytes for record in records}, sent


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_hook_on_the_path_halves_what_is_sent(world_size: int) -> None:
    reference = train_reference("mlp", world_size, steps=1)
    for run, sent, whole in run_threads(train_in_half_precision, world_size):
        assert sent and {key: 2 * size for key, size in sent.items()} == whole
        assert_equal_params(run.params, reference.params, tolerance=1e-3)
        # It is bfloat16 that was sent: float32 would be equal to the last bits.
        worst = max((run.params[fqn] - reference.params[fqn]).abs().max().item() for fqn in run.params)
        assert worst > 1e-6


# A second set of ranks


def two_by_two() -> tuple[dist.DeviceMesh, Grid]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    shard, replicas = Ranks.of_mesh(mesh["shards"]), Ranks.of_mesh(mesh["copies"])
    return mesh["shards"], Grid(shard, replicas, Ranks.of_world())


def train_on_two_dims(with_replicas: bool) -> tuple[Run, int]:
    model = annotated(two_by_two)
    state = fully_shard.state(model)
    assert state is not None and state.grid.replicas is not None
    if with_replicas:
        replicas = make_transport("process_group", state.grid.replicas.process_group)
        for flat in flats_of(model):
            flat.routes.gradient_path = ThenAllReduce(flat.routes.gradient_path, replicas)
    return train(model), state.grid.divisor


def test_a_second_path_reduces_over_the_replicas_and_divides_once() -> None:
    reference = train_reference("mlp", 4)
    for run, divisor in run_threads(train_on_two_dims, 4, True):
        assert divisor == 4
        assert_equal_params(run.params, reference.params, tolerance=1e-6)
    for run, _ in run_threads(train_on_two_dims, 4, False):
        with pytest.raises(AssertionError):
            assert_equal_params(run.params, reference.params, tolerance=1e-6)


# What gathers read


def train_from_afar() -> tuple[Run, list[int]]:
    model = annotated()
    for flat in flats_of(model):
        flat.routes.gather_path = FromAfar(flat.routes.gather_path)
    return train(model), [flat.routes.gather_path.fetched for flat in flats_of(model)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_gather_goes_through_the_path(world_size: int) -> None:
    reference = train_reference("mlp", world_size)
    for run, fetched in run_threads(train_from_afar, world_size):
        assert_equal_params(run.params, reference.params, tolerance=1e-6)
        # Three forwards and backwards; the root stays unsharded from one to the other.
        assert set(fetched) == {3, 6}


# An error on the way


def test_a_path_that_fails_leaves_the_next_step_right() -> None:
    reference = train_reference("mlp", 2)
    for run in run_threads(fail_once, 2):
        assert_equal_params(run.params, reference.params, tolerance=1e-6)


class FailsOnce:
    def __init__(self, inner: GradientPath) -> None:
        self.inner = inner
        self.is_due = True

    def begin(self, source: torch.Tensor) -> Reduction:
        if self.is_due:
            self.is_due = False
            raise ConnectionError("the link is down")
        return self.inner.begin(source)


def fail_once() -> Run:
    model = annotated()
    flat = flats_of(model)[-1]
    flat.routes.gradient_path = FailsOnce(flat.routes.gradient_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    args, kwargs = inputs_of(model, 0, dist.get_rank())
    with pytest.raises(ConnectionError):
        loss_of(model(*args, **kwargs)).backward()
    optimizer.zero_grad()
    return train(model, optimizer=optimizer)
