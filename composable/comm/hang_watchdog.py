"""A watchdog that ends endless waits with an error.

One thread in each process checks at intervals whether the process has waited too long. If so, it asks every rank for
its status, through the store of the default process group, and diagnoses the answers. A rank that is merely slow is no
error: the thread logs it, and asks again later. If the ranks have diverged, the thread closes the process groups in
which they wait. That ends the waits, and each wait raises the diagnosis.

A question has a number. The first rank that asks it collects the answers and writes the diagnosis; all ranks read it.
gloo cannot give up a single wait. But when one wait of a group runs out of time, gloo closes all connections of the
group, and every other wait in it ends: so the thread waits a millisecond for a message that nobody sends.
"""

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from composable.comm.users_frames import call_around, collective_in, is_torchs_wait
from composable.comm.waits import (
    Diagnosis,
    Meeting,
    RankStatus,
    Started,
    described,
    diagnose,
    is_training_thread,
    local_status,
    name_of,
    order_of,
    transports_of,
    waiting_here,
)
from composable.errors import ComposableError, DesyncError, UsageError, explain, place_of_rank
from composable.ground.names import check_number, ranks_text
from composable.ground.torch_private import PrefixStore, Store, groups_of_process, real_backend, store_of_default_group

_T = TypeVar("_T")
VARIABLE = "COMPOSABLE_DIVERGENCE_TIMEOUT"
DEFAULT_S = 30.0
# How often the thread looks within the limit, and the longest pause between two looks.
_LOOKS = 10
_MAX_PAUSE_S = 3.0
# How long ranks may take to answer, in looks, and the least time in seconds: a rank may hold the interpreter's lock.
_PATIENCE_LOOKS = 5
_MIN_PATIENCE_S = 2.0
_LONGEST_WORD = 300
_LEFT = "sys.exit, or at the end of its program"
# The tag of the message that nobody sends.
_NO_TAG = 2**31 - 1
_FIX = (
    "run the same modules in the same order on every rank, and let every rank raise, or none (fewer batches on a rank: "
    "docs/uneven_inputs.md; layers that some ranks skip, as experts: HandleOptions(follows_parent=True); a loss that "
    "leaves out what activation checkpointing computes: add 0 * output.sum()); "
    "the process groups are closed: start again from a checkpoint"
)
_LOG = logging.getLogger("composable")


