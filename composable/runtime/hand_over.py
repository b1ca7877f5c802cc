"""The end of a root's reductions: ranks tell each other what is left, and parameters get what was reduced.

When that is, with the end of a backward or by hand, is the business of ``backwards.py`` and ``scheduler.py``.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from composable.collectives import Transport
from composable.errors import UsageError, place_of_rank
from composable.ragged import note_finished, note_unfinished
from composable.runtime.account import Account
from composable.runtime.agreement import Agreement, Comparison
from composable.runtime.reductions import Reductions
from composable.runtime.turn import Turn
from composable.storage import Handle

__all__ = ["HandOver"]


class HandOver:
    """Ends the reductions of one root, of one backward or of several.

    Args:
        turns: Of all handles of the root.
        reductions: What is under way.

    Attributes:
        agreements: How the ranks of each group compare what they have.
    """

    __slots__ = ("_is_deferred", "_is_settled", "_reductions", "_turns", "agreements")

    def __init__(self, turns: Mapping[Handle, Turn], reductions: Reductions) -> None:
        self._is_deferred = False
        self._is_settled = True
        self._turns = turns
        self._reductions = reductions
        self.agreements: Sequence[Agreement | Comparison] = ()

    @property
    def is_deferred(self) -> bool:
        """Backwards have ended whose reductions did not; a later backward or the user ends them."""
        return self._is_deferred

    @is_deferred.setter
    def is_deferred(self, is_deferred: bool) -> None:
        if is_deferred is not self._is_deferred:
            (note_unfinished if is_deferred else note_finished)(self._turns)
            self._is_deferred = is_deferred

    def agree_by(self, make: Callable[[Sequence[Account]], Sequence[Agreement | Comparison]]) -> None:
        """Let the ranks compare at each end; ``make`` gets the accounts of all handles."""
        self.agreements = make([account for turn in self._turns.values() for account in turn.accounts])

    def open(self) -> None:
        """A backward begins: what one left that a hook of the user, or Ctrl-C, cut short in its end is forgotten."""
        if not self._is_settled:
            for turn in self._turns.values():
                for account in turn.accounts:
                    account.clear()
        self._is_settled = False

    def postpone(self) -> None:
        """Leave the end to a later backward, or to the user: accounts go on where they are."""
        self._is_settled = True

    def tell(self, *, ends: bool) -> None:
        """Note what the leaves still hold; if this ends the reductions, also those of before, tell the other ranks."""
        is_synced, goes_on = self.is_deferred, False
        for turn in self._turns.values():
            if not turn.handle.requires_gradient_sync:
                turn.handle.keep_gradients()
            elif ends:
                is_synced = True
                for account in turn.accounts:
                    account.look()
                    goes_on |= account.has_more or self._is_kept(turn.handle, account)
            else:
                self.is_deferred = True
        if ends and is_synced:
            for agreement in self.agreements:
                agreement.begin(has_failed=self._reductions.failure is not None, goes_on=goes_on)

    def end(self, tidy: Callable[[], None]) -> None:
        """Reduce what is left on any rank, and hand over every gradient.

        Args:
            tidy: Called when nothing is under way any more, before parameters get their gradients.

        Raises:
            UsageError: On this rank, or on one that tells of it in its message, a gradient could not be reduced.
                Or one came too late for a module whose ranks send no message.
        """
        self._is_settled = False
        with torch.no_grad():
            self._reductions.finish()
            complaining = {agreement: None for agreement in self.agreements if agreement.finish()}
            stray = self._reduce_the_rest()
            failure: Exception | None = self._reductions.end() or (_stray(stray) if stray else None)
            complaining |= self._tell_again(has_failed=failure is not None)
            tidy()
            was_deferred, self.is_deferred = self.is_deferred, False
            self._settle()
            if was_deferred:
                for turn in self._turns.values():
                    if turn.handle.keeps_gradients:
                        # Once more: what they wait beside may be another gradient now.
                        turn.handle.keep_gradients()
        # In each group: ranks that share another one with this rank wait there to hear of it.
        for agreement in complaining:
            try:
                agreement.raise_together(failure)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _tell_again(self, *, has_failed: bool) -> dict[Agreement | Comparison, None]:
        """Tell where some rank had more to reduce how that went; returns where some rank complains now."""
        again = [agreement for agreement in self.agreements if agreement.goes_on]
        for agreement in again:
            agreement.begin(has_failed=has_failed)
        return {agreement: None for agreement in again if agreement.finish()}

    def transports(self) -> set[Transport]:
        """Return all that ranks tell each other by."""
        return {agreement.transport for agreement in self.agreements if agreement.transport is not None}

    def abandon(self) -> None:
        """Forget what was told and not heard."""
        for agreement in self.agreements:
            agreement.abandon()

    def forget_kept(self) -> None:
        """Forget shards that wait for an all-reduce over copies: some may hold part of a backward only."""
        for turn in self._turns.values():
            turn.handle.forget_kept_shards()
            self._note_waiting(turn)

    def close(self) -> None:
        """Forget the agreements, and with them the shards."""
        self.agreements = ()

    def _settle(self) -> None:
        """Give parameters what waited for the other ranks; hooks of users run."""
        for turn in self._turns.values():
            for account in turn.accounts:
                account.settle(fills_unused=turn.handle.fills_unused)
            if turn.handle.waits_for_copies:
                turn.handle.keep_gradients()
            self._note_waiting(turn)
        self._is_settled = True

    def _note_waiting(self, turn: Turn) -> None:
        """Let users know whether gradients wait for a later backward, or for an all-reduce over copies."""
        if turn.handle.is_waiting:
            note_unfinished([turn.handle], is_droppable=True)
            turn.is_waiting = True
        elif turn.is_waiting:
            note_finished([turn.handle])
            turn.is_waiting = False

    def _is_kept(self, handle: Handle, account: Account) -> bool:
        """Say whether earlier backwards left shards that are to be summed up over copies now."""
        kept = account.flat.routes.kept
        return kept.total is not None and not kept.defers and handle.requires_gradient_sync

    def _reduce_the_rest(self) -> list[Handle]:
        """Reduce what some rank still holds; returns handles of whose gradients the ranks do not tell each other."""
        stray: list[Handle] = []
        for handle, turn in self._turns.items():
            for account in turn.accounts:
                if not account.has_more:
                    if self._is_kept(handle, account):
                        self._reductions.begin(account, None)
                    continue
                account.has_more = False
                # What has been stepped cannot take another part of its gradient.
                if account.fills_with_zeros or account.flat.gradients.steppers:
                    stray.append(handle)
                    handle.drop_gradients()
                else:
                    self._reductions.reduce(account, handle.gradient_buffers)
        self._reductions.finish()
        return stray


def _stray(handles: Sequence[Handle]) -> UsageError:
    return UsageError(
        "a gradient arrived after its module was reduced: a parameter was used outside its forward",
        at=f"{place_of_rank()}, {', '.join(handle.described for handle in handles)}",
        fix="use them in the forward of their own module, let the module above own them, "
        + (
            "or step after backward"
            if any(handle.steppers for handle in handles)
            else "or annotate with unused_gradients='none'"
        ),
    )
