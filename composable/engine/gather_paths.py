"""How a rank's shard becomes the whole buffer, and where shards and reduced gradients rest between uses.

One path a flat buffer, so that what happens on the way can grow. Precision and offload are paths around a path: cast
into the buffer's dtype first, copy from the host first. Memory that a device copies to or from without the host waiting
has to be page-locked.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from composable.comm import Pending, Transport
from composable.planning import OffloadPolicy

__all__ = ["CopyGather", "Gather", "GatherPath", "RestingPlace"]


@dataclass(frozen=True)
class RestingPlace:
    """A kind of memory.

    Attributes:
        device: Where it is.
        is_elsewhere: Not where the ranks talk and compute: what rests there is copied to be used.
        pins: It is page-locked, so that these copies need not wait.
    """

    device: torch.device
    is_elsewhere: bool = False
    pins: bool = False

    @staticmethod
    def under(policy: OffloadPolicy, device: torch.device) -> "RestingPlace":
        """Return where a policy lets rest what is used on ``device``; without a device that is the host anyway."""
        if not policy.is_offloading or device.type == "cpu":
            return RestingPlace(device)
        return RestingPlace(torch.device("cpu"), is_elsewhere=True, pins=policy.pins)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory there, with undefined content."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pins)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory there, zero."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pins)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or its values in page-locked memory if it lies here and has to be in such."""
        if not self.pins or tensor.device.type != self.device.type or tensor.is_pinned():
            return tensor
        return tensor.pin_memory()


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

    def __init__(self, transport: Transport, key: int, home: RestingPlace) -> None:
        super().__init__(transport, key)
        self._is_queued = home.pins

    def begin(self, buffer: torch.Tensor, shard: torch.Tensor) -> Pending:
        numel, rank = shard.numel(), self.transport.rank
        # Through `data`, so that parameters which view the buffer do not count as modified.
        own = buffer.data[rank * numel : (rank + 1) * numel]
        own.copy_(shard, non_blocking=self._is_queued)
        return self.transport.begin_all_gather(buffer, own, self.key)