@contextmanager
def meeting(group: dist.ProcessGroup | None, kind: str, what: str = "", **details: Any) -> Iterator[None]:
    """Record a wait while the context lasts, and explain torch's errors in it; arguments as for ``Meeting``."""
    try:
        with Meeting(group, kind, what, **details) as own:
            is_real = group is not None and real_backend(group)
            if group is not None and is_real and (own.before_in_another_thread() or order_of(group).is_taken()):
                raise two_threads()
            yield
    except ComposableError:
        raise
    except RuntimeError as error:
        raise explained(error, group, what=what or call_around(sys._getframe(2))) from error


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Record that waits in this context are part of the call ``what``, such as one in which modules are annotated.

    Raises ``UsageError`` if another thread is in such a call: the messages of both would meet in any order.
    """
    with Meeting(None, "", what) as own:
        before = own.before_in_another_thread()
        if before and (world := dist.group.WORLD) is not None and real_backend(world):
            raise UsageError(
                f"two threads annotate modules, or run the first forward of a model, at once: {before} is under way",
                at=f"in {what}",
                fix="annotate models and run the first forward of each in one thread, in one order on all ranks",
            )
        yield


@contextmanager
def annotating(caller: str) -> Iterator[None]:
    """Start the watchdog for the call ``caller``, and record for other ranks an error that ends the call."""
    _WATCH.start()
    _WATCH.failed_call = ""
    try:
        with calling(caller):
            yield
    except BaseException as error:
        _WATCH.failed_call = f"has left {caller} by {described(error)}"
        raise


@contextmanager
def explain_waits() -> Iterator[None]:
    """Explain calls of ``torch.distributed`` in this context that wait for ranks that are gone.

    For collectives of your own, such as a mean of losses. An error that torch raises while it waits, in words of its
    backend, becomes a ``DesyncError`` that names the ranks it waited for and, if the ranks have diverged, where each of
    them is. Other errors pass through. Not collective.

    Raises:
        DesyncError: The wait has ended by an error, on this rank.
    """
    try:
        yield
    except RuntimeError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if isinstance(error, ComposableError) or trace is None or not is_torchs_wait(trace.tb_frame):
            raise
        raise explained(error, collective_in(trace.tb_frame)[0], what=call_around(trace.tb_frame)) from error


def explained(error: RuntimeError, waited: Started | dist.ProcessGroup | None, *, what: str = "") -> RuntimeError:
    """Return the error to raise after ``error`` has ended a wait: the diagnosis, if there is one.

    The rank waited for the collective ``waited``, or in that group in the call ``what``.
    """
    groups = waited.transport.groups if isinstance(waited, Started) else (waited or dist.group.WORLD,)
    thread = _WATCH.thread
    if thread is not None:
        thread.look_now()
        for group in filter(_WATCH.closed.get, filter(None, groups)):
            return diverged(_WATCH.closed[group])
    what = name_of(waited)[0] if isinstance(waited, Started) else f"the other ranks in {what}"
    at = place_of_rank()
    fix = (
        "read the errors of the other ranks first: one has ended, cannot be reached, or kept this one waiting "
        "longer than the group permits (docs/cluster.md), or had fewer batches (docs/uneven_inputs.md)"
    )
    with suppress(KeyError, RuntimeError, ValueError):  # of a group that was destroyed
        others = [one for one in dist.get_process_group_ranks(groups[0]) if one != dist.get_rank()]
        at = f"{at}, waiting for {ranks_text(others)}"
        none: dict[int, str] = {}
        words = none if thread is None else _in_time(partial(_words_of, thread.words, others), none)
        # An exception, if there is one: the others may have left because of it.
        for rank, word in sorted(words.items(), key=lambda told: told[1] != _LEFT):
            fix = f"rank {rank} has ended by {word[:_LONGEST_WORD]}; start again from a checkpoint"
    first_line = str(error).partition("\n")[0]
    return DesyncError(f"the wait for {what} has ended by an error of the process group: {first_line}", at=at, fix=fix)


def _words_of(words: Store, ranks: Sequence[int]) -> dict[int, str]:
    """Return what the store knows of what has ended ``ranks``."""
    return {one: words.get(str(one)).decode(errors="replace") for one in ranks if words.check([str(one)])}


def _in_time(ask: Callable[[], _T], otherwise: _T, limit_s: float = _MIN_PATIENCE_S) -> _T:
    """Return what ``ask`` has of a store, or ``otherwise`` if that fails or takes long: its host may be gone."""
    answers: list[_T] = []

    def run() -> None:
        with suppress(RuntimeError, DesyncError):
            answers.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(limit_s)
    return answers[0] if answers else otherwise


def two_threads() -> UsageError:
    """Return the error of a second thread in a process group, where ranks match collectives by their order alone."""
    return UsageError(
        "two threads communicate in one process group at once, where ranks match collectives by their order alone",
        at=place_of_rank(),
        fix="let one thread at a time train, clip, save and load. Steps alone may run in several threads: on one host "
        'with HandleOptions(transport="shared_memory"), else on meshes with groups of their own, '
        'DeviceMesh.from_group(dist.new_group(), "cpu")',
    )


def diverged(lines: Sequence[str]) -> DesyncError:
    """Return the error that a rank raises when it uses a closed group; ``lines``: the lines of the diagnosis."""
    return DesyncError(
        "\n".join(["the ranks went different ways, and one waits for a call that will never come", *lines]), fix=_FIX
    )


def set_divergence_timeout(seconds: float | None) -> None:
    """Choose how long a rank waits for others before all ranks are asked where they are.

    If they have diverged, every rank raises ``DesyncError``. Call this function on each rank, or set the environment
    variable ``COMPOSABLE_DIVERGENCE_TIMEOUT`` to the seconds; the default is 30.

    Args:
        seconds: The limit; ``None``, 0 or infinity: never ask.

    Raises:
        ConfigError: ``seconds`` is negative or not a number.
    """
    _WATCH.limit_s = _limit(seconds, "seconds")
    _WATCH.start()


def watch_ranks() -> None:
    """Start the watchdog also on a rank that has annotated nothing: ranks that have annotated may wait for it."""
    if _WATCH.thread is None and not torch.compiler.is_compiling() and dist.is_available() and dist.is_initialized():
        _WATCH.start()


def check_store() -> None:
    """Raise ``DesyncError`` if the process with the store of the default group has ended: torch tries for minutes."""
    try:
        store_of_default_group().check(["composable watch"])
    except dist.DistError as error:
        raise DesyncError(
            f"the store of the process group does not answer: {str(error).splitlines()[0]}",
            fix="keep the process that holds it, torchrun's or that of rank 0, until all ranks have ended; start again",
        ) from error
    except RuntimeError:
        pass  # A store that cannot be asked, as that of torch's fake backend.


class _Watch:
    """The watchdog of a process: the limit, the thread for the default process group, and why groups were closed."""

    def __init__(self) -> None:
        self.closed: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self.limit_s: float | None = None
        self.failed_call = ""
        self.thread: _Thread | None = None
        self._show_uncaught: Callable[..., object] | None = None

    def start(self) -> None:
        """Start a thread for the default process group, if the group has other ranks and no thread yet."""
        if self.limit_s is None:
            self.limit_s = _limit(os.environ.get(VARIABLE, DEFAULT_S), VARIABLE)
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is not None and not real_backend(group):
            return
        if (old := self.thread) is not None:
            if old.is_alive() and (old.limit_s, old.group()) == (self.limit_s, group):
                return
            old.end()
            self.thread = None
        if group is None or not self.limit_s or group.size() == 1:
            return
        check_store()
        self.thread = _Thread(self, group, self.limit_s)
        self.thread.start()
        atexit.unregister(self.end)
        # Before the interpreter ends: a thread that it finds in a call of the store would abort the process.
        atexit.register(self.end)
        if self._show_uncaught is None:
            self._show_uncaught, sys.excepthook = sys.excepthook, self._uncaught

    def _uncaught(self, kind: Any, error: BaseException, trace: Any) -> None:
        """Show an exception that ends this process, and end the waits of other ranks for it: a process ends slowly."""
        explain(error)
        try:
            (self._show_uncaught or sys.__excepthook__)(kind, error, trace)
        finally:
            thread, goes_on = self.thread, hasattr(sys, "ps1") or sys.flags.interactive
            if thread is not None and thread.is_alive() and is_training_thread() and not goes_on:
                _in_time(partial(thread.words.set, str(thread.rank), described(error)), None)
                _end_all_waits()

    def end(self) -> None:
        """End the thread with the process, and the waits of other ranks for it: what follows takes a second."""
        if self.thread is not None and self.thread.is_alive():
            self.thread.end(_LEFT)
            _end_all_waits()


class _Thread(threading.Thread):
    """The watchdog thread, until the process group is destroyed; it asks the ranks where a wait takes ``limit_s``."""

    def __init__(self, watch: _Watch, group: dist.ProcessGroup, limit_s: float) -> None:
        super().__init__(name="composable watch", daemon=True)
        self.group = weakref.ref(group)
        self.limit_s = limit_s
        self._watch = watch
        self.rank = group.rank()
        self._size = group.size()
        # A connection of its own: a connection is locked while a call on it waits for a key.
        store: Store = store_of_default_group().clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        store.set_timeout(timedelta(seconds=60))
        self._store: Store = PrefixStore("composable watch", store)
        self.words: Store = PrefixStore("composable uncaught", store)  # What has ended each rank.
        self._pause_s = min(limit_s / _LOOKS, _MAX_PAUSE_S)
        self._patience_s = max(_PATIENCE_LOOKS * self._pause_s, _MIN_PATIENCE_S)
        self._question = 0
        self._ended = threading.Event()
        self._last_word = ""
        self._looking = threading.Lock()
        self._has_caught_up = False
        self._seen: tuple[object, ...] = ()  # The mark of the wait that it has seen last; empty: there is none.
        self._since = self._asks_after_s = 0.0  # Since when it sees that wait, and the time until it asks the ranks.
        self._told: set[str] = set()

    def end(self, word: str = "") -> None:
        """End the thread, and wait a short time for its end; ``word``: what ends the process, told to other ranks."""
        self._last_word = word
        self._ended.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout=_MIN_PATIENCE_S)

    def look_now(self) -> None:
        """Read the decisions of the other ranks so far, if the store still answers."""
        if self.is_alive() and not self._ended.is_set():
            # Not as a part of a look that is under way, which may have read the store too early.
            _in_time(self._look, None, 2 * self._patience_s)

    def run(self) -> None:
        while not self._ended.is_set() and not self._is_over():
            failure: Exception | None = None
            try:
                self._look()
            except Exception as error:
                failure = error
            # The store ends with the rank or the launcher that holds it, often just before this rank ends.
            if not self._ended.wait(self._pause_s) and failure is not None and not self._is_over():
                self._warn("the store of the process group has failed", f"{type(failure).__name__}: {failure}")
        if self._last_word and not self._is_over():
            with suppress(RuntimeError):
                self.words.compare_set(str(self.rank), "", self._last_word)

    def _is_over(self) -> bool:
        """Say whether the process group was destroyed."""
        return self.group() is None or dist.group.WORLD is not self.group()

    def _key(self, what: str) -> str:
        return f"{self._question}/{what}"

    def _look(self) -> None:
        with self._looking:
            while not self._has_caught_up and self._store.check([self._key("verdict")]):
                self._question += 1  # An old question.
            self._has_caught_up = True
            is_asker = self._has_waited_too_long() and self._store.add(self._key("asked"), 1) == 1
            if is_asker or self._store.check([self._key("asked")]):
                self._answer(is_asker=is_asker)

    def _has_waited_too_long(self) -> bool:
        now, found = time.monotonic(), waiting_here()
        mark = found.mark if found is not None and found.is_ours else ()
        if mark != self._seen:
            # The wait may be a pause old already, and a look may come a pause late: ask within the limit even so.
            self._seen, self._since, self._asks_after_s = mark, now, self.limit_s - 2 * self._pause_s
        if not mark or now - self._since < self._asks_after_s:
            return False
        # Ask again after twice the time.
        self._asks_after_s = 2 * (now - self._since) + self.limit_s
        return True

    def _answer(self, *, is_asker: bool) -> None:
        """Write the status of this process to the store, then read the diagnosis and act on it."""
        status = local_status()
        if (failed := self._watch.failed_call) and status.wait is None:
            status = replace(status, failed_call=failed, text=f"{failed}; {status.text}")
        self._store.set(self._key(f"place/{self.rank}"), status.as_text())
        # Listed before the diagnosis is read: by then there may be another world, with groups of the same names.
        groups = groups_of_process()
        if self._is_over():
            return
        # Without a diagnosis in time, the asking rank has ended or is slow. All ranks read the same one: the first.
        if is_asker or not self._has_come(self._key("verdict"), 4 * self._patience_s):
            ranks = self._collect() if is_asker else {}
            diagnosis = Diagnosis() if self._is_over() else diagnose(ranks)
            self._store.compare_set(self._key("verdict"), "", diagnosis.as_text())
        diagnosis = self._read(self._key("verdict"), Diagnosis.from_text) or Diagnosis()
        self._question += 1
        if diagnosis.groups:
            self._close(diagnosis, groups)
        elif self._seen and diagnosis.lines:
            _LOG.warning(
                "a rank has waited long for others\n%s\n  at:  %s", "\n".join(diagnosis.lines), place_of_rank()
            )

    def _collect(self) -> dict[int, RankStatus | None]:
        deadline = time.monotonic() + self._patience_s
        keys = {rank: self._key(f"place/{rank}") for rank in range(self._size)}
        has_come = {rank: self._has_come(key, deadline - time.monotonic()) for rank, key in keys.items()}
        return {rank: self._read(key, RankStatus.from_text) if has_come[rank] else None for rank, key in keys.items()}

    def _read(self, key: str, read: Callable[[str], _T]) -> _T | None:
        """Return what ``read`` makes of an answer; ``None`` if it is none: others can reach the store too."""
        answer = self._store.get(key)
        try:
            return read(answer.decode())
        except (ValueError, RecursionError) as error:
            self._warn("an answer in the store is not from this library, and counts as none", f"{key}: {error}")
            return None

    def _warn(self, what: str, why: object) -> None:
        """Log a fault of the store, each kind once."""
        if what not in self._told:
            self._told.add(what)
            _LOG.warning("watching for ranks that wait for ever: %s\n  at:  %s, %s", what, place_of_rank(), why)

    def _has_come(self, key: str, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while not self._store.check([key]):
            if time.monotonic() >= deadline or self._ended.is_set():
                return False
            time.sleep(min(self._pause_s, 0.02))
        return True

    def _close(self, diagnosis: Diagnosis, known: Mapping[str, dist.ProcessGroup]) -> None:
        """Close the groups of the diagnosis that are in ``known``: end every wait in them, refuse new collectives."""
        groups = {name: group for name, group in known.items() if name in diagnosis.groups}
        found = waiting_here()
        if groups and (found is None or not found.is_ours):
            # A rank that waits in no call of this package gets the error only at its next collective.
            _LOG.error("%s", diverged(diagnosis.lines))
        self._watch.closed.update(dict.fromkeys(groups.values(), diagnosis.lines))
        for transport in transports_of(groups.values()):
            transport.closed_because = diagnosis.lines
        for group in groups.values():
            _end_waits(group)


def _end_all_waits() -> None:
    """End the waits for this rank in the groups of annotations.

    Not in the groups of other threads, such as one that still writes a checkpoint.
    """
    for transport in transports_of(groups_of_process().values()):
        transport.leave()
        for group in transport.groups:
            _end_waits(group)


def _end_waits(group: dist.ProcessGroup) -> None:
    if real_backend(group) != "gloo":
        # NCCL's own watchdog ends waits on the device.
        return
    for peer in range(group.size()):
        # A connection that its peer has closed ends this wait at once, and leaves the others open.
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def _limit(value: object, name: str) -> float:
    """Return the limit in seconds; 0: no limit."""
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value  # Text of the environment.
    fix = "give a number of seconds, 0 to wait as long as the process group does"
    seconds = 0.0 if value is None else check_number(name, value, least=0.0, fix=fix)
    return seconds if seconds < math.inf else 0.0


_WATCH = _Watch()
