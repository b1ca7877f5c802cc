"""How a flat buffer's gradients become this rank's shard of their mean.

One object a flat buffer. Other ways are paths around a path: an all-reduce over the ranks that hold copies of
the shard, a copy to the host; or functions of the user's in place of one, or behind it. Whatever the way, the
sum is divided once, by the ``divisor`` of the path that sums; a communication hook divides by itself.
"""

from typing import Protocol

import torch

from composable.collectives import Pending, Transport
from composable.engine.gather_paths import RestingPlace
from composable.errors import ConfigError

__all__ = [
    "AllReducePath",
    "Around",
    "GradientPath",
    "KeptShards",
    "PathHome",
    "Reduced",
    "Reduction",
    "Replicas",
    "ScatterPath",
    "SecondScatterPath",
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


class Replicas:
    """The ranks that hold copies of the shards of some buffers, whose reductions have a second leg between them.

    The second leg of a reduction starts when the next one begins, or when somebody waits for it: so it runs beside the
    first leg of the next one.

    Args:
        transport: Between them.
    """

    __slots__ = ("_first_leg", "transport")

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._first_leg: _AllReducing | None = None

    def next(self, reduction: "_AllReducing") -> None:
        """Note whose second leg is due next."""
        self._first_leg = reduction

    def start(self) -> None:
        """Start the second leg that is due, if any; its first leg is waited for."""
        due, self._first_leg = self._first_leg, None
        if due is not None:
            due.start()


class KeptShards:
    """What the first legs of reductions gave whose second leg is to come with that of a later one.

    Attributes:
        defers: The next reductions have no second leg.
        total: Sum of the shards [S], in the dtype that travels, divided in full; ``None``: nothing is kept.
        bits: Of the parameters that some rank had a gradient for.
    """

    __slots__ = ("bits", "defers", "total")

    def __init__(self) -> None:
        self.defers = False
        self.total: torch.Tensor | None = None
        self.bits = 0

    def add(self, shard: torch.Tensor) -> None:
        """Keep another shard."""
        self.total = shard if self.total is None else self.total.add_(shard)

    def drop(self, number: int, start: int, stop: int) -> None:
        """Forget the gradient of a parameter, by its bit and its place in the shard."""
        self.bits &= ~(1 << number)
        if self.total is not None:
            self.total[start:stop].zero_()

    def clear(self) -> None:
        """Forget the gradients of all parameters."""
        self.total, self.bits = None, 0

    def take(self) -> torch.Tensor | None:
        """Return the sum, which is kept no longer."""
        total, self.total = self.total, None
        return total


class AllReducePath(Around):
    """Another path, then an all-reduce of the shard that it gives over the ranks that hold copies of the shard.

    Args:
        inner: The other path; its result has the dtype that travels.
        replicas: Who holds copies.
        kept: What earlier reductions left to do; it says whether this one leaves more.
        key: Of the buffer between them, the same on all.
        dtype: Of the result.
        scale: Of what the other path gives, where that has divided by its own ranks only.
    """

    __slots__ = ("_dtype", "_kept", "_key", "_kind", "_replicas", "_scale")

    def __init__(
        self,
        inner: GradientPath,
        replicas: Replicas,
        kept: KeptShards,
        key: int,
        dtype: torch.dtype,
        *,
        scale: float = 1.0,
    ) -> None:
        super().__init__(inner)
        self._replicas = replicas
        self._kept = kept
        self._key = key
        self._dtype = dtype
        self._scale = scale
        self._kind: type[_AllReducing] = _AllReducing

    def begin(self, source: torch.Tensor) -> Reduction:
        self._replicas.start()
        first = self.inner.begin(source)
        return _Keeping(first, self._kept, self._scale) if self._kept.defers else self._follow(first, self._scale)

    def resume(self) -> Reduction:
        self._replicas.start()
        return self._follow(Reduced(self._kept.take()), scale=1.0)

    def _follow(self, first: Reduction, scale: float) -> Reduction:
        reduction = self._kind(first, self._replicas, self._kept, self._key, self._dtype, scale)
        self._replicas.next(reduction)
        return reduction


class SecondScatterPath(AllReducePath):
    """Another path, then a reduce-scatter of what it gives over ranks with which it is shared; as ``AllReducePath``."""

    __slots__ = ()

    def __init__(self, inner: GradientPath, replicas: Replicas, kept: KeptShards, key: int, dtype: torch.dtype) -> None:
        super().__init__(inner, replicas, kept, key, dtype)
        self._kind = _ScatteringOn


class _Keeping:
    """A reduction that ends with its first leg."""

    __slots__ = ("_first", "_kept", "_scale")

    def __init__(self, first: Reduction, kept: KeptShards, scale: float) -> None:
        self._first = first
        self._kept = kept
        self._scale = scale

    def finish(self) -> None:
        shard = self._first.finish()
        assert shard is not None, "nothing below keeps it"
        # The path of the next reduction may be another one.
        self._kept.add(shard if self._scale == 1.0 else shard.mul_(self._scale))


class _AllReducing:
    __slots__ = ("_dtype", "_first", "_kept", "_key", "_pending", "_replicas", "_scale", "_shard")

    def __init__(
        self,
        first: Reduction,
        replicas: Replicas,
        kept: KeptShards,
        key: int,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        self._first: Reduction | None = first
        self._replicas = replicas
        self._kept = kept
        self._key = key
        self._dtype = dtype
        self._scale = scale
        self._shard: torch.Tensor | None = None
        self._pending: Pending | None = None

    def start(self) -> None:
        """Wait for the first leg and start the second one. Collective over the ranks that hold copies."""
        if self._first is None:
            return
        shard = self._first.finish()
        assert shard is not None, "nothing below keeps it"
        earlier = self._kept.take()
        if earlier is not None:
            shard.mul_(self._scale).add_(earlier)
            self._scale = 1.0
        self._first = None
        self._begin(shard, self._replicas.transport)

    def _begin(self, shard: torch.Tensor, transport: Transport) -> None:
        self._shard = shard
        self._pending = transport.begin_all_reduce(shard, self._key, scale=self._scale)

    def finish(self) -> torch.Tensor:
        if self._first is not None:
            # This is the one that is due: whatever began later has started it.
            self._replicas.start()
            self.start()
        if self._pending is not None:
            self._pending.finish()
        shard = self._shard
        assert shard is not None, "started above"
        return shard if shard.dtype is self._dtype else shard.to(self._dtype)


class _ScatteringOn(_AllReducing):
    """The second leg is a reduce-scatter."""

    __slots__ = ("_source",)

    def _begin(self, shard: torch.Tensor, transport: Transport) -> None:
        dtype = None if shard.dtype is self._dtype else self._dtype
        self._source: torch.Tensor | None = shard
        self._shard = transport.empty(shard.numel() // transport.world_size, shard, dtype)
        self._pending = transport.begin_reduce_scatter(shard, self._shard, self._key, scale=self._scale)

    def finish(self) -> torch.Tensor:
        shard = super().finish()
        self._source = None
        return shard
