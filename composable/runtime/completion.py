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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from composable.errors import UsageError, place_of_rank
from composable.runtime.account import Account
from composable.runtime.step import Step
from composable.runtime.turn import Turn
from composable.storage import Handle

__all__ = ["Completion"]


class Completion:
    """The handles that the next backward completes, or the running one has still to complete.

    A forward arms them. When a backward begins they are queued, in the order of their first forwards.

    Args:
        step: Of the root.
    """

    __slots__ = ("_armed", "_last_armed", "_queue", "_step")

    def __init__(self, step: Step) -> None:
        self._step = step
        self._armed: list[Turn] = []
        # Those of the last backward: it may run once more through the same graph.
        self._last_armed: list[Turn] = []
        self._queue: list[Turn] = []

    # Before backward

    def arm(self, turn: Turn) -> None:
        """A differentiable call of ``turn`` has ended: the next backward completes it, and what goes with it."""
        for one in (turn, *turn.followers):
            if one.first_forward is None:
                one.first_forward = turn.entered_at
                self._armed.append(one)

    @property
    def oldest(self) -> int | None:
        """Clock of the first call that waits for its backward; ``None``: none does."""
        return _first_forward(self._armed[0]) if self._armed else None

    @contextmanager
    def without_armed(self) -> Iterator[None]:
        """Let forwards that wait for their backward take no part in one that runs meanwhile."""
        armed, last_armed = self._armed, self._last_armed
        first_forwards = [(turn, turn.first_forward) for turn in armed]
        self._armed, self._last_armed = [], []
        for turn in armed:
            turn.first_forward = None
        try:
            yield
        finally:
            self._armed, self._last_armed = armed, last_armed
            for turn, first_forward in first_forwards:
                turn.first_forward = first_forward

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
        # Of a forward that had its backward: only these are armed without a first forward.
        again: set[Turn] = set() if self._armed else set(self._last_armed)
        self._drop_zeroed_gradients(step.handles)
        for handle, turn in step.turns.items():
            if handle.casts_gradients:
                handle.sum_in_reduce_dtype()
            if handle.has_unsynced_gradients and turn.first_forward is None:
                turn.first_forward = 0
                if turn not in again:
                    armed = [*armed, turn]
        self._queue = sorted(armed, key=_first_forward)
        for turn in armed:
            turn.queued_in = step.backward_id
        self._last_armed, self._armed = armed, []

    def end_backward(self) -> None:
        """Forget the forwards that the backward has gone through."""
        for turn in self._last_armed:
            turn.first_forward = None
            turn.handle.end_secondary()

    def expect_late(self, turn: Turn) -> None:
        """Let the end of backward complete what was not expected in it, or is complete already, and what follows."""
        for one in turn.followers:
            self.expect_late(one)
        backward_id = self._step.backward_id
        if turn.completed_in == backward_id:
            # Forwards and backwards interleave: reduced already, and more is coming.
            turn.is_late = True
        elif turn.queued_in != backward_id:
            # It ran before the backward before this one, or its first forward had no grad.
            turn.queued_in = backward_id
            turn.first_forward = 0
            self._queue.insert(0, turn)
            self._last_armed.append(turn)

    def complete_after(self, clock: float) -> None:
        """The gradient of what was made at ``clock`` arrived: complete the handles whose first call began later."""
        queue, step = self._queue, self._step
        if not queue or _first_forward(queue[-1]) <= clock or step.is_threaded:
            return
        if step.makes_graph:
            with torch.no_grad():
                self._complete_queued_after(clock)
        else:
            self._complete_queued_after(clock)

    def _complete_queued_after(self, clock: float) -> None:
        queue = self._queue
        while queue and _first_forward(queue[-1]) > clock:
            self._complete(queue.pop(), is_early=True)

    def complete_the_rest(self) -> None:
        """A backward ends: complete what no module has.

        Raises:
            UsageError: More came of a gradient that was stepped on.
        """
        while self._queue:
            self._complete(self._queue.pop(), is_early=False)
        for turn in self._step.turns.values():
            if turn.is_late:
                turn.is_late = False
                if turn.handle.steppers:
                    raise _stepped_already(turn.handle)
                self._complete(turn, is_early=False)

    def complete_kept(self, turns: Sequence[Turn]) -> None:
        """Reduce, outside of any backward, what those without synchronisation have left."""
        # All of them first: reductions that end meanwhile replace what kept gradients wait beside.
        self._drop_zeroed_gradients(turn.handle for turn in turns)
        for turn in reversed(turns):
            self._complete(turn, is_early=False)

    def _drop_zeroed_gradients(self, handles: Iterable[Handle]) -> None:
        """Forget kept gradients that users have dropped by ``zero_grad``."""
        teller = self._step.teller
        for handle in handles:
            if handle.keeps_gradients:
                dropped = handle.drop_zeroed_gradients()
                if teller is not None and any(dropped):
                    teller.drop(handle, dropped)

    def _complete(self, turn: Turn, *, is_early: bool) -> None:
        """Reduce the handle's gradients and free its parameters."""
        step, handle = self._step, turn.handle
        turn.completed_in = step.backward_id
        if step.makes_graph:
            # A backward of this backward will read the parameters.
            step.unsharded.linger(handle, with_graph=True)
        step.streams.meet()
        trainable = [account for account in turn.accounts if account.flat.is_trainable]
        if trainable:
            handle.has_unsynced_gradients = not handle.requires_gradient_sync
        if trainable and handle.requires_gradient_sync:
            self._reduce(turn, trainable, is_early=is_early)
        else:
            waiting = [account.flat.gradients for account in trainable] if is_early else []
            if any(gradients.expects_more(gradients.bits()) for gradients in waiting):
                step.unsharded.linger(handle)
            if handle.reshard_after_backward:
                step.reshard_unless_running(handle)
        step.streams.meet()
        if turn.leaders:
            # What stays has to be the same on all ranks, also where its modules took no part.
            if handle.is_gathering:
                step.unsharded.unshard(handle)
            handle.end_secondary()

    def _reduce(self, turn: Turn, accounts: Sequence[Account], *, is_early: bool) -> None:
        """Start the reductions; before the last of them the parameters are freed."""
        step, handle = self._step, turn.handle
        for account in accounts:
            if step.teller is not None:
                step.teller.reduce(handle, turn.accounts.index(account))
            gradient = step.reductions.take(account, handle.gradient_buffers)
            if is_early and account.flat.gradients.expects_more(account.had):
                # Not complete after all: parts of backward that read the parameters are still to run.
                step.unsharded.linger(handle)
            if account is accounts[-1] and handle.reshard_after_backward:
                step.reshard_unless_running(handle)
            if gradient is not None:
                step.reductions.begin(account, gradient)


def _first_forward(turn: Turn) -> int:
    return turn.first_forward or 0


def _stepped_already(handle: Handle) -> UsageError:
    return UsageError(
        "more of a gradient arrives in the backward that has stepped on the rest of it",
        at=f"{place_of_rank()}, module {handle.fqn!r}",
        fix="run one backward for each forward, or step after backward",
    )
