"""A rank that is killed, or interrupted by Ctrl-C, anywhere in a synchronous save or a load: what every rank gets."""

import os
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from composable import DesyncError, UsageError, fully_shard, load_checkpoint, save_checkpoint
from tests.world import RankErrors, run_ranks


class AtCall:
    """Kills or interrupts this rank when it enters its ``number``-th function of saving code; counts them."""

    def __init__(self, how: str, number: int) -> None:
        self.how, self.number, self.count = how, number, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not ("composable/saving" in file or "distributed/checkpoint" in file):
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
