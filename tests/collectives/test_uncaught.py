"""An exception that ends a rank is told to the ranks that wait for it at once, not when the process has ended."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

# Rank 1 stays alive after its exception, in a thread: what the others hear cannot come from the end of the process.
RANK = """
    import sys, threading
    import torch, torch.distributed as dist
    from torch import nn
    from composable import DesyncError, fully_shard, replicate

    rank, store, call = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = {"fully_shard": fully_shard, "replicate": replicate}[call](nn.Sequential(nn.Linear(4, 4)))
    for step in range(3):
        if (rank, step) == (1, 2):
            threading.Thread(target=sys.stdin.readline).start()
            raise ValueError("out of luck")
        try:
            model(torch.ones(2, 4)).sum().backward()
        except DesyncError as error:
            print(error.fix, flush=True)
"""


@pytest.mark.parametrize("call", ["fully_shard", "replicate"])
def test_an_exception_that_ends_a_rank_is_told_at_once(call: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(RANK)]
    first, second = (
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), call],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    )
    try:
        told, _ = first.communicate(timeout=120)
        assert told == "rank 1 has ended by ValueError: out of luck; start again from a checkpoint\n"
        assert second.poll() is None
        _, shown = second.communicate("\n", timeout=120)
        assert shown.rstrip().endswith("ValueError: out of luck")
    finally:
        for rank in (first, second):
            rank.kill()
            rank.communicate()
