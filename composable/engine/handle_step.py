"""Where one handle is in the running step of its root, and what one backward knows of its gradients.

The clock counts starts and ends of forwards of fully sharded modules; backwards have numbers. Parameters are bits of a
number: bit ``i`` is the i-th of the buffer.
"""

from collections.abc import Sequence

import torch
from torch import nn

from composable.dtensor import note_finished
from composable.engine.buffer import FlatBuffer
from composable.engine.handle import Handle

__all__ = ["GradientLedger", "HandleStep"]


class GradientLedger:
    """Who had a gradient in one flat buffer, what was reduced, and who got it, in one backward.

    A parameter that this rank has a gradient for gets the reduced one as soon as it is there. Whether one
    without gets it depends on the other ranks, and waits for the end of backward, as do all of a
    buffer with hooks: they run once, on the whole gradient. So do all that ranks have to step together.

    Attributes:
        grad_mask: The parameters that had a gradient on this rank, in this backward or since the last reduction.
        has_more: Some leaf holds a gradient that was not reduced.
        waiting: What was reduced, [S], with the parameters that got it so far; not if all did.
        message_bytes: How many bytes the ledger takes in a message, the same on all ranks.
    """

    __slots__ = ("_complete_message", "flat", "grad_mask", "handle", "has_more", "message_bytes", "waiting")

    def __init__(self, handle: Handle, flat: FlatBuffer) -> None:
        self.handle = handle
        self.flat = flat
        self.grad_mask = 0
        self.has_more = False
        self.waiting: list[tuple[torch.Tensor, int]] = []
        self.message_bytes = len(flat.params) // 8 + 1
        self._complete_message = (flat.gradients.all_bits << 1).to_bytes(self.message_bytes, "little")

    def clear(self) -> None:
        """Forget a backward that was cut short, also by a hook of the user in ``finish``."""
        self.grad_mask = 0
        self.has_more = False
        self.waiting = []

    def scan_leaves(self) -> None:
        """Note what the leaves still hold."""
        left = self.flat.gradients.bits()
        self.grad_mask |= left
        self.has_more = left != 0

    def take(self, reduced: torch.Tensor) -> None:
        """Give what was reduced, [S], to the parameters that are known to get it."""
        gradients = self.flat.gradients
        given = 0
        if not (gradients.steps_together or gradients.has_hooks()):
            given = self.grad_mask | self.flat.routes.kept.bits
            if given and not gradients.steppers:
                gradients.accumulate(reduced, given)
            elif given:
                self._give(reduced, given)
        if given != gradients.all_bits:
            self.waiting.append((reduced, given))

    def finish(self) -> None:
        """End the backward: the rest goes to the parameters that any rank had a gradient for, or to all as zeros."""
        kept = self.flat.routes.kept
        mask, self.grad_mask = self.grad_mask | kept.bits, 0
        kept.bits = 0 if kept.total is None else mask
        if not self.waiting:
            return
        rest, self.waiting = self.waiting, []
        if self.handle.settings.fills_unused:
            mask = self.flat.gradients.all_bits
        whole = [reduced for reduced, given in rest if not given]
        if len(whole) > 1:
            # Of these nobody has got a part yet: hooks run once, on the sum.
            for reduced in whole[1:]:
                whole[0].add_(reduced)
            rest = [(whole[0], 0), *(one for one in rest if one[1])]
        for reduced, given in rest:
            left = mask & ~given
            if left:
                self._give(reduced, left, with_hooks=not given and self.flat.gradients.has_hooks())

    def _give(self, reduced: torch.Tensor, bits: int, *, with_hooks: bool = False) -> None:
        if self.flat.gradients.steppers:
            # What waited for the ranks with copies is whole now, and is stepped.
            note_finished([self.handle])
        self.flat.gradients.accumulate(reduced, bits, with_hooks=with_hooks)

    def encode(self) -> bytes:
        """Return what the other ranks have to know."""
        if self.grad_mask == self.flat.gradients.all_bits and not self.has_more:
            return self._complete_message
        return (self.grad_mask << 1 | self.has_more).to_bytes(self.message_bytes, "little")

    def merge(self, messages: Sequence[bytes]) -> None:
        """Take in what all ranks have encoded."""
        found = 0
        for one in messages:
            found |= int.from_bytes(one, "little")
        self.grad_mask = found >> 1
        self.has_more = bool(found & 1)


class HandleStep:
    """Where one handle is.

    Attributes:
        ledgers: Of its flat buffers.
        is_armed: A differentiable forward has run since the last backward: the next one reduces it.
        first_forward: Clock of the first such forward; 0: before all others.
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

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.ledgers = [GradientLedger(handle, flat) for flat in handle.buffers]
        self.modules_left: set[nn.Module] = set()
        self.is_waiting = False
        self.leaders: tuple[HandleStep, ...] = ()
        self.followers: tuple[HandleStep, ...] = ()
        self.forget()

    def forget(self) -> None:
        """Begin anew: another root has run the handle meanwhile."""
        # Of no backward and no forward: their numbers start at 1.
        self.completed_in = self.kept_in = self.met_in = self.queued_in = -1
        self.forget_order()
        self.end_step()

    def forget_order(self) -> None:
        """Forget the hints for prefetch."""
        self.next_forward: HandleStep | None = None
        self.previous_forward: HandleStep | None = None
        self.next_backward: HandleStep | None = None

    def end_step(self) -> None:
        """Forget a step that was cut short; the hints stay."""
        self.is_armed = False
        self.first_forward = 0
        self.entered_at = -1
        self.is_late = False
        self.modules_left.clear()
        for ledger in self.ledgers:
            ledger.clear()
