"""Turns an error on one rank into an error on every rank, before the ranks part ways.

A rank that raises alone leaves the others waiting in the next collective. Code that may fail on
some ranks only (reading a file, checking what rank 0 was given) runs in ``agreed``, and what
follows is reached by all ranks or by none.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from composable.errors import ComposableError, DesyncError, place_of_rank

__all__ = ["agreed", "compare_ranks", "raise_together"]


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


def compare_ranks(
    compared: str,
    failure: Exception | None,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    shown: str,
    what: str,
    fix: str,
) -> None:
    """Raise on every rank unless all have equal texts and no failure.

    Collective: all ranks of ``group``. Ranks that meet here from different calls find different texts.

    Args:
        compared: What has to be equal.
        failure: What this rank alone knows to be wrong.
        group: The ranks that have to agree.
        device: Of the tensors that the group talks in.
        shown: The same for people, who get the first lines that differ.
        what: What is wrong if the texts differ.
        fix: What the user should do then.

    Raises:
        Exception: ``failure``, or what another rank told of its own.
        DesyncError: The texts differ.
    """
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        if failure is not None:
            raise failure
        return
    digest = hashlib.sha256(compared.encode()).digest()
    mine = torch.tensor([failure is not None, *digest], dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    found = torch.stack(every).tolist()
    if any(one[0] for one in found):
        raise_together(failure, group, device)
    if all(one == found[0] for one in found):
        return
    texts: list[str] = [""] * len(every)
    dist.all_gather_object(texts, shown, group=group)
    raise DesyncError(f"{what}\n{_first_difference(texts)}", at=place_of_rank(), fix=fix)


def _first_difference(texts: Sequence[str]) -> str:
    lines = [text.splitlines() for text in texts]
    for index in range(max(len(own) for own in lines)):
        at_index = [own[index] if index < len(own) else "(nothing)" for own in lines]
        if len(set(at_index)) > 1:
            return "\n".join(f"    rank {rank}: {line.strip()}" for rank, line in enumerate(at_index))
    return "    (the printed plans are equal; the options differ)"


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
