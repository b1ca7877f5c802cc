"""Runs pytest in two processes that share the test files: ``python -m tests.side_by_side [arguments of pytest]``.

Ranks wait for each other more than they compute, so one process leaves half of two cores idle. Each process takes the
next file that the other has not taken. The first shows what it does as it goes; what fails in the other is told at
once, and its report follows at the end.

Nothing limits the whole run. A process is stuck that was idle for ``PATIENCE_S`` in which no test has ended: the stacks of
its threads are shown, and both processes are interrupted, so that they still report what has failed until then.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from tests.idleness import LOOK_S, Idleness

# More than that of tests/world.py for ranks.
PATIENCE_S = 300.0
# How long a process that was interrupted may take for its report.
REPORT_S = 120.0
_WORST_LAST = (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share-files", type=Path, metavar="FOLDER", help="run files that no other process has taken")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SharedFiles(config.getoption("--share-files")))


class SharedFiles:
    """Runs tests only where their file was taken first, and notes how it goes.

    Args:
        folder: The same for all processes, for notes of who has taken what.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_mine: dict[Path, bool] = {}
        self._notes = Notes(folder, os.getpid())
        self._stacks = self._notes.stacks.open("w")
        faulthandler.register(signal.SIGUSR1, self._stacks)
        # Who is started in the background of a script ignores it, and could not be asked for a report.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._notes.progress.touch()

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run what no other process does, as pytest runs all: each test is told which one follows."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        mine = (item for item in session.items if self._is_run_here(item.path))
        item = next(mine, None)
        while item is not None:
            following = next(mine, None)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def pytest_collectreport(self) -> None:
        self._notes.progress.touch()

    def pytest_runtest_logfinish(self) -> None:
        self._notes.progress.touch()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._notes.failures.open("a") as file:
                file.write(json.dumps([report.nodeid, report.when, report.longreprtext]) + "\n")

    def pytest_unconfigure(self) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()

    def _is_run_here(self, path: Path) -> bool:
        """Say so; the file of a test is taken when its first test is due."""
        if path not in self._is_mine:
            self._is_mine[path] = self._take(path)
        return self._is_mine[path]

    def _take(self, path: Path) -> bool:
        try:
            (self._folder / str(path).replace("/", "+")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Notes:
    """What a process writes down for the one that has started it.

    Args:
        folder: Where.
        pid: Of the process.

    Attributes:
        progress: Touched whenever a test or the collection of a file has ended.
        failures: A line for each failure.
        stacks: Of all threads, written on SIGUSR1.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self.progress, self.failures, self.stacks = (
            folder / f"{name} of {pid}" for name in ("progress", "failures", "stacks")
        )


class Run:
    """One of the processes, as seen from outside.

    Args:
        command: What it executes.
        folder: Where it writes its notes.
        output: Where its report goes; ``None``: it is shown as it comes.
        patience_s: How long it may be idle in a test.
    """

    def __init__(self, command: Sequence[str], folder: Path, output: IO[str] | None, patience_s: float) -> None:
        stdin = None if output is None else subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=output, stderr=output, stdin=stdin)
        self._notes = Notes(folder, self._process.pid)
        self._idle = Idleness([self._process.pid])
        self._progress = 0.0
        self._patience_s = patience_s
        self._failures: list[list[str]] = []

    @property
    def code(self) -> int | None:
        """The exit status, once there is one."""
        return self._process.poll()

    def look(self) -> bool:
        """Tell what has failed since the last time; return whether the process is stuck."""
        if self._notes.failures.exists():
            # Without a line that is being written.
            lines = self._notes.failures.read_text().rpartition("\n")[0].splitlines()
            for line in lines[len(self._failures) :]:
                self._failures.append(json.loads(line))
                name, when, _ = self._failures[-1]
                print(f"\nFAILED {name} ({when}); the reason follows at the end", flush=True)
        progress = self._notes.progress.stat().st_mtime if self._notes.progress.exists() else 0.0
        if progress != self._progress:
            self._progress, self._idle = progress, Idleness([self._process.pid])
        return self.code is None and self._idle.look() >= self._patience_s

    def show_stacks(self) -> None:
        """Print where the threads are."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        time.sleep(LOOK_S)
        if self._notes.stacks.exists():
            print(self._notes.stacks.read_text(), flush=True)

    def interrupt(self) -> None:
        """Make the process stop and report."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Wait for the report of a process that was interrupted; where there is none, show what it has noted."""
        try:
            code = self._process.wait(REPORT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.look()
        if code < 0:
            print(f"\na process has ended by {signal.Signals(-code).name}; what had failed in it until then:")
            for name, when, text in self._failures:
                print(f"\n{'_' * 20} {name} ({when}) {'_' * 20}\n{text}", flush=True)


class TerminatedError(Exception):
    """This process was asked to end."""


def run(arguments: Sequence[str], patience_s: float = PATIENCE_S) -> int:
    """Run the tests, and return the exit status of the process that did worse."""
    signal.signal(signal.SIGTERM, _terminate)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as output:
        folder = Path(name)
        plugins = ["-p", "tests.tiers", "-p", "tests.side_by_side", f"--share-files={folder}"]
        command = [sys.executable, "-m", "pytest", *plugins, *arguments]
        runs = [Run(command, folder, None, patience_s), Run(command, folder, output, patience_s)]
        try:
            _wait(runs, patience_s)
        finally:
            for one in runs:
                one.end()
            output.seek(0)
            print(output.read(), end="", flush=True)
    codes = [one.code for one in runs]
    return max((code or 0 for code in codes), key=lambda code: _rank_of(code))


def _wait(runs: Sequence[Run], patience_s: float) -> None:
    """Return when all have ended, or were interrupted."""
    try:
        while any(one.code is None for one in runs):
            for one in [one for one in runs if one.look()]:
                print(f"\nno test has ended, and nothing was done, for {patience_s:g} s; the threads:", flush=True)
                one.show_stacks()
                raise TerminatedError
            time.sleep(LOOK_S)
    except TerminatedError:
        for one in runs:
            one.interrupt()
    except KeyboardInterrupt:
        pass  # The terminal has told the others.


def _terminate(*_: object) -> None:
    raise TerminatedError


def _rank_of(code: int) -> int:
    return _WORST_LAST.index(code) if code in _WORST_LAST else len(_WORST_LAST)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
