"""The process that holds the store of the process group ends while ranks still run."""

import subprocess

import pytest

from tests.forked import Forked

HOLDER = """
    import sys
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.readline()
"""

# Without its store, a rank waited two to three times the timeout: here each wait would be 60 s.
RANK = """
    import sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist
    from torch import nn
    from composable import DesyncError, fully_shard, replicate

    rank, port, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    calls = {
        "fully_shard": lambda: fully_shard(model),
        "replicate": lambda: replicate(model),
        "first forward": lambda: model(torch.ones(2, 4)),
        "step": lambda: model(torch.ones(2, 4)).sum().backward(),
    }
    if case in ("first forward", "step"):
        fully_shard(model)
    if case == "step":
        calls[case]()
    dist.barrier()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    try:
        calls[case]()
        print("no error", flush=True)
    except DesyncError as error:
        print(time.monotonic() - start < 30, str(error).partition(":")[0], flush=True)
"""


def start(program: str, *args: object) -> Forked:
    return Forked(program, *args, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def line_of(process: Forked) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("case", ["fully_shard", "replicate", "first forward", "step"])
def test_a_lost_store_is_an_error_at_once_where_it_is_needed(case: str) -> None:
    holder = start(HOLDER)
    ranks = []
    try:
        port = int(line_of(holder))
        ranks = [start(RANK, rank, port, case) for rank in range(2)]
        assert [line_of(rank) for rank in ranks] == ["ready", "ready"]
        holder.communicate("\n")
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        expected = "no error" if case == "step" else "True the store of the process group does not answer"
        assert [line_of(rank) for rank in ranks] == [expected] * 2
    finally:
        for process in (holder, *ranks):
            process.kill()
            process.communicate()
