"""Lets threads that a rank starts take turns too: a checkpoint written in the background, an executor.

Such a thread belongs to its rank. While a simulation runs, what waits in Python's own way (conditions, and with them
events, futures and queues; joins) lets others run instead of blocking the thread that holds the baton. Daemon threads
are left alone: they run at any time, wait as ever, and may not communicate.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from composable.testing.baton import Baton, Player, Unwound

__all__ = ["ThreadOfRank", "taking_turns"]


class ThreadOfRank(threading.Thread):
    """A rank's own thread: does not keep the process alive, but what it starts is no daemon for that."""

    _runs = False

    def run(self) -> None:
        self._runs = True
        super().run()

    @property
    def daemon(self) -> bool:
        return not self._runs

    @daemon.setter
    def daemon(self, value: bool) -> None:
        pass


class _Notice:
    """What a thread waits for in a condition: that its lock is released."""

    def __init__(self, lock: Any, timeout: float | None) -> None:
        self._lock = lock
        self._has_timeout = timeout is not None
        self.is_given_up = False

    def is_over(self) -> bool:
        return self.is_given_up or not self._lock.locked()

    def describe(self) -> str:
        return "another thread of its own"

    def give_up(self) -> bool:
        # Nobody can go on, so nothing but time could pass.
        self.is_given_up = self._has_timeout
        return self.is_given_up


class _End:
    """The end of a thread."""

    def __init__(self, player: Player) -> None:
        self._player = player

    def is_over(self) -> bool:
        return bool(self._player.ended)

    def describe(self) -> str:
        return f"the end of thread {self._player.name!r}"

    def give_up(self) -> bool:
        return False


@contextmanager
def taking_turns(baton: Baton, world: Callable[[], Any], adopt: Callable[[Any], None]) -> Iterator[None]:
    """Let threads that ranks start take part in ``baton`` while the context lasts.

    Args:
        baton: Whose turn it is.
        world: Returns what the calling thread has of torch.distributed.
        adopt: Gives the same to a thread that it starts.
    """
    own_start, own_join, own_wait = threading.Thread.start, threading.Thread.join, threading.Condition.wait
    own_queue = queue.SimpleQueue
    starting = threading.local()
    changed: Any = threading

    def start(thread: threading.Thread) -> None:
        if baton.player_here() is None:
            own_start(thread)
            return
        if not thread.daemon:
            take_part(thread)
        # The thread says that it has started before it waits for its turn.
        starting.is_native = True
        try:
            own_start(thread)
        finally:
            starting.is_native = False

    def take_part(thread: threading.Thread) -> None:
        player, run, of_parent = baton.add_thread(thread), thread.run, world()

        def run_in_turns() -> None:
            baton.enter(player)
            try:
                adopt(of_parent)
                run()
            except Unwound:
                pass
            finally:
                baton.end(player, "ended")

        thread.run = run_in_turns  # type: ignore[method-assign]

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        player = next((one for one in baton.players if one.thread is thread), None)
        if player is not None and baton.player_here() is not None:
            baton.wait(_End(player))
        own_join(thread, timeout)

    def wait(condition: Any, timeout: float | None = None) -> bool:
        asks_only = timeout is not None and timeout <= 0
        if asks_only or baton.player_here() is None or getattr(starting, "is_native", False):
            return own_wait(condition, timeout)
        # As in Condition.wait, with turns in place of blocking.
        lock = threading.Lock()
        lock.acquire()
        condition._waiters.append(lock)
        notice = _Notice(lock, timeout)
        saved = condition._release_save()
        try:
            baton.wait(notice)
        finally:
            condition._acquire_restore(saved)
            if lock in condition._waiters:
                condition._waiters.remove(lock)
        return not notice.is_given_up

    changed.Thread.start, changed.Thread.join, changed.Condition.wait = start, join, wait
    # The one in C waits without asking anybody.
    queue.SimpleQueue = getattr(queue, "_PySimpleQueue", own_queue)  # type: ignore[misc]
    try:
        yield
    finally:
        changed.Thread.start, changed.Thread.join, changed.Condition.wait = own_start, own_join, own_wait
        queue.SimpleQueue = own_queue  # type: ignore[misc]
