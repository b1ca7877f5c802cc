"""A rank that is killed, or interrupted by Ctrl-C, anywhere in a synchronous save or a load: what every rank gets."""

import logging
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from composable import DesyncError, UsageError, find_checkpoint, fully_shard, load_checkpoint, save_checkpoint
from tests.world import RankErrors, run_ranks


class AtCall:
    """Kills or interrupts this rank when it enters its ``number``-th function of saving code; counts them."""

    def __init__(self, how: str, number: int) -> None:
        self.how, self.number, self.count = how, number, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not any(
            one in file for one in ("composable/saving", "composable/runs", "distributed/checkpoint")
        ):
            return
        self.count += 1
        if self.count == self.number:
            if self.how == "kill":
                os._exit(9)
            raise KeyboardInterrupt


def work(call: str, folder: str, how: str, share: float) -> str:
    """Return the name of what ends this rank's call, where the last rank is stopped at this share of its calls."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, policy={nn.Linear})
    counted = AtCall("", -1)
    sys.setprofile(counted)
    save_checkpoint(folder, 1, model)
    if call == "load":
        counted.count = 0
        load_checkpoint(folder, model)
    sys.setprofile(None)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        sys.setprofile(AtCall(how, int(counted.count * share)))
    try:
        if call == "save":
            save_checkpoint(folder, 2, model)
        else:
            load_checkpoint(folder, model)
    except KeyboardInterrupt:
        # As for any program: the process ends. That is what the others notice where torch does not tell them.
        Path(folder, "interrupted").touch()
        os._exit(9)
    finally:
        sys.setprofile(None)
    return "done"


_DRAW = random.Random(1)
SHARES = sorted(_DRAW.uniform(0.2, 0.85) for _ in range(3))


@pytest.mark.parametrize(("call", "share"), [*(("save", share) for share in SHARES), ("load", SHARES[1])])
def test_others_of_a_killed_rank_are_told_which_save_has_not_ended(call: str, share: float, tmp_path: Path) -> None:
    with pytest.raises(RankErrors) as caught:
        run_ranks(work, 2, call, str(tmp_path), "kill", share)
    error = caught.value.errors[0]
    assert isinstance(error, DesyncError), error
    text = str(error)
    assert (call == "load" or f"the save of step 2 to {tmp_path} has not ended: " in text) and "rank 1" in text, text


@pytest.mark.parametrize("share", SHARES)
def test_ctrl_c_in_a_save_stays_ctrl_c(share: float, tmp_path: Path) -> None:
    with pytest.raises(RankErrors) as caught:
        run_ranks(work, 2, "save", str(tmp_path), "interrupt", share)
    assert (tmp_path / "interrupted").exists(), caught.value.errors[1]
    assert isinstance(caught.value.errors[0], (DesyncError, UsageError)), caught.value.errors[0]


def end_at_the_commit(folder: str, asynchronous: bool) -> None:
    """Save; the last rank is killed when the first one gives the manifest its name."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    save_checkpoint(folder, 1, model)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    rename, told = os.rename, logging.FileHandler(Path(folder, f"log-{dist.get_rank()}"))

    def kill_and_rename(old: str, new: str) -> None:
        if str(new).endswith("checkpoint.json"):
            os.kill(pids[-1], signal.SIGKILL)
        rename(old, new)

    logging.getLogger("composable").addHandler(told)
    try:
        with mock.patch.object(os, "rename", kill_and_rename):
            path = save_checkpoint(folder, 2, model, asynchronous=asynchronous).wait()
        assert path == Path(folder, "step-000002")
        Path(folder, "saved").write_text(str(dist.get_rank()))
    finally:
        logging.getLogger("composable").removeHandler(told)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_ends_after_the_commit_is_a_warning_on_the_first(asynchronous: bool, tmp_path: Path) -> None:
    with pytest.raises(RankErrors) as caught:
        run_ranks(end_at_the_commit, 2, str(tmp_path), asynchronous)
    assert set(caught.value.errors) == {1} and (tmp_path / "saved").read_text() == "0", caught.value
    said = (tmp_path / "log-0").read_text()
    assert f"{tmp_path}/step-000002 is whole, and not all ranks have answered that they know it: " in said, said
    assert "rank 1" in said and find_checkpoint(tmp_path).step == 2
