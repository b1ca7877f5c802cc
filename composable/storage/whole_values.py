"""Whole values of sharded parameters on some ranks, gathered or given, also where tensor parallelism has split them.

What the ranks of one shard group gather is a block: a part, where tensor parallelism has split a parameter. So values
go in two steps: between the pieces and the blocks within each column of ranks, and between the blocks and the whole
within one team (see ``ModelRanks``), each block by one message to each that wants it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from composable.collectives import Grid, ModelRanks
from composable.ragged import Exchange, RaggedDTensor, RaggedLayout
from composable.storage.replicas import collect_at, spread_from

__all__ = ["collect_whole", "spread_whole"]

# Blocks below this many bytes travel together: a message costs as much as copying this much.
_PACKED_BYTES = 128 * 2**10


def collect_whole(
    tensors: Sequence[RaggedDTensor],
    grid: Grid,
    ranks: ModelRanks,
    dst: int | None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor] | None:
    """Return the whole values of ``tensors`` on rank ``dst``, or on every rank; others get ``None``. Collective.

    Args:
        tensors: Of one shard group; none on the meta device.
        grid: The ranks of their annotation.
        ranks: Of the model.
        dst: Which of ``ranks.everyone`` gets them; ``None``: each.
        dtype: Of the values of floating-point tensors; default: the tensors' own.
        device: Of the values; default: the tensors' own.
        out: Where the values go, on ranks that get them; their dtypes and devices count instead.
    """
    head = None if dst is None else ranks.in_column(dst)
    taker = None if head is None else ranks.everyone.numbers[head]
    if not ranks.others:
        return collect_at(tensors, grid, taker, dtype=dtype, device=device, out=out)
    # Of a tensor of which another column gives the blocks, this one gathers nothing.
    given = [
        index for index, tensor in enumerate(tensors) if dst is None or head in _givers(tensor, ranks, dst).values()
    ]
    whole = [index for index in given if not tensors[index]._spec.layout.splits]
    parts = [index for index in given if tensors[index]._spec.layout.splits]
    into = [out[index] for index in whole] if out is not None else None
    values = collect_at([tensors[index] for index in whole], grid, taker, dtype=dtype, device=device, out=into)
    fulls = dict(zip(whole, values or ()))
    # Into ``out`` values are cast last.
    cast = {} if out is not None else {"dtype": dtype, "device": device}
    blocks = dict(zip(parts, collect_at([tensors[index] for index in parts], grid, taker, **cast) or ()))
    takers = ranks.team_of(ranks.rank) if dst is None else [dst]
    arrived = _exchange_blocks({index: tensors[index] for index in parts}, blocks, ranks, takers)
    if ranks.rank not in takers:
        return None
    for index, block in blocks.items():
        layout = tensors[index]._spec.layout
        full = fulls[index] = layout.empty_full(block.dtype, block.device) if out is None else out[index]
        layout.block_of(full).copy_(block)
        for places, other in arrived[index].items():
            _part_of(full, layout, places).copy_(other)
    return [fulls[index] for index in range(len(tensors))]


def spread_whole(
    tensors: Sequence[RaggedDTensor],
    grid: Grid,
    ranks: ModelRanks,
    src: int,
    values: Callable[[int], torch.Tensor] | None,
) -> None:
    """Overwrite every rank's pieces with whole values that only rank ``src`` has. Collective.

    Ranks with the data place of ``src`` hold blocks for a while, those of all ``tensors`` at once.

    Args:
        tensors: Of one shard group; none on the meta device.
        grid: The ranks of their annotation.
        ranks: Of the model.
        src: Which of ``ranks.everyone`` has the values.
        values: There: gives that of ``tensors[index]``, with as many elements, in any dtype and on any device.
    """
    head = ranks.in_column(src)
    if ranks.others and head == ranks.rank:
        values = _blocks_from(tensors, ranks, src, values).__getitem__
    spread_from(tensors, grid, ranks.everyone.numbers[head], values)


def _givers(tensor: RaggedDTensor, ranks: ModelRanks, rank: int) -> dict[tuple[int, ...], int]:
    return ranks.givers(tensor._spec.layout.split_ranks, rank)


def _exchange_blocks(
    tensors: Mapping[int, RaggedDTensor], blocks: Mapping[int, torch.Tensor], ranks: ModelRanks, takers: Sequence[int]
) -> dict[int, dict[tuple[int, ...], torch.Tensor]]:
    """Send this rank's ``blocks`` to those of ``takers`` that want them, and return what it gets, by place.

    Args:
        tensors: By the same keys; of those whose blocks this column holds.
        blocks: On other ranks than those that hold them: none.
        ranks: Of the model.
        takers: Of one team.
    """
    exchange = Exchange(ranks.everyone)
    arrived: dict[int, dict[tuple[int, ...], torch.Tensor]] = {index: {} for index in blocks}
    for taker in takers if blocks else ():
        if taker != ranks.rank:
            sent = [index for index in blocks if ranks.rank in _givers(tensors[index], ranks, taker).values()]
            for parcel in _parcels([blocks[index].reshape(-1) for index in sent]):
                exchange.send(parcel, [taker])
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
            for parcel in _parcels(expected):
                exchange.receive(parcel, [piece.dtype for piece in parcel], giver)
    exchange.run()
    return arrived


def _blocks_from(
    tensors: Sequence[RaggedDTensor], ranks: ModelRanks, src: int, values: Callable[[int], torch.Tensor] | None
) -> list[torch.Tensor]:
    """Return this rank's blocks of values that only rank ``src``, of the same team, has."""
    exchange = Exchange(ranks.everyone)
    if ranks.rank != src:
        blocks = [
            torch.empty(tensor._spec.layout.block_shape, dtype=tensor.dtype, device=ranks.everyone.device)
            for tensor in tensors
        ]
        for parcel in _parcels([block.view(-1) for block in blocks]):
            exchange.receive(parcel, [piece.dtype for piece in parcel], src)
        exchange.run()
        return blocks
    assert values is not None, "the source has the values"
    fulls = [values(index).detach().reshape(tensor.shape) for index, tensor in enumerate(tensors)]
    for one in ranks.team_of(src):
        if one != src:
            parts = [
                _part_of(full, layout, ranks.places_along(layout.split_ranks, one))
                for full, layout in zip(fulls, [tensor._spec.layout for tensor in tensors], strict=True)
            ]
            cast = [part.to(tensor.dtype).reshape(-1) for part, tensor in zip(parts, tensors, strict=True)]
            for parcel in _parcels(cast):
                exchange.send(parcel, [one])
    exchange.run()
    return [tensor._spec.layout.block_of(full) for tensor, full in zip(tensors, fulls, strict=True)]


def _part_of(full: torch.Tensor, layout: RaggedLayout, places: Sequence[int]) -> torch.Tensor:
    """Return the block of a whole value that the rank at ``places`` along the splits has; a view."""
    for dim, (start, length) in enumerate(zip(*layout.block_at(places), strict=True)):
        full = full.narrow(dim, start, length)
    return full


def _parcels(pieces: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield what each message holds: one large piece, or all small ones; what has no elements is not sent."""
    small = [piece for piece in pieces if 0 < piece.nbytes < _PACKED_BYTES]
    for piece in pieces:
        if piece.nbytes >= _PACKED_BYTES:
            yield [piece]
    if small:
        yield small
