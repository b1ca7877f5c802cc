"""Reductions in a process group of the user's choice, in place and waited for: what communication hooks are made of.

They run on the current stream of a device, and on the CPU the thread waits. Every rank of the group calls them in the
same order. A wait that ends by an error says what the watch of ranks that wait has found.
"""

import torch
import torch.distributed as dist
from torch.distributed import ReduceScatterOptions

from composable.collectives.watch import explained
from composable.errors import ComposableError
from composable.torch_private import reduce_scatter_into

__all__ = ["all_reduce_in", "reduce_scatter_in", "wait_for_work"]


def all_reduce_in(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace ``tensor`` by its sum over the ranks. Collective."""
    try:
        dist.all_reduce(_real(tensor), group=group)
    except RuntimeError as error:
        raise _told(error, group) from error


def reduce_scatter_in(group: dist.ProcessGroup, source: torch.Tensor, shard: torch.Tensor) -> None:
    """Write the sum over ranks of slice ``rank`` of ``source`` [W * S] to ``shard`` [S], of one dtype. Collective."""
    options = ReduceScatterOptions()
    options.asyncOp = False
    try:
        # torch's own function has one name in some versions, another in others.
        work = reduce_scatter_into(group)(_real(shard), _real(source), options)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise _told(error, group) from error


def wait_for_work(work: object, group: dist.ProcessGroup, what: str = "a communication hook") -> None:
    """Wait for what a collective of others has returned; ``None``: it is over. ``what`` started it, for messages."""
    if work is not None:
        try:
            work.wait()  # type: ignore[attr-defined]  # a work
        except RuntimeError as error:
            raise _told(error, group, what) from error


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _told(error: RuntimeError, group: dist.ProcessGroup, what: str = "a communication hook") -> RuntimeError:
    return error if isinstance(error, ComposableError) else explained(error, group, what=what)
