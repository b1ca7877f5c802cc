"""Whole values of sharded parameters.

The ranks of one shard group gather a block: a part of the parameter if tensor parallelism has split it, else all of it.
So values move in two steps: between pieces and blocks within each column of ranks, and between blocks and the whole
within one team (see ``ModelRanks``), with one message for each block and rank that needs it. Where ranks hold copies of
shards, a block is taken from one copy and given to all. Global numbers name ranks, since a rank has no other number in
a copy that it is not in.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from composable.comm import Grid, ModelRanks, Ranks
from composable.dtensor import PieceExchange, RaggedDTensor, RaggedLayout, collect_blocks, memory_of, spread_blocks
from composable.engine import handle_of


def by_grid(tensors: Iterable[RaggedDTensor]) -> list[tuple[Grid, list[RaggedDTensor]]]:
    """Return ``tensors``, of any shapes, grouped by their ranks, with the annotation's grid or one without copies."""
    found: dict[Ranks, tuple[Grid, list[RaggedDTensor]]] = {}
    for tensor in tensors:
        handle, ranks = handle_of(tensor), tensor._spec.layout.ranks
        grid = Grid(ranks, None, ranks) if handle is None else handle.grid
        found.setdefault(ranks, (grid, []))[1].append(tensor)
    return list(found.values())


def spread_from(
    tensors: Sequence[RaggedDTensor], grid: Grid, giver: int, values: Callable[[int], torch.Tensor] | None
) -> None:
    """Overwrite all ranks' pieces of one annotation with blocks that only rank ``giver`` has. Collective."""
    if giver in grid.shard.numbers:
        spread_blocks(tensors, values, src=grid.shard.numbers.index(giver))
    if grid.replicas is None:
        return
    source = grid.replica_of(giver)
    for piece in (memory_of(tensor._local_tensor).data for tensor in tensors):
        # Pieces in host memory are moved to the device on which the ranks communicate.
        moved = piece.to(grid.replicas.device).contiguous()
        grid.replicas.broadcast(moved, source)
        if moved is not piece and source != grid.replicas.rank:
            piece.copy_(moved)


def collect_whole(
    tensors: Sequence[RaggedDTensor],
    ranks: ModelRanks,
    dst: int | None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[torch.Tensor] | None:
    """Return whole values, [full shape], of ``tensors`` on rank ``dst``, or on every rank; else ``None``. Collective.

    The tensors are of one shard group, ``dst`` is one of ``ranks.everyone``; options are those of ``collect_blocks``.
    """
    head = None if dst is None else ranks.in_column(dst)
    taker = None if head is None else ranks.everyone.numbers[head]
    if not ranks.others:
        return collect_blocks(tensors, taker=taker, dtype=dtype, device=device)
    # This column gathers only the tensors of which it gives the blocks to ``dst``.
    given = [
        index for index, tensor in enumerate(tensors) if dst is None or head in _givers(tensor, ranks, dst).values()
    ]
    own = [tensors[index] for index in given]
    blocks = dict(zip(given, collect_blocks(own, taker=taker, dtype=dtype, device=device) or ()))
    takers = ranks.team_of(ranks.rank) if dst is None else [dst]
    arrived = _exchange_blocks(tensors, blocks, ranks, takers)
    if ranks.rank not in takers:
        return None
    fulls = []
    for index, block in blocks.items():
        layout = tensors[index]._spec.layout
        if not layout.splits:
            fulls.append(block)
            continue
        full = layout.empty_full(block.dtype, block.device)
        layout.block_of(full).copy_(block)
        for places, other in arrived[index].items():
            _part_of(full, layout, places).copy_(other)
        fulls.append(full)
    return fulls


def spread_whole(
    tensors: Sequence[RaggedDTensor],
    grid: Grid,
    ranks: ModelRanks,
    src: int,
    values: Callable[[int], torch.Tensor] | None,
) -> None:
    """Overwrite pieces of all ranks with whole values, [full shape], that only rank ``src`` has. Collective.

    The tensors are of one shard group, ``src`` is one of ``ranks.everyone``. There ``values(index)`` gives a whole
    value in any dtype and on any device. The ranks of its team hold blocks of all ``tensors`` for a while.
    """
    head = ranks.in_column(src)
    if ranks.others and head == ranks.rank:
        values = _blocks_from(tensors, ranks, src, values).__getitem__
    spread_from(tensors, grid, ranks.everyone.numbers[head], values)


def _givers(tensor: RaggedDTensor, ranks: ModelRanks, rank: int) -> dict[tuple[int, ...], int]:
    return ranks.givers(tensor._spec.layout.split_ranks, rank)


def _exchange_blocks(
    tensors: Sequence[RaggedDTensor], blocks: Mapping[int, torch.Tensor], ranks: ModelRanks, takers: Sequence[int]
) -> dict[int, dict[tuple[int, ...], torch.Tensor]]:
    """Send this rank's ``blocks``, by index of their tensors, to ``takers``; return arrived blocks, by place."""
    exchange = PieceExchange(ranks.everyone)
    arrived: dict[int, dict[tuple[int, ...], torch.Tensor]] = {index: {} for index in blocks}
    for taker in takers if blocks else ():
        if taker != ranks.rank:
            sent = [index for index in blocks if ranks.rank in _givers(tensors[index], ranks, taker).values()]
            exchange.send([blocks[index].reshape(-1) for index in sent], [taker])
            continue
        for giver in ranks.team_of(taker):
            expected = []
            for index, block in blocks.items():
                layout = tensors[index]._spec.layout
                places = ranks.places_along(layout.split_ranks, giver)
                if giver != taker and _givers(tensors[index], ranks, taker)[places] == giver:
                    room = torch.empty(layout.block_at(places)[1], dtype=block.dtype, device=block.device)
                    arrived[index][places] = room
                    expected.append(room.view(-1))
            exchange.receive(expected, [piece.dtype for piece in expected], giver)
    exchange.run()
    return arrived


def _blocks_from(
    tensors: Sequence[RaggedDTensor], ranks: ModelRanks, src: int, values: Callable[[int], torch.Tensor] | None
) -> list[torch.Tensor]:
    """Return this rank's blocks of values that only rank ``src``, of the same team, has."""
    exchange = PieceExchange(ranks.everyone)
    layouts = [tensor._spec.layout for tensor in tensors]
    if ranks.rank != src or values is None:
        device = ranks.everyone.device
        blocks = [torch.empty(one._spec.layout.block_shape, dtype=one.dtype, device=device) for one in tensors]
        exchange.receive([block.view(-1) for block in blocks], [block.dtype for block in blocks], src)
    else:
        fulls = [values(index).detach().reshape(tensor.shape) for index, tensor in enumerate(tensors)]
        for one in ranks.team_of(src):
            if one != src:
                places = [ranks.places_along(layout.split_ranks, one) for layout in layouts]
                parts = map(_part_of, fulls, layouts, places)
                cast = [part.to(tensor.dtype).reshape(-1) for part, tensor in zip(parts, tensors, strict=True)]
                exchange.send(cast, [one])
        blocks = [layout.block_of(full) for layout, full in zip(layouts, fulls, strict=True)]
    exchange.run()
    return blocks


def _part_of(full: torch.Tensor, layout: RaggedLayout, places: Sequence[int]) -> torch.Tensor:
    """Return the block of a whole value that the rank at ``places`` along the splits has; a view."""
    for dim, (start, length) in enumerate(zip(*layout.block_at(places), strict=True)):
        full = full.narrow(dim, start, length)
    return full
