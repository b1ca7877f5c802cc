"""Keeps the event-loop threads of a transport from preempting the rank's own thread.

A loop thread wakes for every message. If it wakes on the core of the thread that is sending,
which holds the connection's lock, it takes the core and then polls for the lock. With the
batch policy a thread that wakes waits for its turn instead: see sched(7).

Linux only; elsewhere, where it is not allowed, and where gloo gives its loop threads no name of their own
(torch 2.11), nothing happens.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["never_preempt", "threads_of_process"]

_TASKS = Path("/proc/self/task")


def threads_of_process() -> set[int]:
    """Return the ids of the threads of this process; none where the system does not tell."""
    with suppress(OSError):
        return {int(entry.name) for entry in _TASKS.iterdir()}
    return set()


def never_preempt(threads: Iterable[int], *, name: str) -> list[int]:
    """Give those of ``threads`` that are called ``name`` the batch policy; returns their ids."""
    changed: list[int] = []
    if not hasattr(os, "SCHED_BATCH"):
        return changed
    for thread in threads:
        # A thread may have ended, and a sandbox may refuse: slower, not wrong.
        with suppress(OSError):
            if (_TASKS / str(thread) / "comm").read_text().strip() == name:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                changed.append(thread)
    return changed
