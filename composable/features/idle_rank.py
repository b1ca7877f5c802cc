"""What a rank without inputs does of a root's step: it takes part in every collective and has nothing to add.

It runs no module. Its gradients are zeros, and its shards get their part of the mean as those of other ranks do. The
same objects do it as in a backward of its own, so collectives that start late, such as an all-reduce over
copies, start between the same others on all ranks.
"""

from collections.abc import Sequence

from composable.engine import Scheduler

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

    def gather(self, index: int, *, takes_secondary: bool) -> None:
        """Give this rank's shards to those that compute, or its secondary ones. Collective."""
        self._step.unsharded.gather_for_others(self._step.handles[index], takes_secondary=takes_secondary)

    def begin_backward(self) -> None:
        """Do what a backward begins with."""
        self._step.finalizer.open()

    def drop(self, index: int, bits: Sequence[int]) -> None:
        """Forget gradients that wait for an all-reduce: those of ``bits`` of each buffer."""
        for flat, own in zip(self._step.handles[index].buffers, bits, strict=True):
            flat.gradients.drop_kept(own)

    def reduce(self, index: int, position: int, *, defers: bool) -> None:
        """Reduce zeros; ``defers``: the all-reduce over copies comes later. Collective."""
        handle = self._step.handles[index]
        ledger = self._step.steps[handle].ledgers[position]
        ledger.flat.routes.kept.defers = defers
        self._step.finalizer.reduce(ledger, handle.settings.gradient_buffers)

    def end_reductions(self, synced: Sequence[bool], *, ends: bool) -> None:
        """Tell the ranks that nothing is left here; ``synced``: of each handle, whether it averages. Collective."""
        for handle, is_synced in zip(self._step.handles, synced, strict=True):
            handle.requires_gradient_sync = is_synced
        self._step.finalizer.tell(ends=ends)
        if not ends:
            self._step.finalizer.postpone()

    def hand_over(self) -> None:
        """Give the shards their part of the mean. Collective.

        Raises:
            UsageError: What any rank raises there.
        """
        self._step.finalizer.end(self._step.streams.end_backward)

    def abandon(self) -> None:
        """Forget a step that was cut short on the others."""
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
