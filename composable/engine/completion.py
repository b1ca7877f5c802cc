"""Which handles wait for gradients, when these are complete, and what happens then.

Every collective is decided by events that all ranks share: a fully sharded module starts
or ends its forward, or the gradient of its output arrives. Which *parameters* got a
gradient is never asked, so a parameter that only some ranks use cannot change the order.

When is a handle's gradient complete? Autograd runs ready nodes latest-created first. When
the gradient of a module's output arrives, every node created after that output has run; so
every handle whose first forward call came later is complete and may be reduced, with no
hook on any parameter. What no earlier module completes, the end of backward does. That order says
when to reduce *early*. Where it is wrong, the ranks find out when backward ends, and reduce once more.
See docs/notes/completion.md.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch

from composable.engine.handle import Handle
from composable.engine.handle_step import GradientLedger, HandleStep
from composable.engine.step import Step
from composable.errors import UsageError, place_of_rank

__all__ = ["Completion"]

_first_forward = attrgetter("first_forward")
_NOTHING: Any = nullcontext()


class Completion:
    """The handles that the next backward completes, or the running one has still to complete.

    A forward arms them. When a backward begins they are queued, in the order of their first forwards.

    Args:
        step: Of the root.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._armed: list[HandleStep] = []
        # Those of the last backward: it may run once more through the same graph.
        self._last_armed: list[HandleStep] = []
        self._queue: list[HandleStep] = []

    # Before backward

    def arm(self, own: HandleStep) -> None:
        """A differentiable call of ``own`` has ended: the next backward completes it, and what goes with it."""
        for one in (own, *own.followers):
            if not one.is_armed:
                one.is_armed = True
                one.first_forward = own.entered_at
                self._armed.append(one)

    @property
    def has_armed(self) -> bool:
        """Some call waits for its backward."""
        return bool(self._armed)

    def has_armed_after(self, clock: int) -> bool:
        """Say whether calls wait for their backward, and the first of them began after ``clock``."""
        return bool(self._armed) and self._armed[0].first_forward > clock

    @contextmanager
    def without_armed(self) -> Iterator[None]:
        """Let forwards that wait for their backward take no part in one that runs meanwhile."""
        armed, last_armed = self._armed, self._last_armed
        first_forwards = [(own, own.first_forward) for own in armed]
        self._armed, self._last_armed = [], []
        for own in armed:
            own.is_armed = False
        try:
            yield
        finally:
            self._armed, self._last_armed = armed, last_armed
            for own, first_forward in first_forwards:
                own.is_armed, own.first_forward = True, first_forward

    def forget(self) -> None:
        """Forget what waits for a backward, or for the running one."""
        self._queue.clear()
        self._armed = []
        self._last_armed = []

    # In backward

    def begin_backward(self) -> None:
        """Queue what has run since the last backward, or before it if nothing has, and what has kept gradients."""
        step = self._step
        armed = self._armed or self._last_armed
        is_again = not self._armed
        for handle, own in step.steps.items():
            if handle.keeps_gradients:
                self._drop_zeroed_gradients(handle)
            if handle.casts_gradients:
                handle.sum_in_reduce_dtype()
            if handle.has_unsynced_gradients and not own.is_armed:
                own.is_armed, own.first_forward = True, 0
                if not (is_again and own in self._last_armed):
                    armed = [*armed, own]
        self._queue = sorted(armed, key=_first_forward)
        for own in armed:
            own.queued_in = step.backward_id
        self._last_armed, self._armed = armed, []

    def end_backward(self) -> None:
        """Forget the forwards that the backward has gone through."""
        for own in self._last_armed:
            own.is_armed, own.first_forward = False, 0
            if own.handle.has_secondary:
                own.handle.end_secondary()

    def expect_late(self, own: HandleStep) -> None:
        """Let the end of backward complete what was not expected in it, or is complete already, and what follows."""
        for one in own.followers:
            self.expect_late(one)
        backward_id = self._step.backward_id
        if own.completed_in == backward_id:
            # Forwards and backwards interleave: reduced already, and more is coming.
            own.is_late = True
        elif own.queued_in != backward_id:
            # It ran before the backward before this one, or its first forward had no grad.
            own.queued_in = backward_id
            own.is_armed, own.first_forward = True, 0
            self._queue.insert(0, own)
            self._last_armed.append(own)

    def complete_after(self, clock: float) -> None:
        """The gradient of what was made at ``clock`` arrived: complete the handles whose first call began later."""
        queue, step = self._queue, self._step
        if not queue or queue[-1].first_forward <= clock or step.is_threaded:
            return
        # Where it makes no graph, gradients are disabled in a backward anyway.
        with torch.no_grad() if step.makes_graph else _NOTHING:
            while queue and queue[-1].first_forward > clock:
                self._complete(queue.pop(), is_early=True)

    def complete_the_rest(self) -> None:
        """A backward ends: complete what no module has.

        Raises:
            UsageError: More came of a gradient that was stepped on.
        """
        while self._queue:
            self._complete(self._queue.pop(), is_early=False)
        for own in self._step.steps.values():
            if own.is_late:
                own.is_late = False
                if own.handle.steppers:
                    raise _stepped_already(own.handle)
                self._complete(own, is_early=False)

    def complete_kept(self, waiting: Sequence[HandleStep]) -> None:
        """Reduce, outside of any backward, what those without synchronisation have left."""
        # All of them first: reductions that end meanwhile replace what kept gradients wait beside.
        for own in waiting:
            if own.handle.keeps_gradients:
                self._drop_zeroed_gradients(own.handle)
        for own in reversed(waiting):
            self._complete(own, is_early=False)

    def _drop_zeroed_gradients(self, handle: Handle) -> None:
        """Forget kept gradients that users have dropped by ``zero_grad``."""
        teller = self._step.teller
        dropped = handle.drop_zeroed_gradients()
        if teller is not None and any(dropped):
            teller.drop(handle, dropped)

    def _complete(self, own: HandleStep, *, is_early: bool) -> None:
        """Reduce the handle's gradients and free its parameters."""
        step, handle = self._step, own.handle
        own.completed_in = step.backward_id
        if step.makes_graph:
            # A backward of this backward will read the parameters.
            step.unsharded.retain_until_backward(handle, with_graph=True)
        step.streams.meet()
        trainable = [ledger for ledger in own.ledgers if ledger.flat.is_trainable]
        if trainable:
            handle.has_unsynced_gradients = not handle.requires_gradient_sync
        if trainable and handle.requires_gradient_sync:
            self._reduce(own, trainable, is_early=is_early)
        else:
            waiting = [ledger.flat.gradients for ledger in trainable] if is_early else []
            if any(gradients.expects_more(gradients.bits()) for gradients in waiting):
                step.unsharded.retain_until_backward(handle)
            if handle.reshard_after_backward:
                step.reshard_unless_running(handle)
        step.streams.meet()
        if own.leaders:
            # What stays has to be the same on all ranks, also where its modules took no part.
            if handle.is_gathering:
                step.unsharded.unshard(handle)
            handle.end_secondary()

    def _reduce(self, own: HandleStep, ledgers: Sequence[GradientLedger], *, is_early: bool) -> None:
        """Start the reductions; before the last of them the parameters are freed."""
        step, handle = self._step, own.handle
        for ledger in ledgers:
            if step.teller is not None:
                step.teller.reduce(handle, own.ledgers.index(ledger))
            gradient = step.finalizer.take(ledger, handle.gradient_buffers)
            if is_early and ledger.flat.gradients.expects_more(ledger.grad_mask):
                # Not complete after all: parts of backward that read the parameters are still to run.
                step.unsharded.retain_until_backward(handle)
            if ledger is ledgers[-1] and handle.reshard_after_backward:
                step.reshard_unless_running(handle)
            if gradient is not None:
                step.finalizer.begin(ledger, gradient)


def _stepped_already(handle: Handle) -> UsageError:
    return UsageError(
        "more of a gradient arrives in the backward that has stepped on the rest of it",
        at=f"{place_of_rank()}, module {handle.fqn!r}",
        fix="run one backward for each forward, or step after backward",
    )
