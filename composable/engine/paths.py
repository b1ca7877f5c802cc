"""Paths: shards to buffer, gradients to shard.

One path of each kind a flat buffer, so that what happens on the way can grow. Other ways are paths around a path: a
cast or a copy from the host first, a second leg over the ranks that hold copies of the shard, a function behind it.
Whatever the way, the sum is divided once, by the ``divisor`` of the path that sums; a communication hook divides by
itself.

The second leg of one reduction runs beside the first leg of the next. It may also wait for those of later backwards:
what first legs gave is kept until then. Memory that a device copies to or from without the host waiting has to be
page-locked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from composable.comm import Pending, Transport

__all__ = [
    "AllReducePath",
    "CopyGather",
    "Gather",
    "GradientPath",
    "KeptShards",
    "Reduction",
    "Replicas",
    "RestingPlace",
    "ScatterPath",
    "SumPath",
    "ThenPath",
    "Whole",
]


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
    def of(device: torch.device, *, on_host: bool, pins: bool) -> "RestingPlace":
        """Return where what is used on ``device`` rests; without a device that is the host anyway."""
        if not on_host or device.type == "cpu":
            return RestingPlace(device)
        return RestingPlace(torch.device("cpu"), is_elsewhere=True, pins=pins)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory [numel] there, with undefined content."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pins)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory [numel] there, zero."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pins)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, of any shape, or its values in page-locked memory if it lies here and has to."""
        if not self.pins or tensor.device.type != self.device.type or tensor.is_pinned():
            return tensor
        return tensor.pin_memory()

    def copy(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard`` [S], of a device, in memory there; the current stream has to get there before it is read."""
        result = self.empty(shard.numel(), shard.dtype)
        result.copy_(shard, non_blocking=self.pins)
        return result


class Gather:
    """One all-gather, which fills a buffer from the shards of all ranks.

    Attributes:
        transport: Moves the bytes.
        key: Of the buffer, the same on all ranks.
    """

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


# Ends a reduction that was started; called once. It returns this rank's shard [S] of the mean, in the dtype and on the
# device of the shard, or ``None``: it waits for later reductions. The thread waits on CPU, the current stream on a
# device. The source may be reused afterwards. On page-locked memory the host may read the result only when the current
# stream has got there.
Reduction: TypeAlias = Callable[[], torch.Tensor | None]


class GradientPath(Protocol):
    """Reduces gradients over the ranks.

    Attributes:
        transport: Moves the bytes, or allocates for what moves them.
    """

    @property
    def transport(self) -> Transport: ...

    def begin(self, source: torch.Tensor) -> Reduction:
        """Start to reduce ``source`` [W * S], the gradients of this rank, on the current stream.

        Collective: all ranks, same order. ``source`` may be overwritten, and stays untouched by the
        caller until the reduction is over.
        """
        ...

    def resume(self) -> Reduction:
        """Start to end the reductions that were kept, of which there are some. Collective: all ranks, same order."""
        ...


class Whole:
    """A path that leaves nothing to do."""

    def resume(self) -> Reduction:
        raise AssertionError("nothing is kept")


class ScatterPath(Whole):
    """One reduce-scatter.

    Args:
        transport: Of the ranks that share the shard.
        key: Of the buffer, the same on all ranks.
        divisor: Ranks whose gradients the mean is over, or what the user divides by.
        dtype: Of the result.
    """

    def __init__(self, transport: Transport, key: int, divisor: float, dtype: torch.dtype) -> None:
        self.transport = transport
        self.key = key
        self._divisor = divisor
        self._dtype = dtype

    def begin(self, source: torch.Tensor) -> Reduction:
        transport, numel = self.transport, source.numel()
        dtype = None if source.dtype is self._dtype else self._dtype  # To name it costs as much as to ask.
        shard = transport.empty(numel // transport.world_size, source, dtype)
        pending = transport.begin_reduce_scatter(source, shard, self.key, scale=1.0 / self._divisor)

        def finish() -> torch.Tensor:
            pending.finish()
            return shard

        return finish


class SumPath(ScatterPath):
    """One reduce-scatter that adds up; the division is a step of its own."""

    def begin(self, source: torch.Tensor) -> Reduction:
        divisor = self._divisor
        if source.dtype is torch.float16:
            # The sum could be more than its type holds.
            source.mul_(1.0 / divisor)
            divisor = 1.0
        shard = self.transport.empty(source.numel() // self.transport.world_size, source, self._dtype)
        pending = self.transport.begin_reduce_scatter(source, shard, self.key)

        def finish() -> torch.Tensor:
            pending.finish()
            return shard.div_(divisor)

        return finish


class _Around:
    """A path around another one.

    Attributes:
        inner: The other one.
    """

    def __init__(self, inner: GradientPath) -> None:
        self.inner = inner

    @property
    def transport(self) -> Transport:
        """That of the other path."""
        return self.inner.transport


class ThenPath(_Around):
    """Another path, then a function on the shard that it gives.

    Args:
        inner: The other path.
        function: Called with the reduced shard [S]; returns what takes its place.
        at_once: Before ``begin`` returns: functions that communicate run in one order on all ranks, and never for a
            step that was abandoned.
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
    """The ranks that hold copies of the shards of some buffers, whose reductions have a second leg between them.

    The second leg of a reduction starts when the next one begins, or when somebody waits for it: so it runs beside the
    first leg of the next one.

    Args:
        transport: Between them.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.due: _TwoLegs | None = None

    def start(self) -> None:
        """Start the second leg that is due, if any; its first leg is waited for."""
        due, self.due = self.due, None
        if due is not None:
            due.start()


class KeptShards:
    """What the first legs of reductions gave whose second leg is to come with that of a later one.

    Attributes:
        defers: The next reductions have no second leg.
        total: Sum of the shards [S], in the dtype that travels, divided in full; ``None``: nothing is kept.
        bits: Of the parameters that some rank had a gradient for.
    """

    def __init__(self) -> None:
        self.defers = False
        self.total: torch.Tensor | None = None
        self.bits = 0

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
        """Return the sum [S], which is kept no longer."""
        total, self.total = self.total, None
        return total


class AllReducePath(_Around):
    """Another path, then an all-reduce of the shard that it gives over the ranks that hold copies of the shard.

    Args:
        inner: The other path; its result has the dtype that travels.
        replicas: Who holds copies.
        kept: What earlier reductions left to do; it says whether this one leaves more.
        key: Of the buffer between them, the same on all.
        dtype: Of the result.
        scale: Of what the other path gives, where that has divided by its own ranks only.
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
                # The path of the next reduction may be another one.
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
    """A reduction whose first leg was started."""

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
        """Wait for the second leg; returns its result [S], or nothing where the first leg gave none."""
        if self._second is None:
            # This is the one that is due: whatever began later has started it.
            self._path.replicas.start()
            self.start()
        if self._second is None:
            return None
        pending, shard = self._second
        pending.finish()
        return shard if shard.dtype is self._path.dtype else shard.to(self._path.dtype)
