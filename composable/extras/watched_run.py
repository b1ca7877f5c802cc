"""Watches a run: figures of some steps, to a line of progress, lines of JSON and TensorBoard.

No collective is added to a step, and no step waits for its device: what lies on a device is copied to the host beside
other work, and written in a later step, once it has come. Work and waits are timed only in the steps that are written.

Source: model FLOPs utilisation (MFU), arXiv 2204.02311, appendix B.
"""

import json
import math
import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
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
from composable.errors import ConfigError, UsageError, warn_once
from composable.extras.lateness import LateRanks, StepTimes, is_reached
from composable.ground.names import as_path, bytes_text, check_bool, check_int, check_module, check_number, described
from composable.replication import moment, ms_apart

# The figures that are measured, and how a line shows them.
_SHOWN: dict[str, Callable[[Any], str]] = {
    "step": "step {}".format,
    "step_ms": "{:.1f} ms a step".format,
    "tokens_per_s": "{:,.0f} tokens/s a rank".format,
    "mfu": "MFU {:.1%}".format,
    "exposed_ratio": "{:.0%} exposed communication".format,
    "peak_bytes": lambda value: f"peak {bytes_text(int(value))}",
    **dict.fromkeys(("last_rank", "late_ms"), lambda value: ""),  # They stand in the next one.
    "late": str,
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

    Entering the context is collective: all ranks of the annotation that comes first, with equal ``every`` and ``done``.
    Steps are not, and none waits for its device. All ranks measure, and rank 0 writes. The figures, among them which
    rank the others wait for, and what each costs: docs/watch.md.

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
        DesyncError: As the context begins: other ranks do not watch.

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
        self._late = LateRanks(model)
        self.figures: dict[str, Any] = {}
        self._tell: list[Callable[[dict[str, Any]], object]] = []
        self._every, self._ratio, self._first, self._step = every, ratio, done + 1, done
        # Of the steps after the last line: when they began, their number and tokens.
        self._start, self._steps, self._tokens = self._now(), 0, 0
        # Lines on their way: a moment after which the device has filled what the figures are made of, and the function.
        self._pending: list[tuple[Any, Callable[[], dict[str, Any]]]] = []
        self._times: StepTimes | None = None
        self._is_on = False
        self._exits, self._show, self._path, self._writer = ExitStack(), show, path, writer

    def __repr__(self) -> str:
        return f"<Watch: {_line(self.figures) if self.figures else 'no figures yet'}>"

    def __enter__(self) -> "Watch":
        self._late.watch([*dict.fromkeys(state.outermost() for state in self._states)])
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
        if self._times is not None:
            times, start = self._times, self._start
            self._end_times()
            self._start = self._now()
            if self._step > self._first:  # The first step is another one: memory is made, handles find their order.
                self._late.measured.append((self._step // self._every, times, self._start))
            if self._measures:
                hosted = {name: one.to("cpu", non_blocking=True, copy=True) for name, one in values.items()}
                measured = self._step, self._steps, self._tokens, start, self._start, times, _peak_bytes(self._device)
                self._pending.append((self._start, partial(self._figures_of, *measured, hosted)))
            self._steps = self._tokens = 0
        self._write()
        self._begin_step()

    def _begin_step(self) -> None:
        step = self._step + 1
        if step == self._first or step % self._every == 0:
            self._times = StepTimes(self._now, self._late.numbers)
            for state in self._states:
                state.listeners.add(self._times)

    def _end_times(self) -> None:
        times, self._times = self._times, None
        if times is not None:
            for state in self._states:
                state.listeners.remove(times)

    def _end(self) -> None:
        self._is_on = False
        self._end_times()
        self._late.end()

    def _figures_of(
        self, step: int, steps: int, tokens: int, start: Any, stop: Any, times: StepTimes, peak_bytes: int, values: Any
    ) -> dict[str, Any]:
        """Return the figures of a step, of which the device has ended all."""
        figures: dict[str, Any] = {"step": step, **{name: float(one) for name, one in values.items()}}
        figures["step_ms"] = max(ms_apart(start, stop), 1e-6) / steps
        if tokens:
            figures["tokens_per_s"] = 1000 * tokens / (steps * figures["step_ms"])
            if self._ratio is not None:
                figures["mfu"] = self._ratio * figures["tokens_per_s"]
        return {**figures, "exposed_ratio": times.read(stop)[1], "peak_bytes": peak_bytes, **self._late.find()}

    def _write(self, *, is_last: bool = False) -> None:
        """Write the lines whose figures have come, at the end all of them."""
        while self._pending and (is_last or is_reached(self._pending[0][0])):
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


def _line(figures: dict[str, Any]) -> str:
    shown = {name: value for name, value in figures.items() if value is not None}
    first, *parts = [_SHOWN.get(name, f"{name} {{:.4g}}".format)(value) for name, value in shown.items()]
    return f"{first}: {', '.join(filter(None, parts))}"


def _add_line(file: TextIO, figures: dict[str, Any]) -> None:
    is_number = {name: not isinstance(value, float) or math.isfinite(value) for name, value in figures.items()}
    finite = {name: value if is_number[name] else None for name, value in figures.items()}
    print(json.dumps(finite), file=file, flush=True)


def _add_scalars(writer: Any, figures: dict[str, Any]) -> None:
    for name in figures.keys() - {"step", "late"}:
        if figures[name] is not None:
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
