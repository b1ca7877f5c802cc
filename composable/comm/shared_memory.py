"""A transport through shared memory, for CPU ranks on one host.

To send, a rank copies a message into a block of its memory, which its peers map too; they copy it, or add it up, from
there. No bytes pass through the kernel, and no other thread takes part. Messages are matched by tag and number. Nobody
waits for slow readers: the next message takes another block, so the memory grows by what is in flight.

A rank that waits looks for a moment, then sleeps until its peer wakes it (futex(2)): ranks may outnumber cores.

Several threads may use a transport at once, each for models of its own. One thread may also wait for the collectives of
another one (``settle``), or add up sums for it: each collective has a lock.

Prior art: DeepSpeed's all-reduce through shared memory, ``csrc/cpu/comm/shm.cpp``.
"""

import os
import platform
import sys
import time
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from threading import RLock

import torch
import torch.distributed as dist

from composable.comm.mapped_memory import Block, OwnMemory, PeerMemory
from composable.comm.ranks import Ranks, kept_with, make_group
from composable.comm.transport import Messages, Pending, ProcessGroupTransport, register_transport
from composable.errors import ConfigError
from composable.ground.torch_private import real_backend, timeout_of

# A rank handles the message of each peer by itself: beyond so many, that takes longer than a ring of gloo.
MAX_RANKS = 16

# What a process group keeps: memory that was mapped to see whether that is possible; ``None``: it is not.
MET = "met"

# Sums of these run in float32.
_LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})

# How often a rank looks before it sleeps.
_SPINS = 20


