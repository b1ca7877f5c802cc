"""What a promise that every backward runs the same graph is worth: counts of the first one, held against the next."""

from collections.abc import Sequence

__all__ = ["StaticGraph"]


class StaticGraph:
    """How many gradients each parameter gets in a backward of this rank.

    Attributes:
        counts: That number, by parameter; ``None``: no backward has shown it.
        used: Of each parameter, how many ranks had a gradient for it then.
        unused: The parameters that no rank had a gradient for; equal on all ranks.
        changes: (parameter, gradients, gradients expected) for what was not as expected in the last backward.
    """

    __slots__ = ("changes", "counts", "unused", "used")

    def __init__(self) -> None:
        self.counts: list[int] | None = None
        self.used: list[float] = []
        self.unused: list[int] = []
        self.changes: list[tuple[int, int, int]] = []

    def learn(self, seen: Sequence[int], used: Sequence[float]) -> None:
        """Take a backward that ended well on every rank as the one that all others are like."""
        self.counts = list(seen)
        self.used = list(used)
        self.unused = [index for index, number in enumerate(used) if not number]

    def copied(self) -> "StaticGraph":
        """Return the same knowledge, for a copy of the parameters."""
        twin = self.of_rank()
        twin.used = self.used
        return twin

    def of_rank(self) -> "StaticGraph":
        """Return what is known without the ranks of then, for others beside this one."""
        twin = StaticGraph()
        twin.counts, twin.unused = self.counts, self.unused
        return twin

    def allows(self, index: int, seen: int) -> bool:
        """Say whether the gradient number ``seen`` of a parameter in one backward is one of those expected."""
        return self.counts is not None and seen <= self.counts[index]

    def holds(self, seen: Sequence[int], kept: Sequence[int]) -> bool:
        """Say whether a backward is like the first one; notes ``changes``.

        Args:
            seen: How many gradients of each parameter it had.
            kept: Of each parameter, whether one came without synchronisation before: of ``unused`` it is in no bucket.
        """
        self.changes = [(index, 1, 0) for index in self.unused if kept[index] and not seen[index]]
        if self.counts is not None and self.counts != seen:
            expected = enumerate(zip(seen, self.counts, strict=True))
            self.changes += [(index, now, then) for index, (now, then) in expected if now != then]
        return not self.changes

    def changes_elsewhere(self, used: Sequence[float]) -> list[int]:
        """Return the parameters of which another number of ranks has a gradient than in the first backward."""
        return [index for index, (now, then) in enumerate(zip(used, self.used, strict=False)) if now != then]
