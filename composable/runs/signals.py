"""A notice that this process will be ended, and the save that all ranks then make after the same step.

A rank that has had a notice writes at the end of its step ``s`` the step after which all ranks save, ``s + 1``, to the
store of the default process group. Every rank looks there once, at the end of each step. No rank ends step ``s + 1``
without the gradients that the first one sends in that step, after it wrote: so every rank finds the number in time. Of
several ranks that write, the first one counts: it has written before any rank could end the step that it chose.

This holds if each step has a backward that averages gradients over all ranks. A device may run behind its host, which
then ends a step before the average is there. So the host waits at the end of a step until the device has ended the step
before, and all save after ``s + 2``.
"""

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from composable.comm import Ranks
from composable.errors import ConfigError, DesyncError, UsageError
from composable.ground.names import check_int
from composable.ground.torch_private import PrefixStore, store_of_default_group
from composable.runs.storage import Storage

# Whoever signals all processes of a job signals torchrun too, which sends the signal to its ranks once more.
_ECHO_S = 5.0
_LOG = logging.getLogger("composable")


class SaveNotice(AbstractContextManager["SaveNotice"]):
    """The result of ``save_on_signal``: it is told the end of every step, and saves after the agreed one."""

    def __init__(self, ranks: Ranks, key: str, save: Callable[..., object], kind: str, exit_code: int | None):
        self._save, self._exit_code, self._rank = save, exit_code, ranks.rank
        self._store = None if ranks.is_alone else PrefixStore(f"composable notice/{key}", store_of_default_group())
        self._process = os.getpid()
        # The device that may run behind its host, and an event at the end of the last step there.
        self._device: Any = None if kind == "cpu" else torch.get_device_module(kind)
        self._ended: Any = None
        self._before: dict[int, Any] = {}  # The handlers of before.
        self._came: dict[int, float] = {}  # When each signal has come for the first time.
        self._is_asked = self._is_over = False
        self._last = -1
        self._due: tuple[int, int] | None = None  # The step after which all ranks save, and the rank that chose it.

    def request(self) -> None:
        """Give a notice by hand, as a signal does: on any rank, in any thread. Not collective."""
        self._is_asked = True

    def step(self, step: int, *, extra: Any = None) -> bool:
        """Tell the end of a step; after a notice on any rank, save and end the process, on all ranks after one step.

        All ranks call it after each optimizer step, with the same number. It asks the store of the process group once;
        on a device it also waits for the end of the step before. In ``Join``, call it in the ``step`` of ``joinable``.

        Args:
            step: Optimizer steps done, more than in the call before; as for ``save_checkpoint``.
            extra: As for ``save_checkpoint``, or a function that returns it, which is called before a save only.

        Returns:
            Whether the run was saved; then it is time to return. Only if ``exit_code`` is ``None``.

        Raises:
            SystemExit: The run was saved, on every rank; with the ``exit_code`` of ``save_on_signal``.
            ConfigError: ``step`` is no number, or not above the last one.
            UsageError: The notice is closed, or the run was saved already; or the save has failed.
            DesyncError: Other ranks save after an earlier step, or the store does not answer.
        """
        if self._is_over:
            raise UsageError("step() of a notice that is closed, or has saved", fix="call save_on_signal again")
        check_int("step", step, self._last + 1, fix=f"pass a number above {self._last}, the last")
        self._last = step
        if self._device is not None:
            if self._ended is not None:
                self._ended.synchronize()
            self._ended = self._device.current_stream().record_event()
        self._due = self._due or self._look(step)
        if self._due is None or step < self._due[0]:
            return False
        if step > self._due[0]:
            what = f"this rank is after step {step}, and rank {self._due[1]} has asked all to save after {self._due[0]}"
            raise DesyncError(what, fix="average gradients, and then call step(), in each step on every rank")
        self._is_over = True
        self._save(step, extra=extra() if callable(extra) else extra)
        if self._rank == self._due[1]:
            _LOG.warning("rank %d had a notice: all ranks have saved step %d", self._rank, step)
        if self._exit_code is None:
            return True
        raise SystemExit(self._exit_code)

    def _look(self, step: int) -> tuple[int, int] | None:
        """Return the step after which all ranks save and the rank that chose it, if one has; choose it if asked to."""
        if self._store is None:
            return (step, self._rank) if self._is_asked else None
        wanted = f"{step + (1 if self._device is None else 2)} {self._rank}"
        try:
            if not self._is_asked and not self._store.check(["due"]):
                return None
            # Atomic: the number of the first rank stays.
            due, by = self._store.compare_set("due", "", wanted).decode().split()
        except RuntimeError as error:
            raise DesyncError("the store does not answer", fix="load the last save") from error
        return int(due), int(by)

    def close(self) -> None:
        """Let signals do what they did before ``save_on_signal``, as the end of a ``with`` does. Not collective."""
        self._is_over = True
        while self._before:
            signal.signal(*self._before.popitem())

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_signal(self, number: int, frame: object) -> None:
        """Note a signal. The same one again ends the process, and in a fork SIGTERM does, which its parent may send."""
        is_again = time.monotonic() - self._came.setdefault(number, time.monotonic()) > _ECHO_S
        if is_again if os.getpid() == self._process else number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._is_asked = True


