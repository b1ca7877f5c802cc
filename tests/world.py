"""Runs a test function on real gloo processes, one per rank, or on ranks that are threads.

    def add_ranks() -> int: ...            # at the top level of a test file, so it can be pickled

    assert run_ranks(add_ranks, 2) == [1, 1]

The processes are started once and used by every test of the session. Each task gets a default
process group of its own, with a rendezvous of its own; random seed, grad mode and warnings
(which are errors) start afresh. A group is taken down only when all ranks have reported: a
rank that leaves early would reset connections that others still read from.

``run_threads`` takes the same and gives the same, on ``composable.testing``: no process, no gloo, a
hundredth of the time. It is for breadth; transport, crashes and timeouts need processes.

A failing or hanging rank never makes the test hang: the pool is killed and a new one starts
with the next task. Processes are forked from a server that has imported torch, so a restart
costs a tenth of a second.
"""

import atexit
import datetime
import faulthandler
import functools
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from composable.errors import ComposableError
from tests.idleness import LOOK_S, Idleness
from tests.pairwise import pairs_of
from tests.place import options_of_place

__all__ = ["RankErrors", "on_ranks", "run_ranks", "run_threads", "shut_down", "told"]

T = TypeVar("T")

# How long ranks may be idle before they hang. Time in which one computes, or waits for a processor that others use,
# does not count (tests/idleness.py): on a machine that is busy they may take as long as pytest lets the test.
PATIENCE_S = 60.0
# After a failure the other ranks may be idle for so long before they have failed on their own account, then, with the
# connections to the failed ranks closed, for so long before they have noticed.
OWN_ERROR_S = 3.0
NOTICE_S = 5.0
# How long a process that was told to dump its stacks and abort may take, busy or not.
ABORT_S = 60.0
# Ranks that are threads have no limit for what is idle: that is seen at once. Less than pytest's own limit for a test.
THREADS_S = 1500.0
# Of the ranks' process groups: so long that what waits is found before.
GROUP_S = 3600.0

# What torch itself does on the paths under test, and no caller can avoid: (message, category).
UNAVOIDABLE_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # torch 2.15, where forward mode is used for the first time.
    ("`torch.jit.script` is deprecated", FutureWarning),
    # Sparse tensors that are pickled.
    ("Sparse invariant checks are implicitly disabled", UserWarning),
    # torch 2.11, whenever a profiler starts.
    ("Warning: Profiler clears events at the end of each cycle", UserWarning),
)


class RankErrors(Exception):  # noqa: N818  # several errors in one
    """Some ranks raised, died or did not finish.

    Attributes:
        errors: What each failed rank raised. A rank that hangs has a ``TimeoutError``, one
            whose process died a ``ChildProcessError``.
    """

    def __init__(self, errors: dict[int, BaseException], text: str) -> None:
        super().__init__(text)
        self.errors = errors


def run_ranks(
    fn: Callable[..., T], world_size: int, *args: object, timeout_s: float = PATIENCE_S, **kwargs: object
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks and return what each returned.

    Args:
        fn: A function that can be pickled, as can its arguments and its result.
        world_size: Size of the default process group that ``fn`` runs in.
        *args: Handed to ``fn`` on every rank.
        timeout_s: Ranks that have not finished are killed when all of them were idle for so long.
        **kwargs: Handed to ``fn`` on every rank.

    Raises:
        RankErrors: With the traceback of every rank that raised, and the stacks of those that hang.
    """
    return _POOL.run(pickle.dumps((fn, args, kwargs)), world_size, timeout_s)


def run_threads(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float = THREADS_S,
    ranks_per_host: int | None = None,
    **kwargs: object,
) -> list[T]:
    """Do what ``run_ranks`` does, on ranks that are threads of this process, on the device of ``tests.place``.

    Args:
        fn: As for ``run_ranks``: it, its arguments and its result are pickled, so that ranks share no object.
        world_size: Size of the default process group that ``fn`` runs in.
        *args: Handed to ``fn`` on every rank.
        timeout_s: When ranks that have not finished are ended.
        ranks_per_host: How many ranks share a simulated host; ``None``: all do.
        **kwargs: Handed to ``fn`` on every rank.

    Raises:
        RankErrors: With the traceback of every rank that raised. Ranks that wait for those are not among them.
    """
    if importlib.util.find_spec("composable.testing") is None:  # The core alone.
        assert ranks_per_host is None
        return run_ranks(fn, world_size, *args, **kwargs)
    from composable.testing.simulation import run

    call = pickle.dumps((fn, args, kwargs))
    options = {"timeout_s": timeout_s, "ranks_per_host": ranks_per_host, **options_of_place()}
    outcome = run(world_size, lambda rank: _fresh_start(call), **options)
    gc.collect(0)
    if outcome.errors:
        reports = {
            rank: "".join(traceback.format_exception(type(error), error, error.__traceback__))
            for rank, error in outcome.errors.items()
        }
        raise RankErrors(dict(outcome.errors), _paragraphs(reports))
    return [pickle.loads(outcome.results[rank]) for rank in range(world_size)]


def on_ranks(
    world_size: int | None = None, /, *, run: Callable[..., object] = run_threads, **cases: Iterable[Any]
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Let each of so many ranks run the body of a test, for each value of its arguments.

    Args:
        world_size: How many; ``None``: as many as ``world_size`` among ``cases``, or the test's parameters, says.
        run: On threads or on processes.
        **cases: Values by argument; of several arguments every two values meet.
    """

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        def test(**kwargs: Any) -> None:
            run(_run_body, world_size or kwargs.pop("world_size"), body.__module__, body.__name__, **kwargs)

        functools.update_wrapper(test, body)
        own = inspect.signature(body)
        size = [inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)] if world_size is None else []
        test.__signature__ = own.replace(parameters=[*own.parameters.values(), *size])  # type: ignore[attr-defined]
        if len(cases) < 2:
            return functools.reduce(lambda made, case: pytest.mark.parametrize(*case)(made), cases.items(), test)
        return pytest.mark.parametrize(*pairs_of(**cases))(test)

    return decorate


