"""The interface of all transports, and the transport that uses a process group's own collectives.

A transport belongs to one shard group. ``begin_*`` starts a collective and returns a ``Pending``; ``finish`` makes its
result readable by the current stream (CUDA) or by the calling thread (CPU). All ranks of the group call ``begin_*`` in
the same order with equal shapes and the same ``key``. On CUDA, all-gathers and reduce-scatters run on the stream that
is current in ``begin_*``; the others run beside it.

Buffers are one-dimensional and contiguous. ``W`` is the group size, ``S`` the shard numel.

The decorator ``register_transport`` on the class of a transport lets plans and users choose it by name. The attributes
of the class also decide the numbers in plans. CONTRIBUTING.md has the recipe.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import starmap
from threading import get_ident
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceScatterOptions

from composable.comm.hang_watchdog import diverged, explained
from composable.comm.waits import Order, Started, notice_transport, order_of
from composable.errors import ConfigError
from composable.ground.torch_private import (
    AllgatherOptions,
    all_gather_into,
    modes_off,
    reduce_scatter_into,
    tensors_have_values,
)

# The dtypes that every backend can gather and broadcast. Other dtypes travel as bytes.
_CARRIED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)


class Pending(Protocol):
    """A collective that was started."""

    def finish(self) -> None:
        """Wait until the result may be read and every buffer may be reused. Idempotent."""
        ...

    def is_over(self) -> bool:
        """Say whether ``finish`` would return without waiting for other ranks."""
        ...


class Transport(ABC):
    """The base class of transports, which move bytes between the ranks of one group.

    Attributes:
        name: The name that the plan prints and ``transport=`` accepts.
        moves: The tensors that it can move, for messages.
        cost: Of the transports that fit a group, the one of least cost is taken.
        is_shared: It has connections of its own, so all annotations on a group share one transport.
        maps_memory: Ranks map each other's memory, so they have to be processes on one host that may do so.
        is_direct: Slices go straight to the rank that needs them, which adds them up in float32 at least; otherwise
            they go around a ring. Plans use this to count bytes and buffers.
        rank: This rank within the group.
        world_size: Ranks in the group.
        groups: The process groups that it uses; empty before its first use of one.
        begun: How many collectives this rank has started whose messages have tags, by tag.
        closed_because: The diagnosis that every rank got when the ranks diverged; then nothing more can be started.
        carries_values: Tensors have values, and those that arrive are those that were sent. If not, only shapes count,
            and who has to know a number of other ranks asks ``Ranks.exchange``.
        has_nccl: CUDA tensors travel by NCCL: ``finish`` lets a stream wait, and the thread goes on.
        in_flight: The collectives that were started, and that no thread has waited for to the end.
        order: The order of all other collectives in the group; shared by all transports of the group.
    """

    name: str
    moves: str = "tensors of any device"
    cost: int = 0
    is_shared: bool = False
    maps_memory: bool = False
    is_direct: bool = False
    rank: int
    world_size: int
    groups: "tuple[dist.ProcessGroup, ...]" = ()
    begun: Mapping[int, int] = MappingProxyType({})
    order: Order
    closed_because: tuple[str, ...] = ()
    carries_values: bool = True
    has_nccl: bool = False
    in_flight: "dict[Started, None]"
    _keys_taken: int = 0

    @classmethod
    def serves(cls, device_type: str, backend: str) -> bool:
        """Say whether this transport can move tensors of ``device_type`` over a group of ``backend``."""
        return True

    @classmethod
    def fits(cls, device_type: str, backend: str, hosts: Sequence[int]) -> bool:
        """Say whether this transport is the one for tensors of a device, if none of lower cost is.

        ``backend`` is that of the group, ``hosts`` the number of the host of each rank.
        """
        return cls.serves(device_type, backend)

    def allocate_key(self) -> int:
        """Return a key that no other buffer of this transport has; all ranks in the same order."""
        key = self._keys_taken
        self._keys_taken = key + 1
        return key

    @abstractmethod
    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        """Fill ``buffer`` [W * S] with every rank's ``shard`` [S], in rank order; both have the same dtype, any dtype.

        ``shard`` does not overlap ``buffer``, or it is the slice of ``buffer`` for this rank. The caller leaves both
        untouched until ``finish``.
        """

    @abstractmethod
    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        """Write ``scale`` times the sum over ranks of slice ``rank`` of ``source`` [W * S] to ``shard`` [S].

        Both are floating-point or complex. If ``shard`` has another dtype than ``source``, the dtype of ``source``
        travels, and the sum runs in the wider of the two where that costs no further rounding. ``source`` may be
        overwritten. The caller leaves both untouched until ``finish``.
        """

    @abstractmethod
    def begin_all_reduce(self, tensor: torch.Tensor, key: int, *, scale: float = 1.0) -> Pending:
        """Replace ``tensor``, of any shape and dtype that the backend sums, by ``scale`` times its sum over ranks."""

    @abstractmethod
    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        """Replace ``tensor``, of any shape and dtype, by the tensor of the rank ``source_rank`` within the group."""

    def empty(self, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor [numel] of undefined content, in memory that suits this transport, on the device of ``like``.

        ``dtype`` is by default the dtype of ``like``. The source and shard of ``begin_reduce_scatter`` come from here.
        On a device, the tensor is allocated on the current stream.
        """
        return like.new_empty(numel) if dtype is None else like.new_empty(numel, dtype=dtype)

    def settle(self) -> None:
        """Wait for all collectives in flight, also where an exception has cut a ``begin_*`` short."""

    def give_up(self) -> None:
        """Wait for all collectives in flight, of which nobody reads a result: also if they fail, as ranks have gone."""

    def free_memory(self) -> None:
        """Free memory that is kept for later messages: a buffer has gone that sent some. Not collective."""

    def leave(self) -> None:
        """End waits of other ranks that process groups do not end: an exception ends this process. Not collective."""


