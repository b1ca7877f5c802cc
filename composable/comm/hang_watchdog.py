"""A watchdog that ends endless waits with an error.

One thread in each process looks now and then whether something was waited for too long. Then it asks every rank for its
status, through the store in which the process group has met, and has the answers diagnosed. A rank that is merely slow
is no error: that is logged, and asked again later. If the ranks have diverged, the process groups in which they wait
are closed, which ends the waits, and each raises what the diagnosis says.

A question has a number. Whoever is first to ask it collects the answers and writes the diagnosis; all ranks read it.
gloo has no way to give up a wait. But where one wait of a group runs out of time, gloo closes all connections of
the group, and every other wait in it ends: so a message that nobody sends is waited for, for a millisecond.
"""

import atexit
import logging
import math
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from composable.comm.rank_status import (
    Diagnosis,
    Meeting,
    RankStatus,
    Started,
    call_around,
    described,
    diagnose,
    group_in,
    is_torchs_wait,
    local_status,
    name_of,
    transports_of,
    waiting_here,
)
from composable.errors import ComposableError, DesyncError, place_of_rank
from composable.ground.names import check_number, ranks_text
from composable.ground.torch_private import (
    PrefixStore,
    Store,
    groups_of_process,
    real_backend,
    store_of_default_group,
)

__all__ = [
    "annotating",
    "calling",
    "diverged",
    "explain_waits",
    "explained",
    "meeting",
    "set_divergence_timeout",
    "watch_ranks",
]


VARIABLE = "COMPOSABLE_DIVERGENCE_TIMEOUT"
DEFAULT_S = 30.0
# Looks in the time of the limit, and the longest time between two.
_LOOKS = 10
_MAX_PAUSE_S = 3.0
# How long ranks get to answer, in looks and at least in seconds: a rank may hold the interpreter's lock.
_PATIENCE_LOOKS = 5
_MIN_PATIENCE_S = 2.0
# Of the message that nobody sends.
_NO_TAG = 2**31 - 1
_FIX = (
    "run the same modules in the same order on every rank, and let every rank raise, or none; "
    "the process groups are closed: start again from a checkpoint"
)
_LOG = logging.getLogger("composable")


