"""The state and the times of one backward of a replicated module."""

import enum
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from composable.errors import place_of_rank
from composable.ground.names import count_text, list_text
from composable.ground.torch_private import current_autograd_node, running_transform, will_engine_execute_node
from composable.replication.buckets import Bucket
from composable.replication.managed import ReducedParam
from composable.replication.reports import MOST_NAMES, UNUSED, Complaint

_LOG = logging.getLogger("composable")


class Phase(enum.Enum):
    """The phase of a backward.

    AT_REST: no backward runs; the last one ended well, or was recovered. OPEN: a gradient has arrived; or an exception
    has stopped the backward just now. STOPPED: an exception has stopped the backward; it is not recovered yet.
    """

    AT_REST = enum.auto()
    OPEN = enum.auto()
    STOPPED = enum.auto()


@dataclass(slots=True, eq=False, repr=False)
class Round:
    """The state of one backward, reused for the next one: gradient hooks hold the lists ``seen`` and ``order``."""

    seen: list[int]  # For each parameter, the number of its gradients that arrived.
    order: list[int] = field(default_factory=list)  # Parameters in the order in which their gradients arrived.
    phase: Phase = Phase.AT_REST  # The phase of the backward.
    # A module around began the backward, on all ranks: no bucket is sent before the backward ends.
    is_led: bool = False
    # The round averages gradients that earlier backwards kept; ranks agreed on it when a backward ended.
    ends_kept: bool = False
    synchronises: bool = True  # The backward averages gradients.
    # The backward adds gradients to ``param.grad``, on some rank, which ``torch.autograd.grad`` does not do.
    accumulates: bool = False
    sent: int = 0  # The number of buckets that were sent, which is the index of the next bucket.
    stepped: int = 0  # The number of these buckets whose parameters an optimizer has stepped inside backward.
    complaint: Complaint | None = None  # Why it ends with an error, on this rank and others; ``None``: it does not.
    # How many parameters had no gradient when they were sent: none came, or a hook of a user has dropped it.
    gaps: int = 0
    kept: int = 0  # The number of backwards since the last average; -1: this rank follows the others, with zeros.
    forwards: int = 0  # The number of forwards with a graph since the last average; 0: forwards are not counted.
    _armed_modules: set[int] = field(default_factory=set)
    _node: Any = None
    _told: set[str] = field(default_factory=set)  # log lines
    _guard: "weakref.ref[Callable[[], None]] | None" = None

    @property
    def is_complete(self) -> bool:
        """Every parameter got its gradient, and has it still."""
        return len(self.order) == len(self.seen) and not self.gaps

    def clear(self, buckets: Sequence[Bucket], *, synchronises: bool) -> None:
        """Reset the state for a backward in which no gradient has arrived yet."""
        self.seen[:] = [0] * len(self.seen)
        self.order.clear()
        self._armed_modules.clear()
        self.sent = self.stepped = self.gaps = 0
        self.complaint = None
        self.accumulates = self.is_led = self.ends_kept = False
        for bucket in buckets:
            bucket.pending = bucket.arrivals
        self.synchronises = synchronises

    def open(self, end: Callable[[], None]) -> None:
        """Begin a backward; autograd frees the callback ``end`` when the backward has ended or failed."""
        self._guard = weakref.ref(end, self._note_end)
        self.phase = Phase.OPEN

    def _note_end(self, guard: "weakref.ref[Callable[[], None]]") -> None:
        """Mark the backward as stopped if autograd freed ``end`` before the round was closed: an exception came."""
        if guard is self._guard and self.phase is Phase.OPEN:
            self.phase = Phase.STOPPED
            self._node = None

    def is_due(self) -> bool:
        """Say whether the backward that ends, and was not stopped, should have brought gradients to parameters."""
        node, self._node = self._node, None
        # With torch.autograd.grad, for example, it should not.
        return bool(self.order) or self.ends_kept or (_is_whole_backward(node) if self.is_led else self.accumulates)

    def count_anew(self) -> None:
        """Restart the counts of forwards and backwards: ranks may have counted different numbers."""
        self.kept = self.forwards = 0

    def reset(self) -> None:
        """Restore the state before the first backward, whatever the last backward left."""
        self._node = self._guard = None
        self.clear((), synchronises=True)
        self.phase = Phase.AT_REST

    def arm(self, module_index: int, params: Sequence[ReducedParam]) -> None:
        """Note that the gradient of an output of an annotated module arrives; ``params``: all of the round."""
        if not self._armed_modules and not self.is_led:
            # Usually the first parameter decides it; transforms of torch.func never accumulate. A rank that uses none
            # of the parameters, in a backward that goes all the way, does what those do that use some.
            self.accumulates = running_transform() is None and (
                any(map(self._accumulates, params)) or _is_whole_backward(current_autograd_node())
            )
        self._armed_modules.add(module_index)

    def _accumulates(self, item: ReducedParam) -> bool:
        """Say whether the running backward may add a gradient to the parameter's ``grad``."""
        try:
            return bool(will_engine_execute_node(get_gradient_edge(item.param).node))
        except RuntimeError:  # Raised for a leaf that is an input of torch.autograd.grad, or frozen.
            if item.param.requires_grad and "grad" not in self._told:
                self._told.add("grad")
                _LOG.warning(
                    "torch.autograd.grad of a replicated parameter gives the gradient of this rank, not the average\n"
                    "  at:  %s, parameter %r\n  fix: call backward, and read param.grad; or average what it returned",
                    place_of_rank(),
                    item.fqn,
                )
            return False

    def follow(self) -> None:
        """Note that a module around runs this backward, on all of its ranks."""
        self.is_led = self.accumulates = True
        self._node = current_autograd_node()

    def complaint_of(self, params: Sequence[ReducedParam], kept: Sequence[int]) -> Complaint | None:
        """Return the complaint about parameters without a gradient since the last round, of modules in this backward.

        ``kept`` says of each parameter whether an earlier backward, without synchronisation, gave it a gradient.
        """
        missing = [
            item.fqn
            for item, number, was_kept in zip(params, self.seen, kept, strict=True)
            if not number and not was_kept and item.module_index in self._armed_modules
        ]
        if not missing:
            return None
        count, names = count_text(len(missing), "parameter"), list_text(missing, MOST_NAMES)
        return UNUSED._replace(text=f"backward ended without a gradient for {count}: {names}")


