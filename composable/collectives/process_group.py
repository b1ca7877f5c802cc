"""Collectives of a process group: NCCL, gloo beyond a few ranks, the fake backend.

The calls go to the process group itself: the functions of ``torch.distributed`` cost half as
much host time again, in checks that planning has made already.
"""

import math
from collections.abc import Callable, Sequence
from itertools import starmap
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceScatterOptions

from composable.collectives.base import Order, Pending, Transport
from composable.collectives.in_flight import Messages, wait_for_all
from composable.collectives.watch import notice_transport
from composable.torch_private import AllgatherOptions, all_gather_into, reduce_scatter_into

__all__ = ["DONE", "ProcessGroupTransport"]

# What every backend can gather and broadcast. Others travel as bytes.
_CARRIED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)

_ORDERS: "WeakKeyDictionary[dist.ProcessGroup, Order]" = WeakKeyDictionary()


class _Done:
    """A collective that has happened."""

    __slots__ = ()

    def finish(self) -> None:
        pass

    def is_over(self) -> bool:
        return True


DONE = _Done()


class _Running(Messages):
    """A collective of the process group, then the scaling of its result, and the cast.

    Args:
        transport: That starts it.
        tag: As the watch of ranks that wait has it.
        call: Starts the collective.
        args: Of the call.
        result: What it fills.
        factor: What the result is multiplied with, if anything.
        cast: Where the result goes then, in another dtype, if anywhere.
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
        Messages.__init__(self, transport, tag, number)  # super() costs as much again
        self._result = result
        self._factor = factor
        self._cast = cast
        self.works.extend(starmap(call, (args,)))

    @property
    def nbytes(self) -> float:  # type: ignore[override]  # asked while others wait, so it is not stored
        size = self._result.nbytes * (self.transport.world_size if self.tag % 2 else 1)
        return size if self._result.device.type == "cpu" else math.inf

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


class ProcessGroupTransport(Transport):
    """Moves bytes with the collectives of one process group.

    Args:
        group: The shard group.
    """

    name = "process_group"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self._group = group
        self.groups = (group,)
        self.order = _ORDERS.setdefault(group, Order())
        notice_transport(self)
        self.in_flight = {}
        self._all_gather = all_gather_into(group)
        self._reduce_scatter = reduce_scatter_into(group)
        # NCCL averages in the collective itself, which saves a kernel.
        self._mean_scale = 1.0 / self.world_size
        # To multiply with a number, torch makes this of it each time, which takes longer than a small product.
        self._mean_factor = torch.tensor(self._mean_scale, dtype=torch.float64, device="cpu")
        self.has_nccl = "cuda:nccl" in dist.get_backend_config(group)

        # Gathers and reduce-scatters on CUDA run on the caller's stream, which is one for
        # communication: no second stream and no events between the two. Reductions in place
        # may be started from the stream that computes, so they run beside it, on NCCL's own.
        self._gather = AllgatherOptions()
        self._gather_here = AllgatherOptions()
        self._gather_here.asyncOp = False
        self._scatter = ReduceScatterOptions()
        self._scatter_here = ReduceScatterOptions()
        self._scatter_here.asyncOp = False
        self._scatter_mean = ReduceScatterOptions()
        self._scatter_mean.asyncOp = False
        self._scatter_mean.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        self._sum = AllreduceOptions()
        self._mean = AllreduceOptions()
        self._mean.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        # The collective marks its output as modified. Through `data` the mark misses the
        # parameters that view the buffer: autograd saved them, and gathering restores their values.
        buffer = buffer.data
        if self.world_size == 1 or not shard.numel():
            if buffer.data_ptr() != shard.data_ptr():
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
            # The sum may be more than this type holds, where the mean is not. A power of two costs no rounding.
            before = math.ldexp(1.0, min(math.frexp(scale)[1] - 1, 0))
            if before != 1.0:
                source.mul_(before)
                scale /= before
        factor = self._factor(scale)
        return _Running(self, 2 * key + 1, self._reduce_scatter, (shard, source, options), result, factor, cast)

    def begin_all_reduce(self, tensor: torch.Tensor, key: int, *, scale: float = 1.0) -> Pending:
        if self.world_size == 1 or not tensor.numel():
            if scale != 1.0:
                tensor.mul_(scale)
            return DONE
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if tensor.is_cuda and self.has_nccl and scale == self._mean_scale:
            return _Running(self, 2 * key, self._group.allreduce, ([parts], self._mean), tensor, None)
        return _Running(self, 2 * key, self._group.allreduce, ([parts], self._sum), tensor, self._factor(scale))

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        if self.world_size == 1 or not tensor.numel():
            return DONE
        options = BroadcastOptions()
        options.rootRank = source_rank
        parts = tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)
        return _Running(self, 2 * key, self._group.broadcast, ([parts], options), tensor, None)

    def _factor(self, scale: float) -> torch.Tensor | float | None:
        """Return what ``mul_`` takes for ``scale``; ``None``: there is nothing to multiply."""
        if scale == self._mean_scale:
            return self._mean_factor
        return None if scale == 1.0 else scale

    def settle(self) -> None:
        if self.in_flight:
            wait_for_all(self.in_flight)
