"""The promise ``static_graph``: every backward of a rank is like its first one."""

import sys
from collections.abc import Sequence

from composable.ground.names import count_text, list_text
from composable.replication.managed import ReducedParam
from composable.replication.reports import GRAPH_CHANGED, MOST_NAMES, Complaint, Report


class StaticGraph:
    """The gradient counts of the first backward, which ``static_graph=True`` promises for all later ones."""

    def __init__(self, params: Sequence[ReducedParam]) -> None:
        self._fqns = [item.fqn for item in params]
        # The number of gradients of each parameter in a backward of this rank; ``None``: not known yet.
        self.counts: list[int] | None = None
        self._used: Sequence[float] = ()  # For each parameter, how many ranks had a gradient in the first backward.

    def learn(self, seen: Sequence[int], report: Report) -> bool:
        """Take the first backward for the promised one, unless a rank complains of it; say whether it was taken."""
        if any(report.complaints):
            return False
        self.counts, self._used = [*seen], report.used
        return True

    def arrivals_of(self, indices: Sequence[int], *, is_last: bool) -> int:
        """Return how many gradients fill the bucket of the parameters ``indices``, which ``is_last`` in the round."""
        # A parameter may get one more gradient in a graph that is new, or that differs from the first, also a
        # parameter that had none on this rank: so only the end of backward shows that all have arrived.
        return sys.maxsize if is_last or self.counts is None else sum(self.counts[index] for index in indices)

    def is_promised(self, index: int, number: int) -> bool:
        """Say whether parameter ``index`` gets a gradient of this number in every backward."""
        return self.counts is not None and number <= self.counts[index]

    def complaint_of(self, seen: Sequence[int]) -> Complaint | None:
        """Return the complaint of a backward that brought ``seen`` gradients for each parameter."""
        changes = [
            f"{fqn!r} ({count_text(now, 'gradient')}, {then} then)"
            for fqn, now, then in zip(self._fqns, seen, self.counts or seen, strict=True)
            if now != then
        ]
        what = "this backward is not like the first one, though static_graph=True promises it: "
        return GRAPH_CHANGED._replace(text=what + list_text(changes, MOST_NAMES, write=str)) if changes else None

    def names_of(self, used: Sequence[float]) -> str:
        """Return, for the error of other ranks, the parameters that another number of ranks ``used``."""
        fqns = [fqn for fqn, now, then in zip(self._fqns, used, self._used, strict=False) if now != then]
        return f": {list_text(fqns, MOST_NAMES)}" if fqns else ""
