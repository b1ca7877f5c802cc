"""Runs pytest in two processes that share the test files: ``python -m tests.side_by_side [arguments of pytest]``.

Ranks wait for each other more than they compute, so one process leaves half of two cores idle. Each process takes the
next file that the other has not taken. The first shows what it does as it goes; the report of the other follows at the
end. A process that is stuck is ended by pytest's own limit for a test, with the stacks of its threads.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_WORST_LAST = (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share-files", type=Path, metavar="FOLDER", help="run files that no other process has taken")


def pytest_configure(config: pytest.Config) -> None:
    # Who is started in the background of a script ignores it, and could not be asked for a report.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(SharedFiles(config.getoption("--share-files")))


class SharedFiles:
    """Runs tests only where their file was taken first.

    Args:
        folder: The same for all processes, for notes of what is taken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_mine: dict[Path, bool] = {}

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
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        plugins = ["-p", "tests.tiers", "-p", "tests.side_by_side", f"--share-files={folder}"]
        command = [sys.executable, "-m", "pytest", *plugins, *arguments]
        runs = [
            subprocess.Popen(command),
            subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL),
        ]
        try:
            codes = [one.wait() for one in runs]
        except KeyboardInterrupt:
            # The terminal has told both.
            codes = [one.wait() for one in runs]
        finally:
            output.seek(0)
            print(output.read(), end="", flush=True)
    return max(codes, key=lambda code: _WORST_LAST.index(code) if code in _WORST_LAST else len(_WORST_LAST))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
