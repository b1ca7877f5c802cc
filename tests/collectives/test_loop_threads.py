"""Which threads get the batch policy, and that asking for it never fails."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from composable.comm.point_to_point import PointToPointTransport, never_preempt, threads_of_process
from tests.world import on_ranks, run_ranks


def name_of(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/comm").read_text().strip()


@pytest.mark.skipif(sys.platform != "linux", reason="the batch policy is Linux's")
@on_ranks(2, run=run_ranks)
def test_only_the_loop_threads_of_the_transport_yield() -> None:
    """Return the names of the threads under the batch policy, those of loop threads, and this thread's policy."""
    PointToPointTransport(dist.group.WORLD)
    threads = threads_of_process()
    batch = [name_of(thread) for thread in threads if os.sched_getscheduler(thread) == os.SCHED_BATCH]
    batch, loops, own_policy = (
        batch,
        [name for name in map(name_of, threads) if name == "gloo_tcp_loop"],
        os.sched_getscheduler(0),
    )
    # Where gloo gives its threads no name (torch 2.11) nothing tells them from a user's: they stay as they are.
    assert set(batch) == set(loops) and own_policy == os.SCHED_OTHER


def test_threads_of_another_name_or_gone_are_left_alone() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.native_id is not None
    assert never_preempt({ended.native_id, *threads_of_process()}, name="no such thread") == []
