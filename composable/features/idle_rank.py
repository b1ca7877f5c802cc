"""What a rank without inputs does of a root's step: it takes part in every collective and has nothing to add.

It runs no module. Its gradients are zeros, and its shards get their part of the mean as those of other ranks do. The
same objects do it as in a backward of its own, so collectives that start late, such as an all-reduce over
copies, start between the same others on all ranks.
"""

from typing import Any

from composable.engine import Scheduler, StepEvent

__all__ = ["IdleRank"]


class IdleRank:
    """Follows, in one root, what ranks with inputs tell.

    Args:
        scheduler: Of the root.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._step = scheduler.step
        self._before: list[tuple[bool, list[bool]]] | None = None

    def leave_step(self) -> None:
        """This rank has no inputs left: free what is unsharded, drop what was not averaged yet."""
        scheduler = self._scheduler
        scheduler.abandon_step()
        scheduler.stand_by()
        self._before = [
            (handle.requires_gradient_sync, [flat.routes.kept.defers for flat in handle.buffers])
            for handle in scheduler.handles
        ]

    def begin_step(self) -> None:
        """A step of the others begins: this rank's optimizer may have written the shards."""
        self._step.optimizer_stepped()

    def follow(self, event: StepEvent, *args: Any) -> None:
        """Do what the others are about to do, and told. Collective but for DROP and BACKWARD.

        Args:
            event: What.
            *args: GATHER: the place of the handle, and whether from secondary shards. DROP: the same place, and the
                bits of the parameters of each buffer. REDUCE: the place, that of the buffer, and whether the all-reduce
                over copies comes later. TELL: of each handle, whether it averages; and whether that is the end.

        Raises:
            UsageError: What any rank raises where parameters get their gradients.
        """
        step = self._step
        if event is StepEvent.GATHER:
            step.unsharded.gather_for_others(step.handles[args[0]], takes_secondary=args[1])
        elif event is StepEvent.BACKWARD:
            step.finalizer.open()
        elif event is StepEvent.DROP:
            for flat, own in zip(step.handles[args[0]].buffers, args[1], strict=True):
                flat.gradients.drop_kept(own)
        elif event is StepEvent.REDUCE:
            handle = step.handles[args[0]]
            ledger = step.steps[handle].ledgers[args[1]]
            ledger.flat.routes.kept.defers = args[2]
            step.finalizer.reduce(ledger, handle.settings.gradient_buffers)
        elif event is StepEvent.TELL:
            for handle, is_synced in zip(step.handles, args[0], strict=True):
                handle.requires_gradient_sync = is_synced
            step.finalizer.tell(ends=args[1])
            if not args[1]:
                step.finalizer.postpone()
        elif event is StepEvent.ASSIGN:
            step.finalizer.end(step.streams.end_backward)
        else:
            self._scheduler.backwards.tidy_up()

    def leave(self) -> None:
        """No rank has inputs left: on all of them, forget what was not averaged and in which order modules ran."""
        scheduler = self._scheduler
        scheduler.abandon_step(always=True)
        scheduler.let_go(scheduler.handles)
        self.end()

    def end(self) -> None:
        """Nobody is followed from now on, whatever cut that short: all ranks learn anew in which order modules run."""
        self._scheduler.forget_order()
        before, self._before = self._before, None
        for handle, (syncs, defers) in zip(self._step.handles, before or (), strict=before is not None):
            handle.requires_gradient_sync = syncs
            for flat, one in zip(handle.buffers, defers, strict=True):
                flat.routes.kept.defers = one