def _is_whole_backward(node: Any) -> bool:
    """Say whether the running backward goes all the way from ``node`` to the leaves, as ``loss.backward()`` does.

    ``torch.autograd.grad`` runs only the nodes that lead to its inputs. Call this inside the backward.
    """
    if node is None:
        return False
    # `node` itself has begun. The engine would say that it does not run, if it is the only root of the backward.
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


# Times

# All of the first backwards are measured, since they differ from later ones.
_FIRST = 10


@dataclass(frozen=True)
class BackwardTiming:
    """The times of one backward on this rank, in milliseconds.

    Attributes:
        compute_ms: From the first gradient to the last.
        reduce_ms: From the first bucket that was sent to the end of backward.
        overlap_ms: The time in which both ran, computation and reduction.
    """

    compute_ms: float
    reduce_ms: float
    overlap_ms: float

    @property
    def overlap_ratio(self) -> float:
        """The part of averaging that was hidden behind the computation, 0 to 1."""
        return self.overlap_ms / self.reduce_ms if self.reduce_ms else 0.0


class Stopwatch:
    """Measures some backwards: by the clock, or, if gradients are not on the CPU, by events of their device."""

    def __init__(self, device: torch.device) -> None:
        self.every = 100  # Every backward whose number this divides is measured, besides the first ten.
        self.is_on = False  # The running backward is measured.
        self._device = device
        self._marks: dict[str, Any] = {}
        self._last: dict[str, Any] | None = None

    def begin(self, number: int) -> None:
        """Start to measure backward ``number``, counted from 1, if it is one of those to measure."""
        self.is_on = number <= _FIRST or number % self.every == 0
        if self.is_on:
            self._marks = {}
            self.mark("begin")

    def mark(self, name: str) -> None:
        """Note the time under ``name``, once in a backward."""
        if name not in self._marks:
            self._marks[name] = moment(self._device)

    def end(self) -> None:
        """End the measurement, and keep it for ``read``."""
        self.mark("end")
        self._last = self._marks
        self.stop()

    def stop(self) -> None:
        """End the measurement without a result."""
        self.is_on = False

    def read(self) -> BackwardTiming | None:
        """Return the times of the last backward that was measured; waits until the device has finished it."""
        if self._last is None:
            return None
        begin, computed, sent, end = (self._last[name] for name in ("begin", "computed", "sent", "end"))
        compute_ms = ms_apart(begin, computed)
        return BackwardTiming(compute_ms, ms_apart(sent, end), max(0.0, compute_ms - ms_apart(begin, sent)))


def moment(device: torch.device, stream: torch.Stream | None = None) -> Any:
    """Return the present moment for ``ms_apart``: a clock time, or an event in ``stream`` (default: current)."""
    if device.type == "cpu":
        return time.perf_counter() * 1000
    event = torch.Event(device.type, enable_timing=True)
    event.record(stream)
    return event


def ms_apart(start: Any, stop: Any) -> float:
    """Return the milliseconds between two moments; waits until the device has reached both."""
    if isinstance(stop, float):
        return float(stop - start)
    start.synchronize()
    stop.synchronize()
    return float(start.elapsed_time(stop))
