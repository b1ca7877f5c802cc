"""Where one handle is in the running step of its root, and what one backward knows of its gradients.

The clock counts starts and ends of forwards of fully sharded modules; backwards have numbers.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from composable.collectives import Grid
from composable.engine.buffer import FlatBuffer
from composable.engine.handle import Handle, handle_of
from composable.ragged import note_finished

__all__ = ["Account", "Companion", "Teller", "Turn"]


@runtime_checkable
class Companion(Protocol):
    """The state of an annotation that averages by itself."""

    grid: Grid

    def begin_to_follow(self) -> None:
        """Leave it to the root, from now on, when ranks meet. Collective over the annotation's ranks."""
        ...

    def end_to_follow(self) -> None:
        """The root is undone."""
        ...

    def follow_forward(self) -> None:
        """A forward of the root begins. Collective over the annotation's ranks."""
        ...

    def follow_backward(self) -> None:
        """A backward of the root begins; collectives that this starts run at its end."""
        ...


class Teller(Protocol):
    """Tells of one root. Each call may raise ``DesyncError``: ranks with inputs tell different things."""

    @property
    def has_listeners(self) -> bool:
        """Some rank runs no modules in this step: it cannot be asked for what only who ran them knows."""
        ...

    def begin_forward(self, module: nn.Module) -> None:
        """The outermost module that runs starts its forward.

        Raises:
            RuntimeError: All ranks are to stop where one has no inputs.
        """
        ...

    def end_forward(self, module: nn.Module, *, is_awaited: bool) -> None:
        """It ends; ``is_awaited``: a backward may follow."""
        ...

    def begin_backward(self) -> None:
        """A backward begins."""
        ...

    def drop(self, handle: Handle, bits: Sequence[int]) -> None:
        """Users have dropped kept gradients of the handle, those of ``bits`` of each buffer."""
        ...

    def gather(self, handle: Handle, *, takes_secondary: bool) -> None:
        """The handle's parameters are about to be gathered, from secondary shards or not."""
        ...

    def reduce(self, handle: Handle, position: int) -> None:
        """The gradients of the handle's buffer at ``position`` are about to be reduced."""
        ...

    def end_reductions(self, *, ends: bool) -> None:
        """The ranks are about to tell each other what is left; not if ``ends`` is false, but later."""
        ...

    def hand_over(self) -> None:
        """Parameters are about to get their gradients."""
        ...

    def end_by_hand(self) -> None:
        """They got them, outside of a backward."""
        ...

    def abandon(self, *, is_needed: bool) -> None:
        """A step is about to be forgotten; ``is_needed``: it left more than what this step has told of."""
        ...


class Turn:
    """Where one handle is.

    Attributes:
        handle: The handle.
        accounts: Of its flat buffers.
        first_forward: Clock of its first differentiable forward since the last backward; 0: before all others;
            ``None``: there was none, so the next backward does not reduce it.
        entered_at: Clock of the start of a forward that has not ended.
        queued_in: The last backward that has or had to complete it.
        met_in: The last backward in which a gradient of an output arrived.
        completed_in: The last backward that completed it: reduced its gradients, or kept them.
        kept_in: The last forward that left secondary shards.
        is_late: Gradients are still coming in the backward that completed it.
        modules_left: Of several modules that share the handle, those still to run in this forward.
        next_forward: Who followed in the latest forward, a hint for prefetch; so are the other two.
        previous_forward: Who went before in the latest forward.
        next_backward: Who followed in the latest backward.
        is_waiting: Users were told that its gradients wait for a later backward, or an all-reduce over copies.
        leaders: With whose modules it is gathered, resharded and reduced, whether its own run or not.
        followers: Those that it does so with.
    """

    __slots__ = (
        "accounts",
        "completed_in",
        "entered_at",
        "first_forward",
        "followers",
        "handle",
        "is_late",
        "is_waiting",
        "kept_in",
        "leaders",
        "met_in",
        "modules_left",
        "next_backward",
        "next_forward",
        "previous_forward",
        "queued_in",
    )

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.accounts = [
            Account(flat, fills_with_zeros=handle.plan.unused_gradients == "zero") for flat in handle.buffers
        ]
        self.modules_left: set[nn.Module] = set()
        self.is_waiting = False
        self.leaders: tuple[Turn, ...] = ()
        self.followers: tuple[Turn, ...] = ()
        self.forget()

    def forget(self) -> None:
        """Begin anew: another root has run the handle meanwhile."""
        self.completed_in: int | None = None
        self.kept_in: int | None = None
        self.met_in: int | None = None
        self.queued_in: int | None = None
        self.forget_order()
        self.end_step()

    def forget_order(self) -> None:
        """Forget the hints for prefetch."""
        self.next_forward: Turn | None = None
        self.previous_forward: Turn | None = None
        self.next_backward: Turn | None = None

    def end_step(self) -> None:
        """Forget a step that was cut short; the hints stay."""
        self.first_forward: int | None = None
        self.entered_at: int | None = None
        self.is_late = False
        self.modules_left.clear()
        for account in self.accounts:
            account.clear()


