"""A transport of direct sends, for few gloo ranks.

gloo's own collectives copy through extra buffers and occupy a thread each. Here every rank sends
its slice straight to the memory of each peer that needs it, two to ten times as fast. The host's
cost grows with the number of peers, so this transport is for small groups.

gloo's event loop polls while another thread holds the lock of its connection. Two measures keep
the polling short: a connection carries slices one way only, and the loop's thread may not take
the core of a rank's own thread, which may hold the lock. Without them, if ranks exchange little
and often on busy cores, the polling costs more than the saved copies (docs/notes.md).

gloo matches messages first in, first out per (peer, tag). Tags come from the buffer's key and
the process group is the transport's own, so neither user traffic nor another buffer can match.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.distributed as dist

from composable.comm.hang_watchdog import explained
from composable.comm.ranks import make_group
from composable.comm.transport import Messages, Pending, ProcessGroupTransport, add_up, register_transport

# Each peer costs the host one send and one receive, 10 us together; gloo's own all-gather
# costs it 12 us whatever the number of peers.
MAX_RANKS = 8

_TASKS = Path("/proc/self/task")


class _PeerGather(Messages):
    """An exchange under way: slices from and to every peer."""

    __slots__ = ()

    has_tag = True

    def __init__(self, transport: "PointToPointTransport", tag: int) -> None:
        begun = transport.begun
        begun[tag] = number = begun[tag] + 1
        super().__init__(transport, tag, number)


class _Reduce(_PeerGather):
    """A reduction under way: slices from every peer, and their sum once they have arrived.

    Args:
        transport: The transport that sent the slices.
        tag: Tag of the messages.
        shard: The result.
        lowest: The slice of the lowest peer; ``shard`` itself where both have the same dtype.
        others: The other ranks' slices, this rank's among them, in rank order.
        factor: The factor of the result, as ``mul_`` takes it; ``None``: no factor.
    """

    __slots__ = ("_factor", "_lowest", "_others", "_shard")

    def __init__(
        self,
        transport: "PointToPointTransport",
        tag: int,
        shard: torch.Tensor,
        lowest: torch.Tensor,
        others: list[torch.Tensor],
        factor: torch.Tensor | float | None,
    ) -> None:
        super().__init__(transport, tag)
        self._shard = shard
        self._lowest = lowest
        self._others = others
        self._factor = factor

    def finish(self) -> None:
        super().finish()
        others, self._others = self._others, []
        if others:
            add_up(self._shard, [self._lowest, *others], self._factor)


def _spares_the_wire(hosts: Sequence[int]) -> bool:
    """Say whether two all-gathers and a reduce-scatter send no more from the busiest host than gloo's collectives.

    In each of these three, a host with n of W ranks sends n (W - n) slices straight to peers. With gloo, a rank passes
    W - 1 slices on to the next rank, and twice as many in a reduce-scatter, which gloo runs as an all-reduce
    (docs/notes.md).
    """
    size = len(hosts)
    direct = max(3 * count * (size - count) for count in Counter(hosts).values())
    around = zip(hosts, (*hosts[1:], hosts[0]), strict=True)
    steps_out = Counter(host for host, following in around if host != following)
    return direct <= 4 * (size - 1) * max(steps_out.values(), default=0)


@register_transport
class PointToPointTransport(ProcessGroupTransport):
    """A transport that sends slices between every pair of ranks; the process group runs the other collectives.

    Collective: makes process groups of its own, so all ranks of ``group`` construct it.

    Args:
        group: The shard group; its backend for CPU tensors is gloo.
    """

    name = "point_to_point"
    moves = "CPU tensors over gloo"
    cost = 1
    is_shared = True
    asks_hosts = True
    is_direct = True

    @classmethod
    def serves(cls, device_type: str, backend: str) -> bool:
        return device_type == "cpu" and backend == "gloo"

    @classmethod
    def fits(cls, device_type: str, backend: str, hosts: Sequence[int]) -> bool:
        return cls.serves(device_type, backend) and 2 <= len(hosts) <= MAX_RANKS and _spares_the_wire(hosts)

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        others = threads_of_process()
        # Slices to higher ranks travel in one group, slices to lower ranks in the other.
        order = sorted(ranks)
        upward, downward = (make_group(order, group, backend="gloo") for _ in range(2))
        never_preempt(threads_of_process() - others, name="gloo_tcp_loop")
        super().__init__(upward)
        self.groups = (upward, downward)
        self.begun: defaultdict[int, int] = defaultdict(int)
        # The new groups have their ranks sorted; slices are in the order of `group`.
        self.rank = group.rank()
        self._addresses = [order.index(rank) for rank in ranks]
        own = self._addresses[self.rank]
        # Nearest first, so that not all ranks send to rank 0 at once.
        peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        above = [peer for peer in peers if self._addresses[peer] > own]
        below = [peer for peer in peers if self._addresses[peer] < own]
        self._receives = [
            (group.recv, senders, [self._addresses[peer] for peer in senders])
            for group, senders in ((upward, below[::-1]), (downward, above[::-1]))
            if senders
        ]
        self._sends = [
            (group.send, receivers, [self._addresses[peer] for peer in receivers])
            for group, receivers in ((upward, above), (downward, below))
            if receivers
        ]

    def _exchange(
        self, messages: Messages, sent: Sequence[torch.Tensor], landing: Sequence[torch.Tensor], tag: int
    ) -> None:
        """Send one tensor to each peer, and receive one tensor from each.

        Args:
            messages: The exchange, which gets the works.
            sent: The tensors to send, by rank.
            landing: The tensors to receive into, by rank.
            tag: Tag of the messages.
        """
        tags = repeat(tag)
        calls = [map(recv, [[landing[peer]] for peer in peers], at, tags) for recv, peers, at in self._receives]
        calls += [map(send, [[sent[peer]] for peer in peers], at, tags) for send, peers, at in self._sends]
        # `finish` waits for sends too: once it returns, the caller may write the shard and free the buffer.
        try:
            messages.works.extend(chain(*calls))
        except RuntimeError as error:  # A peer had ended before.
            raise explained(error, messages) from error

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        if self.world_size == 1 or not shard.numel():
            return super().begin_all_gather(buffer, shard, key)
        tag = 2 * key
        # Through `data`, so that parameters which view the buffer do not count as modified.
        slices = buffer.data.chunk(self.world_size)
        gather = _PeerGather(self, tag)
        self._exchange(gather, [shard] * self.world_size, slices, tag)
        own = slices[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return gather

    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        if self.world_size == 1 or not shard.numel():
            return super().begin_reduce_scatter(source, shard, key, scale=scale)
        tag = 2 * key + 1
        slices = source.chunk(self.world_size)
        # The lowest peer's slice lands in the result if the dtypes are equal; other slices land in new tensors.
        lowest = 0 if self.rank else 1
        numel = shard.numel()
        first = shard if shard.dtype is source.dtype else source.new_empty(numel)
        landing = [
            first if peer == lowest else source.new_empty(numel) for peer in range(self.world_size) if peer != self.rank
        ]
        landing.insert(self.rank, slices[self.rank])
        others = [tensor for peer, tensor in enumerate(landing) if peer != lowest]
        reduction = _Reduce(self, tag, shard, first, others, self._factor(scale, source.dtype))
        self._exchange(reduction, slices, landing, tag)
        return reduction

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        return super().begin_broadcast(tensor, self._addresses[source_rank], key)


def threads_of_process() -> set[int]:
    """Return the ids of the threads of this process; empty where the system does not list them."""
    with suppress(OSError):
        return {int(entry.name) for entry in _TASKS.iterdir()}
    return set()


def never_preempt(threads: Iterable[int], *, name: str) -> list[int]:
    """Give the threads of ``threads`` that are called ``name`` the batch scheduling policy, and return their ids.

    A loop thread of gloo wakes for every message. If it wakes on the core of the thread that is sending, which holds
    the connection's lock, it takes the core and then polls for the lock. With the batch policy it waits for its turn
    instead: see sched(7). Nothing happens on other systems than Linux, where the policy is not allowed, and where gloo
    gives its loop threads no name of their own (torch 2.11).
    """
    changed: list[int] = []
    if not hasattr(os, "SCHED_BATCH"):
        return changed
    for thread in threads:
        # A thread may have ended, and a sandbox may refuse: slower, not wrong.
        with suppress(OSError):
            if (_TASKS / str(thread) / "comm").read_text().strip() == name:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                changed.append(thread)
    return changed
