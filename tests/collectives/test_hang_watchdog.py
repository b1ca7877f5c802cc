"""Tests composable/comm/hang_watchdog.py: what a wait says that the process group has ended. More: tests/test_divergence.py."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from composable import ConfigError, DesyncError, explain_waits
from composable.comm import Ranks
from tests.world import run_ranks


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
        assert f"\n  at:  rank {rank}, waiting for rank {rank + 2}\n  fix: read the errors of the other ranks" in text


@pytest.mark.parametrize("error", [ConfigError("mine"), RuntimeError("mine"), KeyError("mine")])
def test_what_is_no_wait_passes_through_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_waits():
        raise error
    assert caught.value is error and caught.value.__cause__ is None
