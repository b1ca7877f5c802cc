"""Watches a run: figures of some steps, to a line of progress, lines of JSON and TensorBoard.

Nothing here is collective, and no step waits for its device: what lies on a device is copied to the host beside other
work, and written in a later step, once it has come. Waits are timed only in the steps that are written.

Source: model FLOPs utilisation (MFU), arXiv 2204.02311, appendix B.
"""

import json
import math
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.annotation import nothing_annotated, states_of
from composable.comm import Ranks
from composable.engine import StepListener, Work
from composable.errors import ConfigError, UsageError, warn_once
from composable.ground.names import as_path, bytes_text, check_bool, check_int, check_module, check_number, described
from composable.replication import moment, ms_apart

# The figures that are measured, and how a line shows them.
_SHOWN: dict[str, Callable[[float], str]] = {
    "step": "step {}".format,
    "step_ms": "{:.1f} ms a step".format,
    "tokens_per_s": "{:,.0f} tokens/s a rank".format,
    "mfu": "MFU {:.1%}".format,
    "exposed_ratio": "{:.0%} exposed communication".format,
    "peak_bytes": lambda value: f"peak {bytes_text(int(value))}",
}


def watch(
    model: nn.Module,
    *,
    every: int = 10,
    flops: float | None = None,
    peak_flops: float | None = None,
    show: Callable[[str], object] | bool = True,
    jsonl: str | PathLike[str] | None = None,
    writer: Any = None,
    done: int = 0,
) -> "Watch":
    """Tell the figures of a run: after its first step, and after each whose number is a multiple of ``every``.

    Not collective, and no step waits for its device. Rank 0 measures and writes; other ranks only check arguments. The
    figures, and what each costs: docs/watch.md.

    Args:
        model: A module with annotated modules at or below it.
        every: Steps from one line to the next, 1 or more.
        flops: Floating-point operations for one token, forward and backward; with ``peak_flops`` it gives the MFU.
        peak_flops: The most that the device of one rank does in a second, in the dtype of computation.
        show: ``True``: one line that rich rewrites in a terminal; without rich or a terminal, printed lines. ``False``:
            none. Or a function that gets each line, such as ``logger.info``.
        jsonl: A file to which JSON objects are added, a line each, with ``null`` for numbers that are not finite.
        writer: A ``SummaryWriter`` of TensorBoard, or what has its ``add_scalar``. Whoever made it closes it.
        done: Steps done before, in a run that is resumed.

    Returns:
        A context whose value is the ``Watch`` itself, to be told the end of each step.

    Raises:
        ConfigError: An argument is of another kind, one of ``flops`` and ``peak_flops`` is missing, or ``jsonl`` cannot
            be opened, as the context begins.
        UsageError: Nothing is annotated there.

    Example::

        with watch(model, jsonl="run.jsonl") as w:
            for batch in batches:
                loss = train_step(batch)
                w.step(tokens=batch.numel(), loss=loss)
    """
    check_module("model", model)
    for name, value, least in (("every", every, 1), ("done", done, 0)):
        check_int(name, value, least, fix=f"pass a number of steps, {least} or more")
    if (flops, peak_flops) != (None, None):
        fix = "pass flops, for a token, and peak_flops, of a device in a second: the MFU needs both"
        flops = check_number("flops", flops, above=0, fix=fix) / check_number(
            "peak_flops", peak_flops, above=0, fix=fix
        )
    if not callable(show):
        check_bool("show", show)
    if writer is not None and not callable(getattr(writer, "add_scalar", None)):
        raise ConfigError(f"writer is {described(writer)}", fix="pass a torch.utils.tensorboard.SummaryWriter")
    path = None if jsonl is None else as_path("jsonl", jsonl)
    return Watch(model, every, flops, done, show, path, writer)


class _Waits(StepListener):
    """Times the waits of a step for gathers and reductions."""

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now, self.began = now, now()
        self.spans: list[tuple[Any, Any]] = []

    @contextmanager
    def work(self, work: Work, handle: Any, name: str) -> Iterator[None]:
        start = self._now()
        yield
        if work in (Work.WAIT_FOR_GATHER, Work.WAIT_FOR_REDUCE):
            self.spans.append((start, self._now()))


