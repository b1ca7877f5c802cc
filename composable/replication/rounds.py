"""What a reducer knows of one backward: what arrived, in which order, how it ended, how the first one was."""

import enum
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from composable.ground.torch_private import current_autograd_node, running_transform, will_engine_execute_node
from composable.replication.buckets import Bucket
from composable.replication.tensors import ReducedParam

__all__ = ["Phase", "Round", "StaticGraph"]


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
        self.accumulates = self.is_led = False
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
        return bool(self.order) or _is_whole_backward(node)

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
        if self.is_complete:
            return []
        return [
            index
            for index, item in enumerate(params)
            if not self.seen[index] and not kept[index] and item.module_index in self._armed_modules
        ]

    def full_order(self) -> list[int]:
        """Return all parameters in the order of arrival, those without a gradient at the end."""
        # An exception may have come between the notes in `seen` and `order`.
        return list(dict.fromkeys([*self.order, *range(len(self.seen))]))


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
        unused: The parameters that no rank had a gradient for; equal on all ranks.
        changes: (parameter, gradients, gradients expected) for what was not as expected in the last backward.
    """

    counts: list[int] | None = None
    used: list[float] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)

    def learn(self, seen: Sequence[int], used: Sequence[float]) -> None:
        """Take a backward that ended well on every rank as the one that all others are like."""
        self.counts = list(seen)
        self.used = list(used)
        self.unused = [index for index, number in enumerate(used) if not number]

    def allows(self, index: int, seen: int) -> bool:
        """Say whether the gradient number ``seen`` of a parameter in one backward is one of those expected."""
        return self.counts is not None and seen <= self.counts[index]

    def holds(self, seen: Sequence[int], kept: Sequence[int]) -> bool:
        """Say whether a backward is like the first one; notes ``changes``.

        Args:
            seen: How many gradients of each parameter it had.
            kept: Of each parameter, whether one came without synchronisation before: of ``unused`` it is in no bucket.
        """
        self.changes = [(index, 1, 0) for index in self.unused if kept[index] and not seen[index]]
        if self.counts is not None and self.counts != seen:
            expected = enumerate(zip(seen, self.counts, strict=True))
            self.changes += [(index, now, then) for index, (now, then) in expected if now != then]
        return not self.changes