# The registered transports

_T = TypeVar("_T", bound="type[ProcessGroupTransport]")
_REGISTERED: "dict[str, type[ProcessGroupTransport]]" = {}


def register_transport(transport: _T) -> _T:
    """Let plans and users choose a transport class by its name; a process group is its only argument.

    Raises:
        ConfigError: The class lacks a name of its own, or a method that ``Transport`` leaves to it.
    """
    lacking = sorted(getattr(transport, "__abstractmethods__", Transport.__abstractmethods__))
    lacking += [] if "name" in vars(transport) else ["a name of its own"]
    if lacking:
        fix = 'derive it from ProcessGroupTransport, which has all methods, and set `name = "..."` in it'
        raise ConfigError(f"the transport {transport.__name__} lacks {', '.join(lacking)}", fix=fix)
    _REGISTERED[transport.name] = transport
    return transport


def transport_names() -> list[str]:
    """Return the names of all transports, in falling order of cost: the first ones fit the most groups."""
    return [one.name for one in sorted(_REGISTERED.values(), key=lambda one: -one.cost)]


def transport_class(name: str, *others: str) -> "type[ProcessGroupTransport]":
    """Return the transport of this name; ``others`` are values that ``ConfigError`` names beside known ones."""
    if not isinstance(name, str) or name not in _REGISTERED:
        known = ", ".join(map(repr, [*others, *transport_names()]))
        raise ConfigError(f"transport is {name!r:.80}", fix=f"pass one of {known}")
    return _REGISTERED[name]


def choose_transport(
    device_type: str, backend: str, hosts: Sequence[int], name: str = "auto", *, may_map: bool = True
) -> str:
    """Return the name of the transport for a shard group: a pure function of values that all its ranks have.

    Args:
        device_type: Device type of the parameters.
        backend: Backend of the shard group, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
        hosts: The number of the host of each of its ranks, as ``hosts_of`` gives them.
        name: The user's choice; ``auto``: of the transports that fit, the one of least cost.
        may_map: The ranks can map each other's memory, or it is not known yet.

    Raises:
        ConfigError: ``name`` is unknown, or does not fit device and backend.
    """
    by_device = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    own_backend = by_device.get(device_type, "") if by_device else backend
    if name == "auto":
        fitting = [one for one in _REGISTERED.values() if one.fits(device_type, own_backend, hosts)]
        return min((one for one in fitting if may_map or not one.maps_memory), key=lambda one: one.cost).name
    chosen = transport_class(name, "auto")
    if not chosen.serves(device_type, own_backend):
        raise ConfigError(
            f"transport {name!r} moves {chosen.moves}; the group is {backend} on {device_type}",
            fix="pass transport='auto'",
        )
    return name


# Collectives under way