def save_on_signal(
    run: str | PathLike[str] | Storage,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
    keep: int = 2,
    exit_code: int | None = 75,
) -> SaveNotice:
    """Save at a signal to any rank, on all ranks after the same step, and end them.

    In a loop::

        notice = save_on_signal("run", model, optimizer)
        for step in range(done + 1, steps + 1):
            ...
            optimizer.step()
            notice.step(step, extra=schedule.state_dict)

    Collective: all ranks, with equal arguments, in their main threads. A notice that comes during a step is obeyed
    after the next one, on a device after the one after that; a run that ends before goes on to its end. The same signal
    again, more than 5 s later, ends the process as soon as Python runs. A background save is waited for.

    Args:
        run: The folder of the run, a path, a URL or a ``Storage``, as for ``save_checkpoint``.
        model: As for ``save_checkpoint``. In each step a backward averages gradients over all ranks.
        optimizer: As for ``save_checkpoint``.
        signals: The signals that are notices. Empty: only ``SaveNotice.request`` is, in any thread.
        keep: As for ``save_checkpoint``.
        exit_code: The code with which processes end after the save. 75 is ``EX_TEMPFAIL`` of sysexits.h: try again.
            ``None``: they go on, and ``SaveNotice.step`` returns true.

    Raises:
        ConfigError: A wrong argument, on any rank.
        DesyncError: Ranks gave different values of ``exit_code``.
        UsageError: Another ``save_on_signal`` has these signals, or this is not the main thread, on any rank.
    """
    # Not above: they import torch's checkpoints.
    from composable.runs.checkpoint import checked_run, save_checkpoint

    ranks = Ranks.of_world()
    with ranks.agreed():
        checked_run("run", run, model, optimizer, keep)
        numbers = _checked(signals)
        if exit_code is not None:
            check_int("exit_code", exit_code, 0, 127, fix="pass 0 to 127, or None")
    text, what = f"exit_code={exit_code}", "the ranks call save_on_signal with different arguments"
    ranks.compare(text, shown=text, what=what, fix="make the call with equal arguments on all ranks")
    key = ranks.object_of(0, secrets.token_hex(8))
    kinds = {ranks.device.type, *(tensor.device.type for tensor in model.parameters())} - {"cpu", "meta"}
    save = partial(save_checkpoint, run, model=model, optimizer=optimizer, keep=keep)
    notice = SaveNotice(ranks, key, save, min(kinds, default="cpu"), exit_code)
    # A handler that C code has installed reads as None, and cannot be put back.
    notice._before = {one: signal.signal(one, notice._on_signal) or signal.SIG_DFL for one in numbers}
    return notice


def _checked(signals: Iterable[int]) -> tuple[signal.Signals, ...]:
    """Return the signals, for which this thread may install handlers."""
    try:
        numbers = tuple(dict.fromkeys(signal.Signals(one) for one in signals))
    except (TypeError, ValueError):
        numbers = (signal.SIGKILL,)  # which no process catches
    if {signal.SIGKILL, signal.SIGSTOP} & {*numbers}:
        raise ConfigError(f"signals is {signals!r}", fix="pass signals to catch, such as [signal.SIGTERM]")
    if numbers and threading.current_thread() is not threading.main_thread():
        what = "save_on_signal in a thread: signals come to the main thread"
        raise UsageError(what, fix="call it there, or pass signals=() and call request() of what it returns")
    taken = [one.name for one in numbers if isinstance(getattr(signal.getsignal(one), "__self__", None), SaveNotice)]
    if taken:
        raise UsageError(f"another save_on_signal has {taken[0]}", fix="close() it first, or make one for all")
    return numbers
