"""What a promise that every backward runs the same graph is worth: counts of the first one, held against the next."""

from collections.abc import Sequence

__all__ = ["StaticGraph"]


class StaticGraph:
    """How many gradients each parameter gets in a backward of this rank.

    Attributes:
        counts: That number, by parameter; ``None``: no backward has shown it.
        used: Of each parameter, how many ranks had a gradient for it then.
    """

    __slots__ = ("counts", "used")

    def __init__(self) -> None:
        self.counts: list[int] | None = None
        self.used: list[float] = []

    def learn(self, seen: Sequence[int], used: Sequence[float]) -> None:
        """Take a backward that ended well on every rank as the one that all others are like."""
        self.counts = list(seen)
        self.used = list(used)

    def copied(self) -> "StaticGraph":
        """Return the same knowledge, for a copy of the parameters."""
        twin = StaticGraph()
        twin.counts, twin.used = self.counts, self.used
        return twin

    def of_rank(self) -> "StaticGraph":
        """Return what is known of this rank alone, for other ranks beside it."""
        twin = StaticGraph()
        twin.counts = self.counts
        return twin

    def unused(self) -> list[int]:
        """Return the parameters that no rank has a gradient for; equal on all ranks."""
        return [index for index, used in enumerate(self.used) if not used]

    def allows(self, index: int, seen: int) -> bool:
        """Say whether the gradient number ``seen`` of a parameter in one backward is one of those expected."""
        return self.counts is not None and seen <= self.counts[index]

    def changes(self, seen: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (parameter, gradients now, gradients expected) for what is not as it was."""
        if self.counts is None or self.counts == seen:
            return []
        return [
            (index, now, then) for index, (now, then) in enumerate(zip(seen, self.counts, strict=True)) if now != then
        ]

    def changes_elsewhere(self, used: Sequence[float]) -> list[int]:
        """Return the parameters of which another number of ranks has a gradient than in the first backward."""
        return [index for index, (now, then) in enumerate(zip(used, self.used, strict=False)) if now != then]