def _run_body(module: str, name: str, /, **kwargs: object) -> None:
    """Find the body where its test is: ranks share no object."""
    getattr(importlib.import_module(module), name).__wrapped__(**kwargs)


def shut_down() -> None:
    """Stop the processes; the next ``run_ranks`` starts new ones."""
    _POOL.stop()


class _Worker:
    """The parent's side of one process."""

    def __init__(self, process: BaseProcess, pipe: Connection, stack_file: Path) -> None:
        self.process = process
        self.pipe = pipe
        self.stack_file = stack_file

    def abort(self) -> None:
        """Make the process write its stacks and die."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGABRT)

    def stacks(self) -> str:
        """Return the stacks of a process that died."""
        self.process.join(ABORT_S)
        return self.stack_file.read_text() if self.stack_file.exists() else ""


class _Pool:
    """Processes that wait for tasks; process i is always rank i."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._folder: Path | None = None
        self._tasks_run = 0

    def run(self, call: bytes, world_size: int, timeout_s: float) -> list[Any]:
        self._start(world_size)
        workers = self._workers[:world_size]
        self._tasks_run += 1
        for rank, worker in enumerate(workers):
            worker.pipe.send((call, f"task{self._tasks_run}", rank, world_size))
        task = _Task(workers, timeout_s)
        try:
            task.collect()
        except BaseException:
            # Ctrl-C, or pytest's own time limit.
            print(_paragraphs(task.stacks()), file=sys.stderr)
            self.stop(is_clean=False)
            raise
        if task.reports:
            self.stop(is_clean=False)
            raise task.as_error()
        for worker in workers:
            worker.pipe.send(None)
        return [pickle.loads(task.results[rank]) for rank in range(world_size)]

    def stop(self, *, is_clean: bool = True) -> None:
        for worker in self._workers:
            # A closed pipe ends a process that waits for a task.
            worker.pipe.close()
            if not is_clean:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(ABORT_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()
        self._store = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, count: int) -> None:
        if self._store is None or self._folder is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        # macOS libraries do not survive a fork.
        context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
        if sys.platform != "darwin":
            context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.testing", "pytest"])
        while len(self._workers) < count:
            rank = len(self._workers)
            pipe, far_end = context.Pipe()
            stack_file = self._folder / f"stacks{rank}"
            process = context.Process(
                target=_work, args=(far_end, self._store.port, stack_file), name=f"rank {rank}", daemon=True
            )
            process.start()
            far_end.close()
            self._workers.append(_Worker(process, pipe, stack_file))


