"""Timelines: a step as events, a trace, a picture.

Hooks note when modules run, and listeners to the steps note when bytes are sent and waited for. On a device each moment
is an event in a stream; its time is read only when events are asked for.

Source: the trace event format of Chrome; colours that colour-blind people tell apart, Okabe and Ito 2008.
"""

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from composable.annotation import (
    ReplicateState,
    handle_of_module,
    nothing_annotated,
    replicate_state_of,
    sharded_state_of,
    states_of,
)
from composable.comm import Ranks, history_here
from composable.engine import Handle, StepListener, Work
from composable.errors import ConfigError, UsageError
from composable.extras.drawing import Canvas, shortened
from composable.ground.frames import in_backward
from composable.ground.names import check_module, count_text, described
from composable.ground.torch_hooks import before_forward, beside_forward
from composable.ground.torch_private import opaque
from composable.planning import name_modules
from composable.replication import moment, ms_apart

# The most steps that are kept, and the most events in a step: forwards before a backward are of one step.
_MOST_STEPS, _MOST_SPANS = 16, 50_000


@contextmanager
def timeline(model: nn.Module) -> Iterator["Timeline"]:
    """Record when each handle and each bucket of ``model`` gathers, waits, computes and reduces, inside the context.

    A step begins with the first forward after a backward; the last 16 steps are kept. Training gives the same numbers,
    to the bit. On a device, times are taken in its streams, and reading them waits for the device. On the CPU, a
    gather or a reduction ends when this rank has waited for it: nothing shows an earlier end.

    Not collective: each rank that enters the context records its own times; the others need not enter it.

    Args:
        model: A module with annotated modules at or below it.

    Yields:
        The ``Timeline``, to be read inside the context or after it.

    Raises:
        ConfigError: ``model`` is no module.
        UsageError: Nothing is annotated there.

    Example::

        with timeline(model) as times:
            for batch in batches[:3]:
                model(batch).sum().backward()
        Path("step.svg").write_text(times.draw())
        Path("step.json").write_text(times.trace())  # open it in ui.perfetto.dev
    """
    check_module("model", model)
    with ExitStack() as exits:
        yield Timeline(model, exits)


@dataclass(frozen=True)
class TimelineEvent:
    """An event of a handle, a replicated module or one of its buckets on this rank.

    Attributes:
        step: Number of the step, from 0 on.
        row: FQN of the module, "(root)" for the model itself; the number of a bucket follows.
        fqn: FQN of the module.
        kind: "gather", "wait", "forward", "recompute", "backward" or "reduce".
        start_ms: Milliseconds since the first step that is kept began.
        stop_ms: When it ended, on the same clock.
    """

    step: int
    row: str
    fqn: str
    kind: str
    start_ms: float
    stop_ms: float


class _ShardedTimes(StepListener):
    """Notes the gathers and reductions of sharded modules, and the ends of their backwards."""

    def __init__(self, times: "Timeline") -> None:
        self._times = times
        # When each began, and, on a device, when it ends in its stream.
        self._gathers: dict[Handle, tuple[Any, Any]] = {}
        self._reductions: defaultdict[Handle, deque[tuple[Any, Any]]] = defaultdict(deque)

    @contextmanager
    def work(self, work: Work, handle: Any, name: str) -> Iterator[None]:
        times, start = self._times, self._times._now()
        if work is Work.GATHER:
            start = self._now_beside("unshard", handle) or start
        yield
        if work is Work.GATHER:
            self._gathers[handle] = start, self._now_beside("unshard", handle)
        elif work is Work.REDUCE:
            self._reductions[handle].append((start, self._now_beside("reduce", handle)))
        else:
            now, reductions = times._now(), self._reductions[handle]
            if work is Work.WAIT_FOR_GATHER:
                begun, ended = self._gathers.pop(handle, (start, start))
                times._note(handle, "gather", begun, ended or now)
            elif reductions:  # If not, it began before the context.
                begun, ended = reductions.popleft()
                times._note(handle, "reduce", begun, ended or now)
            times._note(handle, "wait", start, now)

    def _now_beside(self, name: str, handle: Handle) -> Any:
        """Return the present moment in the stream ``name`` of the root; ``None``: on the CPU there is no stream."""
        state = sharded_state_of(handle.modules[0])
        root = None if state is None else state.root
        stream = None if root is None else getattr(root.scheduler.step.streams, name, None)
        return None if stream is None else self._times._now(stream)

    def step_forgotten(self, *, was_unfinished: bool) -> None:
        self._reductions.clear()

    def backward_reached(self, owner: object) -> None:
        self._times._begin_backward(owner)

    def handle_completed(self, handle: Handle) -> None:
        self._times._end_backward(handle)


