"""How a rank's shard becomes the whole buffer: one object a flat buffer, so that what happens on the way can grow.

Precision and offload are paths around a path: cast into the buffer's dtype first, copy from the host first.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist

from composable.collectives import DONE, Pending, Transport, wait_for_work
from composable.storage.resting_place import RestingPlace
from composable.storage.staging import stage

__all__ = ["CommGather", "CopyGather", "Gather", "GatherPath"]


class GatherPath(Protocol):
    """Fills a buffer from the shards of all ranks.

    Attributes:
        transport: Moves the bytes.
        key: Of the buffer, the same on all ranks.
    """

    transport: Transport
    key: int

    def begin(self, buffer: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Start to fill ``buffer`` [W * S] with every rank's ``shard`` [S], on the current stream.

        Collective: all ranks of the shard group, same order. Both stay untouched until ``finish``.
        """
        ...


class Gather:
    """One all-gather.

    Attributes:
        transport: Moves the bytes.
        key: Of the buffer, the same on all ranks.
    """

    __slots__ = ("key", "transport")

    def __init__(self, transport: Transport, key: int) -> None:
        self.transport = transport
        self.key = key

    def begin(self, buffer: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self.transport.begin_all_gather(buffer, shard, self.key)


class CopyGather(Gather):
    """One all-gather of shards in another dtype than the buffer's, or on the host.

    That is the copy that brings this rank's shard into the buffer in any case.

    Args:
        transport: Moves the bytes.
        key: Of the buffer.
        home: Where the shard rests. Where that is page-locked, ``begin`` returns before the shard was read, and
            the host must not write to it until the current stream has got there.
    """

    __slots__ = ("_is_queued",)

    def __init__(self, transport: Transport, key: int, home: RestingPlace) -> None:
        super().__init__(transport, key)
        self._is_queued = home.pins

    def begin(self, buffer: torch.Tensor, shard: torch.Tensor) -> Pending:
        numel, rank = shard.numel(), self.transport.rank
        # Through `data`, so that parameters which view the buffer do not count as modified.
        own = buffer.data[rank * numel : (rank + 1) * numel]
        own.copy_(shard, non_blocking=self._is_queued)
        return self.transport.begin_all_gather(buffer, own, self.key)


class CommGather(Gather):
    """An all-gather of the user's: torch's ``Comm``. The buffer's memory is ours, so what it fills is copied.

    Args:
        transport: Of the ranks; nothing goes through it.
        key: Of the buffer.
        comm: Of the user.
        group: Of these ranks.
        fqn: Of a parameter of the buffer.
    """

    __slots__ = ("_comm", "_fqn", "_group")

    def __init__(self, transport: Transport, key: int, comm: Any, group: dist.ProcessGroup, fqn: str) -> None:
        super().__init__(transport, key)
        self._comm = comm
        self._group = group
        self._fqn = fqn

    def begin(self, buffer: torch.Tensor, shard: torch.Tensor) -> Pending:
        # Through `data`, so that parameters which view the buffer do not count as modified.
        buffer = buffer.data
        if self.transport.world_size == 1:
            buffer.copy_(shard)
            return DONE
        own = stage(self._comm, shard.numel(), buffer, self._fqn)
        own.copy_(shard)
        output = stage(self._comm, buffer.numel(), buffer, self._fqn)
        work = self._comm(output_tensor=output, input_tensor=own, group=self._group, async_op=False)
        wait_for_work(work, self._group)
        # At once: the user's memory may be used again by the next call.
        buffer.copy_(output)
        return DONE