class _Done:
    """A collective that is over."""

    __slots__ = ()

    def finish(self) -> None:
        pass

    def is_over(self) -> bool:
        return True


DONE = _Done()


class Messages(Started):
    """The works of one collective, kept by the transport until a thread has waited for them.

    An exception may stop the code that was to wait, even during the start. A work that nobody holds frees memory that
    gloo still needs, and gloo writes to memory that is freed before its work is over. So this object is made before
    the works are posted, by one call of ``works.extend``: Python runs no signal handler inside that call, so every
    posted work is on record. Raises ``DesyncError`` if the transport is closed.
    """

    __slots__ = ("works",)

    def __init__(self, transport: Transport, tag: int, number: int) -> None:
        if transport.closed_because:
            raise diverged(transport.closed_because)
        self.transport = transport
        self.tag = tag
        self.number = number
        self.waiter = None
        self.works: list[dist.Work] = []
        transport.in_flight[self] = None

    def finish(self) -> None:
        """Wait for the works. Idempotent, also where an exception came between two of them."""
        works = self.works
        if not works:
            return
        if self.waiter is not None:
            # A work that was waited for is complete; to wait for its message again is to wait for the next message.
            works = [work for work in works if not work.is_completed()]
        self.waiter = get_ident()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self.waiter = 0
            raise explained(error, self) from error
        finally:
            self.waiter = 0
        self.works = []
        self.transport.in_flight.pop(self, None)

    def is_over(self) -> bool:
        """Say whether ``finish`` would return at once."""
        return all(work.is_completed() for work in self.works)


class _Running(Messages):
    """A collective of the process group, then the scaling of its result, and the cast.

    Args:
        tag: Twice the key of the buffer; one more for a reduce-scatter.
        call: The function that starts it, with ``args``.
        result: The tensor that the collective fills.
        factor: The factor that ``result`` is multiplied by, if any.
        cast: The tensor of another dtype that ``result`` is copied to in the end, if any.
    """

    __slots__ = ("_cast", "_factor", "_result")

    def __init__(
        self,
        transport: "ProcessGroupTransport",
        tag: int,
        call: Callable[..., dist.Work],
        args: Sequence[object],
        result: torch.Tensor,
        factor: torch.Tensor | float | None,
        cast: torch.Tensor | None = None,
    ) -> None:
        order = transport.order
        order.count = number = order.count + 1
        order.recent.append(tag)
        if transport.closed_because:
            raise diverged(transport.closed_because)
        # The same as in `Messages.__init__`: a call of it would cost as much time again.
        self.transport = transport
        self.tag = tag
        self.number = number
        self.waiter = None
        self.works = []
        transport.in_flight[self] = None
        self._result = result
        self._factor = factor
        self._cast = cast
        self.works.extend(starmap(call, (args,)))
        order.digest = hash((order.digest, tag))

    def finish(self) -> None:
        Messages.finish(self)
        if self._factor is not None:
            self._result.mul_(self._factor)
            self._factor = None
        if self._cast is not None:
            self._cast.copy_(self._result)
            self._cast = None

    def is_over(self) -> bool:
        # NCCL lets the stream wait, and the thread goes on.
        return (self._result.is_cuda and self.transport.has_nccl) or Messages.is_over(self)


