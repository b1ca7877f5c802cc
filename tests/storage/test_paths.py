"""The gather and gradient paths carry what users may think of: other bytes on the way, other places.

Each path is a dozen lines of a test, put in the place of a handle's own,
and trains like one process.
"""

import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard
from composable.comm import Pending
from composable.engine.paths import Gather, GradientPath, Reduction
from tests.counting import Collective, CountingTransport
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.parity import LR, Run, assert_equal_params, full_params, inputs_of, train_reference
from tests.world import run_threads


class HalfPrecision:
    """Sends gradients in bfloat16 and gives the mean back in the dtype they had, as a communication hook would."""

    def __init__(self, inner: GradientPath) -> None:
        self.inner, self.transport = inner, inner.transport

    def begin(self, source: torch.Tensor) -> Reduction:
        finish = self.inner.begin(source.bfloat16())
        return lambda: finish().to(source.dtype)


class FromAfar:
    """Keeps a copy of the shard elsewhere and fetches it for each gather, as offload would."""

    def __init__(self, inner: Gather) -> None:
        self.inner = inner
        # Read by the watch of ranks that wait, for as long as the model lives.
        self.transport, self.key = inner.transport, inner.key
        self.fetched = 0

    def begin(self, buffer: torch.Tensor, shard: torch.Tensor) -> Pending:
        self.fetched += 1
        return self.inner.begin(buffer, shard.clone())


def annotated() -> nn.Module:
    return fully_shard(make_model("mlp"), policy=BLOCK_CLASSES)


def train(model: nn.Module, steps: int = 3) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
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


def test_a_hook_on_the_path_halves_what_is_sent() -> None:
    reference = train_reference("mlp", 3, steps=1)
    for run, sent, whole in run_threads(train_in_half_precision, 3):
        assert sent and {key: 2 * size for key, size in sent.items()} == whole
        assert_equal_params(run.params, reference.params, tolerance=1e-3)
        # It is bfloat16 that was sent: float32 would be equal to the last bits.
        worst = max((run.params[fqn] - reference.params[fqn]).abs().max().item() for fqn in run.params)
        assert worst > 1e-6


# What gathers read


def train_from_afar() -> tuple[Run, list[int]]:
    model = annotated()
    for flat in flats_of(model):
        flat.routes.gather_path = FromAfar(flat.routes.gather_path)
    return train(model), [flat.routes.gather_path.fetched for flat in flats_of(model)]


def test_every_gather_goes_through_the_path() -> None:
    reference = train_reference("mlp", 3)
    for run, fetched in run_threads(train_from_afar, 3):
        assert_equal_params(run.params, reference.params, tolerance=1e-6)
        # Three forwards and backwards; the root stays unsharded from one to the other.
        assert set(fetched) == {3, 6}
