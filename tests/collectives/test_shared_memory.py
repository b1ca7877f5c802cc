"""What only the transport through shared memory does; what all transports do is in ``test_transports.py``."""

import gc
import logging
import os
import resource
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard, replicate
from composable.comm import shared_memory, transport_of
from composable.comm.mapped_memory import ENTRIES
from composable.comm.shared_memory import SharedMemoryTransport
from composable.errors import ConfigError, DesyncError
from tests.world import RankErrors, on_ranks, run_ranks, run_threads

pytestmark = pytest.mark.skipif(
    not SharedMemoryTransport.serves("cpu", "gloo"), reason="shared memory is for Linux on x86-64"
)


def make() -> SharedMemoryTransport:
    assert dist.group.WORLD is not None
    return SharedMemoryTransport(dist.group.WORLD)


def gather(transport: SharedMemoryTransport, key: int, numel: int = 4) -> list[float]:
    """Return the first element of each rank's shard of ``numel`` elements."""
    buffer = torch.zeros(transport.world_size * numel)
    transport.begin_all_gather(buffer, torch.full((numel,), float(transport.rank)), key).finish()
    return buffer.view(transport.world_size, numel)[:, 0].tolist()


def exchange(transport: SharedMemoryTransport, numel: int, in_flight: int) -> None:
    """Run a few collectives at once, and check them."""
    size, rank = transport.world_size, transport.rank
    pendings, pairs = [], []
    for key in range(in_flight):
        buffer, result = torch.zeros(size * numel), torch.zeros(numel)
        pendings.append(transport.begin_all_gather(buffer, torch.full((numel,), rank + 10.0 * key), key))
        pendings.append(transport.begin_reduce_scatter(torch.full((size * numel,), rank + 1.0), result, key))
        pairs.append((buffer, result))
    for pending in pendings[::-1]:
        pending.finish()
    for key, (buffer, result) in enumerate(pairs):
        assert buffer[::numel].tolist() == [peer + 10.0 * key for peer in range(size)]
        assert result.unique().tolist() == [size * (size + 1) / 2]


@on_ranks(3, run=run_ranks)
def test_the_memory_does_not_grow_with_the_number_of_steps() -> None:
    transport = make()
    sizes = []
    for _ in range(60):
        for numel in (5000, 5001, 40_000):
            exchange(transport, numel, 2)
            dist.barrier()
        sizes.append(transport.memory.size)
    # At most the messages of two exchanges: those of a peer that has not read the last ones, and the next ones.
    assert sizes[-1] == sizes[2] < 2 * 2 * 4 * (2 * 2 * 5001 + 3 * 40_000)


def layers(width: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])


def one_step(model: nn.Module, width: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(2, width)).sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


@on_ranks(2, run=run_ranks)
def test_the_memory_of_messages_goes_with_the_model_that_sent_them() -> None:
    stays = shard_layers(layers(16))
    expected = one_step(stays, 16)
    assert dist.group.WORLD is not None
    memory = transport_of(dist.group.WORLD, "shared_memory").memory
    dist.barrier()
    before = os.fstat(memory.fd).st_blocks
    for width in (250, 300, 350):
        model = shard_layers(layers(width))
        one_step(model, width)
        dist.barrier()
        assert os.fstat(memory.fd).st_blocks * 512 > 4 * width**2
        del model
        gc.collect()
        assert os.fstat(memory.fd).st_blocks <= before
        # Blocks of the model that stays went too, and come again.
        for own, first in zip(one_step(stays, 16), expected, strict=True):
            assert torch.equal(own, first)
        dist.barrier()