@contextmanager
def meeting(group: dist.ProcessGroup | None, kind: str, what: str = "", **details: Any) -> Iterator[None]:
    """Put a wait on record while the context lasts, and explain what torch raises there; as ``Meeting``."""
    try:
        with Meeting(group, kind, what, **details):
            yield
    except ComposableError:
        raise
    except RuntimeError as error:
        raise explained(error, group, what=what or call_around(sys._getframe(2))) from error


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Say of what is waited for in this context that it is part of ``what``: a call in which modules are annotated."""
    with Meeting(None, "", what):
        yield


@contextmanager
def annotating(caller: str) -> Iterator[None]:
    """Watch over the ranks from this call on, and remember for the others what it raises."""
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
        raise explained(error, group_in(trace.tb_frame), what=call_around(trace.tb_frame)) from error


def explained(error: RuntimeError, waited: Started | dist.ProcessGroup | None, *, what: str = "") -> RuntimeError:
    """Return the error for a wait that ended with ``error``: that of the diagnosis, if there is one.

    Args:
        error: What ended the wait.
        waited: What was waited for, or the group in which.
        what: The call that waited in the group.
    """
    groups = waited.transport.groups if isinstance(waited, Started) else (waited or dist.group.WORLD,)
    thread = _WATCH.thread
    if thread is not None:
        thread.look_now()
        for group in groups:
            if group is not None and group in _WATCH.closed:
                return diverged(_WATCH.closed[group])
    what = name_of(waited)[0] if isinstance(waited, Started) else f"the other ranks in {what}"
    at = place_of_rank()
    with suppress(KeyError, RuntimeError, ValueError):  # of a group that was destroyed
        others = [one for one in dist.get_process_group_ranks(groups[0]) if one != dist.get_rank()]
        at = f"{at}, waiting for {ranks_text(others)}"
    first_line = str(error).partition("\n")[0]
    return DesyncError(
        f"the wait for {what} has ended by an error of the process group: {first_line}",
        at=at,
        fix="read the errors of the other ranks first: one has ended, cannot be reached, or kept this one waiting "
        "longer than the group permits; docs/cluster.md says what to do next",
    )


def diverged(lines: Sequence[str]) -> DesyncError:
    """Return what every rank raises that uses a group which was closed; ``lines``: of the diagnosis."""
    return DesyncError(
        "\n".join(["the ranks went different ways, and one waits for a call that will never come", *lines]),
        at=place_of_rank(),
        fix=_FIX,
    )


def set_divergence_timeout(seconds: float | None) -> None:
    """Choose how long a rank waits for others before all ranks are asked where they are.

    If they have diverged, every rank raises ``DesyncError``. Each rank calls it, or the environment variable
    ``COMPOSABLE_DIVERGENCE_TIMEOUT`` says the same; the default is 30 seconds.

    Args:
        seconds: The limit; ``None``, 0 or infinity: never ask.

    Raises:
        ConfigError: ``seconds`` is no such number.
    """
    _WATCH.limit_s = _limit(seconds, "seconds")
    _WATCH.start()


def watch_ranks() -> None:
    """Watch over the ranks also where nothing was annotated: ranks that did may wait for this one."""
    if _WATCH.thread is None and not torch.compiler.is_compiling() and dist.is_available() and dist.is_initialized():
        _WATCH.start()


class _Watch:
    """What a process has: the limit, the thread for its default process group, and why groups were closed."""

    def __init__(self) -> None:
        self.closed: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self.limit_s: float | None = None
        self.failed_call = ""
        self.thread: _Thread | None = None

    def start(self) -> None:
        """Watch over the default process group, if it has other ranks and nobody does yet."""
        if self.limit_s is None:
            self.limit_s = _limit(os.environ.get(VARIABLE, DEFAULT_S), VARIABLE)
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is not None and not real_backend(group):
            return
        if self.thread is not None:
            if self.thread.is_alive() and self.thread.limit_s == self.limit_s and self.thread.group() is group:
                return
            self.thread.end()
            self.thread = None
        if group is None or not self.limit_s or group.size() == 1:
            return
        self.thread = _Thread(self, group, self.limit_s)
        self.thread.start()
        atexit.unregister(self.end)
        # Before the interpreter ends: a thread that it finds in a call of the store would abort the process.
        atexit.register(self.end)

    def end(self) -> None:
        if self.thread is not None:
            self.thread.end()


@dataclass
class _Seen:
    """A wait, as the watch has seen it."""

    mark: tuple[object, ...]
    since: float
    patience_s: float  # Until the ranks are asked.


class _Thread(threading.Thread):
    """Watches until the process group is destroyed.

    Attributes:
        limit_s: How long a wait may take until the ranks are asked.
    """

    def __init__(self, watch: _Watch, group: dist.ProcessGroup, limit_s: float) -> None:
        super().__init__(name="composable watch", daemon=True)
        self.group = weakref.ref(group)
        self.limit_s = limit_s
        self._watch = watch
        self._rank = group.rank()
        self._size = group.size()
        # A connection of its own: one that waits for a key is locked meanwhile.
        store: Store = store_of_default_group().clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        store.set_timeout(timedelta(seconds=60))
        self._store: Store = PrefixStore("composable watch", store)
        self._pause_s = min(limit_s / _LOOKS, _MAX_PAUSE_S)
        self._patience_s = max(_PATIENCE_LOOKS * self._pause_s, _MIN_PATIENCE_S)
        self._question = 0
        self._wake = threading.Event()
        self._looked = threading.Condition()
        self._looks = 0
        self._is_ended = False
        self._seen: _Seen | None = None

    def end(self) -> None:
        """Let the thread come to its end."""
        self._is_ended = True
        self._wake.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout=_MIN_PATIENCE_S)

    def look_now(self) -> None:
        """Return when the thread has read what the other ranks have decided so far, if the store still answers."""
        deadline = time.monotonic() + 2 * self._patience_s
        with self._looked:
            # Of a look that is under way, it is not known what it has read already.
            enough = self._looks + 2
            while self._looks < enough and self.is_alive() and not self._is_ended and time.monotonic() < deadline:
                self._wake.set()
                self._looked.wait(self._patience_s / 20)

    def run(self) -> None:
        try:
            while self._store.check([self._key("verdict")]):
                self._question += 1  # An old one.
            while not self._is_ended and not self._is_over():
                self._look()
                with self._looked:
                    self._looks += 1
                    self._looked.notify_all()
                self._wake.wait(self._pause_s)
                self._wake.clear()
        except Exception as error:
            # The store ends with the rank or the launcher that holds it.
            _LOG.debug("the thread that watches ranks that wait has ended: %s", error)
        finally:
            with self._looked:
                self._is_ended = True
                self._looked.notify_all()

    def _is_over(self) -> bool:
        """Say whether the process group was destroyed."""
        return self.group() is None or dist.group.WORLD is not self.group()

    def _key(self, what: str) -> str:
        return f"{self._question}/{what}"

    def _look(self) -> None:
        is_asker = self._has_waited_too_long() and self._store.add(self._key("asked"), 1) == 1
        if is_asker or self._store.check([self._key("asked")]):
            self._answer(is_asker=is_asker)

    def _has_waited_too_long(self) -> bool:
        now, found, seen = time.monotonic(), waiting_here(), self._seen
        if found is None or not found.is_ours:
            self._seen = None
            return False
        if seen is None or seen.mark != found.mark:
            # It may have begun just after the last look, and is seen to be over after the limit at the next.
            seen = self._seen = _Seen(found.mark, now, self.limit_s - 2 * self._pause_s)
        if now - seen.since < seen.patience_s:
            return False
        # Asked again after twice as long.
        seen.patience_s = 2 * (now - seen.since) + self.limit_s
        return True

    def _answer(self, *, is_asker: bool) -> None:
        """Tell the status of this process, and do what the ranks are told."""
        status = local_status()
        if (failed := self._watch.failed_call) and status.wait is None:
            status = replace(status, failed_call=failed, text=f"{failed}; {status.text}")
        self._store.set(self._key(f"place/{self._rank}"), pickle.dumps(status))  # type: ignore[arg-type]  # bytes too
        # By the time that the diagnosis is read there may be another world, whose groups have the same names.
        groups = groups_of_process()
        if self._is_over():
            return
        diagnosis = Diagnosis()
        if is_asker:
            ranks = self._collect()
            diagnosis = diagnosis if self._is_over() else diagnose(ranks)
        # Else who asked has ended, or is slower than that. All ranks have to read the same diagnosis: the first.
        if is_asker or not self._has_come(self._key("verdict"), 4 * self._patience_s):
            self._store.compare_set(self._key("verdict"), "", diagnosis.as_text())
        diagnosis = Diagnosis.from_text(self._store.get(self._key("verdict")).decode())
        self._question += 1
        if diagnosis.groups:
            self._close(diagnosis, groups)
        elif self._seen and diagnosis.lines:
            _LOG.warning(
                "a rank has waited long for others\n%s\n  at:  %s", "\n".join(diagnosis.lines), place_of_rank()
            )

    def _collect(self) -> dict[int, RankStatus | None]:
        deadline = time.monotonic() + self._patience_s
        found: dict[int, RankStatus | None] = {}
        for rank in range(self._size):
            key = self._key(f"place/{rank}")
            is_there = self._has_come(key, deadline - time.monotonic())
            # What these ranks have written just now.
            found[rank] = pickle.loads(self._store.get(key)) if is_there else None
        return found

    def _has_come(self, key: str, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while not self._store.check([key]):
            if time.monotonic() >= deadline or self._is_ended:
                return False
            time.sleep(min(self._pause_s, 0.02))
        return True

    def _close(self, diagnosis: Diagnosis, known: Mapping[str, dist.ProcessGroup]) -> None:
        """End every wait in the groups of the diagnosis, of those ``known``, and let nobody start anything in them."""
        groups = {name: group for name, group in known.items() if name in diagnosis.groups}
        found = waiting_here()
        if groups and (found is None or not found.is_ours):
            # Who does not wait in a call of this package learns of it at the next collective.
            _LOG.error("%s", diverged(diagnosis.lines))
        self._watch.closed.update(dict.fromkeys(groups.values(), diagnosis.lines))
        for transport in transports_of(groups.values()):
            transport.closed_because = diagnosis.lines
        for group in groups.values():
            _end_waits(group)


def _end_waits(group: dist.ProcessGroup) -> None:
    if real_backend(group) != "gloo":
        # NCCL's own watchdog ends what waits on the device.
        return
    for peer in range(group.size()):
        # A connection that its peer has closed ends this wait at once, and leaves the others open.
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def _limit(value: object, name: str) -> float:
    """Return the limit in seconds; 0: none."""
    if value is None:
        return 0.0
    if isinstance(value, str):  # of the environment
        with suppress(ValueError):
            value = float(value)
    seconds = check_number(
        name, value, least=0.0, fix="give a number of seconds, 0 to wait as long as the process group does"
    )
    return seconds if seconds < math.inf else 0.0


_WATCH = _Watch()
