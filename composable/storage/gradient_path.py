"""How a flat buffer's gradients become this rank's shard of their mean.

One object a flat buffer. Other ways are paths around a path: an all-reduce over the ranks that hold copies of
the shard, a copy to the host; or functions of the user's in place of one, or behind it. Whatever the way, the
sum is divided once, by the ``divisor`` of the path that sums; a communication hook divides by itself.
"""

from typing import Protocol

import torch

from composable.collectives import Pending, Transport
from composable.errors import ConfigError
from composable.storage.resting_place import RestingPlace

__all__ = [
    "Around",
    "GradientPath",
    "PathHome",
    "Reduced",
    "Reduction",
    "ScatterPath",
    "SumPath",
    "Whole",
    "divided_before",
]


class Reduction(Protocol):
    """A reduction that was started."""

    def finish(self) -> torch.Tensor | None:
        """Return this rank's shard [S] of the mean, in the dtype and on the device of the shard; call it once.

        ``None``: it waits for later reductions. The thread waits on CPU, the current stream on a device. The source may
        be reused afterwards. On page-locked memory the host may read the result only when the current stream has got
        there.
        """
        ...


class GradientPath(Protocol):
    """Reduces gradients over the ranks.

    Attributes:
        transport: Moves the bytes, or allocates for what moves them.
    """

    transport: Transport

    def begin(self, source: torch.Tensor) -> Reduction:
        """Start to reduce ``source`` [W * S], the gradients of this rank, on the current stream.

        Collective: all ranks, same order. ``source`` may be overwritten, and stays untouched by the
        caller until ``finish``.
        """
        ...

    def resume(self) -> Reduction:
        """Start to end the reductions that were kept, of which there are some. Collective: all ranks, same order."""
        ...


class Whole:
    """A path that leaves nothing to do."""

    __slots__ = ()

    def resume(self) -> Reduction:
        raise AssertionError("nothing is kept")


class ScatterPath(Whole):
    """One reduce-scatter.

    Attributes:
        transport: Moves the bytes.
        key: Of the buffer, the same on all ranks.

    Args:
        transport: Of the ranks that share the shard.
        key: Of the buffer.
        divisor: Ranks whose gradients the mean is over, or what the user divides by.
        dtype: Of the result.
    """

    __slots__ = ("_dtype", "_scale", "key", "transport")

    def __init__(self, transport: Transport, key: int, divisor: float, dtype: torch.dtype) -> None:
        self.transport = transport
        self.key = key
        self._scale = 1.0 / divisor
        self._dtype = dtype

    def begin(self, source: torch.Tensor) -> Reduction:
        transport, numel = self.transport, source.numel()
        dtype = None if source.dtype is self._dtype else self._dtype  # To name it costs as much as to ask.
        shard = transport.empty(numel // transport.world_size, source, dtype)
        return _Scattering(transport.begin_reduce_scatter(source, shard, self.key, scale=self._scale), shard)


class _Scattering:
    __slots__ = ("_pending", "_shard")

    def __init__(self, pending: Pending, shard: torch.Tensor) -> None:
        self._pending = pending
        self._shard = shard

    def finish(self) -> torch.Tensor:
        self._pending.finish()
        return self._shard


class Reduced:
    """A reduction that is over, or that the current stream of a device has queued to its end."""

    __slots__ = ("_shard",)

    def __init__(self, shard: torch.Tensor | None) -> None:
        self._shard = shard

    def finish(self) -> torch.Tensor | None:
        return self._shard


class SumPath(ScatterPath):
    """One reduce-scatter that adds up; the division is a step of its own."""

    __slots__ = ("_divisor",)

    def __init__(self, transport: Transport, key: int, divisor: float, dtype: torch.dtype) -> None:
        super().__init__(transport, key, divisor, dtype)
        self._divisor = divisor

    def begin(self, source: torch.Tensor) -> Reduction:
        transport = self.transport
        left = divided_before(source, self._divisor)
        shard = transport.empty(source.numel() // transport.world_size, source, self._dtype)
        pending = transport.begin_reduce_scatter(source, shard, self.key)
        return _Summing(pending, shard, left)


class _Summing(_Scattering):
    __slots__ = ("_divisor",)

    def __init__(self, pending: Pending, shard: torch.Tensor, divisor: float) -> None:
        super().__init__(pending, shard)
        self._divisor = divisor

    def finish(self) -> torch.Tensor:
        return super().finish().div_(self._divisor)


def divided_before(source: torch.Tensor, divisor: float) -> float:
    """Divide what a sum of could be more than its type holds, where the mean is not; returns what is left to divide."""
    if source.dtype is not torch.float16:
        return divisor
    source.mul_(1.0 / divisor)
    return 1.0


class Around:
    """A path around another one.

    Attributes:
        inner: The other one.
    """

    __slots__ = ("inner",)

    def __init__(self, inner: GradientPath) -> None:
        self.inner = inner

    @property
    def transport(self) -> Transport:
        """That of the other path."""
        return self.inner.transport

    @transport.setter
    def transport(self, transport: Transport) -> None:
        self.inner.transport = transport

    @property
    def failure(self) -> ConfigError | None:
        """That of the other path."""
        return getattr(self.inner, "failure", None)

    @failure.setter
    def failure(self, failure: ConfigError | None) -> None:
        self.inner.failure = failure  # type: ignore[attr-defined]


class PathHome(Around):
    """A path around a path: its result is copied to where the shard rests.

    Args:
        inner: Reduces.
        home: Where the results go.
    """

    __slots__ = ("_home",)

    def __init__(self, inner: GradientPath, home: RestingPlace) -> None:
        super().__init__(inner)
        self._home = home

    def begin(self, source: torch.Tensor) -> Reduction:
        return _GoingHome(self.inner.begin(source), self._home)

    def resume(self) -> Reduction:
        return _GoingHome(self.inner.resume(), self._home)


class _GoingHome:
    __slots__ = ("_home", "_reduction")

    def __init__(self, reduction: Reduction, home: RestingPlace) -> None:
        self._reduction = reduction
        self._home = home

    def finish(self) -> torch.Tensor | None:
        shard = self._reduction.finish()
        if shard is None:
            return None
        result = self._home.empty(shard.numel(), shard.dtype)
        result.copy_(shard, non_blocking=self._home.pins)
        return result
