"""Tests composable/comm/hang_watchdog.py: what a wait says that the process group has ended. More: tests/test_divergence.py."""

import math
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from composable import ConfigError, DesyncError, explain_waits
from composable.comm import Ranks
from composable.comm.hang_diagnosis import Diagnosis
from composable.comm.hang_watchdog import _Seen, _Thread, _Watch
from composable.comm.rank_status import Started, Waiting
from composable.comm.transport import ProcessGroupTransport
from composable.ground.torch_private import started_in
from tests.world import on_ranks, run_ranks


def wait_alone(call: Callable[[dist.ProcessGroup], object]) -> str:
    """Return what the first rank gets that makes ``call`` in a group of ranks 1 and 3 of 4, or 0 and 2: nobody comes."""
    rank = dist.get_rank()
    groups = []
    for members in ([0, 2], [1, 3]):
        # Ranks have so long to connect too, so they come together.
        dist.barrier()
        groups.append(dist.new_group(members, timeout=timedelta(seconds=4)))
    text = ""
    if rank < 2:
        with pytest.raises(DesyncError) as caught:
            call(groups[rank])
        assert isinstance(caught.value.__cause__, RuntimeError)
        text = str(caught.value)
    dist.barrier()
    return text


def reduce_explained(group: dist.ProcessGroup) -> None:
    with explain_waits():
        dist.all_reduce(torch.ones(()), group=group)


def reduce_as_the_package_does(group: dist.ProcessGroup) -> None:
    Ranks.of(group, torch.device("cpu")).reduce(torch.ones(()), dist.ReduceOp.SUM)


@pytest.mark.parametrize(
    ("call", "name"),
    [(reduce_explained, "torch.distributed.all_reduce"), (reduce_as_the_package_does, "reduce")],
)
def test_a_wait_that_the_group_ends_says_who_was_waited_for(
    call: Callable[[dist.ProcessGroup], object], name: str
) -> None:
    for rank, text in enumerate(run_ranks(wait_alone, 4, call)[:2]):
        assert f"the wait for the other ranks in {name} has ended by an error of the process group: " in text
        assert f"\n  at:  rank {rank}, waiting for rank {rank + 2}\n  fix: see what the other ranks say first" in text


@pytest.mark.parametrize("error", [ConfigError("mine"), RuntimeError("mine"), KeyError("mine")])
def test_what_is_no_wait_passes_through_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_waits():
        raise error
    assert caught.value is error and caught.value.__cause__ is None


@on_ranks(2, run=run_ranks)
def test_the_first_verdict_holds_for_all_ranks() -> None:
    """Return what is read of two questions: rank 0 is the first to decide one, rank 1 the other."""
    assert dist.group.WORLD is not None
    threads = [_Thread(_Watch(), dist.group.WORLD, 30.0) for _ in range(2)]
    found = []
    for first, thread in enumerate(threads):
        thread._question = 10**6 + first
        for turn in range(2):
            if dist.get_rank() == (first + turn) % 2:
                thread._decide(Diagnosis(is_diverged=dist.get_rank() == 1, lines=("told",)))
            dist.barrier()
        found.append(thread._read().is_diverged)
    assert (found[0], found[1]) == (False, True)


class _Sent(Started):
    """A collective of so many bytes."""

    __slots__ = ("has_tag", "nbytes")

    def __init__(self, transport: ProcessGroupTransport, nbytes: float, *, has_tag: bool = False) -> None:
        self.transport, self.tag, self.number, self.waiter = transport, 0, 1, 0
        self.nbytes, self.has_tag = nbytes, has_tag
        transport.in_flight[self] = None


def wait_for(nbytes: float, looks_s: list[float], answers: int = 3, *, has_tag: bool = False, calls: int = 0) -> bool:
    """Say whether a wait is overdue after such looks, before the last of which so many other calls were made."""
    group = dist.group.WORLD
    assert group is not None
    thread = _Thread(_Watch(), group, 30.0)
    found = Waiting(0, (), _Sent(ProcessGroupTransport(group), nbytes, has_tag=has_tag), None, sys._getframe())
    seen = _Seen((), 0.0, 30.0, answers=answers, started=started_in(group))
    is_overdue = False
    for number, look_s in enumerate(looks_s):
        for _ in range(calls if number == len(looks_s) - 1 else 0):
            dist.barrier()
        is_overdue = thread._is_overdue(found, seen, look_s)
    return is_overdue


@pytest.mark.parametrize(
    ("nbytes", "looks_s", "others", "is_overdue"),
    [
        (100, [3.0] * 102, {}, True),
        (100, [3.0] * 101, {}, False),
        (100, [3.0] * 102, {"answers": 2}, False),  # the process was stopped in between, say
        (100, [3.0] * 102, {"calls": 1}, False),  # something was started meanwhile
        (1e9, [3.0] * 400, {}, False),  # a slow link
        (1e9, [3.0] * 440, {}, True),
        (math.inf, [3.0] * 4000, {}, False),  # of a device, say
        (100, [3.0] * 4000, {"has_tag": True}, False),
    ],
)
def test_a_wait_is_overdue_after_longer_than_its_bytes_take(
    nbytes: float, looks_s: list[float], others: dict[str, int], is_overdue: bool
) -> None:
    assert run_ranks(wait_for, 2, nbytes, looks_s, **others) == [is_overdue] * 2
