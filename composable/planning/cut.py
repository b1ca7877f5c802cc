"""How one parameter is cut over ranks: anywhere, at bounds that all ranks know."""

import math
from collections.abc import Sequence
from itertools import pairwise

from composable.errors import ConfigError
from composable.torch_private import Placement

__all__ = ["RaggedShard", "boxes", "local_shape"]


class RaggedShard(Placement):
    """Cuts a flattened tensor at ``bounds``: rank ``r`` owns elements ``[bounds[r], bounds[r + 1])``.

    Args:
        bounds: One more than there are ranks; from 0 to the tensor's numel, never falling.

    Raises:
        ConfigError: The bounds do not start at 0, or fall.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        # The base is a C++ object: without this call its first use is a segmentation fault.
        super().__init__()
        self.bounds = tuple(bounds)
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(b < a for a, b in pairwise(self.bounds)):
            raise ConfigError(f"bounds are {self.bounds}", fix="give one bound a rank and the end: 0, rising, numel")
        self._hash = hash(self.bounds)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is RaggedShard and self.bounds == other.bounds)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"RaggedShard(bounds={self.bounds})"

    def __str__(self) -> str:
        return repr(self)

    def __reduce__(self) -> tuple[object, ...]:
        return (RaggedShard, (self.bounds,))


def local_shape(shape: Sequence[int], bounds: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the shape of the piece that ``rank`` owns.

    ``(rows, *shape[1:])`` when *all* bounds fall on rows, else one dimension, so that every rank
    sees the same number of dimensions. Scalars are one-dimensional.
    """
    numel = bounds[rank + 1] - bounds[rank]
    row = math.prod(shape[1:])
    if not shape or row == 0 or any(bound % row for bound in bounds):
        return (numel,)
    return (numel // row, *shape[1:])


def boxes(shape: Sequence[int], lo: int, hi: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the flat range ``[lo, hi)`` of a row-major tensor into axis-aligned boxes.

    Returns:
        At most ``2 * ndim - 1`` pairs of (offsets, sizes), in flat order.
    """
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
