"""A transport of direct sends, for few gloo ranks.

gloo's own collectives copy through extra buffers and occupy a thread each. Here every rank sends
its slice straight to the memory of each peer that needs it, two to ten times as fast. The host's
cost grows with the number of peers, so this transport is for small groups.

gloo matches messages first in, first out per (peer, tag). Tags come from the buffer's key and
the process group is the transport's own, so neither user traffic nor another buffer can match.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, repeat

import torch

from composable.comm.hang_watchdog import explained
from composable.comm.transport import DirectTransport, Messages, Pending, add_up, register_transport

# Each peer costs the host one send and one receive, 10 us together; gloo's own all-gather
# costs it 12 us whatever the number of peers.
MAX_RANKS = 8


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
class PointToPointTransport(DirectTransport):
    """A transport that sends slices between every pair of ranks; the process group runs the other collectives."""

    name = "point_to_point"
    moves = "CPU tensors over gloo"
    cost = 1

    @classmethod
    def serves(cls, device_type: str, backend: str) -> bool:
        return device_type == "cpu" and backend == "gloo"

    @classmethod
    def fits(cls, device_type: str, backend: str, hosts: Sequence[int]) -> bool:
        return cls.serves(device_type, backend) and 2 <= len(hosts) <= MAX_RANKS and _spares_the_wire(hosts)

    def _exchange(
        self, messages: Messages, sent: Sequence[torch.Tensor], landing: Sequence[torch.Tensor], tag: int
    ) -> None:
        """Send ``sent[r]`` to each peer r, and receive into ``landing[r]``; ``messages`` gets the works."""
        group, peers = self._group, self.peers
        calls = [
            map(call, [[by_rank[peer]] for peer in order], [self.addresses[peer] for peer in order], repeat(tag))
            for call, by_rank, order in ((group.recv, landing, peers), (group.send, sent, peers[::-1]))
        ]
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
