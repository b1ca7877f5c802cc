"""What a reducer knows of one backward: which gradients arrived, in which order, and how it ended."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from composable.replication.bucket import Bucket, ReducedParam
from composable.torch_private import current_autograd_node, running_transform, will_engine_execute_node

__all__ = ["Round"]


class Round:
    """The state of one backward, and after it of the next: what runs for each gradient holds ``seen`` and ``order``.

    Args:
        numel: How many parameters there are.

    Attributes:
        is_led: A module around began it, on all ranks: nothing is started before its end.
        is_open: The backward is running, and a gradient arrived in it; or an exception stopped it just now.
        synchronises: It averages gradients.
        was_stopped: The last backward ended by an exception, and nobody has put things right since.
        seen: For each parameter, how many gradients of it arrived.
        order: Parameters in the order of arrival.
        sent: How many buckets were started, which is the index of the next.
        stepped: How many of them had their parameters stepped, inside backward.
        accumulates: Gradients are added to those of the parameters, which ``torch.autograd.grad`` does not do.
        complaint: What this rank tells the others: parameters without a gradient, -1 for a backward that was stopped.
        kept: How many backwards there were since the last that averaged; -1: this rank follows the others, with zeros.
        forwards: How many forwards that record a graph there were since then; 0: they do not count.
    """

    __slots__ = (
        "_armed_modules",
        "_guard",
        "_node",
        "accumulates",
        "complaint",
        "forwards",
        "is_led",
        "is_open",
        "kept",
        "order",
        "seen",
        "sent",
        "stepped",
        "synchronises",
        "was_stopped",
    )

    def __init__(self, numel: int) -> None:
        self.is_led = False
        self.is_open = False
        self.synchronises = True
        self.was_stopped = False
        self.seen = [0] * numel
        self.order: list[int] = []
        self.sent = 0
        self.stepped = 0
        self.accumulates = False
        self.complaint = 0
        self.kept = self.forwards = 0
        self._armed_modules: set[int] = set()
        self._node: Any = None
        self._guard: weakref.ref[Callable[[], None]] | None = None

    @property
    def is_complete(self) -> bool:
        """Every parameter got its gradient."""
        return len(self.order) == len(self.seen)

    def clear(self, buckets: Sequence[Bucket], *, synchronises: bool) -> None:
        """Make this the state of a backward in which nothing has arrived."""
        self.seen[:] = [0] * len(self.seen)
        self.order.clear()
        self._armed_modules.clear()
        self.sent = 0
        self.stepped = 0
        self.accumulates = False
        self.is_led = False
        self.complaint = 0
        for bucket in buckets:
            bucket.pending = bucket.arrivals
        self.synchronises = synchronises

    def open(self, end: Callable[[], None]) -> None:
        """Begin; ``end`` is what autograd frees when backward ends."""
        self._guard = weakref.ref(end, self._note_end)
        self.is_open = True

    def _note_end(self, guard: "weakref.ref[Callable[[], None]]") -> None:
        """Notice a backward whose end did not come to an end: an exception stopped it."""
        if guard is self._guard and self.is_open:
            self.was_stopped = True
            self.is_open = False
            self._node = None

    def is_due(self) -> bool:
        """Say, when a backward ends that was not stopped, whether gradients were due in it."""
        node, self._node = self._node, None
        # None are with torch.autograd.grad, say.
        return bool(self.order) or _is_whole_backward(node)

    def close(self) -> None:
        """End: everybody has what the backward was for, or a backward that was stopped was put right."""
        self.was_stopped = False
        self.is_open = False

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
