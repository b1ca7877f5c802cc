"""Reductions with a second leg: of the shard that the first one gives, over ranks that hold copies or parts of it.

The second leg of one reduction runs beside the first leg of the next. It may also wait for those of later backwards:
what first legs gave is kept until then.
"""

import torch

from composable.collectives import Pending, Transport
from composable.storage.gradient_path import Around, GradientPath, Reduced, Reduction

__all__ = ["AllReducePath", "KeptShards", "Replicas", "SecondScatterPath"]


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
