"""How a flat buffer's gradients become this rank's shard of their mean.

One object a flat buffer. Other ways are paths around a path: a hook that sends fewer bytes, an
all-reduce over the ranks that hold copies of the shard, a copy to the host. Whatever the way, the
sum is divided once, by the ``divisor`` of the path that sums.
"""

from typing import Protocol

import torch

from composable.collectives import Pending, Transport

__all__ = ["GradientPath", "Reduction", "ScatterPath"]


class Reduction(Protocol):
    """A reduction that was started."""

    def finish(self) -> torch.Tensor:
        """Return this rank's shard [S] of the mean, in the dtype and on the device of the shard; call it once.

        The thread waits on CPU, the current stream on a device. The source may be reused afterwards.
        """
        ...


class GradientPath(Protocol):
    """Reduces gradients over the ranks.

    Attributes:
        transport: Moves the bytes.
        key: Of the buffer, the same on all ranks.
    """

    transport: Transport
    key: int

    def begin(self, source: torch.Tensor) -> Reduction:
        """Start to reduce ``source`` [W * S], the gradients of this rank, on the current stream.

        Collective: all ranks, same order. ``source`` may be overwritten, and stays untouched by the
        caller until ``finish``.
        """
        ...


class ScatterPath:
    """One reduce-scatter.

    Attributes:
        transport: Moves the bytes.
        key: Of the buffer, the same on all ranks.

    Args:
        transport: Of the ranks that share the shard.
        key: Of the buffer.
        divisor: Ranks whose gradients the mean is over.
        dtype: Of the result.
    """

    __slots__ = ("_dtype", "_scale", "key", "transport")

    def __init__(self, transport: Transport, key: int, divisor: int, dtype: torch.dtype) -> None:
        self.transport = transport
        self.key = key
        self._scale = 1.0 / divisor
        self._dtype = dtype

    def begin(self, source: torch.Tensor) -> Reduction:
        transport = self.transport
        shard = transport.empty(source.numel() // transport.world_size, source, self._dtype)
        return _Scattering(transport.begin_reduce_scatter(source, shard, self.key, scale=self._scale), shard)


class _Scattering:
    __slots__ = ("_pending", "_shard")

    def __init__(self, pending: Pending, shard: torch.Tensor) -> None:
        self._pending = pending
        self._shard = shard

    def finish(self) -> torch.Tensor:
        self._pending.finish()
        return self._shard