class _Task:
    """What the ranks of one task have reported so far."""

    def __init__(self, workers: Sequence[_Worker], timeout_s: float) -> None:
        self.results: dict[int, bytes] = {}
        self.errors: dict[int, BaseException] = {}
        self.reports: dict[int, str] = {}
        self._waiting = dict(enumerate(workers))
        self._workers = workers
        self._timeout_s = timeout_s

    def collect(self) -> None:
        """Wait for every rank, or for the end of patience; fill ``results``, ``errors`` and ``reports``."""
        self._wait(self._timeout_s, for_failure=True)
        if self._waiting and self.reports:
            self._wait(OWN_ERROR_S)
            for rank in self.reports:
                self._workers[rank].process.kill()
            self._wait(NOTICE_S)
        if not self._waiting:
            return
        is_hang = not self.reports
        for rank, stacks in self.stacks().items():
            if is_hang:
                self.errors[rank] = TimeoutError(f"rank {rank} has not finished after {self._timeout_s:g} s")
                reason = str(self.errors[rank])
            else:
                reason = "still waiting after the failure of another rank"
            self.reports[rank] = f"{reason}\n{stacks}"

    def stacks(self) -> dict[int, str]:
        """End the ranks that have not finished, and return where each was."""
        for worker in self._waiting.values():
            worker.abort()
        return {rank: worker.stacks() for rank, worker in self._waiting.items()}

    def as_error(self) -> RankErrors:
        """Return the reports as one error; ranks that say the same share a paragraph."""
        return RankErrors(self.errors, _paragraphs(self.reports))

    def _wait(self, seconds: float, *, for_failure: bool = False) -> None:
        """Receive reports until there are all, or no rank does anything for so many seconds."""
        idle = None
        while self._waiting and not (for_failure and self.reports):
            ready = wait([worker.pipe for worker in self._waiting.values()], timeout=LOOK_S)
            if ready:
                idle = None
            elif idle is None:
                idle = Idleness([worker.process.pid or 0 for worker in self._waiting.values()])
            elif idle.look() >= seconds:
                return
            for rank, worker in list(self._waiting.items()):
                if worker.pipe in ready:
                    self._receive(rank, worker)

    def _receive(self, rank: int, worker: _Worker) -> None:
        del self._waiting[rank]
        try:
            is_result, *report = worker.pipe.recv()
        except (EOFError, OSError):
            # The stacks are complete once the process is gone.
            stacks = worker.stacks()
            self.errors[rank] = ChildProcessError(f"process died with exit code {worker.process.exitcode}")
            self.reports[rank] = f"{self.errors[rank]}\n{stacks}"
            return
        if is_result:
            (self.results[rank],) = report
        else:
            error, self.reports[rank] = report
            self.errors[rank] = pickle.loads(error)


def _work(pipe: Connection, port: int, stack_file: Path) -> None:
    """Run tasks until the pipe closes. What the processes of the pool execute."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    # What was imported so far need not be searched for garbage after every task.
    gc.freeze()
    with stack_file.open("w") as stacks:
        # Also on SIGABRT, which the parent sends to a rank that hangs.
        faulthandler.enable(stacks)
        while True:
            try:
                request = pipe.recv()
            except (EOFError, OSError):
                return
            if request is None:
                if dist.is_initialized():
                    dist.destroy_process_group()
                gc.collect()
            else:
                pipe.send(_perform(client, *request))


def _perform(client: dist.TCPStore, call: bytes, name: str, rank: int, world_size: int) -> tuple[object, ...]:
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()  # As if no test had set another one; ranks that differ in it wait for each other.
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, client),
            rank=rank,
            world_size=world_size,
            # The parent's patience ends first, and its report has the stacks of all ranks.
            timeout=datetime.timedelta(seconds=GROUP_S),
        )
        result = _fresh_start(call)
    except BaseException as error:  # pytest.fail and a failed pytest.raises are no Exceptions
        return False, _pickle_error(error), traceback.format_exc()
    return True, result


def _fresh_start(call: bytes) -> bytes:
    """Perform a pickled call as if nothing had happened in this process before; warnings are errors."""
    if "torch.distributed.tensor" in sys.modules:
        # What DTensor remembers by mesh has the groups of an earlier world.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("error")
        for message, category in UNAVOIDABLE_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        fn, args, kwargs = pickle.loads(call)
        return pickle.dumps(fn(*args, **kwargs))


def _paragraphs(reports: Mapping[int, str]) -> str:
    """Return the reports of all ranks as one text; ranks that say the same, each of itself, share a paragraph."""
    paragraphs: dict[str, list[int]] = {}
    for rank, report in reports.items():
        said = re.sub(rf"^(  at:  rank) {rank}\b", r"\1 [its own]", report.strip(), flags=re.MULTILINE)
        paragraphs.setdefault(said, []).append(rank)
    text = "\n\n".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}: {report}"
        for report, ranks in paragraphs.items()
    )
    return f"\n{text}"


def _pickle_error(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


_POOL = _Pool()
atexit.register(shut_down)


def told(call: Callable[[], object]) -> list[str]:
    """Return what ``call`` raises on each rank of the task; anything but our errors is raised here."""
    try:
        call()
        said = "no error"
    except ComposableError as error:
        said = f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    return everyone
