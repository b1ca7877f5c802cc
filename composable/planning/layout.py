"""The place of each parameter in a flat buffer.

Shapes in, numbers out: no process group, so a layout for 512 ranks can be checked on a laptop. Sizes and offsets are
in elements. Parameters lie whole and in the given order; the buffer is cut into equal shards. This file chooses only
where padding goes (between parameters or at the end, never inside one), so that the cuts fall on row boundaries of
the parameters they cross; and, where matrices should lie whole on a rank, the order. A cut may fall anywhere, at bounds
that all ranks know.

A parameter is flattened in the order of its memory, which may differ from the order of its dims (``channels_last``).
Its *order* lists the dims from the outermost in memory to the innermost; it is empty if they lie as numbered.

Source: flat parameters, arXiv 2304.11277; ragged shards, arXiv 2602.22437.
"""

import functools
import math
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, permutations
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from composable.errors import ConfigError
from composable.ground.torch_private import Placement

Align: TypeAlias = Literal["row", "element", "tensor", "matrix"] | int

# Padding for row cuts and aligned starts may take at most 1 / this of the buffer.
_PADDING_SHARE = 100
# 16 bytes of a two-byte dtype: the alignment that vectorised loads and tensor-core matmuls need.
_START_ALIGN = 8
# Pieces laid in the search for an order, from each start: at most 0.1 s each, once for handles of equal shapes. For the
# nine parameters of a Llama block that is 2,000 orders.
_MAX_TRIED = 20_000
# Ranks with at least this share of what the largest holder of a matrix has may own it too: rows are seldom cut into
# equal halves, and the first rank would own all.
_OWNER_SHARE = 0.875
# Row sizes tried as the grain of a shard, most frequent first: bounds the search, not the result's validity.
_MAX_GRAINS = 8


class RaggedShard(Placement):
    """The placement that cuts a flattened tensor: rank ``r`` owns elements ``[bounds[r], bounds[r + 1])``.

    Args:
        bounds: One more than there are ranks; from 0 to the tensor's numel, never falling.
        order: The dims in the order of flattening, the outermost first; empty: as they are numbered.

    Raises:
        ConfigError: The bounds do not start at 0, or fall; or the order does not have each dim once.
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
        if len(self.bounds) < 2 or self.bounds[0] != 0 or [*self.bounds] != sorted(self.bounds):
            raise ConfigError(f"bounds are {self.bounds}", fix="give world_size + 1 bounds that rise from 0 to numel")
        self._hash = hash((self.bounds, self.order))
        # The layout of the parameter with this cut: a tensor that gets the same placement is cut alike.
        self.layout: weakref.ref[Any] | None = None

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

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return repr(self), {"RaggedShard": RaggedShard}  # the text in the source of a compiled graph

    def __reduce__(self) -> tuple[object, ...]:
        return (RaggedShard, (self.bounds, self.order))


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the memory order of a tensor of any shape and dtype; empty: as dims are numbered, or memory has gaps."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else ()


def in_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a view of a tensor [*shape] of any dtype with its dims in the given order: [shape[d] for d in order]."""
    return tensor.permute(*order) if order else tensor


