"""Moves ragged tensors to and from the ranks that hold them whole, piece by piece.

Whole is here what one shard group holds: a *block*, where tensor parallelism has split tensors over other groups.

Every large piece goes straight from where it is owned to where it is wanted; small ones of one owner travel
together. Beside the whole tensors nothing is allocated, except for what travels together and where dtype or
device change, and then no more than one list's pieces.

An *owner* is a rank in the tensors' shard group; pieces without elements are not sent.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from composable.ragged.exchange import Exchange
from composable.ragged.tensor import RaggedDTensor

__all__ = ["cast_dtype", "collect_blocks", "spread_blocks"]

# Pieces below this many bytes travel together: a message costs as much as copying this much.
_PACKED_BYTES = 128 * 2**10


class _Piece(NamedTuple):
    """Elements ``[lo, hi)`` of tensor number ``which``, held by one owner."""

    which: int
    lo: int
    hi: int


def collect_blocks(
    tensors: Sequence[RaggedDTensor],
    *,
    dst: int | None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor] | None:
    """Return the blocks of ``tensors`` on rank ``dst``, dense and independent of each other: fresh, or ``out``.

    Collective: all ranks of the shard group, with the same tensors in the same order.

    Args:
        tensors: Of one shard group; none on the meta device.
        dst: Rank in the shard group that gets the values, the others get ``None``; ``None``: every rank.
        dtype: Of the values of floating-point tensors; default: the tensors' own.
        device: Of the values; default: the tensors' own.
        out: Where the values go, on ranks that get them: contiguous tensors of the right shapes, whose dtypes and
            devices count instead of ``dtype`` and ``device``. On others ``None``.
    """
    if not tensors:
        return None
    layout = tensors[0]._spec.layout
    takers = range(len(layout.bounds) - 1) if dst is None else (dst,)
    fulls: list[torch.Tensor] | None = None
    if layout.rank in takers:
        if out is None:
            fulls = [
                tensor._spec.layout.empty_block(cast_dtype(tensor, dtype), device or tensor._local_tensor.device)
                for tensor in tensors
            ]
        else:
            # What is cut in another order than that of its dims arrives in that order first.
            fulls = [
                tensor._spec.layout.empty_block(full.dtype, full.device) if tensor._spec.layout.order else full
                for tensor, full in zip(tensors, out, strict=True)
            ]
        for tensor, full in zip(tensors, fulls, strict=True):
            own = tensor._spec.layout
            own.flat(full)[own.lo : own.hi].copy_(tensor._local_tensor.detach().reshape(-1))
    flat = [tensor._spec.layout.flat(full) for tensor, full in zip(tensors, fulls or (), strict=fulls is not None)]
    exchange = Exchange(layout.ranks)
    for owner in range(len(layout.bounds) - 1):
        if fulls is None and owner != layout.rank:
            continue
        for parcel in _parcels(tensors, owner):
            if owner == layout.rank:
                locals_ = [tensors[piece.which]._local_tensor.detach().reshape(-1) for piece in parcel]
                exchange.send(locals_, [taker for taker in takers if taker != owner])
            elif fulls is not None:
                targets = [flat[piece.which][piece.lo : piece.hi] for piece in parcel]
                exchange.receive(targets, [tensors[piece.which].dtype for piece in parcel], owner)
    exchange.run()
    if fulls is None or out is None:
        return fulls
    for target, full in zip(out, fulls, strict=True):
        if full is not target:
            target.copy_(full)
    return list(out)


def spread_blocks(tensors: Sequence[RaggedDTensor], values: Callable[[int], torch.Tensor] | None, *, src: int) -> None:
    """Overwrite every rank's pieces with blocks that only rank ``src`` has.

    Collective: all ranks of the shard group, with the same tensors in the same order.

    Args:
        tensors: Of one shard group; none on the meta device.
        values: On rank ``src``: gives the block of ``tensors[index]``, of its ``block_shape``, in any dtype and on any
            device; asked once for each, in order. On other ranks not used.
        src: Rank in the shard group that has the values.
    """
    if not tensors:
        return
    layout = tensors[0]._spec.layout
    exchange = Exchange(layout.ranks)
    if layout.rank == src:
        assert values is not None, "the source has the values"
        fulls = [
            tensor._spec.layout.flat(values(index).detach()) if tensor.numel() else None
            for index, tensor in enumerate(tensors)
        ]
        for owner in range(len(layout.bounds) - 1):
            for parcel in _parcels(tensors, owner):
                pieces = [full[piece.lo : piece.hi] for piece in parcel if (full := fulls[piece.which]) is not None]
                if owner == src:
                    for piece, value in zip(parcel, pieces, strict=True):
                        _own_piece(tensors[piece.which]).copy_(value)
                else:
                    dtypes = [tensors[piece.which].dtype for piece in parcel]
                    cast = [value.to(dtype) for value, dtype in zip(pieces, dtypes, strict=True)]
                    exchange.send(cast, [owner])
    else:
        for parcel in _parcels(tensors, layout.rank):
            targets = [_own_piece(tensors[piece.which]) for piece in parcel]
            exchange.receive(targets, [target.dtype for target in targets], src)
    exchange.run()


def cast_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of ``tensor`` where floating-point tensors are cast to ``dtype``; bytes by its name are none."""
    if dtype is None or not tensor.is_floating_point() or getattr(tensor, "_composable_holds_bytes", False):
        return tensor.dtype
    return dtype


def _own_piece(tensor: RaggedDTensor) -> torch.Tensor:
    # `.data` leaves the version counter alone: nothing that autograd saved is changed.
    return tensor._local_tensor.data.view(-1)


def _parcels(tensors: Sequence[RaggedDTensor], owner: int) -> list[list[_Piece]]:
    """Return what each message from or to ``owner`` holds: one large piece, or all small ones."""
    parcels: list[list[_Piece]] = []
    small: list[_Piece] = []
    for index, tensor in enumerate(tensors):
        lo, hi = tensor._spec.layout.bounds[owner : owner + 2]
        if lo == hi:
            continue
        if (hi - lo) * tensor.dtype.itemsize < _PACKED_BYTES:
            small.append(_Piece(index, lo, hi))
        else:
            parcels.append([_Piece(index, lo, hi)])
    return [*parcels, small] if small else parcels
