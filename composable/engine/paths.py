"""Paths of bytes between ranks: shards to buffer, gradients to shard.

A flat buffer has one path of each kind. A path can go around another path: with a cast or a copy from the host before
it, with a second leg over the ranks that hold copies of the shard, or with a function after it. In each case the sum is
divided once, by the ``divisor`` of the path that sums; a communication hook divides by itself.

The second leg of one reduction runs beside the first leg of the next. It may also wait for a later backward: the shards
of first legs are kept until then. Memory that a device copies to or from without the host waiting has to be
page-locked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from composable.comm import Pending, Transport


@dataclass(frozen=True)
class RestingPlace:
    """The memory in which shards rest."""

    device: torch.device  # Device of the memory.
    # It is not on the device where ranks communicate and compute: shards are copied there before use.
    is_elsewhere: bool = False
    pins: bool = False  # It is page-locked, so that the host need not wait for these copies.

    @staticmethod
    def of(device: torch.device, *, on_host: bool, pins: bool) -> "RestingPlace":
        """Return the resting place of shards that are used on ``device``; on the CPU it is the host anyway."""
        if _MAKERS:
            return _MAKERS[-1](device, on_host)
        if not on_host or device.type == "cpu":
            return RestingPlace(device)
        return RestingPlace(torch.device("cpu"), is_elsewhere=True, pins=pins)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory [numel] of this kind, with undefined content."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pins)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory [numel] of this kind, zero."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pins)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, of any shape, or a page-locked copy if it lies here and page-locked memory is needed."""
        if not self.pins or tensor.device.type != self.device.type or tensor.is_pinned():
            return tensor
        return tensor.pin_memory()

    def copy(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a copy of a device's ``shard`` [S] in this memory; wait for the current stream before reading it."""
        result = self.empty(shard.numel(), shard.dtype)
        result.copy_(shard, non_blocking=self.pins)
        return result


_MAKERS: list[Callable[[torch.device, bool], RestingPlace]] = []


def make_resting_places_by(make: Callable[[torch.device, bool], RestingPlace]) -> None:
    """Let ``RestingPlace.of`` return what ``make`` does of its first two arguments: torch knows no device."""
    _MAKERS.append(make)


class Gather:
    """One all-gather, which fills a buffer from the shards of all ranks; its ``key`` is the same on all ranks."""

    def __init__(self, transport: Transport, key: int) -> None:
        self.transport = transport
        self.key = key

    def begin(self, buffer: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Start to fill ``buffer`` [W * S] with every rank's ``shard`` [S], on the current stream.

        Collective: all ranks of the shard group, same order. Both stay untouched until ``finish``.
        """
        return self.transport.begin_all_gather(buffer, shard, self.key)


class CopyGather(Gather):
    """One all-gather of shards in another dtype than the buffer's, or on the host.

    To cast or move it costs no extra copy: this rank's shard is copied into the buffer in any case. If ``home``, where
    the shard rests, is page-locked, ``begin`` returns before the shard was read, and the host must not write to the
    shard until the current stream has copied it.
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


# A function that ends a started reduction; called once. It returns this rank's shard [S] of the mean, in the dtype and
# on the device of the shard, or ``None`` if the shard waits for later reductions. The thread waits on CPU, the current
# stream on a device. The source may be reused afterwards. In page-locked memory the host may read the result only after
# it has waited for the current stream.
Reduction: TypeAlias = Callable[[], torch.Tensor | None]


class GradientPath(Protocol):
    """Reduces gradients over the ranks; ``transport`` moves the bytes, or allocates memory for what does."""

    @property
    def transport(self) -> Transport: ...

    def begin(self, source: torch.Tensor) -> Reduction:
        """Start to reduce ``source`` [W * S], the gradients of this rank, on the current stream.

        Collective: all ranks, same order. ``source`` may be overwritten, and stays untouched by the
        caller until the reduction is over.
        """
        ...

    def resume(self) -> Reduction:
        """Start the second leg of reductions that were kept; there must be some. Collective: all ranks, same order."""
        ...


class Whole:
    """A path that keeps no reduction for later."""

    def resume(self) -> Reduction:
        raise AssertionError("nothing is kept")


@dataclass(eq=False)
class ScatterPath(Whole):
    """One reduce-scatter."""

    transport: Transport  # Between the ranks of the shard group.
    key: int  # Key of the buffer, the same on all ranks.
    _divisor: float  # Number of ranks that the mean is over, or the user's divisor.
    _dtype: torch.dtype  # Dtype of the result.

    def begin(self, source: torch.Tensor) -> Reduction:
        transport, numel = self.transport, source.numel()
        dtype = None if source.dtype is self._dtype else self._dtype  # Naming the same dtype would cost time.
        shard = transport.empty(numel // transport.world_size, source, dtype)
        pending = transport.begin_reduce_scatter(source, shard, self.key, scale=1.0 / self._divisor)

        def finish() -> torch.Tensor:
            pending.finish()
            return shard

        return finish


class SumPath(ScatterPath):
    """One reduce-scatter that adds up; the division is a separate step."""

    def begin(self, source: torch.Tensor) -> Reduction:
        divisor = self._divisor
        if source.dtype is torch.float16:
            # The sum could overflow float16.
            source.mul_(1.0 / divisor)
            divisor = 1.0
        shard = self.transport.empty(source.numel() // self.transport.world_size, source, self._dtype)
        pending = self.transport.begin_reduce_scatter(source, shard, self.key)

        def finish() -> torch.Tensor:
            pending.finish()
            return shard.div_(divisor)

        return finish


class _Around:
    """A path around another one, ``inner``."""

    def __init__(self, inner: GradientPath) -> None:
        self.inner = inner

    @property
    def transport(self) -> Transport:
        """Transport of the other path."""
        return self.inner.transport


class ThenPath(_Around):
    """Another path, then a function of its reduced shard [S], which returns the shard to use in its place.

    ``at_once``: call it before ``begin`` returns: so functions that communicate run in one order on all ranks, and
    never for a step that was abandoned.
    """

    def __init__(
        self, inner: GradientPath, function: Callable[[torch.Tensor], torch.Tensor], *, at_once: bool = False
    ) -> None:
        super().__init__(inner)
        self._function = function
        self._at_once = at_once

    def begin(self, source: torch.Tensor) -> Reduction:
        return self._followed(self.inner.begin(source))

    def resume(self) -> Reduction:
        return self._followed(self.inner.resume())

    def _followed(self, reduction: Reduction) -> Reduction:
        def finish() -> torch.Tensor | None:
            shard = reduction()
            return None if shard is None else self._function(shard)

        if not self._at_once:
            return finish
        result = finish()
        return lambda: result


class Replicas:
    """The ranks that hold copies of the shards of some buffers; reductions have a second leg between these ranks.

    The second leg of a reduction starts when the next reduction begins, or when its result is waited for: so it runs
    beside the first leg of the next reduction.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.due: _TwoLegs | None = None

    def start(self) -> None:
        """Wait for the first leg of the reduction that is due, if any, and start its second leg."""
        due, self.due = self.due, None
        if due is not None:
            due.start()


class KeptShards:
    """The sum of shards from first legs of reductions, whose second leg runs with that of a later reduction."""

    def __init__(self) -> None:
        self.defers = False  # The next reductions have no second leg.
        # Sum of the shards [S], in the dtype of the all-reduce, already divided; ``None``: nothing is kept.
        self.total: torch.Tensor | None = None
        self.bits = 0  # Bits of the parameters that some rank had a gradient for.

    def add(self, shard: torch.Tensor) -> None:
        """Keep another shard [S]."""
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
        """Return the sum [S], and keep it no longer."""
        total, self.total = self.total, None
        return total


class AllReducePath(_Around):
    """Another path, then an all-reduce of its result over the ranks that hold copies of the shard.

    Args:
        inner: The other path; its result has the dtype of the all-reduce.
        replicas: The ranks that hold copies.
        kept: Shards that earlier reductions have left; ``kept.defers``: this one leaves its shard too.
        key: Key of the buffer between these ranks, the same on all.
        dtype: Dtype of the result.
        scale: Factor for the result of the other path, if that has divided by its own ranks only.
    """

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
        self.replicas = replicas
        self.kept = kept
        self.key = key
        self.dtype = dtype
        self._scale = scale

    def begin(self, source: torch.Tensor) -> Reduction:
        self.replicas.start()
        first = self.inner.begin(source)
        if not self.kept.defers:
            return self._followed(first, self._scale)

        def keep() -> None:
            shard = first()
            if shard is not None:
                # Scaled now: the next reduction may have another path.
                self.kept.add(shard if self._scale == 1.0 else shard.mul_(self._scale))

        return keep

    def resume(self) -> Reduction:
        self.replicas.start()
        total = self.kept.take()
        return self._followed(lambda: total, 1.0)

    def _followed(self, first: Reduction, scale: float) -> Reduction:
        self.replicas.due = legs = _TwoLegs(self, first, scale)
        return legs.finish


class _TwoLegs:
    """A reduction of two legs, of which the first was started."""

    def __init__(self, path: AllReducePath, first: Reduction, scale: float) -> None:
        self._path = path
        self._first: Reduction | None = first
        self._scale = scale
        self._second: tuple[Pending, torch.Tensor] | None = None

    def start(self) -> None:
        """Wait for the first leg and, if it has a result, start the second one. Collective over the copies."""
        if self._first is None:
            return
        shard, path = self._first(), self._path
        if shard is not None:
            earlier = path.kept.take()
            if earlier is not None:
                shard.mul_(self._scale).add_(earlier)
                self._scale = 1.0
            transport = path.replicas.transport
            self._first = None
            self._second = transport.begin_all_reduce(shard, path.key, scale=self._scale), shard
        self._first = None

    def finish(self) -> torch.Tensor | None:
        """Wait for the second leg; returns its result [S], or ``None`` where the first leg gave none."""
        if self._second is None:
            # This reduction is the one that is due: a later one would have started its second leg.
            self._path.replicas.start()
            self.start()
        if self._second is None:
            return None
        pending, shard = self._second
        pending.finish()
        return shard if shard.dtype is self._path.dtype else shard.to(self._path.dtype)
