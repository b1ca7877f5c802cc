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

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from composable.engine.handle import Handle
from composable.engine.handle_step import Account, Turn
from composable.engine.step import LED, Step
from composable.engine.stepping import refuse_graph_of_backward
from composable.errors import UsageError, place_of_rank
from composable.frames import in_split_backward
from composable.torch_hooks import Ending, in_backward_of_nothing, next_ending_number

__all__ = ["Backwards", "Completion"]


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


class Backwards:
    """Runs the backwards of one root, and forgets those that were cut short, with the forwards before them.

    Args:
        step: Of the root.
        completion: Of the same.
        at_end: Lets this run at the end of the running backward; returns what autograd frees when that ends.

    Attributes:
        number: Its place among all that end a backward.
    """

    __slots__ = ("__weakref__", "_at_end", "_completion", "_end", "_is_ending", "_last", "_step", "number")

    def __init__(self, step: Step, completion: Completion, at_end: Callable[[Ending], Callable[[], None]]) -> None:
        self.number = next_ending_number()
        self._step = step
        self._completion = completion
        self._at_end = at_end
        # What autograd holds of the running one.
        self._end: Callable[[], object] = lambda: None
        self._is_ending = False
        # Whose gradient arrived last in the running one.
        self._last: Turn | None = None

    # Begin

    def begin_backward(self, *, runs_again: bool = False) -> None:
        """Begin the backward that is running, unless it was begun.

        Args:
            runs_again: Activation checkpointing tells, which enables gradients whether backward makes a graph or not.
        """
        step = self._step
        if not step.is_backward:
            self._begin()
        elif self._end() is None:
            # That was another one, which an exception has stopped.
            self.tidy_up()
            self._begin()
        if step.makes_graph is None and not runs_again:
            step.makes_graph = torch.is_grad_enabled()
            if step.makes_graph:
                self._check_steppers()

    def _begin(self) -> None:
        step = self._step
        if step.is_closed:
            raise UsageError(
                "backward of a forward that ran before the model's annotation was changed",
                at=place_of_rank(),
                fix="run backward before unannotate, or forward again after it",
            )
        step.check_waited_for()
        if in_split_backward():
            self.check_split_backward()
        # First: the next forward undoes a backward that was cut short, here as well.
        step.is_backward = True
        self._end = weakref.ref(self._at_end(self), self._note_end)
        step.backward_id += 1
        step.makes_graph = None
        if not step.settings.ends_backward:
            self._check_steppers()
        if step.teller is not None:
            step.teller.begin_backward()
        step.hand_over.open()
        self._completion.begin_backward()
        for companion in step.companions:
            companion.follow_backward()

    def _note_end(self, _: object) -> None:
        """Autograd has ended a backward: also one that an exception stopped, and whose gradients users drop now."""
        if self._step.is_backward:
            self._step.unsharded.hide()

    def check_split_backward(self) -> None:
        """Raise if a stage of torch's pipelines takes gradients of inputs and of parameters apart.

        It looks for the parameters that modules hold in the graph, and finds none of those that were computed with.

        Raises:
            UsageError: The parameters are not shown by ``unshard_params``.
        """
        handles = self._step.handles
        if any(handle.held_with is None for handle in handles):
            raise UsageError(
                "a pipeline's stage takes gradients of inputs and of parameters apart, and between forward and "
                "backward a sharded module holds no whole parameters",
                at=f"{place_of_rank()}, {handles[0].described}",
                fix="enter unshard_params(module, writeback=False) for the step, as ShardedStage in "
                "examples/clients/pipelining.py does, or take a schedule without zero bubble",
            )

    def _check_steppers(self) -> None:
        for handle in self._step.handles:
            if handle.steppers:
                if self._step.makes_graph:
                    raise refuse_graph_of_backward(handle.fqn)
                raise UsageError(
                    "gradients are to wait for a later backward, and an optimizer steps inside this one",
                    at=f"{place_of_rank()}, module {handle.fqn!r}",
                    fix="accumulate in no_sync instead, or remove() what step_in_backward returned",
                )

    def reduce_kept(self) -> None:
        """Reduce what backwards without synchronisation left, in a backward of nothing. Collective; nothing runs."""
        with self._completion.without_armed():
            in_backward_of_nothing(self.begin_backward)

    # Gradients of outputs

    def is_running(self, backward_id: int) -> bool:
        """Say whether a backward is running that has this number."""
        return self._step.is_backward and self._step.backward_id == backward_id

    def pre_backward(self, handle: Handle, clock: float, *, gathers: bool = True) -> int:
        """The gradient of an output of ``handle`` arrived; returns the number of the backward.

        Args:
            handle: The handle.
            clock: End of the call that made the output, as ``post_forward`` gave it.
            gathers: Backward of that call may read the parameters.
        """
        self.begin_backward()
        step, completion = self._step, self._completion
        completion.complete_after(clock)
        backward_id, turn = step.backward_id, step.turns[handle]
        if clock == LED and turn.leaders:
            if gathers:
                step.unsharded.unshard(handle)
            return backward_id
        if turn.queued_in != backward_id or turn.completed_in == backward_id:
            completion.expect_late(turn)
        if gathers:
            self.unshard(handle)
        self._begin_followers(turn)
        if turn.met_in != backward_id:
            turn.met_in = backward_id
            self._prefetch_after(turn)
        return backward_id

    def unshard(self, handle: Handle) -> None:
        """Make the parameters usable until the backward ends with them. Collective unless they are unsharded."""
        self._step.unsharded.unshard(handle)
        handle.end_secondary()

    def _prefetch_after(self, turn: Turn) -> None:
        """Start to gather what is likely to be next after the first gradient of ``turn``, or what users have said."""
        last, self._last = self._last, turn
        if last is not None:
            last.next_backward = turn
        turns, prefetch = self._step.turns, turn.handle.backward_prefetch
        if prefetch is not None:
            for ahead in prefetch:
                # Those of another root are gathered by that root, on streams of its own.
                if ahead in turns:
                    self._begin_unshard(turns[ahead])
            return
        following = turn.next_backward or turn.previous_forward
        # A handle that is not armed takes no part in this backward.
        if (
            following is not None
            and following.first_forward is not None
            and following.completed_in != self._step.backward_id
        ):
            self._begin_unshard(following)

    def _begin_unshard(self, turn: Turn) -> None:
        if turn.handle.unshard_in_backward:
            self._step.unsharded.begin_unshard(turn.handle)
        self._begin_followers(turn)

    def _begin_followers(self, turn: Turn) -> None:
        """Start to gather what goes with a handle."""
        for one in turn.followers:
            if one.handle.unshard_in_backward and one.handle.held_with is None:
                self._step.unsharded.begin_unshard(one.handle)

    # End

    def start(self) -> None:
        """End a backward: complete what no earlier module completed, and tell the other ranks what is left.

        Unless the user ends it later.
        """
        step = self._step
        if not step.is_backward:
            return
        with torch.no_grad():
            self._completion.complete_the_rest()
        if step.teller is not None:
            step.teller.end_reductions(ends=step.settings.ends_backward)
        step.hand_over.tell(ends=step.settings.ends_backward)
        self._is_ending = True

    def finish(self) -> None:
        """Reduce what is left on any rank, and hand over every gradient.

        Raises:
            UsageError: On this rank, or on one that tells of it in its message, a gradient could not be reduced.
                Or one came too late for a module whose ranks send no message.
        """
        if not self._is_ending:
            return  # `start` raised: the next forward begins by tidying up.
        self._is_ending = False
        step = self._step
        if not step.settings.ends_backward:
            with torch.no_grad():
                self.end_backward()
            step.hand_over.postpone()
            return
        if step.teller is not None:
            step.teller.hand_over()
        step.hand_over.end(self.end_backward)

    def end_backward(self) -> None:
        """Free what the running backward has kept, if one is running, and forget where it was."""
        step = self._step
        if not step.is_backward:
            return  # Ended by hand.
        unsharded = step.unsharded
        for handle in unsharded:
            if step.makes_graph and not handle.is_gathering:
                unsharded.linger(handle, with_graph=True)
            if handle.reshard_after_backward or handle.is_gathering:
                step.reshard_unless_running(handle)
            elif not step.is_in_use(handle):
                handle.hide()
        if step.makes_graph:
            unsharded.watch_lingering(self.begin_backward)
        unsharded.end_lingering()
        self._completion.end_backward()
        while step.first_nodes and step.first_nodes[-1] < 0:
            # Run again by checkpointing, and stopped in the hook after forward: torch tells nobody.
            step.first_nodes.pop()
            del step.running[len(step.first_nodes) :]
        step.streams.end_backward()
        self._last = None
        step.forget_threads()
        step.is_backward = False

    # Recovery

    def reset(self) -> None:
        """Begin anew, from whatever state an exception at any line has left; it may cut this short too."""
        self.tidy_up()
        self._step.first_nodes.clear()
        self._step.running.clear()

    def tidy_up(self) -> None:
        """Forget the forwards and backwards so far, but for a forward that is running around the backward."""
        step = self._step
        if step.teller is not None:
            is_kept = any(handle.waits_for_copies for handle in step.handles)
            step.teller.abandon(is_needed=step.is_backward or step.is_deferred or is_kept)
        for handle in step.handles:
            handle.settle()
        step.hand_over.abandon()
        step.reductions.abandon()
        step.streams.end_backward()
        step.unsharded.end_lingering(always=True)
        for handle in step.unsharded:
            step.reshard_unless_running(handle)
        for handle, turn in step.turns.items():
            turn.end_step()
            handle.drop_gradients()
            handle.drop_secondary()
        step.hand_over.forget_kept()
        step.hand_over.is_deferred, step.finalizing = False, None
        self._completion.forget()
        self._last = None
        step.forget_threads()
        self._is_ending = False
        step.is_backward = False
