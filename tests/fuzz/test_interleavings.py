"""Forwards and backwards in any order give the gradients of one process."""

import pytest

from tests.fuzz.interleavings import LAYOUTS, in_one_process, run_interleavings
from tests.world import run_ranks, run_threads


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world_size", "first", "last"), [(2, 0, 20), (3, 100, 110)])
def test_any_order_of_forwards_and_backwards_is_right(layout: str, world_size: int, first: int, last: int) -> None:
    seeds = range(first, last)
    run_threads(run_interleavings, world_size, layout, seeds, in_one_process(layout, seeds, world_size))


def test_so_it_is_on_processes() -> None:
    layout, seeds = "mixed", range(10)
    run_ranks(run_interleavings, 2, layout, seeds, in_one_process(layout, seeds, 2))
