"""The scheduler, which runs a root's handles.

Hooks of modules call its two passes, see ``passes.py``.
"""

from collections.abc import Callable, Iterable

import torch

from composable.engine.handle import Handle
from composable.engine.param import ParamView
from composable.engine.passes import Backwards, Forwards
from composable.engine.step import Completion, Step
from composable.engine.unsharded import Streams
from composable.errors import UsageError
from composable.ground.modes import unseen
from composable.ground.torch_hooks import Ending


class Scheduler:
    """Runs the handles of one root.

    Args:
        step: The state of its steps.
        at_end: Lets ``Backwards`` run at the end of the running backward; returns an object that autograd frees then.
    """

    def __init__(self, step: Step, at_end: Callable[[Ending], Callable[[], None]]) -> None:
        self.step = step
        self.completion = Completion(self.step)
        self.backwards = Backwards(self.step, self.completion, at_end)
        self.forwards = Forwards(self.step, self.completion, self.backwards)

    @property
    def _stream_to_name(self) -> dict[int, str]:
        """Name of each stream by its id, for debugging; empty on the CPU."""
        return dict(self.step.streams.names)

    # Unshard and reshard by hand

    @unseen
    def unshard(self, handle: Handle) -> None:
        """Make the modules of ``handle`` hold unsharded parameters. Collective unless it is unsharded."""
        self.step.unsharded.unshard(handle)
        self.step.streams.wait_for_copies()

    @unseen
    def begin_unshard(self, handle: Handle) -> None:
        """Start to gather a handle ahead of use; ``unshard`` waits for it."""
        self.step.unsharded.begin_unshard(handle)

    def refresh(self, handles: Iterable[Handle]) -> None:
        """Free hidden parameters of ``handles``, left by an earlier step, where a rank has written its shard since.

        Collective. Within a step nothing happens: its forward has checked them.
        """
        hidden = [handle for handle in handles if handle.view is ParamView.HIDDEN]
        if hidden and not self.step.is_under_way:
            self.step.unsharded.free_stale(hidden)

    @unseen
    def reshard(self, handle: Handle) -> None:
        """Free the unsharded parameters of ``handle``; no error if there are none, or a context holds them."""
        self.step.unsharded.reshard(handle)
        self.step.streams.wait_for_copies()

    def reshard_hidden(self) -> None:
        """Free parameters that a backward kept, if settings no longer keep them; within a step, its end does this."""
        if self.step.is_under_way:
            return
        for handle in tuple(self.step.unsharded.members):
            if handle.view is ParamView.HIDDEN and handle.settings.reshard_after_backward:
                self.step.unsharded.reshard(handle)

    def check_between_steps(self) -> None:
        """Raise ``UsageError`` where a step is running, or reductions are under way."""
        if self.step.is_under_way or self.step.finalizer.is_deferred:
            raise UsageError("streams cannot change within a step", fix="do it between two steps")

    def use_streams(self, streams: Streams) -> None:
        """Run on other streams from now on; frees what is unsharded.

        Raises:
            UsageError: A step is running, or reductions are under way.
        """
        self.check_between_steps()
        step = self.step
        step.unsharded.free()
        step.drop_secondaries()
        # Also for memory freed so far: the current stream waits for its last readers.
        step.streams.end_backward()
        step.streams = step.unsharded.streams = step.finalizer.streams = streams
        streams.shards_written()

    # Ending by hand

    def reduce_kept(self) -> None:
        """Reduce gradients that backwards without synchronisation left. Collective, between steps."""
        if self.step.is_backward:
            self.abandon_step()  # A backward was stopped by an exception: its gradients are dropped.
        # Ranks compare in any case: there may be shards that wait for an all-reduce over copies.
        self.step.finalizer.defer(waits=True)
        self.finalize()
        self.end_finalize()

    @unseen
    def finalize(self) -> None:
        """Begin to end the backwards so far: reduce gradients that wait for it, and start messages to the other ranks.

        Nothing happens if no backward has ended since the last call. Otherwise collective, then call ``end_finalize``.

        Raises:
            UsageError: The last ``finalize`` has not been waited for.
        """
        step = self.step
        step.check_waited_for()
        waiting = [own for handle, own in step.steps.items() if handle.requires_gradient_sync and handle.is_unsynced]
        if not waiting and not self.step.finalizer.is_deferred:
            return
        step.finalizer.defer(waits=True)
        step.makes_graph = False
        try:
            with torch.no_grad():
                self.completion.complete_kept(waiting)
                step.streams.end_backward()
            for hear in step.listeners.backward_ends:
                hear(averages=step.averages, ends=True)
            step.finalizer.tell(ends=True)
            step.finalizing = object()
        except BaseException:
            # No forward would find out that this was cut short.
            self.backwards.reset()
            raise

    @unseen
    def end_finalize(self) -> None:
        """Give each gradient to its sharded parameter; raises the errors of ``Backwards.finish``."""
        step = self.step
        if step.finalizing is None:
            return
        step.finalizing = None
        for hear in step.listeners.gradients_come:
            hear()
        try:
            step.finalizer.end(self.backwards.end_backward)
        except BaseException:
            if self.step.finalizer.is_deferred:
                self.backwards.reset()
            raise
        finally:
            for hear in step.listeners.gradients_came:
                hear()

    # Recovery

    def abandon_step(self, *, always: bool = False) -> None:
        """Forget a step that an exception or Ctrl-C cut short: free buffers, drop its gradients. Nothing is running.

        Args:
            always: Also forget a step that has ended, and gradients that wait to be reduced.
        """
        if always or self.step.is_under_way:
            self.backwards.reset()

    def stand_by(self) -> None:
        """Free what is unsharded, and drop gradients that wait on this rank for a later backward; nothing is running.

        Reduced gradients that wait for all ranks stay.
        """
        step = self.step
        step.unsharded.free()
        for handle, own in step.steps.items():
            for flat in handle.buffers:
                flat.gradients.drop()
            own.is_armed = False
        self.completion.forget()

    def forget_order(self) -> None:
        """Prefetch nothing until forwards have shown the order of modules again. On every rank alike."""
        for own in self.step.steps.values():
            own.forget_order()

    def let_go(self, handles: Iterable[Handle]) -> None:
        """Leave ``handles`` to another root.

        Raises:
            UsageError: In the middle of a forward or backward.
        """
        step = self.step
        if step.is_under_way or self.step.finalizer.is_deferred:
            raise UsageError(
                "a module that ran on its own is called inside another annotated one before its own step has ended",
                fix="call the outermost annotated module before the modules inside it",
            )
        step.unsharded.free_retained()
        for handle in handles:
            step.unsharded.reshard(handle)
            handle.drop_secondary()
            if handle in step.steps:
                step.steps[handle].forget()
        self.completion.forget()

    def leave_ranks(self) -> None:
        """Forget a step that was cut short and tell no rank of it: some may have gone. Call ``close`` next."""
        flats = [flat for handle in self.step.handles for flat in handle.buffers]
        for transport in self.step.finalizer.transports().union(*(flat.routes.transports() for flat in flats)):
            transport.give_up()
        self.step.finalizer.give_up()

    def close(self) -> None:
        """Let go of every handle; a backward of an earlier forward then raises. No step is running."""
        self.abandon_step()
        self.let_go(self.step.handles)
        self.step.is_closed = True
        # An earlier graph holds this scheduler, and must not hold the shards with it.
        self.step.finalizer.agreements = []
        for own in self.step.steps.values():
            own.ledgers = []