class Account:
    """One flat buffer in one backward.

    A parameter that this rank has a gradient for gets the reduced one as soon as it is there. Whether one
    without gets it depends on the other ranks, and waits for the end of backward, as do all of a
    buffer with hooks: they run once, on the whole gradient. So do all that ranks have to step together.

    Args:
        flat: The buffer.
        fills_with_zeros: A missing gradient is zero, whatever the other ranks have.

    Attributes:
        had: The parameters that had a gradient on this rank, in this backward or since the last reduction.
        has_more: Some leaf holds a gradient that was not reduced.
        waits: What was reduced, [S], with the parameters that got it so far; not if all did.
    """

    __slots__ = ("_all_told", "_numel_bytes", "fills_with_zeros", "flat", "had", "has_more", "waits")

    def __init__(self, flat: FlatBuffer, *, fills_with_zeros: bool) -> None:
        self.flat = flat
        self.fills_with_zeros = fills_with_zeros
        self._numel_bytes = len(flat.params) // 8 + 1
        self._all_told = (flat.gradients.all_bits << 1).to_bytes(self._numel_bytes, "little")
        self.waits: list[tuple[torch.Tensor, int]] = []
        self.had = 0
        self.has_more = False

    def clear(self) -> None:
        """Forget a backward that was cut short, also by a hook of the user in ``settle``."""
        self.had = 0
        self.has_more = False
        if self.waits:
            self.waits = []

    def look(self) -> None:
        """Note what the leaves still hold."""
        left = self.flat.gradients.bits()
        self.had |= left
        self.has_more = left != 0

    def take(self, reduced: torch.Tensor) -> None:
        """Give what was reduced, [S], to the parameters that are known to get it."""
        flat = self.flat
        given = 0
        if not flat.gradients.has_hooks():
            given = self.had | flat.routes.kept.bits
            if self.fills_with_zeros:
                given = flat.gradients.all_bits
            elif flat.gradients.steps_together:
                given = 0
            if given:
                self._give(reduced, given)
        if given != flat.gradients.all_bits:
            self.waits.append((reduced, given))

    def settle(self, *, fills_unused: bool) -> None:
        """End the backward: the rest goes to the parameters that any rank had a gradient for, which ``had`` is now.

        Args:
            fills_unused: To all others as well: zeros.
        """
        kept = self.flat.routes.kept
        had, self.had = self.had | kept.bits, 0
        kept.bits = 0 if kept.total is None else had
        if not self.waits:
            return
        rest, self.waits = self.waits, []
        if fills_unused:
            had = self.flat.gradients.all_bits
        whole = [reduced for reduced, given in rest if not given]
        if len(whole) > 1:
            # Of these nobody has got a part yet: hooks run once, on the sum.
            for reduced in whole[1:]:
                whole[0].add_(reduced)
            rest = [(whole[0], 0), *(one for one in rest if one[1])]
        for reduced, given in rest:
            left = had & ~given
            if left:
                self._give(reduced, left, with_hooks=not given and self.flat.gradients.has_hooks())

    def _give(self, reduced: torch.Tensor, bits: int, *, with_hooks: bool = False) -> None:
        if self.flat.gradients.steppers:
            # What waited for the ranks with copies is whole now, and is stepped.
            handle = handle_of(self.flat.params[0].sharded)
            note_finished([] if handle is None else [handle])
        self.flat.gradients.accumulate(reduced, bits, with_hooks=with_hooks)

    # As bytes: the same number on all ranks.

    @property
    def numel_bytes(self) -> int:
        """How many bytes the account takes in a message."""
        return self._numel_bytes

    def told(self) -> bytes:
        """Return what the other ranks have to know."""
        if self.had == self.flat.gradients.all_bits and not self.has_more:
            return self._all_told
        return (self.had << 1 | self.has_more).to_bytes(self._numel_bytes, "little")

    def hear(self, told: Sequence[bytes]) -> None:
        """Take in what all ranks told."""
        found = 0
        for one in told:
            found |= int.from_bytes(one, "little")
        self.had = found >> 1
        self.has_more = bool(found & 1)
