"""Turns an error on one rank into an error on every rank, before the ranks part ways.

A rank that raises alone leaves the others waiting in the next collective. Code that may fail on
some ranks only (reading a file, checking what rank 0 was given) runs in ``agreed``, and what
follows is reached by all ranks or by none.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from composable.errors import ComposableError, DesyncError, place_of_rank

__all__ = ["agreed", "raise_together"]


@contextmanager
def agreed(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Run a block that may raise on some ranks, and raise on every rank if it did on any.

    Collective: all ranks of ``group``. The block itself must not communicate within it.

    Args:
        group: The ranks that have to agree.
        device: Of the tensors that the group talks in.

    Raises:
        Exception: What the block raised here.
        ComposableError: What it raised on another rank, of the same type where it is an error of this library.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_together(failure, group, device)


def raise_together(failure: Exception | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ``failure`` on the rank that has one and what it says on the others; nothing if there is none.

    Collective: all ranks of ``group``, same order.
    """
    if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
        flag = torch.tensor([failure is not None], dtype=torch.uint8, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        if flag.item():
            failures: list[ComposableError | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(failures, _as_told(failure), group=group)
            if failure is None:
                failure = next(told for told in failures if told is not None)
    if failure is not None:
        raise failure


def _as_told(failure: Exception | None) -> ComposableError | None:
    """Return what the other ranks raise: the same, with the place where it happened."""
    if failure is None:
        return None
    place = place_of_rank()
    if not isinstance(failure, ComposableError):
        return DesyncError(f"another rank raised {type(failure).__name__}: {failure}", at=place)
    at = failure.at or ""
    return type(failure)(
        failure.what, at=at if at.startswith("rank ") else ", ".join(filter(None, [place, at])), fix=failure.fix
    )