class Watch:
    """What ``watch`` gives, a context: it is told the end of each step, and writes the figures of some.

    Attributes:
        figures: Those that were written last, by name; empty before that, and on ranks other than 0.
    """

    def __init__(
        self, model: nn.Module, every: int, ratio: float | None, done: int, show: Any, path: Path | None, writer: Any
    ) -> None:
        self._states = states_of(model.modules())
        if not self._states:
            raise nothing_annotated("watch", model)
        devices = [state.grid.everyone.device for state in self._states]
        self._device = next((one for one in devices if one.type != "cpu"), devices[0])
        self._now = partial(moment, self._device)
        world = Ranks.of_world()
        self._measures = world.numbers[world.rank] == 0
        self.figures: dict[str, float] = {}
        self._tell: list[Callable[[dict[str, float]], object]] = []
        self._every, self._ratio, self._first, self._step = every, ratio, done + 1, done
        # Of the steps after the last line: when they began, their number and tokens.
        self._start, self._steps, self._tokens = self._now(), 0, 0
        # Lines on their way: a moment after which the device has filled what the figures are made of, and the function.
        self._pending: list[tuple[Any, Callable[[], dict[str, float]]]] = []
        self._waits: _Waits | None = None
        self._is_on = False
        self._exits, self._show, self._path, self._writer = ExitStack(), show, path, writer

    def __repr__(self) -> str:
        return f"<Watch: {_line(self.figures) if self.figures else 'no figures yet'}>"

    def __enter__(self) -> "Watch":
        if self._measures and self._path is not None:
            try:
                file = self._exits.enter_context(self._path.open("a", encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"jsonl cannot be opened: {error}", fix="pass a file in a folder") from error
            self._tell.append(partial(_add_line, file))
        if self._measures and self._writer is not None:
            self._tell.append(partial(_add_scalars, self._writer))
        if self._measures and self._show is not False:
            show_line = _progress(self._exits) if self._show is True else self._show
            self._tell.append(lambda figures: show_line(_line(figures)))
        self._exits.callback(self._end)
        self._is_on, self._start = True, self._now()
        self._begin_step()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with self._exits:
            if error is None:
                if self._measures and self._step < self._first:
                    warn_once("watch was told of no step, and shows nothing: call w.step() at the end of each step")
                self._write(is_last=True)

    def step(self, tokens: int | None = None, **figures: Any) -> None:
        """Tell the end of a step, after the optimizer's.

        Args:
            tokens: Those of this rank in this step; pass them in all steps or in none.
            **figures: Numbers, or tensors of one element on any device, such as ``loss`` and ``grad_norm``. A line has
                those of its step, as rank 0 has them.

        Raises:
            ConfigError: An argument is of another kind, or has the name of a figure that is measured.
            UsageError: The context is not entered, or left.
        """
        if not self._is_on:
            raise UsageError("step() of a watch outside of its context", fix="call it in `with watch(...) as w:`")
        if (tokens is None and self._ratio) or not (tokens is None or (type(tokens) is int and tokens >= 0)):
            raise ConfigError(f"tokens is {described(tokens)}", fix="pass how many tokens this rank had in the step")
        values = {name: _value(name, one) for name, one in figures.items()}
        self._step, self._steps, self._tokens = self._step + 1, self._steps + 1, self._tokens + (tokens or 0)
        if self._waits is not None:
            waits, start, per_step = self._waits, self._start, (self._steps, self._tokens)
            self._end_waits()
            hosted = {name: one.to("cpu", non_blocking=True, copy=True) for name, one in values.items()}
            peak_bytes, self._start = _peak_bytes(self._device), self._now()
            measured = self._step, *per_step, start, self._start, waits, peak_bytes
            self._pending.append((self._start, partial(self._figures_of, *measured, hosted)))
            self._steps = self._tokens = 0
        self._write()
        self._begin_step()

    def _begin_step(self) -> None:
        step = self._step + 1
        if self._measures and (step == self._first or step % self._every == 0):
            self._waits = _Waits(self._now)
            for state in self._states:
                state.listeners.add(self._waits)

    def _end_waits(self) -> None:
        waits, self._waits = self._waits, None
        if waits is not None:
            for state in self._states:
                state.listeners.remove(waits)

    def _end(self) -> None:
        self._is_on = False
        self._end_waits()

    def _figures_of(
        self, step: int, steps: int, tokens: int, start: Any, stop: Any, waits: _Waits, peak_bytes: int, values: Any
    ) -> dict[str, float]:
        """Return the figures of a step, of which the device has ended all."""
        figures: dict[str, float] = {"step": step, **{name: float(one) for name, one in values.items()}}
        figures["step_ms"] = max(ms_apart(start, stop), 1e-6) / steps
        if tokens:
            figures["tokens_per_s"] = 1000 * tokens / (steps * figures["step_ms"])
            if self._ratio is not None:
                figures["mfu"] = self._ratio * figures["tokens_per_s"]
        waited_ms = sum(ms_apart(*one) for one in waits.spans)
        figures["exposed_ratio"] = min(waited_ms / max(ms_apart(waits.began, stop), 1e-6), 1.0)
        return {**figures, "peak_bytes": peak_bytes}

    def _write(self, *, is_last: bool = False) -> None:
        """Write the lines whose figures have come, at the end all of them."""
        while self._pending and (is_last or isinstance(self._pending[0][0], float) or self._pending[0][0].query()):
            self.figures = self._pending.pop(0)[1]()
            for tell in self._tell:
                tell(self.figures)


def _value(name: str, value: Any) -> torch.Tensor:
    """Return a figure as a tensor of one element."""
    if isinstance(value, DTensor) and all(one.is_replicate() for one in value.placements):
        value = value.to_local()
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() == 1
    if name in _SHOWN or not (is_number or is_tensor):
        fix = "pass a number, or a plain tensor of one element, under a name that watch does not use"
        raise ConfigError(f"the figure {name!r} is {described(value)}", fix=fix)
    return value.detach() if is_tensor else torch.tensor(float(value), dtype=torch.float64)


def _peak_bytes(device: torch.device) -> int:
    """Return the most bytes that the device's allocator has had in use; on the CPU, the process."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(torch.get_device_module(device.type).max_memory_allocated(device))


def _line(figures: dict[str, float]) -> str:
    parts = [_SHOWN.get(name, f"{name} {{:.4g}}".format)(value) for name, value in figures.items()]
    return f"{parts[0]}: {', '.join(parts[1:])}"


def _add_line(file: TextIO, figures: dict[str, float]) -> None:
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    print(json.dumps(finite), file=file, flush=True)


def _add_scalars(writer: Any, figures: dict[str, float]) -> None:
    for name in figures.keys() - {"step"}:
        writer.add_scalar(name, figures[name], figures["step"])


def _progress(exits: ExitStack) -> Callable[[str], object]:
    """Return what shows a line: one that rich rewrites in a terminal, or ``print``."""
    with suppress(ImportError):
        from rich.console import Console

        console = Console()
        if console.is_terminal:
            status = console.status("step 0")
            exits.callback(lambda: console.print(status.status))  # The last line stays.
            return exits.enter_context(status).update
    return partial(print, flush=True)