class _ReplicatedTimes(StepListener):
    """Notes the reductions of the buckets of one annotation of ``replicate``, and the ends of its backwards."""

    def __init__(self, times: "Timeline", state: ReplicateState) -> None:
        self._times = times
        self._state = state
        # The number of each bucket on its way, counted from 1, and when its reduction began.
        self._sent: list[tuple[int, Any]] = []

    def backward_begins(self, *, averages: bool) -> None:
        self._sent.clear()

    def backward_reached(self, owner: object) -> None:
        self._times._begin_backward(owner)

    def backward_ends(self, *, averages: bool, ends: bool) -> None:
        self._times._end_backward(*self._state.modules)

    @contextmanager
    def work(self, work: Work, handle: Any, name: str) -> Iterator[None]:
        times, start, reducer = self._times, self._times._now(), self._state.reducer
        if work is Work.REDUCE:
            self._sent.append((reducer.round.sent + 1, start))
            if reducer.round.sent + 1 == len(reducer.buckets):
                times._end_backward(*self._state.modules)
        yield
        if work is Work.WAIT_FOR_REDUCE and self._sent:
            now, count, module = times._now(), reducer.round.sent, self._state.modules[0]
            for number, begun in self._sent:
                if number <= count:  # A communication hook waits for the buckets before the one it sends next.
                    times._note(module, "reduce", begun, now, f" bucket {number}")
            times._note(module, "wait", start, now)
            self._sent = [one for one in self._sent if one[0] > count]


# For each kind of event: the colour of its bar, the bar's first pixel in the row, and its height.
_LOOKS = {
    "forward": ("#0072b2", 2, 11),
    "recompute": ("#56b4e9", 2, 11),
    "backward": ("#009e73", 2, 11),
    "gather": ("#e69f00", 14, 6),
    "reduce": ("#cc79a7", 14, 6),
    "wait": ("#d55e00", 2, 18),
}
_MOST_ROWS, _LEFT, _WIDTH, _TOP, _ROW = 24, 190, 740, 78, 24


def _merged(events: list[TimelineEvent], kind: str, row: str | None = None) -> list[tuple[float, float]]:
    """Return the (start, stop) of all events of a kind, in order of their start; those that overlap are one."""
    found: list[tuple[float, float]] = []
    for one in [one for one in events if one.kind == kind and row in (None, one.row)]:
        start_ms, stop_ms = found.pop() if found and one.start_ms <= found[-1][1] else (one.start_ms, 0.0)
        found.append((start_ms, max(stop_ms, one.stop_ms)))
    return found


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)


def _ms(length_ms: float) -> str:
    return f"{float(f'{length_ms:.3g}'):g} ms"


