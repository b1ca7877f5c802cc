"""Which threads get the batch policy, and that asking for it never fails."""

import os
import sys
import threading

import pytest
import torch.distributed as dist

from composable.collectives.choose import make_transport
from composable.collectives.loop_threads import never_preempt, threads_of_process
from tests.world import run_ranks


def policies() -> tuple[set[str], int]:
    """Return the names of the threads that a transport put under the batch policy, and this thread's policy."""
    make_transport("point_to_point", dist.group.WORLD)
    names = set()
    for thread in threads_of_process():
        if os.sched_getscheduler(thread) == os.SCHED_BATCH:
            with open(f"/proc/self/task/{thread}/comm") as file:
                names.add(file.read().strip())
    return names, os.sched_getscheduler(0)


@pytest.mark.skipif(sys.platform != "linux", reason="the batch policy is Linux's")
def test_only_the_loop_threads_of_the_transport_yield() -> None:
    assert run_ranks(policies, 2) == [({"gloo_tcp_loop"}, os.SCHED_OTHER)] * 2


def test_threads_of_another_name_or_gone_are_left_alone() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.native_id is not None
    assert never_preempt({ended.native_id, *threads_of_process()}, name="no such thread") == []
