"""Runs a function on ranks that are threads of this process.

    def add_ranks(rank: int) -> float:
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return total.item()

    assert simulate(2, add_ranks) == [1.0, 1.0]

One rank runs at a time, so a run is the same every time, and one that cannot go on ends at once.
"""

import ctypes
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch

from composable.errors import ConfigError, UsageError
from composable.testing.faults import Fault, FaultPlan
from composable.testing.process_group import SimulatedRank
from composable.testing.rendezvous import Board
from composable.testing.torch_world import RankStore, TorchOfRanks
from composable.testing.turn_scheduler import ProcessState, RankThread, StartedByRank, TurnScheduler, Unwound

__all__ = ["Outcome", "run", "simulate"]

T = TypeVar("T")

# Torch is changed for one simulation at a time.
_RUNNING = threading.Lock()
_NUMBERS = itertools.count(1)
# How long a rank that is stuck may take to notice that it is over.
UNWIND_S = 2.0


def simulate(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    faults: Sequence[Fault] = (),
    seed: int | None = None,
    timeout_s: float = 60.0,
    ranks_per_host: int | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(rank, *args, **kwargs)`` on ``world_size`` ranks, each a thread, and return what each returned.

    Inside, torch.distributed is initialised, with CPU collectives that behave as gloo's. Random generators, default
    dtype and warning filters belong to a rank, as in a process of its own, and start as the caller's are now.
    Global variables, environment variables and objects that ``fn`` finds outside itself are shared: make models in it.

    Args:
        world_size: How many ranks.
        fn: What each rank runs.
        *args: Handed to ``fn`` after the rank; the same objects on all ranks.
        faults: What is to go wrong: ranks or messages late, messages lost, calls that raise.
        seed: Varies the order in which ranks take turns. The same seed gives the same order; without one, a rank
            runs until it has to wait.
        timeout_s: How long all ranks together may take.
        ranks_per_host: How many ranks share a host, as ``HYBRID_SHARD`` without a mesh sees it; ``None``: all do.
        **kwargs: Handed to ``fn``.

    Raises:
        DesyncError: Every rank that is left waits for another one, or ranks meet in different collectives.
        TimeoutError: A rank has not come to an end; says where it is.
        ConfigError: A wrong argument.
        UsageError: A simulation is running in this process, or a fault has met no call.
        BaseException: What the first rank to raise has raised; the others do not go on beyond where they need it.
    """
    options: dict[str, Any] = {"faults": faults, "seed": seed, "timeout_s": timeout_s, "ranks_per_host": ranks_per_host}
    outcome = run(world_size, fn, *args, **options, **kwargs)
    if outcome.errors:
        rank, error = next(iter(outcome.errors.items()))
        if sys.version_info >= (3, 11):
            error.add_note(_note(rank, outcome))
        raise error
    return [outcome.results[rank] for rank in range(world_size)]


@dataclass
class Outcome:
    """How a simulation ended: ranks that neither returned nor raised were unwound.

    Attributes:
        results: What ranks returned.
        errors: What ranks raised, the first one first.
    """

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)


def run(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    faults: Sequence[Fault] = (),
    seed: int | None = None,
    timeout_s: float = 60.0,
    ranks_per_host: int | None = None,
    **kwargs: Any,
) -> Outcome:
    """Do what ``simulate`` does, but return what ranks raised.

    Raises:
        TimeoutError: As in ``simulate``, like the next two.
        ConfigError: A wrong argument.
        UsageError: A simulation is running, or a fault has met no call.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"world_size is {world_size!r}", fix="pass the number of ranks, 1 or more")
    on_host = world_size if ranks_per_host is None else ranks_per_host
    if isinstance(on_host, bool) or not isinstance(on_host, int) or on_host < 1:
        raise ConfigError(f"ranks_per_host is {ranks_per_host!r}", fix="pass the number of ranks on each host, or None")
    plan = FaultPlan(faults, world_size)
    if not _RUNNING.acquire(blocking=False):
        raise UsageError("a simulation is running in this process", fix="run one after the other, not one in another")
    try:
        simulation = _Simulation(world_size, lambda rank: fn(rank, *args, **kwargs), plan, seed, timeout_s, on_host)
        outcome = simulation.run()
    finally:
        _RUNNING.release()
    if plan.left() and not outcome.errors:
        raise UsageError(
            f"faults met no call: {', '.join(map(str, plan.left()))}", fix="name a rank, call and number that happen"
        )
    return outcome


class _Simulation:
    """Threads that take turns, and what they share."""

    def __init__(
        self,
        world_size: int,
        fn: Callable[[int], Any],
        faults: FaultPlan,
        seed: int | None,
        timeout_s: float,
        ranks_per_host: int,
    ) -> None:
        self._fn = fn
        self._timeout_s = timeout_s
        self._turns = TurnScheduler(world_size, seed)
        self._torch = TorchOfRanks(self._turns)
        self._store = RankStore(self._turns)
        self._outcome = Outcome()
        board = Board()
        self._ranks = [
            SimulatedRank(rank, next(_NUMBERS), self._turns, board, faults, ranks_per_host)
            for rank in range(world_size)
        ]

    def run(self) -> Outcome:
        """Run all ranks; when this returns, no thread and no process group is left."""
        callers_state = ProcessState()
        for thread in self._turns.threads:
            thread.thread = StartedByRank(target=self._run_rank, args=(thread,), name=f"rank {thread.rank}")
        with self._torch.installed():
            try:
                for thread in list(self._turns.threads):
                    _python_thread(thread).start()
                self._turns.start()
                if not self._turns.all_ended.acquire(timeout=self._timeout_s):
                    raise self._timeout()
            except BaseException:
                # Also Ctrl-C.
                self._unwind()
                raise
            finally:
                callers_state.restore()
            self._join()
        return self._outcome

    def _run_rank(self, thread: RankThread) -> None:
        self._turns.enter(thread)
        rank, how = thread.rank, "returned"
        try:
            timeout = timedelta(seconds=self._timeout_s)
            world = self._torch.default_group(self._ranks[rank], len(self._ranks), self._store, timeout)
            with torch.enable_grad(), world:
                self._outcome.results[rank] = self._fn(rank)
        except Unwound:
            how = "been unwound"
        except BaseException as error:  # SystemExit and a test's own failures too
            self._outcome.errors[rank] = error
            thread.has_raised, how = True, f"raised {type(error).__name__}"
        finally:
            self._turns.end(thread, how)

    def _timeout(self) -> TimeoutError:
        holder = self._turns.holder
        frame = sys._current_frames().get(_python_thread(holder).ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)"
        return TimeoutError(
            f"the simulation has not ended after {self._timeout_s:g} s: rank {holder.rank} is stuck in\n{stack}"
        )

    def _unwind(self) -> None:
        self._turns.unwind_all()
        thread = _python_thread(self._turns.holder)
        if thread.ident is not None and thread.is_alive():
            # As soon as it executes Python again.
            ident, error = ctypes.c_ulong(thread.ident), ctypes.py_object(Unwound)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
        if self._turns.all_ended.acquire(timeout=UNWIND_S):
            self._join()

    def _join(self) -> None:
        for thread in self._turns.threads:
            _python_thread(thread).join()


def _python_thread(thread: RankThread) -> threading.Thread:
    assert thread.thread is not None, "made before the first turn"
    return thread.thread


def _note(rank: int, outcome: Outcome) -> str:
    others = [f"rank {other} {type(error).__name__}" for other, error in outcome.errors.items() if other != rank]
    return f"raised on rank {rank}" + (f"; later raised: {', '.join(others)}" if others else "")
