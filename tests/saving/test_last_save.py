"""What the end of a process does to a checkpoint that is being written in the background: waits, or fails aloud."""

import os
import random
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from composable import find_checkpoint, load_checkpoint
from composable.__main__ import main
from tests.forked import Forked
from tests.idleness import LOOK_S, Idleness

# For how long all ranks may be idle, on a machine that may be as busy as it likes.
IDLE_S = 120.0

# Each line after `steps` may be the last one that a rank runs: `leave` ends it there if its turn has come.
PROGRAM = """
    import os, resource, signal, sys, torch, torch.distributed as dist
    from torch import nn
    from composable import fully_shard, save_checkpoint

    folder, rank, size, steps, way, last_place, disk_bytes = sys.argv[1:]

    def leave(place):
        if place != int(last_place):
            return
        if way == "destroy":
            dist.destroy_process_group()
        if way == "raise":
            raise ValueError("the script's own")
        if way == "kill":
            os._exit(7)
        sys.exit(3 if way == "exit" else 0)

    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=int(rank), world_size=int(size))
    torch.manual_seed(0)
    # A weight of more than a megabyte: its checksum has a thread of its own.
    model = nn.Sequential(nn.Linear(900, 700, bias=False), nn.Linear(700, 1))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = None
    for step in range(1, int(steps) + 1):
        model(torch.ones(2, 900)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if int(disk_bytes):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(disk_bytes),) * 2)
        leave(3 * step - 2)
        handle = save_checkpoint(f"{folder}/run", step, model, optimizer, asynchronous=True)
        leave(3 * step - 1)
        if step % 2:
            handle.wait()
        leave(3 * step)
    leave(0)
"""


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    code: int
    said: str


def run_to_the_end(
    folder: Path, ways: list[str], *, steps: int = 1, last_place: int = 2, disk_bytes: list[int] | None = None
) -> list[End]:
    """Run the program on a rank for each of ``ways``."""
    # Without the watch of ranks that wait: its judgement of a rank that has ended is not the subject.
    environment = os.environ | {"COMPOSABLE_DIVERGENCE_TIMEOUT": "0"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    limits = disk_bytes or [0] * len(ways)
    ranks = [
        Forked(
            *(PROGRAM, folder, rank, len(ways), steps, way, last_place, limits[rank]),
            stderr=subprocess.PIPE,
            env=environment,
        )
        for rank, way in enumerate(ways)
    ]
    idle = Idleness([rank.pid for rank in ranks])
    try:
        for rank in ranks:
            while rank.poll() is None and idle.look() < IDLE_S:
                with suppress(subprocess.TimeoutExpired):
                    rank.wait(LOOK_S)
    finally:
        for rank in ranks:
            rank.kill()
    said = [rank.communicate()[1] for rank in ranks]
    return [End(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def check_latest(run: Path) -> int:
    """Return the step of the latest checkpoint, which must load, with the values of that step."""
    latest = find_checkpoint(run)
    assert main(["check", str(run)]) == 0
    model = nn.Sequential(nn.Linear(900, 700, bias=False), nn.Linear(700, 1))
    load_checkpoint(run, model)
    # The bias of the last layer moves by the same number in each step, two rows and a rate of 0.01.
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(900, 700, bias=False), nn.Linear(700, 1))[1].bias
    torch.testing.assert_close(model[1].bias, start - 0.02 * latest.step)
    return latest.step


@pytest.mark.parametrize(("ways", "codes"), [(["end", "destroy"], [0, 0]), (["exit", "raise"], [3, 1])])
def test_the_last_save_of_a_run_is_whole_however_the_script_ends(
    ways: list[str], codes: list[int], tmp_path: Path
) -> None:
    ends = run_to_the_end(tmp_path, ways)
    assert [end.code for end in ends] == codes, ends
    assert check_latest(tmp_path / "run") == 1


@pytest.mark.parametrize(("ways", "full_rank"), [(["end", "destroy"], 1), (["exit", "raise"], 0)])
def test_a_last_save_that_fails_ends_every_rank_with_an_error(ways: list[str], full_rank: int, tmp_path: Path) -> None:
    ends = run_to_the_end(tmp_path, ways, disk_bytes=[100_000 if rank == full_rank else 0 for rank in range(2)])
    for rank, end in enumerate(ends):
        assert end.code == 1
        assert f"the save of step 1 to {tmp_path}/run has failed, and nobody waited for it" in end.said
        assert f"rank {full_rank}: OSError: [Errno 27] File too large" in end.said
        assert f"at:  rank {rank}\n" in end.said
    assert not list(tmp_path.glob("run/step-*"))


def test_a_failure_that_was_raised_is_not_told_again(tmp_path: Path) -> None:
    for end in run_to_the_end(tmp_path, ["end"] * 2, last_place=3, disk_bytes=[100_000, 0]):
        assert end.code == 1 and "File too large" in end.said and "nobody waited" not in end.said


@pytest.mark.parametrize("seed", range(2))
def test_an_end_at_a_random_place_leaves_a_whole_checkpoint(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    ways = [draw.choice(["end", "destroy", "exit", "raise", "kill"]) for _ in range(2)]
    place = draw.randint(4, 9)
    ends = run_to_the_end(tmp_path, ways, steps=3, last_place=place)
    codes = {"end": 0, "destroy": 0, "exit": 3, "raise": 1, "kill": 7}
    begun = (place + 1) // 3
    step = check_latest(tmp_path / "run")
    if "kill" in ways:
        # A rank that is gone at once takes the save with it; steps 1 and 3 were awaited.
        assert step in (begun, begun - 1) and step >= (3 if place == 9 else 1)
        assert all(end.code in (codes[way], 1) for end, way in zip(ends, ways, strict=True)), ends
    else:
        assert step == begun
        assert [end.code for end in ends] == [codes[way] for way in ways], ends
