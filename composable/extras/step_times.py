"""Timelines: a step as events, a trace, a picture.

Hooks note when modules run, a proxy of a root's streams notes when bytes are sent, and the stopwatch of a reducer notes
when buckets are. On a device each moment is an event in a stream; its time is read only when events are asked for.

Source: the trace event format of Chrome; colours that colour-blind people tell apart, Okabe and Ito 2008.
"""

import json
import math
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from composable.annotation import handle_of_module, sharded_state_of
from composable.comm import Ranks
from composable.engine import Handle, HandleStep, Scheduler, Step, StepEvent
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.extras.drawing import Canvas, shortened
from composable.ground.frames import in_backward
from composable.ground.names import check_module, described
from composable.ground.torch_hooks import (
    GradientHook,
    before_forward,
    beside_forward,
    differentiable_tensors,
    on_gradient,
)
from composable.ground.torch_private import opaque, running_transform
from composable.planning import name_modules
from composable.replication import ReplicateState, moment, ms_apart, replicate_state_of
from composable.whole_model import nothing_annotated, states_of

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


class _TimedStreams:
    """Proxy of the streams of a root; a listener of the root's steps."""

    queues = True  # So that reductions come here too.
    has_idle_ranks = False

    def __init__(self, scheduler: Scheduler, times: "Timeline") -> None:
        self.inner: Any = scheduler.step.streams
        self._times = times
        self._scheduler = scheduler
        self._gathers: dict[Handle, tuple[Any, Any]] = {}
        self._reducing: tuple[Handle, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _now_beside(self, name: str) -> Any:
        """Return the present moment in the stream ``name`` of the root; ``None``: on the CPU there is no stream."""
        stream = getattr(self.inner, name, None)
        return None if stream is None else self._times._now(stream)

    def begin_unshard(self, handle: Handle) -> None:
        start = self._now_beside("unshard") or self._times._now()
        self.inner.begin_unshard(handle)
        self._gathers[handle] = start, self._now_beside("unshard")

    def wait_for_unshard(self, handle: Handle) -> None:
        waits = self._times._now()
        self.inner.wait_for_unshard(handle)
        start, stop = self._gathers.pop(handle, (waits, waits))
        self._note(handle, "gather", start, stop, waits)

    def begin_reduction(self, path: Any, gradient: Any, *, to_host: bool = False) -> Any:
        known = (*self._reducing, *self._scheduler.handles)
        handle = next(one for one in known if any(flat.routes.gradient_path is path for flat in one.buffers))
        start = self._times._now()
        reduction = self.inner.begin_reduction(path, gradient, to_host=to_host)
        stop = self._now_beside("reduce")

        def finish() -> Any:
            waits = self._times._now()
            shard = reduction()
            self._note(handle, "reduce", start, stop, waits)
            return shard

        return finish

    def _note(self, handle: Handle, kind: str, start: Any, stop: Any, waits: Any) -> None:
        now = self._times._now()
        self._times._note(handle, kind, start, stop or now)
        self._times._note(handle, "wait", waits, now)

    def on(self, event: StepEvent, subject: Any = None, detail: Any = None) -> None:
        """Note the end of a handle's backward: when its reduction begins, or when the root's backward ends."""
        if event is StepEvent.REDUCE:
            self._reducing = (subject,)
            self._times._end_backward(subject)
        elif event is StepEvent.TELL:
            self._times._end_backward(*reversed(self._scheduler.handles))

    def leave(self) -> None:
        """Give the root its own streams back."""
        self._scheduler.unlisten(self)
        outer: Any = self._scheduler.step.streams
        if outer is self:
            self._scheduler.step.run_on(self.inner)
        while isinstance(outer, _TimedStreams):  # The proxy of another timeline, which was entered later.
            if outer.inner is self:
                outer.inner = self.inner
            outer = outer.inner


class _FirstGradient(GradientHook):
    """Runs when the gradient of an output arrives; in a graph it does nothing."""

    __slots__ = ("_owner", "_times")

    def __init__(self, times: "Timeline", owner: object) -> None:
        self._times = weakref.ref(times)
        self._owner = owner

    @partial(opaque, traced=lambda hook, grad: None)
    def __call__(self, grad: torch.Tensor) -> None:
        times = self._times()
        if times is not None:
            times._begin_backward(self._owner)


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
        self._exits = exits
        # An *owner* is a handle or a replicated module.
        self._names: dict[object, tuple[str, str]] = {}
        self._owners: dict[nn.Module, object] = {}
        self._places: dict[object, tuple[Step, HandleStep]] = {}
        self._running: list[tuple[nn.Module, Any]] = []
        self._backwards: dict[object, Any] = {}
        self._buckets: dict[ReplicateState, list[tuple[int, Any]]] = {}
        self._waits: dict[ReplicateState, Any] = {}
        for held in (self._names, self._owners, self._places, self._backwards, self._buckets, self._waits):
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
        for state in states:
            if isinstance(state, ReplicateState):
                state.reducer.stopwatch.listeners.append(hear := partial(self._hear, state))
                exits.callback(state.reducer.stopwatch.listeners.remove, hear)
            elif state.root is not None:
                self._attach(state.root.scheduler)

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
        return sum(stop - start for start, stop in waits) / length_ms

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
        share = f"{self.exposed_ratio(step):.0%} exposed communication"
        title = f"Step {events[0].step} of rank {self._rank}: {float(f'{length_ms:.3g}'):g} ms, {share}"
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
            raise UsageError("a timeline has no step", at=place_of_rank(), fix="run forwards inside the context first")
        if type(step) is not int or not -len(numbers) <= step < len(numbers):
            fix = f"pass 0 to {len(numbers) - 1}, or -1 for the last"
            raise ConfigError(f"step is {described(step)}", at=place_of_rank(), fix=fix)
        events = [one for one in events if one.step == numbers[step]]
        waits: list[tuple[float, float]] = []
        for one in [one for one in events if one.kind == "wait"]:
            start_ms, stop_ms = waits.pop() if waits and one.start_ms <= waits[-1][1] else (one.start_ms, 0.0)
            waits.append((start_ms, max(stop_ms, one.stop_ms)))
        return events, max(max(one.stop_ms for one in events) - events[0].start_ms, 1e-6), waits

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

    def _attach(self, scheduler: Scheduler) -> None:
        step = scheduler.step
        if step.handles and step.handles[0] not in self._places:
            self._places.update((handle, (step, own)) for handle, own in step.steps.items())
            timed: Any = _TimedStreams(scheduler, self)
            step.run_on(timed)
            scheduler.listen(timed)
            self._exits.callback(timed.leave)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Timeline":
        return self  # A copied module has copies of the hooks; they record nothing.

    @opaque
    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a step with the outermost module that is called; from now on record the root of each module."""
        if module not in self._owners:
            return  # A copy.
        if not self._running and not in_backward():
            is_again = id(module) in self._openers and not torch.is_grad_enabled()
            if not self._steps or self._had_backward or is_again:
                self._begin_step()
            self._openers.add(id(module))
        state = sharded_state_of(module)
        if state is not None and running_transform() is None:
            self._attach(state.lazy_init().scheduler)  # As the hook of the annotation does next.

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
        if owner in self._names and torch.is_grad_enabled() and running_transform() is None:
            for tensor in differentiable_tensors(output):
                if tensor.grad_fn is not None:
                    on_gradient(tensor, _FirstGradient(self, owner))

    def _begin_backward(self, owner: object) -> None:
        self._had_backward = True
        for other in self._backwards.keys() & self._places.keys():
            step, own = self._places[other]
            if own.completed_in == step.backward_id:
                self._end_backward(other)  # Where nothing is reduced.
        if owner in self._names:
            self._backwards.setdefault(owner, self._now())

    def _end_backward(self, *owners: object) -> None:
        for owner in owners:
            if owner in self._backwards:
                self._note(owner, "backward", self._backwards.pop(owner), self._now())

    def _hear(self, state: ReplicateState, mark: str) -> None:
        """Note the moment of a stopwatch's ``mark``, for the buckets of an annotation."""
        now, sent, count = self._now(), self._buckets.setdefault(state, []), state.reducer.round.sent
        if mark == "begin":
            sent.clear()
        elif mark == "sent":
            sent.append((count + 1, now))
        elif mark == "waiting":
            self._waits[state] = now
        elif mark == "arrived" and sent:
            for number, start in sent:
                if number <= count:  # A communication hook waits for the buckets before the one it sends next.
                    self._note(state.modules[0], "reduce", start, now, f" bucket {number}")
            self._note(state.modules[0], "wait", self._waits[state], now)
            self._buckets[state] = [one for one in sent if one[0] > count]
        if mark == "computed" or (mark == "sent" and count + 1 == len(state.reducer.buckets)):
            self._end_backward(*state.modules)
