"""What ranks tell each other behind the gradients of the last bucket, and the errors that follow.

There lie *flags*: one per parameter, set by the ranks that have a gradient for it; and for each rank two numbers: its
complaint, zero if it has none, and how often it ran the modules since the last average. The all-reduce adds the flags
up. So, without one more collective, every rank learns which parameters no rank used, and of errors on other ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from composable.engine import HostCopy, Riders
from composable.errors import ComposableError, UsageError
from composable.ground.names import ranks_text

# The highest count: bfloat16 holds all integers up to it.
_MOST_RUNS = 256
MOST_NAMES = 10  # in an error
# Adds numbers up over all ranks.
_AddUp: TypeAlias = Callable[[Sequence[float]], list[float]] | None


class Complaint(NamedTuple):
    """Why a round ends with an error, on a rank and on all others.

    Attributes:
        number: What stands for it in the flags; not 0.
        text: What the rank raises that complains; in ``COMPLAINTS`` what other ranks raise.
        fix: The fix of both.
        also: The line that follows ``text`` if other ranks complain of the same.
    """

    number: int
    text: str
    fix: str
    also: str = ""


GRAPH_CHANGED = Complaint(
    -3,
    "the backward of {ranks} is not like the first one, though static_graph=True promises it{names}",
    "drop the gradients of this step; use the same parameters in every step, or find_unused_parameters=True",
    also="nor is that of {ranks}",
)
UNUSED = Complaint(
    1,
    "{ranks} ended backward without a gradient for {names}",
    "let every parameter take part in the loss on every rank, freeze those that do not before replicate, "
    "or pass find_unused_parameters=True, which several backwards of one forward need",
    also="so did {ranks}, perhaps for other parameters",
)
_FIX_THERE = "drop the gradients of this step, and read the error that was raised there"
STOPPED = Complaint(-1, "{ranks} did not finish backward: an exception stopped it there", _FIX_THERE)
HOOK_FAILED = Complaint(
    -2, "{ranks} got no averages of the right dtype and shape from the communication hook{names}", _FIX_THERE
)
# In the order in which an error has them.
COMPLAINTS = (GRAPH_CHANGED, UNUSED, STOPPED, HOOK_FAILED)


def error_of(own: Complaint | None, told: Mapping[int, float], names: Mapping[Complaint, str]) -> UsageError:
    """Return the error of a round that failed, on this rank or on another one.

    ``own`` is the complaint of this rank, ``told`` has those of other ranks, as numbers, by their rank, and ``names``
    has the names that the texts of complaints contain.
    """
    lines, fixes = [], []
    for one in COMPLAINTS:
        ranks = [rank for rank, number in told.items() if number == one.number]
        text = one.text
        if own is not None and own.number == one.number:
            lines.append(own.text)
            fixes.append(own.fix)
            text = f"    {one.also}"
        if ranks:
            lines.append(text.format(ranks=ranks_text(ranks), names=names.get(one, "")))
            fixes.append(one.fix)
    return UsageError("\n".join(lines), fix=fixes[0])


class Report(NamedTuple):
    """The flags of all ranks after a round."""

    used: Sequence[float] = ()  # For each parameter, the number of ranks that had a gradient.
    complaints: Sequence[float] = ()  # For each rank, the number of its complaint; 0: it has none.
    # For each rank, how often it ran the modules since the last average; 0: it follows other ranks.
    runs: Sequence[float] = ()


class FlagBlock:
    """Writes and reads the flags of ``count`` parameters in every round, behind the gradients of the last bucket.

    Behind them lie the bytes of ``riders``, an element each: first those of the first rank, where others add zeros.
    """

    def __init__(self, count: int, rank: int, world_size: int, add_up: _AddUp = None) -> None:
        self._stop = count + 2 * world_size
        self._count = count
        self._rank = rank
        self._world_size = world_size
        self.carry(Riders())
        self._late: HostCopy | None = None
        self.is_captured = False  # A CUDA graph has written it.
        # What has added up the flags of all ranks where blocks have no values, and the sums.
        self._add_up, self._told = add_up, list[float]()

    def carry(self, riders: Riders) -> None:
        """Let ``riders``, in place of those so far, travel behind the flags of blocks [numel] from now on."""
        self.riders = riders
        self.numel = self._stop + self._world_size * riders.rank_bytes
        self._plain: torch.Tensor | None = None  # The block of a rank that does not complain and ran once.

    def write(self, block: torch.Tensor, used: Sequence[bool] | None, complaint: int, runs: int = 1) -> None:
        """Fill ``block`` [numel], the tail of the last bucket, before it is sent.

        ``used`` says for each parameter whether this rank has a gradient; ``None``: all have one, and there is no
        complaint. ``runs``: how often this rank ran the modules since the last average; 0: it follows other ranks.
        """
        count, own_run = self._count, self._count + self._world_size + self._rank
        if self._plain is None or self._plain.dtype != block.dtype or self._plain.device != block.device:
            values = [1] * count + [int(index == own_run) for index in range(count, self.numel)]
            self._plain = torch.tensor(values, dtype=block.dtype, device=block.device)
        block.copy_(self._plain)
        if runs != 1:
            block.narrow(0, own_run, 1).fill_(min(runs, _MOST_RUNS))  # An assignment waits for the device.
        if used is not None:
            block[:count].copy_(torch.tensor(used, dtype=block.dtype))
            block.narrow(0, count + self._rank, 1).fill_(complaint)
        if self._add_up is not None:
            own = [*(used or [True] * count), *[0] * 2 * self._world_size]
            own[count + self._rank], own[own_run] = complaint, runs
            self._told = self._add_up(own)
        elif self.riders.members:
            riders_bytes = self.riders.rank_bytes
            self.riders.tell(block.narrow(0, self._stop + self._rank * riders_bytes, riders_bytes))

    def hear(self, block: torch.Tensor) -> ComposableError | None:
        """Let riders hear by ``block`` [numel] after the all-reduce; returns an error to raise, alike on all ranks."""
        return self.riders.hear(block[self._stop :]) if self._add_up is None else None

    def values(self, block: torch.Tensor) -> list[float]:
        """Return the flags in ``block`` [numel], for which the host waits."""
        if self._add_up is not None:
            return self._told
        values: list[float] = block[: self._stop].tolist()
        return values

    def report(self, block: torch.Tensor) -> Report:
        """Return the report of ``block`` [numel] after the all-reduce; waits for the device."""
        values, first, second = self.values(block), self._count, self._count + self._world_size
        return Report(values[:first], values[first:second], values[second:])

    def read(self, block: torch.Tensor) -> Report | None:
        """Return the report of ``block`` [numel], if a rank complains, or ranks differ in how often they ran modules.

        On a device other than the CPU, where reading would stop this thread until the device is
        idle, return the report of the round before, if any. In a CUDA graph nothing is read.
        """
        captures = block.is_cuda and torch.cuda.is_current_stream_capturing()
        self.is_captured |= captures
        if self._add_up is not None or captures:
            return None
        block = block[: self._stop]
        if block.device.type == "cpu":
            return self._notable(block)
        report = None
        if self._late is not None:
            host = self._late.read()  # The copy of the round before: long done.
            host[self._count + self._rank] = 0  # This rank has raised its own complaint already.
            report = self._notable(host)
        self._late = HostCopy(block)
        return report

    def _notable(self, block: torch.Tensor) -> Report | None:
        told = block[self._count :].tolist()
        # Ranks that ran the modules different numbers of times since the last average are not always wrong.
        is_plain = not any(told[: self._world_size]) and len({*told[self._world_size :]} - {0}) < 2
        return None if is_plain else self.report(block)
