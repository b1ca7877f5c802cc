"""What each backward of a root does: when it begins, when gradients of outputs arrive, and when it ends.

Which handles are complete by then is the business of ``completion.py``.
"""

import weakref
from collections.abc import Callable

import torch

from composable.engine.completion import Completion
from composable.engine.handle import Handle
from composable.engine.handle_step import HandleStep
from composable.engine.step import LED, Step
from composable.engine.stepping import refuse_graph_of_backward
from composable.errors import UsageError, place_of_rank
from composable.ground.frames import in_split_backward
from composable.ground.torch_hooks import Ending, in_backward_of_nothing, next_ending_number

__all__ = ["Backwards"]


class Backwards:
    """Runs the backwards of one root, and forgets those that were cut short, with the forwards before them.

    Args:
        step: Of the root.
        completion: Of the same.
        at_end: Lets this run at the end of the running backward; returns what autograd frees when that ends.

    Attributes:
        number: Its place among all that end a backward.
    """

    def __init__(self, step: Step, completion: Completion, at_end: Callable[[Ending], Callable[[], None]]) -> None:
        self.number = next_ending_number()
        self._step = step
        self._completion = completion
        self._at_end = at_end
        # What autograd holds of the running one.
        self._end: Callable[[], object] = lambda: None
        # Of the running one, known when it starts to end; ``None``: it does not.
        self._ends_reductions: bool | None = None
        # Whose gradient arrived last in the running one.
        self._last: HandleStep | None = None

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
        if step.finalizing is not None:
            step.check_waited_for()
        if in_split_backward():
            self.check_split_backward()
        # First: the next forward undoes a backward that was cut short, here as well.
        step.is_backward = True
        self._end = weakref.ref(self._at_end(self), self._note_end)
        step.backward_id += 1
        step.makes_graph = None
        settings = step.settings
        if not settings.is_last_backward or settings.finalizes_by_hand:
            self._check_steppers()
        if step.teller is not None:
            step.teller.begin_backward()
        step.finalizer.open()
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
        backward_id, own = step.backward_id, step.steps[handle]
        if clock == LED and own.leaders:
            if gathers:
                step.unsharded.unshard(handle)
            return backward_id
        if own.queued_in != backward_id or own.completed_in == backward_id:
            completion.expect_late(own)
        if gathers:
            self.unshard(handle)
        if own.followers:
            self._begin_followers(own)
        if own.met_in != backward_id:
            own.met_in = backward_id
            self._prefetch_after(own)
        return backward_id

    def unshard(self, handle: Handle) -> None:
        """Make the parameters usable until the backward ends with them. Collective unless they are unsharded."""
        self._step.unsharded.unshard(handle)
        if handle.has_secondary:
            handle.end_secondary()

    def _prefetch_after(self, own: HandleStep) -> None:
        """Start to gather what is likely to be next after the first gradient of ``own``, or what users have said."""
        last, self._last = self._last, own
        if last is not None:
            last.next_backward = own
        steps, prefetch = self._step.steps, own.handle.backward_prefetch
        if prefetch is not None:
            for ahead in prefetch:
                # Those of another root are gathered by that root, on streams of its own.
                if ahead in steps:
                    self._begin_unshard(steps[ahead])
            return
        following = own.next_backward or own.previous_forward
        # A handle that is not armed takes no part in this backward.
        if following is not None and following.is_armed and following.completed_in != self._step.backward_id:
            self._begin_unshard(following)

    def _begin_unshard(self, own: HandleStep) -> None:
        if own.handle.unshard_in_backward:
            self._step.unsharded.begin_unshard(own.handle)
        self._begin_followers(own)

    def _begin_followers(self, own: HandleStep) -> None:
        """Start to gather what goes with a handle."""
        for one in own.followers:
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
        ends = step.settings.ends_backward
        if step.teller is not None:
            step.teller.end_reductions(ends=ends)
        step.finalizer.tell(ends=ends)
        self._ends_reductions = ends

    def finish(self) -> None:
        """Reduce what is left on any rank, and hand over every gradient.

        Raises:
            UsageError: On this rank, or on one that tells of it in its message, a gradient could not be reduced.
        """
        ends, self._ends_reductions = self._ends_reductions, None
        step = self._step
        if ends is None:
            return  # `start` raised: the next forward begins by tidying up.
        if not ends:
            with torch.no_grad():
                self.end_backward()
            step.finalizer.postpone()
            return
        if step.teller is not None:
            step.teller.hand_over()
        step.finalizer.end(self.end_backward)

    def end_backward(self) -> None:
        """Free what the running backward has kept, if one is running, and forget where it was."""
        step = self._step
        if not step.is_backward:
            return  # Ended by hand.
        unsharded = step.unsharded
        for handle in tuple(unsharded.members):
            if step.makes_graph and not handle.is_gathering:
                unsharded.retain_until_backward(handle, with_graph=True)
            if handle.reshard_after_backward or handle.is_gathering:
                step.reshard_unless_running(handle)
            elif not step.is_in_use(handle):
                handle.hide()
        if step.makes_graph:
            unsharded.notice_backward(unsharded.retained, self.begin_backward)
        unsharded.free_retained()
        self._completion.end_backward()
        while step.first_nodes and step.first_nodes[-1] < 0:
            # Run again by checkpointing, and stopped in the hook after forward: torch tells nobody.
            step.first_nodes.pop()
            del step.running[len(step.first_nodes) :]
        step.streams.end_backward()
        self._last = None
        step.is_threaded, step.thread = False, None
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
        step.finalizer.abandon()
        step.streams.end_backward()
        step.unsharded.free_retained(always=True)
        for handle in tuple(step.unsharded.members):
            step.reshard_unless_running(handle)
        for handle, own in step.steps.items():
            own.end_step()
            handle.drop_gradients()
            handle.drop_secondary()
        step.finalizer.forget_kept()
        step.finalizer.is_deferred, step.finalizing = False, None
        self._completion.forget()
        self._last = None
        step.is_threaded, step.thread = False, None
        self._ends_reductions = None
        step.is_backward = False
