"""What can go wrong on request: messages and ranks that are late, messages that get lost, and calls that raise.

Only values; ``process_group`` looks here at every call what is to happen to it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from composable.errors import ConfigError

__all__ = ["OPS", "Delay", "Drop", "Fault", "FaultPlan", "Raise"]

OPS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)


@dataclass(frozen=True)
class Delay:
    """The rank's message leaves late: after the ranks have taken ``turns`` turns, or can do nothing else.

    Attributes:
        turns: How late, counted in turns of all ranks; there is no time in a simulation.
        holds_rank: Whether the rank is late itself, and does not go on before its message has left: a slow rank, of
            which the others get ahead. Otherwise the link is slow: the call returns at once, as always, and a rank
            that waits for the result waits longer.
    """

    turns: int = 1
    holds_rank: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Drop:
    """The rank's message never leaves. Whoever waits for it gets a ``DesyncError`` once no rank can go on."""


@dataclass(frozen=True)
class Raise:
    """The call raises ``error`` and sends nothing."""

    error: BaseException


@dataclass(frozen=True)
class Fault:
    """Something that happens to one call of one rank.

    Attributes:
        rank: Global rank of the caller.
        op: Which kind of call: one of ``OPS``, or ``"any"``. Every form of an all-gather is an ``"all_gather"``.
        nth: Which of the rank's calls of that kind, from 1, counted over all groups.
        action: What happens to it.
    """

    rank: int
    op: str
    action: Delay | Drop | Raise
    nth: int = 1


class FaultPlan:
    """Tells each call its fault, and in the end which faults met no call.

    Args:
        faults: What is to happen.
        world_size: Ranks there are.

    Raises:
        ConfigError: A fault that can meet no call.
    """

    def __init__(self, faults: Sequence[Fault], world_size: int) -> None:
        for fault in faults:
            if not 0 <= fault.rank < world_size:
                raise ConfigError(f"fault on rank {fault.rank} of {world_size}", fix="name a rank that there is")
            if fault.op not in (*OPS, "any"):
                raise ConfigError(f"fault in {fault.op!r}", fix=f"pass 'any' or one of {', '.join(map(repr, OPS))}")
            if fault.nth < 1:
                raise ConfigError(f"fault in call {fault.nth}", fix="calls are counted from 1")
            if not isinstance(fault.action, Delay | Drop | Raise):
                raise ConfigError(f"action is {fault.action!r}", fix="pass a Delay, a Drop or a Raise")
            if isinstance(fault.action, Delay) and fault.action.turns < 1:
                raise ConfigError(f"delay of {fault.action.turns} turns", fix="pass 1 or more")
        self._to_come = list(faults)
        self._calls: Counter[tuple[int, str]] = Counter()

    def take(self, rank: int, op: str) -> Delay | Drop | Raise | None:
        """Count a call and return what is to happen to it."""
        if not self._to_come:
            return None
        for kind in (op, "any"):
            self._calls[rank, kind] += 1
        for fault in self._to_come:
            if fault.rank == rank and fault.op in (op, "any") and fault.nth == self._calls[rank, fault.op]:
                self._to_come.remove(fault)
                return fault.action
        return None

    def left(self) -> list[Fault]:
        """Return the faults that met no call."""
        return list(self._to_come)