class _Exchange(Messages):
    """A collective under way, which is the work that it waits for; the message of each rank has ``nbytes``."""

    __slots__ = ("block", "left", "lock", "nbytes")

    has_tag = True

    def __init__(self, transport: "SharedMemoryTransport", tag: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.block: Block | None = None  # Set once the message is sent.
        self.left = transport.peers.copy()  # Peers whose message this rank is not done with.
        self.lock = RLock()  # Held by the thread that sends or uses messages.
        super().__init__(transport, tag, transport.begun[tag] + 1)
        # From here on it is sent, now or when it is waited for, also if an exception cuts this short.
        self.works.append(self)  # type: ignore[arg-type]  # it has the methods that are called
        with self.lock:
            self.send()

    def is_over(self) -> bool:
        return not self.works or self.transport.has_come((self.tag, self.number))

    def is_completed(self) -> bool:
        """Say that ``wait`` does no harm: it goes on where an exception cut it short."""
        return False

    def wait(self) -> None:
        """Wait for the messages of all peers, and use them."""
        with self.lock:
            self.use()

    @abstractmethod
    def use(self) -> None:
        """Use the messages of all peers, once they have come."""

    @abstractmethod
    def send(self) -> None:
        """Send this rank's message, unless it was sent."""


class _SharedGather(_Exchange):
    """An all-gather under way."""

    __slots__ = ("_shard", "_slices")

    def __init__(self, transport: "SharedMemoryTransport", tag: int, buffer: torch.Tensor, shard: torch.Tensor) -> None:
        self._shard = shard
        self._slices = buffer.chunk(transport.world_size)
        super().__init__(transport, tag, shard.nbytes)
        own = self._slices[transport.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

    def send(self) -> None:
        if self.block is None:
            shard, block = self._shard, self.transport.memory.take(self.nbytes)
            block.view(shard.dtype, 0, shard.numel()).copy_(shard)
            self.block = self.transport.publish(self, self.tag, block)

    def use(self) -> None:
        self.send()
        shard, transport = self._shard, self.transport
        while self.left:
            peer = self.left[-1]
            block = transport.receive(self, self.tag, peer)
            self._slices[peer].copy_(block.view(shard.dtype, 0, shard.numel()))
            transport.give_back(self, self.tag, peer)


class _Reduction(_Exchange):
    """A reduce-scatter under way, or the first half of an all-reduce: every rank adds up one slice.

    Args:
        source: [N].
        bounds: Where the slices of the ranks begin and end.
        result: The sum of this rank's slice; ``None``: a message, which has room for it where its own slice would be.
        factor: The factor of the sum, as ``mul_`` takes it; ``None``: no factor.
    """

    __slots__ = ("_bounds", "_factor", "_gap", "_is_added", "_result", "_source")

    def __init__(
        self,
        transport: "SharedMemoryTransport",
        tag: int,
        source: torch.Tensor,
        bounds: Sequence[int],
        result: torch.Tensor | None,
        factor: torch.Tensor | float | None,
    ) -> None:
        self._source, self._bounds, self._result, self._factor = source, bounds, result, factor
        self._gap = 0 if result is None else result.numel()
        self._is_added = False
        super().__init__(transport, tag, (source.numel() - self._gap) * source.itemsize)

    def send(self) -> None:
        if self.block is None:
            source, transport, gap = self._source, self.transport, self._gap
            start, stop = self._bounds[transport.rank : transport.rank + 2]
            block, numel = transport.memory.take(self.nbytes), source.numel()
            if start:
                block.view(source.dtype, 0, start).copy_(source[:start])
            if stop < numel:
                block.view(source.dtype, stop - gap, numel - gap).copy_(source[stop:])
            self.block = transport.publish(self, self.tag, block)

    def add(self) -> None:
        """Add up this rank's slice."""
        self.send()
        transport, source, rank = self.transport, self._source, self.transport.rank
        start, stop = self._bounds[rank : rank + 2]
        parts = []
        for one in range(transport.world_size):
            if one == rank:
                parts.append(source[start:stop])
            else:
                shift = self._gap * (one < rank)
                block = transport.receive(self, self.tag, one)
                parts.append(block.view(source.dtype, start - shift, stop - shift))
        result = self._result
        if result is None and self.block is not None:
            result = self.block.view(source.dtype, start, stop)
        add_up(result, parts, self._factor)  # type: ignore[arg-type]  # there is a block, since all was sent

    def use(self) -> None:
        if not self._is_added:
            self.add()
            self._is_added = True
        while self.left:
            self.transport.give_back(self, self.tag, self.left[-1])


class _Sum(_Reduction):
    """An all-reduce under way; the messages with the sums have the tag ``~tag``."""

    __slots__ = ()

    def is_over(self) -> bool:
        if self.works and not self._is_added and self.lock.acquire(blocking=False):
            try:
                if super().is_over():
                    self.add()
            finally:
                self.lock.release()
        return not self.works or (self._is_added and self.transport.has_come((~self.tag, self.number)))

    def add(self) -> None:
        super().add()
        self.transport.publish(self, ~self.tag, self.block)
        self._is_added = True

    def use(self) -> None:
        if not self._is_added:
            self.add()
        source, bounds, transport, block = self._source, self._bounds, self.transport, self.block
        start, stop = bounds[transport.rank : transport.rank + 2]
        if block is not None and self._result is None:
            source[start:stop].copy_(block.view(source.dtype, start, stop))
            self._result = source[start:stop]  # First: the block may be another message's from here on.
            transport.memory.let_go(block)
        while self.left:
            peer = self.left[-1]
            start, stop = bounds[peer : peer + 2]
            block = transport.receive(self, ~self.tag, peer)
            source[start:stop].copy_(block.view(source.dtype, start, stop))
            transport.give_back(self, ~self.tag, peer)


def add_up(result: torch.Tensor, parts: Sequence[torch.Tensor], factor: torch.Tensor | float | None) -> None:
    """Write ``factor`` times the sum of ``parts``, added in their order, to ``result``; all [S], parts of one dtype.

    The sum runs in float32 where the parts have less, and is rounded once.
    """
    first, second, *rest = parts
    dtype = first.dtype
    if dtype in _LOW_PRECISION:
        if result.dtype is dtype and not rest:
            # One rounding where the factor is a power of two, and no overflow on the way.
            if factor is None:
                torch.add(first, second, out=result)
            else:
                torch.mul(first, factor, out=result).add_(second, alpha=factor)  # type: ignore[arg-type]  # cheaper than float()
            return
        total = first.float() if result.dtype is dtype else result.copy_(first)
        for part in (second, *rest):
            # Cast first: mixed addition is not vectorised.
            total.add_(part.to(total.dtype))
    else:
        total = result if result.dtype is dtype else torch.empty_like(first)
        torch.add(first, second, out=total)
        for part in rest:
            total.add_(part)
    if factor is not None:
        total.mul_(factor)
    if total is not result:
        result.copy_(total)


@register_transport
class SharedMemoryTransport(ProcessGroupTransport):
    """A transport through memory that all ranks map; a process group of its own runs broadcasts.

    Collective: all ranks of ``group`` construct it.

    Args:
        group: The shard group; its backend for CPU tensors is gloo.
        is_own: Nothing else uses the group, whose ranks are sorted: no other one is made.
        asked: Another group of these ranks, which have asked there whether they can share memory.

    Attributes:
        numbers: The global ranks, in the order of ``group``, which is the order of the slices.
        addresses: The number of each rank in the transport's group, whose ranks are sorted.
        peers: The other ranks, nearest last.

    Raises:
        ConfigError: The ranks cannot share memory: they are on several hosts, in containers of their own, or threads.
    """

    name = "shared_memory"
    moves = "CPU tensors over gloo, between ranks on one host with an x86-64 processor"
    cost = 0
    is_shared = maps_memory = is_direct = True

    @classmethod
    def serves(cls, device_type: str, backend: str) -> bool:
        is_able = sys.platform == "linux" and platform.machine() == "x86_64"
        return is_able and device_type == "cpu" and backend == "gloo"

    @classmethod
    def fits(cls, device_type: str, backend: str, hosts: Sequence[int]) -> bool:
        return cls.serves(device_type, backend) and 2 <= len(hosts) <= MAX_RANKS and len(set(hosts)) == 1

    def __init__(
        self, group: dist.ProcessGroup, *, is_own: bool = False, asked: dist.ProcessGroup | None = None
    ) -> None:
        self.numbers = dist.get_process_group_ranks(group)
        order = sorted(self.numbers)
        super().__init__(group if is_own else make_group(order, group, backend="gloo"))
        self.begun: defaultdict[int, int] = defaultdict(int)
        self.rank = group.rank()
        self.addresses = [order.index(number) for number in self.numbers]
        # Each rank begins with another one, so that not all read the memory of one at once.
        self.peers = [(self.rank - step) % self.world_size for step in range(1, self.world_size)]
        if self.world_size > 1:
            # Whether they can was asked in a group of the same ranks, whose first transport takes what was mapped.
            met: list[tuple[OwnMemory, dict[int, PeerMemory]]] = kept_with(asked or group, MET, list)
            self.memory, memories = met.pop() if met else meet(Ranks.of(self._group, torch.device("cpu")))
            self._memories = {peer: memories[self.numbers[peer]] for peer in self.peers}
            weakref.finalize(self, self.memory.leave, os.getpid())

    def publish(self, exchange: _Exchange, tag: int, block: Block) -> Block:
        """Let peers read a message of ``exchange`` in ``block``, which is returned."""
        if tag >= 0:
            self.begun[tag] = exchange.number
        self.memory.publish(tag, exchange.number, block, exchange.nbytes, is_kept=tag < 0)
        return block

    def has_come(self, key: tuple[int, int]) -> bool:
        """Say whether the messages ``key`` of all peers are there."""
        for peer in self.peers:
            memory = self._memories[peer]
            if key not in memory.inbox:
                memory.read_entries()
                if key not in memory.inbox:
                    return False
        return True

    def receive(self, exchange: _Exchange, tag: int, peer: int) -> Block:
        """Wait for the message of ``peer`` in ``exchange``, and return its block.

        Raises ``RuntimeError`` if the peer has ended, takes longer than the group permits, or sent another size; or if
        the ranks have diverged.
        """
        key, memory, started, count = (tag, exchange.number), self._memories[peer], 0.0, 0
        for _ in range(_SPINS):
            if key in memory.inbox:
                break
            count = memory.read_entries()
        while key not in memory.inbox:
            memory.sleep(count)  # Not where another thread has read the message since.
            count = memory.read_entries()
            if key not in memory.inbox:
                started = started or time.monotonic()
                self._check(peer, key, time.monotonic() - started)
        return memory.block_of(key, exchange.nbytes)

    def _check(self, peer: int, key: tuple[int, int], waited_s: float) -> None:
        """Raise ``RuntimeError`` if the wait for the message ``key`` of ``peer`` is in vain."""
        memory = self._memories[peer]
        left = memory.has_left()
        memory.read_entries()  # What it sent before it left.
        limit_s = timeout_of(self._group).total_seconds()
        if key in memory.inbox:
            return
        if left:
            raise RuntimeError(f"rank {self.numbers[peer]} {left}")
        if self.closed_because:
            raise RuntimeError("the ranks have diverged")
        if waited_s > limit_s:
            raise RuntimeError(f"timed out after {limit_s:g} s of waiting for rank {self.numbers[peer]}")

    def give_back(self, exchange: _Exchange, tag: int, peer: int) -> None:
        """Note that ``exchange`` is done with ``peer``, the last one that is left."""
        # First: the block may be another message's as soon as it is given back.
        exchange.left.pop()
        self._memories[peer].give_back((tag, exchange.number))

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        if self.world_size == 1 or not shard.numel():
            return super().begin_all_gather(buffer, shard, key)
        # Through `data`, so that parameters which view the buffer do not count as modified.
        return _SharedGather(self, 2 * key, buffer.data, shard)

    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        if self.world_size == 1 or not shard.numel():
            return super().begin_reduce_scatter(source, shard, key, scale=scale)
        bounds = range(0, source.numel() + 1, shard.numel())
        return _Reduction(self, 2 * key + 1, source, bounds, shard, self._factor(scale, source.dtype))

    def begin_all_reduce(self, tensor: torch.Tensor, key: int, *, scale: float = 1.0) -> Pending:
        if self.world_size == 1 or not tensor.numel() or not tensor.is_contiguous():
            return super().begin_all_reduce(tensor, key, scale=scale)
        for started in list(self.in_flight):
            started.is_over()  # type: ignore[attr-defined]  # it adds up what has come
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        numel = parts.numel()
        step = -(-numel // self.world_size)
        bounds = [min(rank * step, numel) for rank in range(self.world_size + 1)]
        return _Sum(self, 2 * key, parts.view(-1), bounds, None, self._factor(scale, tensor.dtype))

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        return super().begin_broadcast(tensor, self.addresses[source_rank], key)

    def give_up(self) -> None:
        # Peers may still read what was sent: it stays until they have let go of the memory.
        self.in_flight.clear()

    def free_memory(self) -> None:
        if self.world_size > 1:
            self.memory.free_read()

    def leave(self) -> None:
        if hasattr(self, "memory"):  # It has met its peers, if there are any.
            self.memory.leave(os.getpid())


def meet(ranks: Ranks) -> tuple[OwnMemory, dict[int, PeerMemory]]:
    """Make this rank's memory, and map that of each other rank, by its global rank. Collective, as are its errors."""
    why, told, memories = "", (0, 0, b""), {}
    try:
        if not real_backend(ranks.process_group):
            raise OSError("ranks are threads of one process")
        memory = OwnMemory(ranks.rank, ranks.size)
        told = os.getpid(), memory.fd, memory.token
    except (OSError, AttributeError) as error:
        why = str(error)
    everyone = ranks.objects(told)
    if all(token for *_, token in everyone):
        try:
            for peer, (process, fd, token) in enumerate(everyone):
                if peer != ranks.rank:
                    memories[ranks.numbers[peer]] = PeerMemory(process, fd, token, ranks.rank, ranks.size)
        except (OSError, AttributeError) as error:
            why = f"the memory of rank {ranks.numbers[peer]} cannot be opened: {error}"
    for number, reason in zip(ranks.numbers, ranks.objects(why), strict=True):
        if reason:
            raise ConfigError(
                f"the ranks cannot share memory: rank {number}: {reason}", fix='choose transport="process_group"'
            )
    return memory, memories
