"""Blocks where some ranks hold copies of the shards of others: taken from one copy, given to all.

A block is what a shard group holds: the whole, unless tensor parallelism has split that.

Ranks are named by their global numbers: those of one copy know the others by these only.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from composable.collectives import Grid, Ranks
from composable.ragged import RaggedDTensor, collect_blocks, spread_blocks
from composable.storage.handle import handle_of

__all__ = ["by_grid", "collect_at", "copy_to_replicas", "spread_from"]


def by_grid(tensors: Iterable[RaggedDTensor]) -> list[tuple[Grid, list[RaggedDTensor]]]:
    """Return ``tensors`` in groups of those that one annotation's ranks share; what has no handle has no copies."""
    found: dict[Ranks, tuple[Grid, list[RaggedDTensor]]] = {}
    for tensor in tensors:
        handle, ranks = handle_of(tensor), tensor._spec.layout.ranks
        grid = Grid(ranks, None, ranks) if handle is None else handle.grid
        found.setdefault(ranks, (grid, []))[1].append(tensor)
    return list(found.values())


def collect_at(
    tensors: Sequence[RaggedDTensor], grid: Grid, taker: int | None, **options: Any
) -> list[torch.Tensor] | None:
    """Return the blocks of ``tensors`` on one rank, or on every rank; others get ``None``. Collective.

    Args:
        tensors: Of one shard group.
        grid: The ranks of their annotation.
        taker: The rank that gets them; ``None``: every rank.
        **options: Of ``collect_blocks``.
    """
    if taker is None:
        return collect_blocks(tensors, dst=None, **options)
    if taker not in grid.shard.numbers:
        return None  # Another copy gives them.
    return collect_blocks(tensors, dst=grid.shard.numbers.index(taker), **options)


def spread_from(
    tensors: Sequence[RaggedDTensor], grid: Grid, giver: int, values: Callable[[int], torch.Tensor] | None
) -> None:
    """Overwrite every rank's pieces with blocks that only one rank has. Collective.

    Args:
        tensors: Of one shard group.
        grid: The ranks of their annotation.
        giver: The rank that has the values.
        values: As ``spread_blocks`` takes it.
    """
    if giver in grid.shard.numbers:
        spread_blocks(tensors, values, src=grid.shard.numbers.index(giver))
    if grid.replicas is not None:
        copy_to_replicas([tensor._local_tensor.data for tensor in tensors], grid, giver)


def copy_to_replicas(pieces: Sequence[torch.Tensor], grid: Grid, giver: int) -> None:
    """Overwrite ``pieces`` on the ranks that hold copies by those of the copy that the rank ``giver`` is in."""
    replicas = grid.replicas
    if replicas is None:
        return
    source = grid.replica_of(giver)
    for piece in pieces:
        # What rests in host memory travels where the ranks talk.
        moved = piece.to(replicas.device).contiguous()
        replicas.broadcast(moved, source)
        if moved is not piece and source != replicas.rank:
            piece.copy_(moved)
