"""The record of one backward."""

import enum
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from composable.ground.torch_private import current_autograd_node, running_transform, will_engine_execute_node
from composable.replication.buckets import Bucket
from composable.replication.tensors import ReducedParam

__all__ = [
    "BackwardTiming",
    "JoinListener",
    "KeptWith",
    "Phase",
    "Round",
    "StaticGraph",
    "Stopwatch",
    "moment",
    "ms_apart",
]


class Phase(enum.Enum):
    """How far a backward is.

    AT_REST: none runs, and the last one ended well, or was put right. OPEN: a gradient arrived, or an exception
    stopped it just now. STOPPED: an exception stopped it, and nobody has put things right since.
    """

    AT_REST = enum.auto()
    OPEN = enum.auto()
    STOPPED = enum.auto()


@dataclass(slots=True, eq=False, repr=False)
class Round:
    """The state of one backward, and after it of the next: what runs for each gradient holds ``seen`` and ``order``.

    Attributes:
        phase: How far it is.
        is_led: A module around began it, on all ranks: nothing is started before its end.
        ends_kept: It is for what earlier ones kept, as ranks have agreed at the end of the backward.
        synchronises: It averages gradients.
        accumulates: Gradients are added to those of the parameters, which ``torch.autograd.grad`` does not do.
        seen: For each parameter, how many gradients of it arrived.
        order: Parameters in the order of arrival.
        sent: How many buckets were started, which is the index of the next.
        stepped: How many of them had their parameters stepped, inside backward.
        complaint: What this rank tells the others: parameters without a gradient, -1 for a backward that was stopped.
        kept: How many backwards there were since the last that averaged; -1: this rank follows the others, with zeros.
        forwards: How many forwards that record a graph there were since then; 0: they do not count.
    """

    seen: list[int]
    order: list[int] = field(default_factory=list)
    phase: Phase = Phase.AT_REST
    is_led: bool = False
    ends_kept: bool = False
    synchronises: bool = True
    accumulates: bool = False
    sent: int = 0
    stepped: int = 0
    complaint: int = 0
    kept: int = 0
    forwards: int = 0
    _armed_modules: set[int] = field(default_factory=set)
    _node: Any = None
    _guard: "weakref.ref[Callable[[], None]] | None" = None

    @property
    def is_complete(self) -> bool:
        """Every parameter got its gradient."""
        return len(self.order) == len(self.seen)

    def clear(self, buckets: Sequence[Bucket], *, synchronises: bool) -> None:
        """Make this the state of a backward in which nothing has arrived."""
        self.seen[:] = [0] * len(self.seen)
        self.order.clear()
        self._armed_modules.clear()
        self.sent = self.stepped = self.complaint = 0
        self.accumulates = self.is_led = self.ends_kept = False
        for bucket in buckets:
            bucket.pending = bucket.arrivals
        self.synchronises = synchronises

    def open(self, end: Callable[[], None]) -> None:
        """Begin; ``end`` is what autograd frees when backward ends."""
        self._guard = weakref.ref(end, self._note_end)
        self.phase = Phase.OPEN

    def _note_end(self, guard: "weakref.ref[Callable[[], None]]") -> None:
        """Notice a backward whose end did not come to an end: an exception stopped it."""
        if guard is self._guard and self.phase is Phase.OPEN:
            self.phase = Phase.STOPPED
            self._node = None

    def is_due(self) -> bool:
        """Say, when a backward ends that was not stopped, whether gradients were due in it."""
        node, self._node = self._node, None
        # None are with torch.autograd.grad, say.
        return bool(self.order) or self.ends_kept or _is_whole_backward(node)

    def close(self) -> None:
        """End: everybody has what the backward was for, or a backward that was stopped was put right."""
        self.phase = Phase.AT_REST

    def reset(self) -> None:
        """Be as before the first backward, whatever the last one left."""
        self._node = self._guard = None
        self.clear((), synchronises=True)
        self.close()

    def arm(self, module_index: int, params: Sequence[ReducedParam]) -> None:
        """Note that the gradient of an output of an annotated module arrives; ``params`` are all of the round."""
        if not self._armed_modules and not self.is_led:
            # As a rule, the first of them says so; transforms of torch.func never do.
            self.accumulates = running_transform() is None and any(_accumulates(item.param) for item in params)
        if module_index not in self._armed_modules:
            self._armed_modules.add(module_index)
            if not self.is_led:
                self._node = current_autograd_node()

    def follow(self) -> None:
        """Note that the backward is one of a module around, which is where all ranks of it are."""
        self.is_led = self.accumulates = True
        self._node = current_autograd_node()

    def missing(self, params: Sequence[ReducedParam], kept: Sequence[int]) -> list[int]:
        """Return the parameters of the modules in this backward that got no gradient since the last round.

        Args:
            params: All of them.
            kept: Of each parameter, whether it got one before, without synchronisation.
        """
        return [
            index
            for index, item in enumerate(() if self.is_complete else params)
            if not self.seen[index] and not kept[index] and item.module_index in self._armed_modules
        ]