@on_ranks(2, run=run_ranks)
def test_the_ring_of_entries_may_wrap_while_many_are_in_flight() -> None:
    transport = make()
    for _ in range(6):
        exchange(transport, 1, ENTRIES // 5)
    assert transport.memory.words[0] > 2 * ENTRIES
    assert not transport.in_flight


@on_ranks(2, run=run_ranks)
def test_a_sum_stays_until_this_rank_has_read_it_too() -> None:
    transport = make()
    for _ in range(50):
        first, second = (torch.full((1000,), transport.rank + one) for one in (1.0, 5.0))
        one = transport.begin_all_reduce(first, 0)
        if transport.rank:
            # The first sum is sent, and the peer is done with it, before the second one needs a block.
            while not one.is_over():
                pass
            dist.barrier()
        else:
            one.finish()
            dist.barrier()
        other = transport.begin_all_reduce(second, 1)
        one.finish()
        other.finish()
        assert first.unique().tolist() == [3.0]
        assert second.unique().tolist() == [11.0]


@on_ranks(2, run=run_ranks)
def test_memory_that_was_used_in_inference_mode_is_written_outside_of_it_too() -> None:
    transport = make()
    with torch.inference_mode():
        first = gather(transport, 0)
    assert gather(transport, 0) == first == [0.0, 1.0]


@on_ranks(2, run=run_ranks)
def test_the_memory_has_no_name_and_is_for_its_user_alone() -> None:
    transport = make()
    found = os.fstat(transport.memory.fd)
    assert found.st_nlink == 0
    assert stat.S_IMODE(found.st_mode) == 0o600


@on_ranks(2, run=run_ranks)
def test_what_was_mapped_to_see_whether_it_can_be_is_used() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with mock.patch("os.memfd_create", wraps=os.memfd_create) as made:
        fully_shard(model)(torch.ones(1, 2)).sum().backward()
        assert made.call_count == 1
        replicate(other)(torch.ones(1, 2)).sum().backward()
        assert made.call_count == 2
    assert model.weight.grad.full_tensor().tolist() == other.weight.grad.tolist() == [[1.0, 1.0]] * 2


@on_ranks(2, run=run_ranks)
def test_a_peer_that_drops_its_transport_ends_the_wait_for_it() -> None:
    transport = make()
    assert gather(transport, 0) == [0.0, 1.0]
    if transport.rank:
        del transport
        return
    with pytest.raises(DesyncError, match="rank 1 has closed its shared memory"):
        gather(transport, 0)


@on_ranks(2, run=run_ranks)
def test_a_fork_that_ends_does_not_end_the_transport_of_its_parent() -> None:
    transport = make()
    if transport.rank:
        process = os.fork()
        if not process:
            try:
                transport.memory.leave(os.getppid())
            finally:
                os._exit(0)
        os.waitpid(process, 0)
    dist.barrier()
    assert gather(transport, 0) == [0.0, 1.0]


def tell_another_process() -> str:
    if dist.get_rank() == 1:
        # As in a container of its own, where other processes have other numbers.
        shared_memory.os = SimpleNamespace(getpid=os.getppid)  # type: ignore[assignment]
    try:
        with pytest.raises(ConfigError) as caught:
            make()
    finally:
        shared_memory.os = os
    return str(caught.value)


def test_ranks_that_cannot_open_each_others_memory_all_say_so() -> None:
    for text in run_ranks(tell_another_process, 2):
        assert "the ranks cannot share memory: rank 0: the memory of rank 1 cannot be opened: " in text
        assert 'choose transport="process_group"' in text


@on_ranks(2, run=run_threads)
def test_ranks_that_are_threads_have_no_memories_of_their_own() -> None:
    with pytest.raises(ConfigError, match="rank 0: ranks are threads of one process"):
        make()


@on_ranks(2, run=run_ranks)
def test_messages_of_other_sizes_are_an_error() -> None:
    transport = make()
    with pytest.raises(DesyncError, match=r"a message has 1[26] bytes, and 1[26] are due"):
        gather(transport, 0, 3 + transport.rank)


@on_ranks(2, run=run_ranks)
def test_too_little_memory_is_an_error_with_the_bytes_that_are_needed() -> None:
    transport = make()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"\d{7,} bytes of shared memory are needed beside \d+: File too large"):
            gather(transport, 0, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    # What was begun goes on once there is memory.
    transport.settle()
    assert gather(transport, 0) == [0.0, 1.0]


def train_where_one_rank_has_no_memory() -> tuple[str, list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("composable").addHandler(handler)
    own = os.memfd_create
    if dist.get_rank() == 1:
        os.memfd_create = refuse  # type: ignore[assignment]
    try:
        model = fully_shard(nn.Linear(4, 4))
        averaged = replicate(nn.Linear(4, 4))
        for one in (model, averaged):
            one(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
        assert averaged.weight.grad is not None
        assert averaged.weight.grad.unique().tolist() == [3.0]
    finally:
        os.memfd_create = own
        logging.getLogger("composable").removeHandler(handler)
    return fully_shard.state(model).plan.transport, told


def refuse(*_: object) -> int:
    raise OSError("there are no files in memory")


def test_where_a_rank_cannot_map_memory_all_log_it_and_take_the_next_transport() -> None:
    for name, told in run_ranks(train_where_one_rank_has_no_memory, 2):
        assert name == "process_group"
        why = "the ranks cannot share memory: rank 1: there are no files in memory; they use another transport"
        assert [text for text in told if "memory" in text] == [f"{why}, which is slower"]


@on_ranks(2, run=run_ranks)
def test_nothing_of_the_memory_is_left_once_the_transport_is_gone() -> None:
    before = mapped()
    transport = make()
    exchange(transport, 1000, 2)
    dist.barrier()
    assert len(mapped()) > len(before)
    del transport
    assert mapped() == before


def mapped() -> list[str]:
    """Return the open files, and the parts of the address space, that are shared memory."""
    places = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    places += Path("/proc/self/maps").read_text().splitlines()
    return [place for place in places if "memfd:composable" in place]


def train_until_one_is_killed(annotate: Callable[[nn.Module], nn.Module], phase: str) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    annotate(model)
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 1:
        if phase == "idle":
            end()
        elif phase == "forward":
            model[1].register_forward_hook(end)
        else:
            model[1].register_full_backward_hook(end)
    with pytest.raises(DesyncError, match=r"rank 1 has closed its shared memory: process \d+ has ended"):
        model(torch.ones(2, 8)).sum().backward()


def end(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shard_layers(model: nn.Module) -> nn.Module:
    return fully_shard(model, policy={nn.Linear})


@pytest.mark.parametrize("annotate", [shard_layers, replicate])
@pytest.mark.parametrize("phase", ["idle", "forward", "backward"])
def test_a_rank_that_is_killed_is_an_error_on_every_other_one(
    annotate: Callable[[nn.Module], nn.Module], phase: str
) -> None:
    """In a gather, a reduce-scatter, an all-reduce, or between steps."""
    with pytest.raises(RankErrors) as caught:
        run_ranks(train_until_one_is_killed, 3, annotate, phase)
    assert [*caught.value.errors] == [1]
