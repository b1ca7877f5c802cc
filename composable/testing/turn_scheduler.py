"""A scheduler that runs one thread at a time.

A thread passes its turn on when it has to wait, and when it ends. The next thread is the following one that
can go on, or one drawn with ``seed``: never by chance, so that a run can be repeated. When no thread can go
on, each gets an error that says what all of them wait for.

Threads that a rank starts (a checkpoint written in the background, an executor) belong to it and take turns too.
While a simulation runs, Python's own waits (conditions, and so events, futures and queues; joins; selectors, and so
event loops) let other threads run instead of blocking the thread whose turn it is.

Outsiders are threads that take no turns: daemon threads, those of earlier simulations, and any that were there before.
They are left alone: they run at any time, wait as usual, and may not communicate. They may wake a thread that takes
turns. So where no thread can go on and an outsider may yet wake one, the thread that runs the simulation waits for it;
only then do timeouts of waits last as long as they say.

State that ranks in processes would have for themselves, but threads of one process share, is exchanged with the turn:
random generators of torch and Python, default dtype and warning filters. Grad mode, autocast and similar modes belong
to a thread in torch already.
"""

import queue
import random
import selectors
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch

from composable.errors import DesyncError
from composable.ground.frames import place_in

T = TypeVar("T")
# How a thread has ended that is still in a wait of its own, such as an idle event loop, when all ranks have ended.
LEFT = "been left alone"
# How often to look whether there are outsiders yet.
_LOOK_S = 1.0
# The files of torch, of this package and of Python.
_NOT_THE_USERS = tuple(f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parent, threading.__file__))

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
    give_up: Callable[[], bool] = bool
    ends_at: float | None = None  # By time.monotonic, if outsiders may end the wait; None: they cannot.
    is_outside: bool = False  # The thread waits by other means than turns.


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
        if self.waits_for is None or self.waits_for.is_over():
            return True
        return not self.waits_for.is_outside and (self.error is not None or self.is_unwinding)

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
        # No thread has the turn: the next one to go on waits for an outsider.
        self.is_idle = False
        self._news = threading.Lock()
        self._callers_thread = threading.current_thread()
        self._here = threading.local()
        self._random = None if seed is None else random.Random(seed)
        # Late messages: the turn when each is due, and the function that delivers it.
        self._late: list[tuple[int, Callable[[], None]]] = []
        self._turns = 0

    def start(self) -> None:
        """Let the first rank run."""
        self.holder = self._next_after(self.threads[-1]) or self.threads[0]
        self.holder.turn.release()

    def all_have_ended(self, timeout_s: float) -> bool:
        """Wait until all threads have ended, and say whether they have; outsiders may wake some meanwhile.

        Called by a thread that takes no turns.
        """
        deadline = time.monotonic() + timeout_s
        while not (have_ended := all(thread.ended for thread in self.threads)):
            now = time.monotonic()
            if now >= deadline:
                break
            until = [deadline, now + _LOOK_S]
            if self.is_idle:
                waits = [thread.waits_for for thread in self.threads if not thread.ended and thread.waits_for]
                for wait in waits:
                    if wait.ends_at is not None and wait.ends_at <= now:
                        wait.give_up()
                    elif wait.ends_at is not None:
                        until.append(wait.ends_at)
                self._let_run(self._next_or_end(self.holder))
            self._news.acquire(timeout=min(until) - now)
        return have_ended

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
        ends_at: float | None = None,
    ) -> None:
        """Wait until ``is_over`` returns true; other threads run meanwhile.

        Args:
            is_over: Says whether the wait is over.
            describe: Returns a description of the wait, for messages.
            give_up: Called when no thread can go on: ends a wait that has a timeout, and returns whether it has.
            ends_at: The end of the timeout if outsiders may end the wait too.

        Raises:
            DesyncError: No thread can go on.
            Unwound: Another rank has raised, and no thread can go on.
        """
        thread = self._caller()
        while not is_over():
            thread.raise_if_unwinding()
            thread.waits_for = _Wait(is_over, describe, give_up, ends_at)
            self._hand_over(thread)
            thread.waits_for = None
            if thread.error is not None:
                error, thread.error = thread.error, None
                raise error
        thread.raise_if_unwinding()

    def wait_outside(self, call: Callable[[], T], what: str) -> T:
        """Return what ``call`` returns, which waits by other means than turns; other threads run meanwhile."""
        thread, is_over = self._caller(), list[bool]()
        thread.raise_if_unwinding()
        thread.waits_for = _Wait(lambda: bool(is_over), lambda: what, is_outside=True)
        self._states[thread.rank] = ProcessState(self._generators)
        self._pass_on(thread)
        try:
            return call()
        finally:
            is_over.append(True)
            self.notice()
            thread.turn.acquire()
            thread.waits_for = None
            if thread.ended:
                self._here.thread = None  # An outsider from now on.
            else:
                self._states[thread.rank].restore()
                thread.raise_if_unwinding()

    def notice(self) -> None:
        """Notice that a wait may be over; called by any thread."""
        if self.is_idle:
            self._tell()

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
        if thread.ended:
            return
        self._states[thread.rank] = ProcessState(self._generators)
        thread.ended = how
        self._here.thread = None
        self._pass_on(thread)

    def unwind_all(self) -> None:
        """End every thread at its next call or wait."""
        for thread in self.threads:
            thread.is_unwinding = True

    def doing(self) -> str:
        """Return a line for each thread: what it waits for, or how it has ended."""
        return "\n".join(f"    {_doing(thread)}" for thread in self.threads if not (thread.name and thread.ended))

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
        following = following or self._next_or_end(thread)
        if following is None:
            self.is_idle = True
            self._tell()
        elif following is not thread:
            self._let_run(following)
        return following

    def _let_run(self, thread: RankThread | None) -> None:
        if thread is not None:
            self.is_idle, self.holder = False, thread
            thread.turn.release()

    def _next_or_end(self, thread: RankThread) -> RankThread | None:
        """Return the thread that runs next, if there is one; if none ever will, waits end."""
        following = self._next_after(thread)
        if following is None and not self._may_be_woken():
            self._nobody_can_go_on()
            following = self._next_after(thread)
        return following

    def _may_be_woken(self) -> bool:
        """Say whether an outsider, or the end of a wait outside, may let a thread go on.

        Some do not count, as they may never end: waits without a timeout of threads that a rank has started, such as
        idle workers, and those for a rank that has raised.
        """
        waits = [(thread, thread.waits_for) for thread in self.threads if not thread.ended and thread.waits_for]
        has_raised = any(thread.has_raised for thread in self.threads)
        if any(wait.is_outside and not (thread.name and has_raised) for thread, wait in waits):
            return not all(thread.name for thread, _ in waits)
        if not any(
            wait.ends_at is not None and (wait.ends_at < inf or not (thread.name or has_raised))
            for thread, wait in waits
        ):
            return False
        # A thread that Python has not started may have ended, and is still listed.
        others = [one for one in threading.enumerate() if not isinstance(one, threading._DummyThread)]
        return not {self._callers_thread, *(one.thread for one in self.threads)}.issuperset(others)

    def _tell(self) -> None:
        """Let ``all_have_ended`` look again."""
        with suppress(RuntimeError):  # It will.
            self._news.release()

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
                if thread.waits_for is not None and thread.waits_for.is_outside:
                    thread.ended = LEFT
                    thread.turn.release()
                thread.is_unwinding = True
            return
        doing = self.doing()
        for thread in waiting:
            thread.error = DesyncError(
                f"every rank that is left waits for another one\n{doing}",
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
        if turns.thread_here() is None:
            own_join(thread, timeout)
        elif added is None:
            turns.wait_outside(partial(own_join, thread, timeout), f"the end of thread {thread.name!r}")
        else:
            turns.wait(lambda: bool(added.ended), lambda: f"the end of thread {added.name!r}")
            own_join(thread, timeout)

    def wait(condition: Any, timeout: float | None = None) -> bool:
        asks_only = timeout is not None and timeout <= 0
        if asks_only or turns.thread_here() is None or getattr(starting, "is_native", False):
            return own_wait(condition, timeout)
        # As in Condition.wait, with turns in place of blocking. If no thread can go on, the timeout has passed.
        woken, passed = list[bool](), list[float]()

        def release() -> None:
            woken.append(True)
            turns.notice()

        def give_up() -> bool:
            if timeout is not None:
                passed.append(timeout)
            return bool(passed)

        # Stands for the lock that whoever notifies releases.
        waiter = SimpleNamespace(release=release)
        condition._waiters.append(waiter)
        saved = condition._release_save()
        ends_at = inf if timeout is None else time.monotonic() + timeout
        try:
            turns.wait(lambda: bool(woken or passed), lambda: "another thread of its own", give_up, ends_at)
        finally:
            condition._acquire_restore(saved)
            if waiter in condition._waiters:
                condition._waiters.remove(waiter)
        return bool(woken)

    def in_turns(own_select: Callable[..., Any]) -> Callable[..., Any]:
        def select(selector: Any, timeout: float | None = None) -> Any:
            if turns.thread_here() is None or (timeout is not None and timeout <= 0):
                return own_select(selector, timeout)
            return turns.wait_outside(partial(own_select, selector, timeout), "input, or its event loop")

        return select

    own_selects: dict[Any, Any] = {
        kind: kind.select
        for kind in vars(selectors).values()
        if isinstance(kind, type) and issubclass(kind, selectors.BaseSelector) and "select" in vars(kind)
    }
    for kind, own_select in own_selects.items():
        kind.select = in_turns(own_select)
    changed.Thread.start, changed.Thread.join, changed.Condition.wait = start, join, wait
    # The queue written in C blocks without passing the turn on.
    queue.SimpleQueue = getattr(queue, "_PySimpleQueue", own_queue)  # type: ignore[misc]
    try:
        yield
    finally:
        changed.Thread.start, changed.Thread.join, changed.Condition.wait = own_start, own_join, own_wait
        for kind, own_select in own_selects.items():
            kind.select = own_select
        queue.SimpleQueue = own_queue  # type: ignore[misc]