def _accumulates(leaf: torch.Tensor) -> bool:
    """Say whether the running backward may add a gradient to that of ``leaf``."""
    try:
        return bool(will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # Raised for a leaf that is an input of torch.autograd.grad, or frozen.
        return False


def _is_whole_backward(node: Any) -> bool:
    """Say whether the running backward goes all the way from ``node`` to the leaves, as ``loss.backward()`` does.

    ``torch.autograd.grad`` runs only what leads to its inputs. Ask this inside the backward.
    """
    if node is None:
        return False
    # The node itself has begun. The engine would deny it of the only root of a backward, which it counts as no node.
    seen = {node}
    stack = [node]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None or following in seen:
                continue
            try:
                if not will_engine_execute_node(following):
                    return False
            except RuntimeError:  # Raised for a leaf that is an input of torch.autograd.grad.
                return False
            seen.add(following)
            stack.append(following)
    return True


@dataclass(slots=True, eq=False, repr=False)
class StaticGraph:
    """What a promise that every backward runs the same graph is worth: counts of the first one, for the next ones.

    Attributes:
        counts: How many gradients each parameter gets in a backward of this rank; ``None``: no backward has shown it.
        used: Of each parameter, how many ranks had a gradient for it then.
        changes: (parameter, gradients, gradients expected) for what was not as expected in the last backward.
    """

    counts: list[int] | None = None
    used: Sequence[float] = ()
    changes: list[tuple[int, int, int]] = field(default_factory=list)

    def allows(self, index: int, seen: int) -> bool:
        """Say whether the gradient number ``seen`` of a parameter in one backward is one of those expected."""
        return self.counts is not None and seen <= self.counts[index]

    def holds(self, seen: Sequence[int]) -> bool:
        """Say whether a backward with so many gradients of each parameter is like the first one; notes ``changes``."""
        expected = enumerate(zip(seen, self.counts or seen, strict=True))
        self.changes = [(index, now, then) for index, (now, then) in expected if now != then]
        return not self.changes


class KeptWith(Protocol):
    """Those that were told to synchronise again together with this one."""

    def end(self) -> None:
        """Let all that keep gradients end with the running backward, called in it or not. Collective."""
        ...


class JoinListener(Protocol):
    """Tells ranks without inputs what this one is about to start: forwards, rounds, buckets. Each is collective."""

    def is_live(self) -> bool:
        """Say whether the context lasts: it has not ended, also not by an exception."""
        ...

    def begin_forward(self, module: nn.Module, *, broadcasts: bool) -> None:
        """Tell of a forward of ``module`` that a backward may follow; ``broadcasts``: buffers are made equal."""
        ...

    def begin_round(self, synchronises: bool) -> None:
        """Tell of a backward, and whether it averages."""
        ...

    def send(self) -> None:
        """Tell that the next bucket is started."""
        ...

    def finish(self) -> None:
        """Tell that the round ends."""
        ...

    def recover(self) -> None:
        """Tell that a round that was stopped ends: all buckets that were not started are."""
        ...


# Times

# As many first backwards are measured as are not like the others.
_FIRST = 10


@dataclass(frozen=True)
class BackwardTiming:
    """One backward of this rank, in milliseconds.

    Attributes:
        compute_ms: From the first gradient to the last.
        reduce_ms: From the first bucket that was sent to the end of backward.
        overlap_ms: What the two have in common.
    """

    compute_ms: float
    reduce_ms: float
    overlap_ms: float

    @property
    def overlap_ratio(self) -> float:
        """The part of averaging that was hidden behind the computation, 0 to 1."""
        return self.overlap_ms / self.reduce_ms if self.reduce_ms else 0.0


class Stopwatch:
    """Measures one backward in so many: by the clock, or by events where gradients live on a device.

    Attributes:
        every: Each backward of this number is measured, besides the first ten.
        is_on: The running backward is measured.
        listeners: Called with the name of each mark of every backward, however often it comes in one.
    """

    def __init__(self, device: torch.device) -> None:
        self.every = 100
        self.is_on = False
        self.listeners: list[Callable[[str], None]] = []
        self._device = device
        self._marks: dict[str, Any] = {}
        self._last: dict[str, Any] | None = None

    def begin(self, number: int) -> None:
        """Start with backward ``number``, from 1 on, if it is one to measure."""
        self.is_on = number <= _FIRST or number % self.every == 0 or bool(self.listeners)
        if self.is_on:
            self._marks = {}
            self.mark("begin")

    def mark(self, name: str) -> None:
        """Note the time under ``name``, once in a backward."""
        for hear in self.listeners:
            hear(name)
        if name not in self._marks:
            self._marks[name] = moment(self._device)

    def end(self) -> None:
        """Keep what was measured."""
        self.mark("end")
        self._last = self._marks
        self.is_on = False

    def read(self) -> BackwardTiming | None:
        """Return the last backward that was measured; waits until the device has come to its end."""
        if self._last is None:
            return None
        begin, computed, sent, end = (self._last[name] for name in ("begin", "computed", "sent", "end"))
        compute_ms = ms_apart(begin, computed)
        return BackwardTiming(compute_ms, ms_apart(sent, end), max(0.0, compute_ms - ms_apart(begin, sent)))


def moment(device: torch.device, stream: torch.Stream | None = None) -> Any:
    """Return now, for ``ms_apart``: by the clock, or an event of the device in ``stream``, or in the current one."""
    if device.type == "cpu":
        return time.perf_counter() * 1000
    event = torch.Event(device.type, enable_timing=True)
    event.record(stream)
    return event


def ms_apart(start: Any, stop: Any) -> float:
    """Return the milliseconds between two moments; waits until the device has come to both."""
    if isinstance(stop, float):
        return float(stop - start)
    start.synchronize()
    stop.synchronize()
    return float(start.elapsed_time(stop))
