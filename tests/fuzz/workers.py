"""Runs cases in a process that may die: then another one starts, and the case has an outcome all the same."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.fuzz.cases import Case, smaller
from tests.fuzz.runner import Outcome, run_case
from tests.idleness import LOOK_S, Idleness, processor_s

__all__ = ["Worker", "shrink", "worker"]

# A case that computes for so many times as long as one may be idle is stuck too.
MOST_BUSY = 5
# Of the run itself, which only stands in where nobody looks.
RUN_TIMEOUT_S = 3600.0


class Worker:
    """A process that runs one case after the other.

    Args:
        timeout_s: A case is stuck that was idle for so long. Time in which it computes, or waits for a processor that
            others use, does not count: on a machine that is busy, a case may take as long as it likes.
        perform: What runs a case, within so many seconds.
    """

    def __init__(self, timeout_s: float, perform: Callable[..., Outcome] = run_case) -> None:
        # macOS libraries do not survive a fork.
        self._context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
        if sys.platform != "darwin":
            self._context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.testing", "pytest"])
        self._timeout_s = timeout_s
        self._perform = perform
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection
        self._stacks = Path(tempfile.mkstemp(prefix="stacks-")[1])

    def run(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Yield each case with its outcome, as they end."""
        for case in cases:
            if self._process is None:
                self._start()
            try:
                self._pipe.send(case)
                stuck = self._wait()
                if stuck:
                    yield case, Outcome("hang", stuck, self._end(signal.SIGABRT))
                    continue
                outcome = self._pipe.recv()
            except (EOFError, OSError):
                stacks = self._end()
                yield case, Outcome("error", f"the process died: {stacks.partition(chr(10))[0]}", stacks)
            else:
                yield case, outcome

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._end()
        self._stacks.unlink(missing_ok=True)

    def _start(self) -> None:
        self._pipe, far_end = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(far_end, self._stacks, self._perform), daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        far_end.close()

    def _wait(self) -> str:
        """Wait for an outcome; returns why there will be none, or ""."""
        assert self._process is not None and self._process.pid is not None, "started before"
        pids = [self._process.pid]
        idle, first_s, most_s = Idleness(pids), processor_s(pids), MOST_BUSY * self._timeout_s
        while not self._pipe.poll(LOOK_S):
            if idle.look() >= self._timeout_s:
                return f"all threads have waited for {self._timeout_s:g} s"
            if processor_s(pids) - first_s >= most_s:
                return f"not done after {most_s:g} s of processor time"
        return ""

    def _end(self, how: int = 0) -> str:
        """End the process and return the stacks it left."""
        process, self._process = self._process, None
        assert process is not None, "started before"
        self._pipe.close()
        if how and process.pid is not None:
            os.kill(process.pid, how)
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
        return self._stacks.read_text() if self._stacks.exists() else ""


@contextmanager
def worker(timeout_s: float = 20.0, perform: Callable[..., Outcome] = run_case) -> Iterator[Worker]:
    """Give a worker, and end it."""
    one = Worker(timeout_s, perform)
    try:
        yield one
    finally:
        one.close()


def shrink(case: Case, outcome: Outcome, worker: Worker, tries: int = 300) -> Iterator[tuple[Case, Outcome]]:
    """Yield simpler and simpler cases that end in the same way, as many as so many tries find."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for other in smaller(case):
            tries -= 1
            if tries < 0:
                return
            ((_, found),) = worker.run([other])
            if found.kind == outcome.kind and found.text.split(":")[0] == outcome.text.split(":")[0]:
                case, outcome, is_smaller = other, found, True
                yield case, outcome
                break


def _serve(pipe: Connection, stacks: Path, perform: Callable[..., Outcome]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with stacks.open("w") as file:
        faulthandler.enable(file)
        while True:
            try:
                case = pipe.recv()
            except (EOFError, OSError):
                return
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                outcome = perform(case, timeout_s=RUN_TIMEOUT_S)
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()  # Else what it compiled for one tree is looked through for the next.
            pipe.send(outcome)
