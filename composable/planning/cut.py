"""How one parameter is cut over ranks: anywhere, at bounds that all ranks know.

A parameter is flattened in the order of its memory, which need not be that of its dims (``channels_last``). Its
*order* are the dims from the outermost in memory to the innermost; empty where that is how they are numbered.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from composable.errors import ConfigError
from composable.torch_private import Placement

__all__ = ["RaggedShard", "boxes", "in_memory_order", "in_order_of_dims", "local_shape", "order_of", "strides_of"]


class RaggedShard(Placement):
    """Cuts a flattened tensor at ``bounds``: rank ``r`` owns elements ``[bounds[r], bounds[r + 1])``.

    Args:
        bounds: One more than there are ranks; from 0 to the tensor's numel, never falling.
        order: In which the dims are flattened, the outermost first; empty: as they are numbered.

    Raises:
        ConfigError: The bounds do not start at 0, or fall; or the order is none of dims.
    """

    def __init__(self, bounds: Sequence[int], order: Sequence[int] = ()) -> None:
        # The base is a C++ object: without this call its first use is a segmentation fault.
        super().__init__()
        if not isinstance(bounds, Iterable):
            raise ConfigError(f"bounds is {type(bounds).__name__}", fix="give a sequence of numbers")
        self.bounds = tuple(bounds)
        self.order = tuple(order)
        if sorted(self.order) != list(range(len(self.order))):
            raise ConfigError(f"order is {self.order}", fix="give every dim once, the outermost in memory first")
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(b < a for a, b in pairwise(self.bounds)):
            raise ConfigError(f"bounds are {self.bounds}", fix="give one bound a rank and the end: 0, rising, numel")
        self._hash = hash((self.bounds, self.order))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            type(other) is RaggedShard and self.bounds == other.bounds and self.order == other.order
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"RaggedShard(bounds={self.bounds}{f', order={self.order}' if self.order else ''})"

    def __str__(self) -> str:
        return repr(self)

    def __reduce__(self) -> tuple[object, ...]:
        return (RaggedShard, (self.bounds, self.order))


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the order of a tensor's memory; empty where it is that of its dims, and where there are gaps in it."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else ()


def in_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a view of a tensor with its dims in the given order, from the outermost."""
    return tensor.permute(*order) if order else tensor


def in_order_of_dims(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Undo ``in_memory_order``."""
    return tensor.permute(*_inverse(order)) if order else tensor


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def strides_of(shape: Sequence[int], order: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose memory is in an order."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def local_shape(shape: Sequence[int], bounds: Sequence[int], rank: int, order: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the shape of the piece that ``rank`` owns.

    ``(rows, *shape[1:])`` when *all* bounds fall on rows, else one dimension, so that every rank
    sees the same number of dimensions. Scalars, and what has an order of its own, are one-dimensional.
    """
    numel = bounds[rank + 1] - bounds[rank]
    row = math.prod(shape[1:])
    if not shape or order or row == 0 or any(bound % row for bound in bounds):
        return (numel,)
    return (numel // row, *shape[1:])


def boxes(
    shape: Sequence[int], lo: int, hi: int, order: Sequence[int] = ()
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the flat range ``[lo, hi)`` of a tensor into axis-aligned boxes.

    Returns:
        At most ``2 * ndim - 1`` pairs of (offsets, sizes), in flat order.
    """
    if order:
        back = _inverse(order)
        return [
            (tuple(offsets[dim] for dim in back), tuple(sizes[dim] for dim in back))
            for offsets, sizes in boxes([shape[dim] for dim in order], lo, hi)
        ]
    if lo >= hi:
        return []
    if len(shape) <= 1:
        return [((lo,), (hi - lo,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(lo, row), divmod(hi, row)

    def inside_row(index: int, lo: int, hi: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((index, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], lo, hi)]

    if first == last:
        return inside_row(first, head, tail)
    found = []
    if head:
        found += inside_row(first, head, row)
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + inside_row(last, 0, tail)
