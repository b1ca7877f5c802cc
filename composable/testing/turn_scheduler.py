"""A scheduler that runs one thread at a time.

A thread passes its turn on when it has to wait, and when it ends. The next thread is the following one that
can go on, or one drawn with ``seed``: never by chance, so that a run can be repeated. When no thread can go
on, each gets an error that says what all of them wait for.

Threads that a rank starts (a checkpoint written in the background, an executor) belong to it and take turns too.
While a simulation runs, Python's own waits (conditions, and so events, futures and queues; joins) let other threads run
instead of blocking the thread whose turn it is. Daemon threads are left alone: they run at any time, wait as usual, and
may not communicate.

State that ranks in processes would have for themselves, but threads of one process share, is exchanged with the turn:
random generators of torch and Python, default dtype and warning filters. Grad mode, autocast and similar modes belong
to a thread in torch already.
"""

import queue
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composable.errors import DesyncError
from composable.ground.frames import place_in

_NOT_THE_USERS = tuple(str(Path(file).parent) for file in (torch.__file__, __file__, threading.__file__))

# Attributes that `warnings.catch_warnings` replaces, and puts back.
_WARNING_PARTS = ("filters", "showwarning", "_showwarnmsg_impl")


class Unwound(BaseException):
    """The exception that ends a rank which waits for another rank that has raised."""


class ProcessState:
    """The shared state of the process at the moment when the object is made.

    Args:
        generators: Random generators of torch beside the one of the CPU.
    """

    __slots__ = ("_dtype", "_python", "_torch", "_warnings")

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self._torch = [(one, one.get_state()) for one in (torch.default_generator, *generators)]
        self._python = random.getstate()
        self._dtype = torch.get_default_dtype()
        self._warnings = {part: getattr(warnings, part) for part in _WARNING_PARTS if hasattr(warnings, part)}

    def restore(self) -> None:
        """Give the process this state again."""
        for generator, state in self._torch:
            generator.set_state(state)
        random.setstate(self._python)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        for part, value in self._warnings.items():
            setattr(warnings, part, value)


class _Wait(NamedTuple):
    """The wait of a thread; see ``TurnScheduler.wait``."""

    is_over: Callable[[], bool]
    describe: Callable[[], str]
    give_up: Callable[[], bool]


@dataclass(eq=False)
class RankThread:
    """A thread that takes turns.

    Attributes:
        thread: The Python thread.
        name: The name of a thread that a rank has started; empty for the rank's own.
        turn: Locked except while the thread is about to run.
        ended: How it ended, in the words of messages; empty before.
        has_raised: It has raised, so others may wait for it for ever.
        error: The error that it raises at its next turn.
    """

    rank: int
    index: int
    thread: threading.Thread
    name: str = ""
    turn: threading.Lock = field(default_factory=threading.Lock)
    waits_for: _Wait | None = None
    ended: str = ""
    has_raised: bool = False
    error: BaseException | None = None
    is_unwinding: bool = False

    def __post_init__(self) -> None:
        self.turn.acquire()

    def can_go_on(self) -> bool:
        if self.ended:
            return False
        return self.waits_for is None or self.error is not None or self.is_unwinding or self.waits_for.is_over()

    def raise_if_unwinding(self) -> None:
        if self.is_unwinding:
            raise Unwound


