"""How bytes travel: how a rank's shard becomes the whole buffer, and gradients this rank's shard of their mean.

One path of each kind a flat buffer, so that what happens on the way can grow. Other ways are paths around a path: a
cast or a copy from the host first, a second leg over the ranks that hold copies or parts of the shard, a copy to the
host behind it; or functions of the user's in place of one, or behind it. Whatever the way, the sum is divided once, by
the ``divisor`` of the path that sums; a communication hook divides by itself.

The second leg of one reduction runs beside the first leg of the next. It may also wait for those of later backwards:
what first legs gave is kept until then. Memory that a device copies to or from without the host waiting has to be
page-locked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from composable.comm import Pending, Transport
from composable.errors import ConfigError

__all__ = [
    "AllReducePath",
    "Around",
    "CopyGather",
    "Gather",
    "GatherPath",
    "GradientPath",
    "KeptShards",
    "PathHome",
    "Reduction",
    "Replicas",
    "RestingPlace",
    "ScatterPath",
    "SecondScatterPath",
    "SumPath",
    "Whole",
    "divided_before",
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

    transport: Transport

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
        transport = self.transport
        left = divided_before(source, self._divisor)
        shard = transport.empty(source.numel() // transport.world_size, source, self._dtype)
        pending = transport.begin_reduce_scatter(source, shard, self.key)

        def finish() -> torch.Tensor:
            pending.finish()
            return shard.div_(left)

        return finish


def divided_before(source: torch.Tensor, divisor: float) -> float:
    """Divide ``source``, of any shape, where its sum could be more than its type holds; returns what is left to do."""
    if source.dtype is not torch.float16:
        return divisor
    source.mul_(1.0 / divisor)
    return 1.0


class Around:
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

    @transport.setter
    def transport(self, transport: Transport) -> None:
        self.inner.transport = transport

    @property
    def failure(self) -> ConfigError | None:
        """What is wrong with the last result of a function of the user's in the other path."""
        return getattr(self.inner, "failure", None)

    @failure.setter
    def failure(self, failure: ConfigError | None) -> None:
        self.inner.failure = failure  # type: ignore[attr-defined]  # who sets it has read it


class PathHome(Around):
    """A path around a path: its result is copied to where the shard rests.

    Args:
        inner: Reduces.
        home: Where the results go.
    """

    def __init__(self, inner: GradientPath, home: RestingPlace) -> None:
        super().__init__(inner)
        self._home = home

    def begin(self, source: torch.Tensor) -> Reduction:
        return self._then_home(self.inner.begin(source))

    def resume(self) -> Reduction:
        return self._then_home(self.inner.resume())

    def _then_home(self, reduction: Reduction) -> Reduction:
        def finish() -> torch.Tensor | None:
            shard = reduction()
            if shard is None:
                return None
            result = self._home.empty(shard.numel(), shard.dtype)
            result.copy_(shard, non_blocking=self._home.pins)
            return result

        return finish


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
        self.dtype = dtype
        self._key = key
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

    def begin_second(self, shard: torch.Tensor, scale: float) -> tuple[Pending, torch.Tensor]:
        """Start the second leg of ``shard`` [S]; returns what its result lies in as well."""
        return self.replicas.transport.begin_all_reduce(shard, self._key, scale=scale), shard


class SecondScatterPath(AllReducePath):
    """Another path, then a reduce-scatter of what it gives over ranks with which it is shared; as ``AllReducePath``."""

    def begin_second(self, shard: torch.Tensor, scale: float) -> tuple[Pending, torch.Tensor]:
        transport = self.replicas.transport
        dtype = None if shard.dtype is self.dtype else self.dtype
        part = transport.empty(shard.numel() // transport.world_size, shard, dtype)
        return transport.begin_reduce_scatter(shard, part, self._key, scale=scale), part


class _TwoLegs:
    """A reduction whose first leg was started."""

    def __init__(self, path: AllReducePath, first: Reduction, scale: float) -> None:
        self._path = path
        self._first: Reduction | None = first
        self._scale = scale
        self._source: torch.Tensor | None = None  # Untouched until the second leg is over.
        self._second: tuple[Pending, torch.Tensor] | None = None

    def start(self) -> None:
        """Wait for the first leg and, if it has a result, start the second one. Collective over the copies."""
        if self._first is None:
            return
        shard = self._first()
        if shard is None:
            self._first = None
            return
        earlier = self._path.kept.take()
        if earlier is not None:
            shard.mul_(self._scale).add_(earlier)
            self._scale = 1.0
        self._first = None
        self._source = shard
        self._second = self._path.begin_second(shard, self._scale)

    def finish(self) -> torch.Tensor | None:
        """Wait for the second leg; returns its result, [S] or a part of it, or what the first leg returned instead."""
        if self._second is None:
            # This is the one that is due: whatever began later has started it.
            self._path.replicas.start()
            self.start()
        if self._second is None:
            return None
        pending, shard = self._second
        pending.finish()
        self._source = None
        return shard if shard.dtype is self._path.dtype else shard.to(self._path.dtype)
