"""How a run ends that goes wrong: deadlocks, calls that do not fit, errors, ranks that are stuck."""

import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from composable import DesyncError, fully_shard
from composable.testing import simulate
from tests.testing.programs import go_on_alone, part_ways
from tests.world import RankErrors, run_threads


def test_a_deadlock_says_at_once_what_every_rank_waits_for() -> None:
    with pytest.raises(DesyncError) as caught:
        simulate(3, part_ways)
    lines = [line.split(", at programs.py:")[0] for line in str(caught.value).splitlines()]
    assert lines == [
        "every rank that is left waits for another one",
        "    rank 0 waits for all_reduce (sum) [2] float32, collective 1 of group '0' of ranks 0, 1, 2",
        "    rank 1 waits for recv from rank 2 of [3] float32 with tag 4 in group '0' of ranks 0, 1, 2",
        "    rank 2 has returned",
        "  at:  rank 0",
        "  fix: make groups, and call the collectives of each, in the same order on all its ranks",
    ]
    assert ", in part_ways" in str(caught.value)


def step_on_one_rank(rank: int) -> None:
    model = fully_shard(torch.nn.Linear(2, 2))
    if rank == 0:
        model(torch.ones(1, 2))
    else:
        dist.barrier()


def test_a_deadlock_inside_of_this_package_has_the_line_of_the_user() -> None:
    with pytest.raises(DesyncError) as caught:
        simulate(2, step_on_one_rank)
    places = [line.rpartition(", at ")[2] for line in str(caught.value).splitlines() if " waits for " in line]
    assert len(places[-2:]) == 2, caught.value
    assert all("test_failures.py:" in place and ", in step_on_one_rank" in place for place in places[-2:]), caught.value


def meet(rank: int, kind: str) -> None:
    if kind == "op" and rank:
        dist.barrier()
    elif kind == "dtype":
        dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    elif kind == "root":
        dist.broadcast(torch.ones(2), src=rank)
    elif kind == "reduction":
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    else:
        dist.all_reduce(torch.ones(2 + (rank if kind == "shape" else 0)))


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        ("op", "barrier"),
        ("dtype", "all_reduce (sum) [2] float64"),
        ("shape", "all_reduce (sum) [3] float32"),
        ("reduction", "all_reduce (max) [2] float32"),
        ("root", "broadcast root 1 [2] float32"),
    ],
)
def test_ranks_that_meet_in_different_calls_are_shown_both(kind: str, second: str) -> None:
    with pytest.raises(DesyncError, match="ranks meet in different collectives") as caught:
        simulate(2, meet, kind)
    assert f"rank 1: {second}" in str(caught.value)
    with pytest.raises(RankErrors) as each:
        run_threads(meet_here, 2, kind)
    assert [type(error) for _, error in sorted(each.value.errors.items())] == [DesyncError, DesyncError]


def meet_here(kind: str) -> None:
    meet(dist.get_rank(), kind)


def raise_on_one(rank: int, cleaned: list[int]) -> None:
    try:
        dist.barrier()
        if rank == 1:
            raise LookupError("mine")
        dist.barrier()
    finally:
        cleaned.append(rank)
        if rank != 1:
            dist.barrier()


def test_what_one_rank_raises_ends_the_run_and_the_others_clean_up() -> None:
    cleaned: list[int] = []
    with pytest.raises(LookupError, match="mine") as caught:
        simulate(3, raise_on_one, cleaned)
    assert sorted(cleaned) == [0, 1, 2]
    assert "raise_on_one" in [entry.name for entry in caught.traceback]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised on rank 1"]


def test_ranks_that_need_nothing_of_a_failed_one_raise_what_is_theirs() -> None:
    with pytest.raises(ValueError, match="gone") as caught:
        simulate(3, go_on_alone)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised on rank 0; later raised: rank 2 KeyError, rank 1 KeyError"]


def spin(rank: int) -> None:
    dist.barrier()
    while rank == 1:
        time.monotonic()


def test_a_rank_that_is_stuck_is_ended_and_shown() -> None:
    with pytest.raises(TimeoutError, match=r"(?s)has not ended after 3 s: rank 1 is stuck in.*in spin") as caught:
        simulate(2, spin, timeout_s=3)
    del caught
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")] == []