@register_transport
class ProcessGroupTransport(Transport):
    """A transport by the collectives of one process group: NCCL, gloo beyond a few ranks, the fake backend.

    It calls the process group itself: the functions of ``torch.distributed`` cost half as much host time again, in
    checks that planning has made already.
    """

    name = "process_group"
    cost = 10

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self._group = group
        self.groups = (group,)
        self.order = order_of(group)
        notice_transport(self)
        self.in_flight = {}
        self._all_gather = all_gather_into(group)
        self._reduce_scatter = reduce_scatter_into(group)
        # NCCL averages in the collective itself, which saves a kernel.
        self._mean_scale = 1.0 / self.world_size
        # To multiply by a number, torch makes such a tensor each time, which takes longer than a small product; so does
        # a product of two dtypes. For shorter dtypes the factor keeps the digits that they lack.
        with modes_off():
            self._mean_factor = torch.tensor(self._mean_scale, dtype=torch.float64, device="cpu")
            self._mean_factor_of_float32 = self._mean_factor.float()
        self.carries_values = tensors_have_values()
        self.has_nccl = "cuda:nccl" in dist.get_backend_config(group)

        # All-gathers and reduce-scatters on CUDA run on the caller's stream, one for communication: they need no second
        # stream and no events. All-reduces in place may start from the stream that computes, so they run beside it.
        self._gather, self._gather_here = AllgatherOptions(), AllgatherOptions()
        self._scatter, self._scatter_here, self._scatter_mean = (ReduceScatterOptions() for _ in range(3))
        self._sum, self._mean = AllreduceOptions(), AllreduceOptions()
        self._gather_here.asyncOp = self._scatter_here.asyncOp = self._scatter_mean.asyncOp = False
        self._scatter_mean.reduceOp = self._mean.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def allocate_key(self) -> int:
        """Return a key that no other buffer of the group has; all ranks in the same order."""
        key = self.order.keys_taken
        self.order.keys_taken = key + 1
        return key

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        # The collective marks its output as modified. Through `data` the mark does not reach the
        # parameters that view the buffer: autograd saved them, and gathering restores their values.
        buffer = buffer.data
        if self.world_size == 1 or not shard.numel():
            if not self.carries_values or buffer.data_ptr() != shard.data_ptr():
                buffer.copy_(shard)
            return DONE
        options = self._gather_here if buffer.is_cuda else self._gather
        if shard.dtype not in _CARRIED:
            buffer, shard = buffer.view(torch.uint8), shard.view(torch.uint8)
        return _Running(self, 2 * key, self._all_gather, (buffer, shard, options), buffer, None)

    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        if self.world_size == 1 or not shard.numel():
            torch.mul(source, scale, out=shard) if source.dtype is shard.dtype else shard.copy_(source.mul_(scale))
            return DONE
        dtype, cast = source.dtype, None
        if shard.dtype is not dtype:
            cast, shard = shard, source.new_empty(shard.numel())
        result = shard
        if shard.is_complex():
            source, shard = torch.view_as_real(source).view(-1), torch.view_as_real(shard).view(-1)
        if not shard.is_cuda:
            options = self._scatter
        elif self.has_nccl and scale == self._mean_scale:
            options, scale = self._scatter_mean, 1.0
        else:
            options = self._scatter_here
        if dtype is torch.float16 and options is not self._scatter_mean:
            # The sum may overflow this dtype where the mean does not. To scale by a power of two costs no rounding.
            before = math.ldexp(1.0, min(math.frexp(scale)[1] - 1, 0))
            if before != 1.0:
                source.mul_(before)
                scale /= before
        factor = self._factor(scale, dtype)
        return _Running(self, 2 * key + 1, self._reduce_scatter, (shard, source, options), result, factor, cast)

    def begin_all_reduce(self, tensor: torch.Tensor, key: int, *, scale: float = 1.0) -> Pending:
        if self.world_size == 1 or not tensor.numel():
            if scale != 1.0:
                tensor.mul_(scale)
            return DONE
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if tensor.is_cuda and self.has_nccl and scale == self._mean_scale:
            return _Running(self, 2 * key, self._group.allreduce, ([parts], self._mean), tensor, None)
        factor = self._factor(scale, tensor.dtype)
        return _Running(self, 2 * key, self._group.allreduce, ([parts], self._sum), tensor, factor)

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        if self.world_size == 1 or not tensor.numel():
            return DONE
        options = BroadcastOptions()
        options.rootRank = source_rank
        parts = tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)
        return _Running(self, 2 * key, self._group.broadcast, ([parts], options), tensor, None)

    def _factor(self, scale: float, dtype: torch.dtype) -> torch.Tensor | float | None:
        """Return ``scale`` as a factor for ``mul_`` of this dtype; ``None``: there is nothing to multiply."""
        if scale == self._mean_scale:
            return self._mean_factor_of_float32 if dtype is torch.float32 else self._mean_factor
        return None if scale == 1.0 else scale

    def settle(self) -> None:
        for started in list(self.in_flight):
            # Only wait: scaling and casts are left to the callers that finish the collectives, if any do.
            if isinstance(started, Messages):
                Messages.finish(started)
            self.in_flight.pop(started, None)  # Not all: another thread may have begun one.

    def give_up(self) -> None:
        for started in list(self.in_flight):
            if isinstance(started, Messages):
                with suppress(RuntimeError):
                    Messages.finish(started)
                started.works = []
        self.in_flight.clear()