def in_order_of_dims(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a view of a tensor [shape[d] for d in order] of any dtype as [*shape]: undo ``in_memory_order``."""
    return tensor.permute(*_inverse(order)) if order else tensor


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def strides_of(shape: Sequence[int], order: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the strides of a dense tensor with this shape and this order of memory."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def local_shape(shape: Sequence[int], bounds: Sequence[int], rank: int, order: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the shape of the piece that ``rank`` owns.

    ``(rows, *shape[1:])`` when *all* bounds fall on rows, else one dimension, so that every rank
    sees the same number of dimensions. Pieces of scalars, and of parameters with an order, are one-dimensional.
    """
    numel = bounds[rank + 1] - bounds[rank]
    row = math.prod(shape[1:])
    if not shape or order or row == 0 or math.gcd(row, *bounds) != row:
        return (numel,)
    return (numel // row, *shape[1:])


def part_of_dim(size: int, count: int, place: int) -> tuple[int, int]:
    """Return the range of a dim of ``size`` that ``Shard`` gives to one of ``count`` ranks; it may be empty."""
    step = -(-size // count)
    return min(place * step, size), min((place + 1) * step, size)


def boxes(
    shape: Sequence[int], lo: int, hi: int, order: Sequence[int] = ()
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the flat range ``[lo, hi)`` of a tensor into boxes (offsets, sizes), at most ``2 * ndim - 1``, in order."""
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


@dataclass(frozen=True)
class Promise:
    """The only places where a parameter may be cut, at any cost in padding.

    Attributes:
        block: Number of slices of ``dim`` that stay together; ``None``: all, so the parameter is whole on one rank.
        dim: The dim that is outermost in memory.
    """

    block: int | None
    dim: int = 0

    def __str__(self) -> str:
        if self.block is None:
            return "whole on one rank"
        slices = f"slices of dim {self.dim}" if self.dim else "rows"
        return f"cut between {slices}" if self.block == 1 else f"cut between blocks of {self.block} {slices}"


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of the flat buffer, holding one parameter.

    ``order`` are its dims as they lie in memory, from the outermost; empty: as they are numbered.
    """

    fqn: str
    shape: torch.Size
    start: int
    stop: int
    order: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def view_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the parameter as a view [*shape] of its place in a flat buffer [numel of the layout] of any dtype."""
        flat = buffer[self.start : self.stop]
        if not self.order:
            return flat.view(self.shape)
        return in_order_of_dims(flat.view([self.shape[dim] for dim in self.order]), self.order)


class ShardSplit(NamedTuple):
    """A shard as a row of parts: pieces of parameters, and padding."""

    sizes: list[int]  # Elements of each part; they add up to the shard.
    indices: list[int | None]  # For each parameter the index of its part; ``None`` if the rank owns nothing of it.


@functools.lru_cache(1024)
def _bounds(start: int, stop: int, shard_numel: int, world_size: int) -> tuple[int, ...]:
    """Return the bounds of ``FlatLayout.bounds``: one object for all layers that are alike."""
    numel = stop - start
    if numel == 0:
        return (0,) * (world_size + 1)
    # Only the cuts strictly inside the span need arithmetic; this is called per parameter at W = 1024.
    first = start // shard_numel + 1
    inside = tuple(range(first * shard_numel - start, numel, shard_numel))
    return (0,) * first + inside + (numel,) * (world_size + 1 - first - len(inside))


@dataclass(frozen=True)
class FlatLayout:
    """A buffer of ``world_size * shard_numel`` elements; elements that no span covers are padding.

    ``is_ordered``: the layout chose the order of the spans, which are in the order of memory.
    """

    spans: tuple[Span, ...]
    world_size: int
    shard_numel: int
    is_ordered: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.world_size * self.shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements of the whole buffer that belong to no parameter."""
        return self.numel - sum(span.numel for span in self.spans)

    def padding_by_rank(self) -> list[int]:
        """Return for each rank how many elements of its shard belong to no parameter."""
        padding = [self.shard_numel] * self.world_size
        for span in self.spans:
            for rank, (lo, hi) in enumerate(pairwise(self.bounds(span))):
                padding[rank] -= hi - lo
        return padding

    def shard_of(self, rank: int) -> slice:
        """Return the elements that ``rank`` keeps between iterations."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def bounds(self, span: Span) -> tuple[int, ...]:
        """Return the ``world_size + 1`` flat bounds of a parameter, in its own elements.

        Rank ``r`` owns ``[bounds[r], bounds[r + 1])`` of the flattened parameter.
        """
        return _bounds(span.start, span.stop, self.shard_numel, self.world_size)

    def local_range(self, span: Span, rank: int) -> tuple[int, int]:
        """Return where the parameter's piece lies inside the shard of ``rank``; equal bounds if it has none."""
        first = rank * self.shard_numel
        lo = min(max(span.start - first, 0), self.shard_numel)
        hi = min(max(span.stop - first, 0), self.shard_numel)
        return lo, hi

    def split_of(self, rank: int) -> ShardSplit:
        """Return how the shard of ``rank`` is cut into parameters and padding."""
        sizes: list[int] = []
        indices: list[int | None] = []
        filled = 0
        for span in self.spans:
            start, stop = self.local_range(span, rank)
            if start == stop:
                indices.append(None)
                continue
            if start > filled:
                sizes.append(start - filled)
            indices.append(len(sizes))
            sizes.append(stop - start)
            filled = stop
        if filled < self.shard_numel:
            sizes.append(self.shard_numel - filled)
        return ShardSplit(sizes, indices)


def plan_layout(
    params: Sequence[tuple[str, torch.Size]],
    world_size: int,
    *,
    align: Mapping[str, Align] | None = None,
    orders: Mapping[str, tuple[int, ...]] | None = None,
) -> FlatLayout:
    """Pack parameters, then cut the buffer into equal shards.

    They lie in the given order, unless one of them is a ``"matrix"``.

    Args:
        params: (FQN, shape) pairs in ``named_parameters()`` order.
        world_size: Ranks that share the buffer, at least 1.
        align: Where a parameter may be cut, by FQN. ``"row"`` (the default) cuts between rows if that costs at most
            1 % of padding in all, else anywhere; ``"element"`` cuts anywhere. ``"matrix"`` cuts a parameter of two or
            more dims nowhere, if an order of all parameters and at most 1 % of padding can do it; else anywhere, so
            that few of its elements lie off the rank that has most of it. ``"tensor"`` (never cut: whole on one
            rank) and an int n (cut between blocks of n rows only) are promises, kept at any cost in padding.
        orders: Dims of parameters from the outermost in memory, by FQN; a parameter without an order lies row by row.
            With an order, the rows are the slices of the outermost dim.
    """
    align, orders = align or {}, orders or {}
    pieces = tuple(_piece(shape, align.get(fqn, "row"), orders.get(fqn, ())) for fqn, shape in params)
    is_ordered = any(piece.is_matrix for piece in pieces)
    best, order = _best_order(pieces, world_size) if is_ordered else (_best_placement(pieces, world_size), ())
    spans = tuple(
        Span(fqn, torch.Size(shape), start, start + pieces[index].numel, orders.get(fqn, ()))
        for index, start in zip(order or range(len(pieces)), best.starts, strict=True)
        for fqn, shape in [params[index]]
    )
    return FlatLayout(spans, world_size, best.shard_numel, is_ordered)


def layout_of_rows(fqn: str, shape: torch.Size, world_size: int) -> FlatLayout:
    """Give each rank the same number of rows of one parameter, and the last ranks the rest, as ``torch.chunk`` does.

    ``shape`` has at least one dim.
    """
    rows_per_rank = -(-shape[0] // world_size)
    return FlatLayout((Span(fqn, shape, 0, shape.numel()),), world_size, rows_per_rank * torch.Size(shape[1:]).numel())


class _Piece(NamedTuple):
    """One parameter: it may be cut at multiples of ``block`` from its start."""

    numel: int
    block: int
    is_promised: bool
    is_matrix: bool = False


class _Placement(NamedTuple):
    shard_numel: int
    starts: list[int]
    aligned_count: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _piece(shape: torch.Size, align: Align, order: Sequence[int]) -> _Piece:
    numel = shape.numel()
    if align == "element" or numel == 0:
        return _Piece(numel, 1, False)
    if align == "tensor":
        return _Piece(numel, numel, True)
    if align == "matrix" and len(shape) > 1:
        return _Piece(numel, numel, False, True)
    row = numel // shape[order[0] if order else 0] if shape else 1
    return _Piece(numel, row, False) if isinstance(align, str) else _Piece(numel, min(align * row, numel), True)


def _place(
    pieces: Iterable[_Piece], shard_numel: int, slack: int, *, start_align: int = 1, is_greedy: bool = True
) -> _Placement | None:
    """Lay the pieces into shards of ``shard_numel``, spending at most ``slack`` on gaps; ``None``: a promise is broken.

    A gap before a piece moves the first cut inside it onto a block. ``is_greedy`` spends slack on
    pieces without a promise too, and on starts that are multiples of ``start_align``.
    """
    starts: list[int] = []
    end = aligned_count = 0
    for numel, block, is_promised, _ in pieces:
        if is_greedy and numel and 0 < (gap := -end % start_align) <= slack:
            end, slack = end + gap, slack - gap
        head = shard_numel - end % shard_numel if shard_numel else 0
        if numel <= head or block == 1:
            aligned_count += 1
        else:
            gap = head % block
            tail = numel - (head - gap)
            is_possible = gap <= slack and (tail <= shard_numel or shard_numel % block == 0)
            if is_possible and (is_promised or is_greedy or gap == 0):
                end, slack = end + gap, slack - gap
                aligned_count += 1
            elif is_promised:
                return None
        starts.append(end)
        end += numel
    return _Placement(shard_numel, starts, aligned_count)


def _grains(pieces: Iterable[_Piece], limit: int) -> list[int]:
    """Return sizes that a shard should be a multiple of, for pieces that several cuts may cross."""
    counts = Counter(block for numel, block, *_ in pieces if 1 < block < numel)
    common = [block for block, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_MAX_GRAINS]]
    joint, grains = 1, {1, *common}
    for block in common:
        if (wider := math.lcm(joint, block)) <= limit:
            joint = wider
            grains.add(joint)
    return sorted(grains)


def _least_placement(pieces: Sequence[_Piece], total: int, world_size: int) -> _Placement:
    """Return a placement that keeps every promise, in the smallest shards found, with no other gaps."""

    def place(shard_numel: int) -> _Placement | None:
        return _place(pieces, shard_numel, world_size * shard_numel - total, is_greedy=False)

    floor = -(-total // world_size)
    if (best := place(floor)) is not None:
        return best
    # On one rank: no cut at all.
    best = _Placement(total, [0, *accumulate(piece.numel for piece in pieces)][:-1], len(pieces))
    for grain in _grains([piece for piece in pieces if piece.is_promised], total):
        sizes = range(_round_up(floor, grain), best.shard_numel, grain)
        # With mixed grains the condition is not quite monotone, so this may miss the optimum; the result is checked.
        index = bisect_left(sizes, True, key=lambda shard_numel: place(shard_numel) is not None)
        if index < len(sizes):
            best = place(sizes[index]) or best
    return best


def _best_placement(pieces: Sequence[_Piece], world_size: int) -> _Placement:
    """Return the placement with most aligned pieces, then aligned starts, then least padding, among a few sizes."""
    total = sum(piece.numel for piece in pieces)
    best = _least_placement(pieces, total, world_size)
    least = best.shard_numel
    limit = max(least, (total + total // _PADDING_SHARE) // world_size)
    best_score = (best.aligned_count, False, -least)
    for grain in _grains(pieces, limit):
        for start_align in (_START_ALIGN, 1):
            multiple = math.lcm(grain, start_align)
            smallest, largest = _round_up(least, multiple), limit // multiple * multiple
            middle = (smallest + largest) // 2 // multiple * multiple
            for shard_numel in sorted({smallest, middle, largest}) if smallest <= largest else ():
                placed = _place(pieces, shard_numel, world_size * shard_numel - total, start_align=start_align)
                if placed is not None:
                    is_start_aligned = not any(start % _START_ALIGN for start in (shard_numel, *placed.starts))
                    score = (placed.aligned_count, is_start_aligned, -shard_numel)
                    if score > best_score:
                        best, best_score = placed, score
    return best


def largest_part(start: int, numel: int, shard_numel: int) -> int:
    """Return the most elements of a parameter, at ``start`` in the buffer, that one rank has."""
    head = min(shard_numel - start % shard_numel, numel) if numel else 0
    return max(head, min(numel - head, shard_numel))


def choose_owners(cuts: Sequence[Sequence[int]], shapes: Sequence[torch.Size]) -> list[int]:
    """Return for each matrix the rank that computes with the whole of it; the same on all ranks.

    That is the rank that holds most of it, or, among ranks that hold nearly as much, the one with the least work so
    far: multiplications of a matrix with its transpose. Whole matrices come first, then those with most work. ``cuts``
    are the bounds of each matrix, see ``RaggedShard``, over the same ranks.
    """
    owners = [0] * len(cuts)
    loads = [0] * (len(cuts[0]) - 1 if cuts else 0)
    sizes = [[stop - start for start, stop in pairwise(bounds)] for bounds in cuts]
    works = [shape.numel() * (min(shape[0], shape.numel() // max(shape[0], 1)) if shape else 1) for shape in shapes]
    for index in sorted(range(len(cuts)), key=lambda index: (max(sizes[index]) < cuts[index][-1], -works[index])):
        enough = _OWNER_SHARE * max(sizes[index])
        held = [(loads[rank], -size, rank) for rank, size in enumerate(sizes[index]) if size >= enough]
        owners[index] = min(held)[2]
        loads[owners[index]] += works[index]
    return owners


# Less is better: does anything travel; what it costs; how many pieces are cut where they should not be; are starts not
# aligned. What travels is sent twice, to an owner and back, and padding three times, in two gathers and a reduction.
_Score: TypeAlias = tuple[bool, int, int, bool]


def _score(pieces: Sequence[_Piece], placed: _Placement, order: Sequence[int], padding: int) -> _Score:
    numels = [(pieces[index].numel, start) for index, start in zip(order, placed.starts) if pieces[index].is_matrix]
    outside = sum(numel - largest_part(start, numel, placed.shard_numel) for numel, start in numels)
    is_unaligned = any(start % _START_ALIGN for start in (placed.shard_numel, *placed.starts))
    return outside > 0, 2 * outside + 3 * padding, -placed.aligned_count, is_unaligned


@lru_cache(maxsize=64)
def _best_order(pieces: tuple[_Piece, ...], world_size: int) -> tuple[_Placement, tuple[int, ...]]:
    """Return a placement in an order (of indices) in which few elements lie off the rank with most of their matrix.

    The search goes from the given order, and from one that gives each piece, largest first, to the rank with least so
    far, along moves of one piece and swaps of two that leave less outside.
    """
    total = sum(piece.numel for piece in pieces)
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for index in sorted(range(len(pieces)), key=lambda index: -pieces[index].numel):
        rank = loads.index(min(loads))
        ranks[rank].append(index)
        loads[rank] += pieces[index].numel
    orders = tuple(range(len(pieces))), tuple(index for rank in ranks for index in rank)
    least = -(-total // world_size)
    limit = max(least, (total + total // _PADDING_SHARE) // world_size)
    sizes = {least, _round_up(least, _START_ALIGN), _round_up(max(loads), _START_ALIGN), limit}
    best = _best_placement(pieces, world_size)
    found = [(_score(pieces, best, orders[0], world_size * best.shard_numel - total), best, orders[0])]
    for max_tried in (0, _MAX_TRIED):
        # Once nothing travels, there is nothing to climb for.
        if min(found)[0][0] or not max_tried:
            for shard_numel in sorted(size for size in sizes if size <= limit):
                for order in orders:
                    found += _climb(pieces, order, shard_numel, world_size * shard_numel - total, max_tried)
    _, best, best_order = min(found)
    return best, best_order


def _climb(
    pieces: Sequence[_Piece], order: tuple[int, ...], shard_numel: int, padding: int, max_tried: int
) -> list[tuple[_Score, _Placement, tuple[int, ...]]]:
    """Return the best order that moves and swaps of pieces lead to, with its placement; empty if there is none."""

    def judged(order: tuple[int, ...]) -> list[tuple[_Score, _Placement, tuple[int, ...]]]:
        placed = _place([pieces[index] for index in order], shard_numel, padding, start_align=_START_ALIGN)
        return [] if placed is None else [(_score(pieces, placed, order, padding), placed, order)]

    best, tried, is_better = judged(order), 0, True
    while best and is_better and best[0][0][0] and tried < max_tried:
        is_better = False
        for one, other in permutations(range(len(order)), 2):
            changed = [*best[0][2]]
            if pieces[changed[one]].numel == pieces[changed[other]].numel:
                continue
            if one < other:
                changed[one], changed[other] = changed[other], changed[one]
            else:
                changed.insert(other, changed.pop(one))
            found = judged(tuple(changed))
            tried += len(order)
            is_better = bool(found) and found[0][0] < best[0][0]
            if is_better:
                best = found
            if is_better or tried >= max_tried:
                break
    return best
