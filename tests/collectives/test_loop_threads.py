"""Which threads get the batch policy."""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from composable.comm.point_to_point import PointToPointTransport, threads_of_process
from tests.world import on_ranks, run_ranks


def name_of(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/comm").read_text().strip()


@pytest.mark.skipif(sys.platform != "linux", reason="the batch policy is Linux's")
@on_ranks(2, run=run_ranks)
def test_only_the_loop_threads_of_the_transport_yield() -> None:
    PointToPointTransport(dist.group.WORLD)
    threads = threads_of_process()
    batch = [name_of(thread) for thread in threads if os.sched_getscheduler(thread) == os.SCHED_BATCH]
    loops = [name for name in map(name_of, threads) if name == "gloo_tcp_loop"]
    # Where gloo gives its threads no name (torch 2.11) nothing tells them from a user's: they stay as they are.
    assert set(batch) == set(loops) and os.sched_getscheduler(0) == os.SCHED_OTHER