class Timeline:
    """The events of a model inside of ``timeline`` on this rank, with their times: the last 16 steps."""

    def __init__(self, model: nn.Module, exits: ExitStack) -> None:
        states = states_of(model.modules())
        if not states:
            raise nothing_annotated("timeline", model)
        devices = [state.grid.everyone.device for state in states]
        self._now = partial(moment, next((one for one in devices if one.type != "cpu"), devices[0]))
        world = Ranks.of_world()
        self._rank = world.numbers[world.rank]
        # For each step: its number, its start, and its events: ((row, FQN), kind, start, stop).
        self._steps: deque[tuple[int, Any, list[tuple[tuple[str, str], str, Any, Any]]]] = deque(maxlen=_MOST_STEPS)
        self._openers: set[int] = set()  # The outermost modules of the last step.
        self._had_backward = False
        # An *owner* is a handle or a replicated module.
        self._names: dict[object, tuple[str, str]] = {}
        self._owners: dict[nn.Module, object] = {}
        self._running: list[tuple[nn.Module, Any]] = []
        self._backwards: dict[object, Any] = {}
        for held in (self._names, self._owners, self._backwards):
            exits.callback(held.clear)  # Nothing is noted from then on.
        for module, fqn in name_modules([model]).items():
            handle, sharded = handle_of_module(module), sharded_state_of(module)
            if handle is not None or replicate_state_of(module) is not None:
                owner = self._owners[module] = handle or module
                self._names.setdefault(owner, (fqn or "(root)", fqn))
                for hook in beside_forward(module, self._begin_forward, self._end_forward, is_inside=True):
                    exits.callback(hook.remove)
            if module in self._owners or (sharded is not None and module in sharded.modules):
                self._owners.setdefault(module, None)
                exits.callback(before_forward(module, self._before_forward).remove)
        of_sharded = _ShardedTimes(self)
        for state in states:
            listener = _ReplicatedTimes(self, state) if isinstance(state, ReplicateState) else of_sharded
            state.listeners.add(listener)
            exits.callback(state.listeners.remove, listener)

    def __repr__(self) -> str:
        return f"<Timeline of rank {self._rank}: {count_text(len(self._steps), 'step')}; summary() says one in a line>"

    @property
    def events(self) -> list[TimelineEvent]:
        """The events of all steps that are kept, ordered by their start."""
        found, before_ms = [], 0.0
        steps = list(self._steps)
        for (number, began, spans), (_, earlier, _) in zip(steps, [*steps[:1], *steps], strict=False):
            # Step by step: on a device, a long time is less exact than a short one.
            before_ms += ms_apart(earlier, began)
            for (row, fqn), kind, *moments in spans:
                start_ms, stop_ms = (before_ms + ms_apart(began, one) for one in moments)
                found.append(TimelineEvent(number, row, fqn, kind, start_ms, stop_ms))
        return sorted(found, key=lambda one: (one.start_ms, -one.stop_ms))

    def exposed_ratio(self, step: int = -1) -> float:
        """Return the part of a step in which this rank waited for a gather or a reduction, 0 to 1.

        A step lasts from its first event to its last one: the optimizer and the data are not in it.

        Args:
            step: Counted from the first step that is kept, or, if negative, from the end, as in a list.

        Raises:
            ConfigError: There is no such step.
            UsageError: There is no step at all.
        """
        _, length_ms, waits = self._step(step)
        return _length(waits) / length_ms

    def summary(self, step: int = -1) -> str:
        """Return a step in one line of text: its length, what took how long, and the rows that waited longest.

        Forwards that lie in one another count once, and so do backwards. Argument and errors as in ``exposed_ratio``.
        """
        events, _, _ = self._step(step)
        kinds = [kind for kind in _LOOKS if kind != "wait" and any(one.kind == kind for one in events)]
        parts = [f"{kind} {_ms(_length(_merged(events, kind)))}" for kind in kinds]
        by_row = {one.row: _length(_merged(events, "wait", one.row)) for one in events if one.kind == "wait"}
        longest = sorted(by_row.items(), key=lambda found: -found[1])[:3]
        waited = ", ".join(f"{row} {_ms(length)}" for row, length in longest)
        late = history_here()
        return f"{self._title(step)}; {', '.join(parts)}; longest waits: {waited or 'none'}{'; ' if late else ''}{late}"

    def _title(self, step: int) -> str:
        events, length_ms, _ = self._step(step)
        share = f"{self.exposed_ratio(step):.0%} exposed communication"
        return f"Step {events[0].step} of rank {self._rank}: {_ms(length_ms)}, {share}"

    def draw(self, step: int = -1) -> str:
        """Return a step as an SVG picture; argument and errors as in ``exposed_ratio``.

        It has a row for each handle, replicated module and bucket: forward and backward above, gather and reduce
        below, a wait for one of these across both. Of more than 24 rows it shows the first 12 and the last 12.
        """
        events, length_ms, waits = self._step(step)
        first_ms, scale = events[0].start_ms, _WIDTH / length_ms
        rows = list(dict.fromkeys(one.row for one in events))
        if len(rows) > _MOST_ROWS:
            rows[_MOST_ROWS // 2 : -_MOST_ROWS // 2] = [f"+ {len(rows) - _MOST_ROWS} more"]
        tops = {row: _TOP + _ROW * index for index, row in enumerate(["", *rows])}
        bottom = _TOP + _ROW * len(tops) + 12
        title = self._title(step)
        canvas = Canvas(title, "When each module computes, gathers, reduces and waits, on one axis of time.")
        canvas.text(20, 26, title, 15)
        for index, kind in enumerate(kind for kind in _LOOKS if any(one.kind == kind for one in events)):
            canvas.add("rect", x=20 + 110 * index, y=40, width=12, height=12, fill=_LOOKS[kind][0])
            canvas.text(37 + 110 * index, 50, kind)
        unit = 10.0 ** math.floor(math.log10(length_ms / 4))
        unit *= next(one for one in (1, 2, 5, 10) if length_ms / (one * unit) <= 8)
        for tick in range(int(length_ms / unit) + 1):
            x = _LEFT + scale * tick * unit
            canvas.add("rect", x=x, y=_TOP, width=1, height=bottom - _TOP - 12, fill="#dddddd")
            canvas.text(x, _TOP - 6, f"{tick * unit:g} ms", 11)
        for row, top in tops.items():
            canvas.text(20, top + 15, shortened(row or "exposed", _LEFT - 20))
        bars = [(one.row, one.kind, one.start_ms, one.stop_ms) for one in events if one.row in tops]
        bars += [("", "wait", start, stop) for start, stop in waits]
        for row, kind, start_ms, stop_ms in sorted(bars, key=lambda bar: bar[1] == "wait"):
            colour, below, high = _LOOKS[kind]
            tip = f"{row or 'exposed'}: {kind}, {start_ms - first_ms:.3f} to {stop_ms - first_ms:.3f} ms"
            x, wide = _LEFT + scale * (start_ms - first_ms), max(scale * (stop_ms - start_ms), 0.5)
            canvas.add("rect", tip=tip, x=x, y=tops[row] + below, width=wide, height=high, fill=colour)
        return canvas.document(bottom)

    def trace(self) -> str:
        """Return the steps that are kept as JSON for Perfetto or Chrome: a rank is a process, a row is a thread."""
        lanes: dict[tuple[str, int], list[TimelineEvent]] = {}
        for event in self.events:
            # Slices of one thread must lie inside one another, or apart.
            number = 0
            while any(event.start_ms < one.stop_ms < event.stop_ms for one in lanes.get((event.row, number), ())):
                number += 1
            lanes.setdefault((event.row, number), []).append(event)
        pid = self._rank
        found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}}]
        for tid, (row, number) in enumerate(lanes, 1):
            found.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}})
            for one in lanes[row, number]:
                start_ns, stop_ns = round(1e6 * one.start_ms), round(1e6 * one.stop_ms)
                times = {"ts": start_ns / 1000, "dur": (stop_ns - start_ns) / 1000}
                more = {"cat": one.kind, "args": {"fqn": one.fqn, "step": one.step}}
                found.append({"ph": "X", "name": one.kind, "pid": pid, "tid": tid, **times, **more})
        return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"})

    def _step(self, step: int) -> tuple[list[TimelineEvent], float, list[tuple[float, float]]]:
        """Return the events of a step, its length in milliseconds, and the (start, stop) of all waits, merged."""
        events = self.events
        numbers = sorted({one.step for one in events})
        if not numbers:
            raise UsageError("a timeline has no step", fix="run forwards inside the context first")
        if type(step) is not int or not -len(numbers) <= step < len(numbers):
            fix = f"pass 0 to {len(numbers) - 1}, or -1 for the last"
            raise ConfigError(f"step is {described(step)}", fix=fix)
        events = [one for one in events if one.step == numbers[step]]
        length_ms = max(max(one.stop_ms for one in events) - events[0].start_ms, 1e-6)
        return events, length_ms, _merged(events, "wait")

    # The record

    def _note(self, owner: object, kind: str, start: Any, stop: Any, part: str = "") -> None:
        if owner in self._names:
            if not self._steps or len(self._steps[-1][2]) >= _MOST_SPANS:
                self._begin_step()
            row, fqn = self._names[owner]
            self._steps[-1][2].append(((row + part, fqn), kind, start, stop))

    def _begin_step(self) -> None:
        self._steps.append((self._steps[-1][0] + 1 if self._steps else 0, self._now(), []))
        self._openers.clear()
        self._backwards.clear()
        self._had_backward = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Timeline":
        return self  # A copied module has copies of the hooks; they record nothing.

    @opaque
    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a step with the outermost module that is called."""
        if module not in self._owners:
            return  # A copy.
        if not self._running and not in_backward():
            is_again = id(module) in self._openers and not torch.is_grad_enabled()
            if not self._steps or self._had_backward or is_again:
                self._begin_step()
            self._openers.add(id(module))

    @opaque
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        self._running.append((module, self._now()))

    @opaque
    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        stop, owner, start = self._now(), self._owners.get(module), None
        while self._running and start is None:  # Other entries are left by hooks that raised.
            inner, began = self._running.pop()
            start = began if inner is module else None
        if start is not None:
            self._note(owner, "recompute" if in_backward() else "forward", start, stop)

    def _begin_backward(self, owner: object) -> None:
        self._had_backward = True
        if owner in self._names:
            self._backwards.setdefault(owner, self._now())

    def _end_backward(self, *owners: object) -> None:
        for owner in owners:
            if owner in self._backwards:
                self._note(owner, "backward", self._backwards.pop(owner), self._now())
