"""Layouts of flat buffers: examples, and properties over many shapes and world sizes."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.planning.layout import FlatLayout, Span, boxes, local_shape, plan_layout

quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)

shapes = st.lists(st.integers(0, 12), max_size=3).map(torch.Size)
aligns = st.one_of(st.sampled_from(["row", "element", "tensor"]), st.integers(1, 5))
named_shapes = st.lists(shapes, max_size=8).map(lambda found: [(f"p{i}", shape) for i, shape in enumerate(found)])
world_sizes = st.integers(1, 40)


def sizes(*dims: tuple[int, ...]) -> list[tuple[str, torch.Size]]:
    return [(f"p{i}", torch.Size(shape)) for i, shape in enumerate(dims)]


def gpt_block(dim: int) -> list[tuple[str, torch.Size]]:
    vector = (dim,)
    return sizes(
        vector, vector, (3 * dim, dim), (3 * dim,), (dim, dim), vector,
        vector, vector, (4 * dim, dim), (4 * dim,), (dim, 4 * dim), vector,
    )  # fmt: skip


def is_row_aligned(layout: FlatLayout, span: Span) -> bool:
    row = math.prod(span.shape[1:])
    return bool(span.shape) and row > 0 and all(bound % row == 0 for bound in layout.bounds(span))


def owners_of(layout: FlatLayout) -> list[list[list[int]]]:
    """For each parameter and element, the ranks whose shard holds it, by ``bounds``."""
    found = []
    for span in layout.spans:
        owners: list[list[int]] = [[] for _ in range(span.numel)]
        bounds = layout.bounds(span)
        for rank in range(layout.world_size):
            for element in range(bounds[rank], bounds[rank + 1]):
                owners[element].append(rank)
        found.append(owners)
    return found


@quick
@given(named_shapes, world_sizes)
def test_every_element_has_one_owner_and_its_place_in_the_shard_agrees(
    params: list[tuple[str, torch.Size]], world_size: int
) -> None:
    layout = plan_layout(params, world_size)
    owners = owners_of(layout)
    assert all(len(ranks) == 1 for element_owners in owners for ranks in element_owners)
    for span, element_owners in zip(layout.spans, owners, strict=True):
        bounds = layout.bounds(span)
        assert len(bounds) == world_size + 1
        for rank in range(world_size):
            lo, hi = layout.local_range(span, rank)
            assert 0 <= lo <= hi <= layout.shard_numel
            assert hi - lo == bounds[rank + 1] - bounds[rank]
            if hi > lo:
                assert rank * layout.shard_numel + lo == span.start + bounds[rank]
        by_place = [(span.start + element) // layout.shard_numel for element in range(span.numel)]
        assert by_place == [ranks[0] for ranks in element_owners]


@quick
@given(named_shapes, world_sizes, st.data())
def test_parameters_lie_whole_in_order_and_apart_whatever_is_promised(
    params: list[tuple[str, torch.Size]], world_size: int, data: st.DataObject
) -> None:
    align = {fqn: data.draw(aligns) for fqn, _ in params}
    layout = plan_layout(params, world_size, align=align)
    assert [(span.fqn, span.shape) for span in layout.spans] == params
    assert all(span.numel == span.shape.numel() for span in layout.spans)
    assert layout == plan_layout(params, world_size, align=dict(reversed(align.items())))
    ends = [0, *(span.stop for span in layout.spans)]
    assert all(span.start >= end for span, end in zip(layout.spans, ends[:-1], strict=True))
    assert ends[-1] <= layout.numel == layout.world_size * layout.shard_numel


@quick
@given(
    st.one_of(named_shapes, st.lists(st.tuples(*[st.integers(1, 300)] * 2), max_size=12).map(lambda it: sizes(*it))),
    world_sizes,
)
def test_padding_is_the_least_there_is_or_at_most_one_percent(
    params: list[tuple[str, torch.Size]], world_size: int
) -> None:
    layout = plan_layout(params, world_size)
    total = sum(shape.numel() for _, shape in params)
    assert layout.padding_numel == layout.numel - total <= max(-total % world_size, total // 100)


@quick
@given(named_shapes, world_sizes)
def test_the_parts_of_a_shard_are_its_pieces_and_the_padding_between(
    params: list[tuple[str, torch.Size]], world_size: int
) -> None:
    layout = plan_layout(params, world_size)
    for rank in range(world_size):
        split = layout.split_of(rank)
        assert sum(split.sizes) == layout.shard_numel and all(split.sizes)
        starts = [sum(split.sizes[:index]) for index in range(len(split.sizes))]
        for span, index in zip(layout.spans, split.indices, strict=True):
            start, stop = layout.local_range(span, rank)
            assert (index is None) == (start == stop)
            if index is not None:
                assert (starts[index], split.sizes[index]) == (start, stop - start)


@quick
@given(named_shapes, world_sizes)
def test_local_shapes_have_the_same_number_of_dims_on_every_rank(
    params: list[tuple[str, torch.Size]], world_size: int
) -> None:
    layout = plan_layout(params, world_size)
    for span in layout.spans:
        bounds = layout.bounds(span)
        found = [local_shape(span.shape, bounds, rank) for rank in range(world_size)]
        assert [math.prod(shape) for shape in found] == [b - a for a, b in pairwise(bounds)]
        if is_row_aligned(layout, span):
            assert all(shape[1:] == tuple(span.shape[1:]) for shape in found)
            assert sum(shape[0] for shape in found) == span.shape[0]
        else:
            assert all(len(shape) == 1 for shape in found)


@quick
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_boxes_tile_a_flat_range_exactly_and_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    lo = data.draw(st.integers(0, whole.numel()))
    hi = data.draw(st.integers(lo, whole.numel()))
    found = boxes(shape, lo, hi)
    pieces = [
        whole[tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))] for offsets, lengths in found
    ]
    assert [tuple(piece.shape) for piece in pieces] == [lengths for _, lengths in found]
    assert [number for piece in pieces for number in piece.reshape(-1).tolist()] == list(range(lo, hi))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("params", "world_size"),
    [
        *((gpt_block(dim), size) for dim in (64, 512) for size in (2, 3, 4)),
        *((sizes((50257, 768)), n) for n in (3, 64)),
    ],
)
def test_what_is_large_is_cut_on_rows(params: list[tuple[str, torch.Size]], world_size: int) -> None:
    layout = plan_layout(params, world_size)
    assert all(is_row_aligned(layout, span) for span in layout.spans)
    assert layout.padding_numel * 100 <= layout.numel
    # The middle cuts rows of 64, half a row away from the nearest bound.
    assert plan_layout(gpt_block(64), 2).padding_numel == 64


def test_a_gap_moves_the_only_cut_onto_a_row() -> None:
    # One cut, at half of the buffer: no multiple of 35 is near enough, a gap before the matrix is.
    layout = plan_layout(sizes((1001,), (200, 35), (900,)), 2)
    assert is_row_aligned(layout, layout.spans[1])
    assert layout.spans[1].start > layout.spans[0].stop
    assert layout.padding_numel * 100 <= layout.numel


def test_rows_are_cut_anywhere_where_one_percent_does_not_pay_for_them() -> None:
    layout = plan_layout(sizes((16, 16), (16,)), 8)
    assert not is_row_aligned(layout, layout.spans[0])
    assert layout.padding_numel == 0
    assert local_shape(layout.spans[0].shape, layout.bounds(layout.spans[0]), 0) == (34,)


def test_element_alignment_spends_nothing_on_rows() -> None:
    by_row, by_element = (plan_layout(sizes((101, 64)), 2, align={"p0": align}) for align in ("row", "element"))
    assert is_row_aligned(by_row, by_row.spans[0])
    assert not is_row_aligned(by_element, by_element.spans[0])
    assert (by_row.padding_numel, by_element.padding_numel) == (64, 0)


def test_starts_are_vector_aligned_where_one_percent_pays_for_it() -> None:
    layout = plan_layout(sizes((1001,), (64, 64), (1003,), (64, 64)), 2)
    assert [span.start % 8 for span in layout.spans] == [0, 0, 0, 0]
    assert layout.shard_numel % 8 == 0


def test_whole_tensors_stay_whole_at_the_least_shard_that_holds_the_largest() -> None:
    layout = plan_layout(sizes((10, 10), (3, 10), (7, 10)), 2, align=dict.fromkeys(["p0", "p1", "p2"], "tensor"))
    assert layout.shard_numel == 100
    assert [layout.bounds(span) for span in layout.spans] == [(0, 100, 100), (0, 0, 30), (0, 0, 70)]


def test_a_promise_of_blocks_costs_as_little_as_the_blocks_allow() -> None:
    layout = plan_layout([("p0", torch.Size((100, 10)))], 3, align={"p0": 32})
    assert layout.bounds(layout.spans[0]) == (0, 640, 1000, 1000)