class TurnScheduler:
    """A scheduler that lets one thread after the other run.

    Args:
        threads: The threads of the ranks, not started.
        seed: Draws the next thread, and whether a turn ends at a call. ``None``: threads run in order, and a turn ends
            only when a rank has to wait.
        generators: Random generators of torch beside the one of the CPU, of which each rank has a state of its own.
    """

    def __init__(
        self, threads: Sequence[threading.Thread], seed: int | None, generators: Sequence[torch.Generator] = ()
    ) -> None:
        self._generators = generators
        self._states = [ProcessState(generators)] * len(threads)
        self.threads = [RankThread(rank, rank, thread) for rank, thread in enumerate(threads)]
        self.holder = self.threads[0]
        self.all_ended = threading.Lock()
        self.all_ended.acquire()
        self._here = threading.local()
        self._random = None if seed is None else random.Random(seed)
        # Late messages: the turn when each is due, and the function that delivers it.
        self._late: list[tuple[int, Callable[[], None]]] = []
        self._turns = 0

    def start(self) -> None:
        """Let the first rank run."""
        self.holder = self._next_after(self.threads[-1]) or self.threads[0]
        self.holder.turn.release()

    def enter(self, thread: RankThread) -> None:
        """Register the calling thread as ``thread``, and wait for its first turn."""
        thread.turn.acquire()
        self._here.thread = thread
        self._states[thread.rank].restore()

    def thread_here(self) -> RankThread | None:
        """Return the calling thread; ``None``: it takes no turns."""
        return getattr(self._here, "thread", None)

    def add(self, thread: threading.Thread) -> RankThread:
        """Add a thread that the calling rank is about to start."""
        added = RankThread(self._caller().rank, len(self.threads), thread, thread.name)
        self.threads.append(added)
        return added

    def wait(
        self,
        is_over: Callable[[], bool],
        describe: Callable[[], str],
        give_up: Callable[[], bool] = bool,
    ) -> None:
        """Wait until ``is_over`` returns true; other threads run meanwhile.

        Args:
            is_over: Says whether the wait is over.
            describe: Returns a description of the wait, for messages.
            give_up: Called when no thread can go on: ends a wait that has a timeout, and returns whether it has.

        Raises:
            DesyncError: No thread can go on.
            Unwound: Another rank has raised, and no thread can go on.
        """
        thread = self._caller()
        while not is_over():
            thread.raise_if_unwinding()
            thread.waits_for = _Wait(is_over, describe, give_up)
            self._hand_over(thread)
            thread.waits_for = None
            if thread.error is not None:
                error, thread.error = thread.error, None
                raise error
        thread.raise_if_unwinding()

    def let_others_run(self, *, always: bool = True) -> None:
        """Give the turn to another thread that can go on, if there is one: always, or if the seed says so."""
        thread = self._caller()
        thread.raise_if_unwinding()
        if always or (self._random is not None and self._random.random() < 0.5):
            self._hand_over(thread)
            thread.raise_if_unwinding()

    def later(self, turns: int, happen: Callable[[], None]) -> None:
        """Call ``happen`` after ``turns`` turns, or earlier if no thread can go on."""
        self._late.append((self._turns + turns, happen))

    def end(self, thread: RankThread, how: str) -> None:
        """End ``thread``: pass its turn on for the last time."""
        self._states[thread.rank] = ProcessState(self._generators)
        thread.ended = how
        self._here.thread = None
        self._pass_on(thread)

    def unwind_all(self) -> None:
        """End every thread at its next call or wait."""
        for thread in self.threads:
            thread.is_unwinding = True

    def _caller(self) -> RankThread:
        thread: RankThread = self._here.thread  # called only by threads that take turns
        return thread

    def _hand_over(self, thread: RankThread) -> None:
        self._states[thread.rank] = ProcessState(self._generators)
        if self._pass_on(thread) is not thread:
            thread.turn.acquire()
            self._states[thread.rank].restore()

    def _pass_on(self, thread: RankThread) -> RankThread | None:
        """Let the next thread run; returns it, or nothing if all have ended."""
        self._turns += 1
        due = [happen for turn, happen in self._late if turn <= self._turns]
        self._late = [(turn, happen) for turn, happen in self._late if turn > self._turns]
        for happen in due:
            happen()
        following = self._next_after(thread)
        while following is None and self._late:
            self._late.sort(key=lambda late: late[0])
            self._late.pop(0)[1]()
            following = self._next_after(thread)
        if following is None:
            self._nobody_can_go_on()
            following = self._next_after(thread)
        if following is None:
            self.all_ended.release()
        elif following is not thread:
            self.holder = following
            following.turn.release()
        return following

    def _next_after(self, thread: RankThread) -> RankThread | None:
        """Return the thread that runs next; ``thread`` itself only if no other can."""
        order = [*self.threads[thread.index + 1 :], *self.threads[: thread.index + 1]]
        able = [other for other in order if other.can_go_on()]
        if self._random is None or len(able) < 2:
            return able[0] if able else None
        return self._random.choice([other for other in able if other is not thread])

    def _nobody_can_go_on(self) -> None:
        waiting = [thread for thread in self.threads if not thread.ended]
        if any(thread.waits_for is not None and thread.waits_for.give_up() for thread in waiting):
            return
        if any(thread.has_raised for thread in self.threads) or all(thread.name for thread in waiting):
            for thread in waiting:
                thread.is_unwinding = True
            return
        lines = [f"    {_doing(thread)}" for thread in self.threads if not (thread.name and thread.ended)]
        for thread in waiting:
            thread.error = DesyncError(
                "\n".join(["every rank that is left waits for another one", *lines]),
                at=f"rank {thread.rank}",
                fix="make groups, and call the collectives of each, in the same order on all its ranks",
            )


