"""For how long processes have been idle: so that a limit is one for what hangs, and not for a machine that is slow.

    idle = Idleness([process.pid])
    while process.is_alive() and idle.look() < 60:
        process.join(LOOK_S)

A process is idle that uses less than a tenth of a processor, as one does that only looks now and then whether others go
on. Time in which a thread waits for a processor that others use, or for a disk, is not counted. Where the system does
not tell, on macOS, all time is idle.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["LOOK_S", "Idleness", "processor_s"]

# How often to look.
LOOK_S = 0.5
_SHARE = 0.1


class Idleness:
    """Watches processes, and those that they have started.

    Args:
        pids: The processes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._idle_s = 0.0
        self._looked = self._since = time.monotonic()
        self._used_s = processor_s(pids)

    def look(self) -> float:
        """Return for how many seconds all of them have been idle now; to be asked every ``LOOK_S`` or so."""
        now, used_s = time.monotonic(), processor_s(self._pids)
        # A process that ends takes the time that it used along, so that it may be less than before.
        if abs(used_s - self._used_s) >= _SHARE * (now - self._since):
            self._idle_s, self._since, self._used_s = 0.0, now, used_s
        elif not _want_processor(self._pids):
            # Whoever looks late has not seen what was in between.
            self._idle_s += min(now - self._looked, 2 * LOOK_S)
        self._looked = now
        return self._idle_s


def processor_s(pids: Sequence[int]) -> float:
    """Return the seconds of processor time that processes and their children have used; 0 where nothing tells."""
    ticks = sum(sum(map(int, _fields(Path(f"/proc/{pid}/stat"))[11:15])) for pid in _with_children(pids))
    return ticks / os.sysconf("SC_CLK_TCK")


def _want_processor(pids: Sequence[int]) -> bool:
    threads = (file for pid in _with_children(pids) for file in Path(f"/proc/{pid}/task").glob("*/stat"))
    return any(state in "RD" for file in threads for state in _fields(file)[:1])


def _with_children(pids: Sequence[int]) -> Iterator[int]:
    """Yield processes and all that they have started, as far as it lives."""
    if sys.platform != "linux":
        return
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _fields(entry / "stat")):
            children[int(fields[1])].append(int(entry.name))
    left = list(pids)
    while left:
        pid = left.pop()
        yield pid
        left += children[pid]


def _fields(file: Path) -> list[str]:
    """Return what follows the name in a ``stat`` file of Linux: state, parent, ...; nothing if its process is gone."""
    with suppress(OSError):
        return file.read_text().rpartition(")")[2].split()
    return []
