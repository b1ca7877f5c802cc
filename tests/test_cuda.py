"""Streams, events and memory on one GPU: NCCL at world size 1, the fake process group beyond.

With one rank no byte leaves the device, but every stream, event and buffer is used as with
many. Delays are put into the communication streams, so that a missing wait shows as a wrong number.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import ModuleWrapPolicy, fully_shard
from composable.comm import Pending, Transport
from composable.engine.scheduler import Scheduler
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.pairwise import pairs_of
from tests.parity import full, inputs_of

pytestmark = pytest.mark.cuda

# Cycles: about ten milliseconds, far longer than any kernel of these models.
DELAY = 20_000_000


class SlowTransport(Transport):
    """Delays every collective on the stream it runs on, and poisons what it is about to write."""

    def __init__(self, inner: Transport) -> None:
        self.name, self.rank, self.world_size = inner.name, inner.rank, inner.world_size
        self._inner = inner

    @classmethod
    def install(cls, model: nn.Module) -> None:
        """Delay what the handles of a sharded model send."""
        for handle in fully_shard.state(model).lazy_init().handles:
            for flat in handle.buffers:
                for path in (flat.routes.gather_path, flat.routes.gradient_path):
                    while hasattr(path, "inner"):
                        path = path.inner
                    path.transport = cls(path.transport)

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        # A shard that was copied is a part of the buffer.
        is_inside = shard.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        kept = shard.clone() if is_inside else None
        buffer.fill_(float("nan"))
        torch.cuda._sleep(DELAY)
        if kept is not None:
            shard.copy_(kept)
        return self._inner.begin_all_gather(buffer, shard, key)

    def begin_reduce_scatter(self, source: torch.Tensor, shard: torch.Tensor, key: int, **options: Any) -> Pending:
        shard.fill_(float("nan"))
        torch.cuda._sleep(DELAY)
        return self._inner.begin_reduce_scatter(source, shard, key, **options)

    def begin_all_reduce(self, tensor: torch.Tensor, key: int, **options: Any) -> Pending:
        return self._inner.begin_all_reduce(tensor, key, **options)

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        return self._inner.begin_broadcast(tensor, source_rank, key)


@pytest.fixture
def fake() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def allocated() -> int:
    """Return the bytes that are allocated once what other tests have left is gone, and libraries have theirs."""
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for seed in range(steps):
        args, _ = inputs_of(model, seed, 0)
        loss = loss_of(model(*(arg.cuda() for arg in args)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    *pairs_of(
        name=["mlp", "gpt", "gpt_tied", "frozen_mixed", "called_twice"], reshard=[None, False], slow=[True, False]
    )
)
@pytest.mark.usefixtures("nccl")
def test_training_on_a_gpu_equals_a_plain_module(name: str, reshard: bool | None, slow: bool) -> None:
    plain = make_model(name).cuda()
    expected = train(plain, 4)
    model = make_model(name).cuda()
    fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES), reshard_after_forward=reshard)
    if slow:
        SlowTransport.install(model)
    torch.testing.assert_close(train(model, 4), expected, rtol=1e-5, atol=1e-6)
    for (fqn, param), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param), reference.detach(), rtol=1e-5, atol=1e-6, msg=fqn)


@pytest.mark.usefixtures("nccl")
def test_a_module_on_the_cpu_is_sharded_onto_the_gpu() -> None:
    model = make_model("mlp")
    fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES))
    args, _ = inputs_of(model, 0, 0)
    # The root moves its inputs, nested ones and keywords too.
    loss = loss_of(model(*args))
    loss.backward()
    assert loss.is_cuda and all(param.device.type == "cuda" and param.grad is not None for param in model.parameters())


class Nested(nn.Module):
    """Calls a module with a tensor that it makes itself, on the CPU."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.seen: list[str] = []

        def forward(self, x: torch.Tensor, *, note: torch.Tensor) -> torch.Tensor:
            self.seen.append(note.device.type)
            return self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.inner(x, note=torch.ones(1)) * scale


@pytest.mark.usefixtures("nccl")
def test_only_the_root_moves_its_inputs() -> None:
    model = Nested()
    fully_shard(model.inner)
    fully_shard(model)
    assert model(torch.ones(2, 8), scale=torch.ones(1)).is_cuda
    assert model.inner.seen == ["cpu"]


@pytest.mark.usefixtures("fake")
def test_nothing_but_shards_and_gradients_stays_allocated() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
    fully_shard(model, policy={nn.Linear})
    state = fully_shard.state(model)
    before = allocated()
    shard_bytes = state.plan.shard_bytes
    for _ in range(2):
        model(torch.ones(1, 1024, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= shard_bytes + 2**21
    model.zero_grad()
    assert torch.cuda.memory_allocated() - before <= 2**21


@pytest.mark.usefixtures("fake")
def test_at_most_three_handles_and_two_gradient_buffers_are_alive() -> None:
    layers, numel = 8, 1024 * 1024
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers))).cuda()
    fully_shard(model, policy={nn.Linear})
    x = torch.ones(1, 1024, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x).sum().backward()
    # Unsharded: the running handle and the one ahead; gradients: the leaf's own, two buffers, and the shards.
    bound = 4 * numel * (2 + 1 + 2) + 4 * numel * layers // 4
    assert torch.cuda.max_memory_allocated() - before <= bound + 2**21


@pytest.mark.usefixtures("nccl")
def test_streams_have_names() -> None:
    model = make_model("mlp").cuda()
    fully_shard(model)
    scheduler = fully_shard.state(model).lazy_init().scheduler
    assert isinstance(scheduler, Scheduler)
    assert sorted(scheduler._stream_to_name.values()) == ["default", "reduce", "unshard"]