def _doing(thread: RankThread) -> str:
    called = f"rank {thread.rank}, thread {thread.name!r}," if thread.name else f"rank {thread.rank}"
    if thread.waits_for is None:
        return f"{called} has {thread.ended}"
    frame = sys._current_frames().get(thread.thread.ident or 0)
    here = place_in(frame, _NOT_THE_USERS)
    return f"{called} waits for {thread.waits_for.describe()}{f', at {here}' if here else ''}"


@contextmanager
def taking_turns(
    turns: TurnScheduler, world: Callable[[], Any], adopted: Callable[[Any], AbstractContextManager[None]]
) -> Iterator[None]:
    """Let threads that ranks start take part in ``turns`` while the context lasts.

    Args:
        turns: The scheduler.
        world: Returns the process groups of the calling thread.
        adopted: Called in a thread that this one starts; gives that thread the same process groups, and returns the
            context in which it runs.
    """
    own_start, own_join, own_wait = threading.Thread.start, threading.Thread.join, threading.Condition.wait
    own_queue = queue.SimpleQueue
    starting = threading.local()
    changed: Any = threading

    def start(thread: threading.Thread) -> None:
        if turns.thread_here() is None:
            own_start(thread)
            return
        if not thread.daemon:
            take_part(thread)
        # A native wait: the thread reports that it has started before it waits for its turn.
        starting.is_native = True
        try:
            own_start(thread)
        finally:
            starting.is_native = False

    def take_part(thread: threading.Thread) -> None:
        added, run, of_parent = turns.add(thread), thread.run, world()

        def run_in_turns() -> None:
            turns.enter(added)
            try:
                with adopted(of_parent):
                    run()
            except Unwound:
                pass
            finally:
                turns.end(added, "ended")

        thread.run = run_in_turns  # type: ignore[method-assign]

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        added = next((one for one in turns.threads if one.thread is thread), None)
        if added is not None and turns.thread_here() is not None:
            turns.wait(lambda: bool(added.ended), lambda: f"the end of thread {added.name!r}")
        own_join(thread, timeout)

    def wait(condition: Any, timeout: float | None = None) -> bool:
        asks_only = timeout is not None and timeout <= 0
        if asks_only or turns.thread_here() is None or getattr(starting, "is_native", False):
            return own_wait(condition, timeout)
        # As in Condition.wait, with turns in place of blocking. If no thread can go on, the timeout has passed.
        lock, passed = threading.Lock(), list[float]()
        lock.acquire()
        condition._waiters.append(lock)

        def give_up() -> bool:
            if timeout is not None:
                passed.append(timeout)
            return bool(passed)

        saved = condition._release_save()
        try:
            turns.wait(lambda: bool(passed) or not lock.locked(), lambda: "another thread of its own", give_up)
        finally:
            condition._acquire_restore(saved)
            if lock in condition._waiters:
                condition._waiters.remove(lock)
        return not passed

    changed.Thread.start, changed.Thread.join, changed.Condition.wait = start, join, wait
    # The queue written in C blocks without passing the turn on.
    queue.SimpleQueue = getattr(queue, "_PySimpleQueue", own_queue)  # type: ignore[misc]
    try:
        yield
    finally:
        changed.Thread.start, changed.Thread.join, changed.Condition.wait = own_start, own_join, own_wait
        queue.SimpleQueue = own_queue  # type: ignore[misc]
