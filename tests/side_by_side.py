"""Runs pytest in several processes that share the test files: ``python -m tests.side_by_side [arguments of pytest]``.

Ranks wait for each other, for timeouts and for processes that start, so there is one process more than cores. Each
takes the next file that no other has taken; files that wait most come first, or one of them would run alone at the
end. The first process shows what it does as it goes; the reports of the others follow at the end. A process that is
stuck is ended by pytest's own limit for a test, with the stacks of its threads.

``--costs`` shows, per process, which files cost most: seconds, and seconds of CPU of the tests and of all processes
that they started and waited for. What is collected and imported is a file of its own, named ``(start)``.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

PROCESSES = min(os.cpu_count() or 2, 7) + 1
# Of minutes each, many of them spent waiting: for a timeout, for torchrun, for a compiler.
FIRST = (
    *("test_two_hosts.py", "test_compiled_autograd.py", "test_examples.py", "test_installation.py", "test_wheel.py"),
    *("test_option_pairs.py", "test_rehearsed_script.py", "test_rehearsed_clients.py", "test_core_alone.py"),
    *("test_fit.py", "test_signals.py", "test_rehearsed_memory.py"),
)
_WORST_LAST = (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share-files", type=Path, metavar="FOLDER", help="run files that no other process has taken")
    parser.addoption("--costs", type=int, default=0, metavar="N", help="show the N files that took most CPU")


def pytest_configure(config: pytest.Config) -> None:
    # Who is started in the background of a script ignores it, and could not be asked for a report.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(SharedFiles(config.getoption("--share-files")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of ``FIRST`` first, each as a whole."""
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


class SharedFiles:
    """Runs tests only where their file was taken first.

    Args:
        folder: The same for all processes, for notes of what is taken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_mine: dict[Path, bool] = {}
        self._costs: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._told = 0.0, 0.0

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run what no other process does, as pytest runs all: each test is told which one follows."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        mine = (item for item in session.items if self._is_run_here(item.path))
        item = next(mine, None)
        self._note("(start)")
        while item is not None:
            following = next(mine, None)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._note(str(item.path.relative_to(session.config.rootpath)))
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if shown := config.getoption("--costs"):
            terminalreporter.section("wall and CPU, seconds")
            for name, (wall, cpu) in sorted(self._costs.items(), key=lambda cost: -cost[1][1])[:shown]:
                terminalreporter.write_line(f"{wall:8.1f} {cpu:8.1f}  {name}")

    def _note(self, name: str) -> None:
        """Add to a file what was used since the last note; before the first, since this process began."""
        used = os.times()
        now = time.monotonic(), used.user + used.system + used.children_user + used.children_system
        wall, cpu = self._costs[name]
        self._costs[name] = wall + now[0] - (self._told[0] or now[0]), cpu + now[1] - self._told[1]
        self._told = now

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


def run(arguments: Sequence[str]) -> int:
    """Run the tests, and return the exit status of the process that did worse."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plugins = ["-p", "tests.tiers", "-p", "tests.side_by_side", f"--share-files={folder}"]
        command = [sys.executable, "-m", "pytest", *plugins, *arguments]
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(PROCESSES - 1)]
        runs = [subprocess.Popen(command)]
        runs += [subprocess.Popen(command, stdout=one, stderr=one, stdin=subprocess.DEVNULL) for one in outputs]
        try:
            codes = [one.wait() for one in runs]
        except KeyboardInterrupt:
            # The terminal has told all.
            codes = [one.wait() for one in runs]
        finally:
            for output in outputs:
                output.seek(0)
                print(output.read(), end="", flush=True)
    return max(codes, key=lambda code: _WORST_LAST.index(code) if code in _WORST_LAST else len(_WORST_LAST))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
