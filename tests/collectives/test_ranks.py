"""An error on one rank is an error on every rank."""

import pytest
import torch
import torch.distributed as dist

from composable.collectives.ranks import agreed
from composable.errors import ConfigError
from tests.world import RankErrors, run_ranks


def fail_on(ranks: list[int], error: Exception) -> str:
    """Return what this rank gets; what it was given must have come back whole."""
    group = dist.group.WORLD
    assert group is not None
    with agreed(group, torch.device("cpu")):
        pass
    caught: Exception | None = None
    try:
        with agreed(group, torch.device("cpu")):
            if dist.get_rank() in ranks:
                raise error
    except (ConfigError, RuntimeError) as raised:
        caught = raised
    assert (caught is error) is (dist.get_rank() in ranks)
    return "no error" if caught is None else f"{type(caught).__name__}: {caught}"


def test_every_rank_raises_what_one_rank_raised() -> None:
    here, there = run_ranks(fail_on, 2, [1], ConfigError("key is missing", at="parameter 'a'", fix="add it"))[::-1]
    assert here == "ConfigError: key is missing\n  at:  parameter 'a'\n  fix: add it"
    assert there == "ConfigError: key is missing\n  at:  rank 1, parameter 'a'\n  fix: add it"


def test_other_errors_are_told_by_name_and_rank() -> None:
    told = run_ranks(fail_on, 3, [0, 2], RuntimeError("disk is full"))
    assert told[0] == told[2] == "RuntimeError: disk is full"
    assert told[1] == "DesyncError: another rank raised RuntimeError: disk is full\n  at:  rank 0"


def test_one_rank_alone_raises_its_own_error() -> None:
    assert run_ranks(fail_on, 1, [0], ConfigError("x")) == ["ConfigError: x"]
    assert run_ranks(fail_on, 2, [], ConfigError("x")) == ["no error"] * 2


def leave() -> None:
    group = dist.group.WORLD
    assert group is not None
    with agreed(group, torch.device("cpu")):
        if dist.get_rank() == 0:
            raise SystemExit(3)


def test_leaving_the_process_is_not_held_up() -> None:
    with pytest.raises(RankErrors, match="SystemExit"):
        run_ranks(leave, 1)
