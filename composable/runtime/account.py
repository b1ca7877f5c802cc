"""What one backward knows of the gradients of one flat buffer: who had one, what was reduced, who got it.

Parameters are bits of a number: bit ``i`` is the i-th of the buffer.
"""

from collections.abc import Sequence

import torch

from composable.ragged import note_finished
from composable.storage import FlatBuffer, handle_of

__all__ = ["Account"]


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
