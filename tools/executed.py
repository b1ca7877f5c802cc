"""Which test executes which line of the package, for ``tools.mutations``: in a copy of the repository and in forks.

Ranks execute lines too, whether they are threads or the processes of ``tests.world``.
"""

import importlib
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

__all__ = ["FOLDERS", "Notes", "Ran", "run_tests", "start_server"]

REPO = Path(__file__).resolve().parent.parent
FOLDERS = (".", *sorted(path.name for path in (REPO / "composable").iterdir() if any(path.glob("*.py"))))
# Of a test with many cases so many are noted, from the first to the last, until the file has taken so long.
CASES, FILE_S = 4, 150.0
PRELOADED = ["torch", "torch.distributed.tensor", "torch.testing", "pytest"]


class Notes(NamedTuple):
    """How long a test takes, and the lines of each file that it executes, as the bits of a number."""

    seconds: float
    lines: dict[str, int]


class Ran(NamedTuple):
    """The notes of tests that have passed, and what failed."""

    passed: dict[str, Notes]
    failed: list[str]


def start_server() -> None:
    """Import what takes long, and start the process from which the ranks of all forks are made."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOADED:
        importlib.import_module(name)
    multiprocessing.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()
    # It is no child of the forks, which therefore would start another one.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


def run_tests(root: Path, tests: Sequence[str], patience_s: float, *, takes_notes: bool = False) -> Ran:
    """Run tests on the copy at ``root``: until one fails, or ends nothing for so long, unless notes are taken."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_in_fork, args=(sender, root, tests, takes_notes))
    process.start()
    sender.close()
    ran, start, name = Ran({}, []), time.monotonic(), "no test"
    try:
        while not ran.failed or (takes_notes and time.monotonic() < start + FILE_S):
            if not receiver.poll(patience_s):
                ran.failed.append(f"hangs after {name}")
                break
            name, notes = receiver.recv()
            if not name:
                break
            if notes is None:
                ran.failed.append(name)
            else:
                ran.passed[name] = notes
    except EOFError:
        ran.failed.append(f"the process died after {name}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
    for name in ran.failed:
        ran.passed.pop(name, None)
    return ran


def _in_fork(pipe: Connection, root: Path, tests: Sequence[str], takes_notes: bool) -> None:
    """Run the tests of the copy, with this file as it is there."""
    os.setsid()
    os.chdir(root)
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["PYTHONPATH"] = str(root)
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(REPO)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "tools")]:
        del sys.modules[name]
    importlib.import_module("tools.executed").run_pytest(pipe, tests, takes_notes)


def run_pytest(pipe: Connection, tests: Sequence[str], takes_notes: bool) -> None:
    """Send ``(name, None)`` of each test that fails, ``(name, notes)`` of each that ends, and an empty name."""
    lines = trace_package() if takes_notes else {}
    if takes_notes:
        pool = importlib.import_module("tests.world")._Pool
        pool.run = _with_lines_of_ranks(pool.run, lines)
    code = pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[_Reporter(pipe, lines)])
    is_told = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    pipe.send(("" if is_told else f"pytest ends with {code!r}", None))


class _Reporter:
    def __init__(self, pipe: Connection, lines: dict[str, set[int]]) -> None:
        self._pipe = pipe
        self._lines = lines

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._lines:
            cases: dict[str, list[pytest.Item]] = {}
            for item in items:
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
            spread = [those[i * len(those) // CASES] for those in cases.values() for i in range(CASES)]
            items[:] = list(dict.fromkeys(spread))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._lines:
            sys.settrace(_trace)  # again, if the last test has ended it
        start = time.monotonic()
        result = yield
        masks = {file: sum(1 << line for line in seen) for file, seen in self._lines.items() if seen}
        for seen in self._lines.values():
            seen.clear()
        self._pipe.send((item.nodeid, Notes(round(time.monotonic() - start, 3), masks)))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._pipe.send((report.nodeid, None))


_TRACERS: dict[str, Any] = {}


def trace_package() -> dict[str, set[int]]:
    """Return sets that are filled from now on with the lines of each file that this process executes."""

    def tracer_of(seen: set[int]) -> Any:
        def tracer(frame: FrameType, event: str, argument: object) -> Any:
            seen.add(frame.f_lineno)
            return tracer

        return tracer

    paths = [path for one in FOLDERS for path in (REPO / "composable" / one).glob("*.py")]
    lines: dict[str, set[int]] = {str(path.relative_to(REPO)): set() for path in paths}
    _TRACERS.update({str(REPO / file): tracer_of(seen) for file, seen in lines.items()})
    threading.settrace(_trace)
    sys.settrace(_trace)
    return lines


def _trace(frame: FrameType, event: str, argument: object) -> Any:
    return _TRACERS.get(frame.f_code.co_filename)


def _with_lines_of_ranks(run: Callable[..., list[Any]], lines: dict[str, set[int]]) -> Callable[..., list[Any]]:
    """Return the ``run`` of a pool of processes that adds the lines which these execute."""

    def run_traced(pool: object, call: bytes, *args: Any) -> list[Any]:
        outcomes = run(pool, pickle.dumps((_traced, (call,), {})), *args)
        for _, of_rank in outcomes:
            for file, seen in of_rank.items():
                lines[file] |= seen
        return [result for result, _ in outcomes]

    return run_traced


def _traced(call: bytes) -> tuple[Any, dict[str, set[int]]]:
    lines = trace_package()
    try:
        fn, args, kwargs = pickle.loads(call)
        return fn(*args, **kwargs), lines
    finally:
        sys.settrace(None)
