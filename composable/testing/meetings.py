"""Where ranks meet: collectives by number within their group, messages by sender, receiver and tag.

The last rank to arrive in a collective carries it out for all. A message moves when both ends are there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from composable.errors import DesyncError
from composable.testing.exchange import Call, describe, exchange, fingerprint, move

__all__ = ["Board", "GroupKey", "Meeting", "Transfer"]


@dataclass(frozen=True)
class GroupKey:
    """A process group, the same on all its ranks.

    Attributes:
        name: As torch.distributed calls it.
        ranks: Global ranks, in the order of the group.
        nth: How many groups of that name and those ranks there were before.
    """

    name: str
    ranks: tuple[int, ...]
    nth: int

    def __str__(self) -> str:
        return f"group {self.name!r} of ranks {', '.join(map(str, self.ranks))}"


@dataclass(eq=False)
class Meeting:
    """A collective that some ranks have called."""

    group: GroupKey
    number: int
    calls: dict[int, Call] = field(default_factory=dict)
    is_over: bool = False
    failure: str = ""

    def arrive(self, group_rank: int, call: Call) -> None:
        """Add a rank's call; the last one carries out the collective."""
        self.calls[group_rank] = call
        if len(self.calls) < len(self.group.ranks):
            return
        calls = [self.calls[rank] for rank in range(len(self.group.ranks))]
        if any(fingerprint(call) != fingerprint(calls[0]) for call in calls):
            self.failure = "ranks meet in different collectives"
        else:
            try:
                exchange(calls)
            except (RuntimeError, ValueError) as error:
                self.failure = str(error)
        self.is_over = True

    def raise_failure(self, rank: int) -> None:
        """Raise on ``rank`` what is wrong with the collective, if anything is."""
        if self.failure:
            lines = [f"    rank {self.group.ranks[at]}: {describe(call)}" for at, call in sorted(self.calls.items())]
            raise DesyncError(
                "\n".join([self.failure, *lines]),
                at=f"rank {rank}, collective {self.number} of {self.group}",
                fix="make all ranks of a group call the same collectives in the same order, with equal shapes",
            )


@dataclass(eq=False)
class Transfer:
    """One end of a message; ``peer`` is a group rank, -1 for any."""

    group: GroupKey
    own: int
    peer: int
    tag: int
    tensor: torch.Tensor
    is_send: bool
    is_over: bool = False
    failure: str = ""

    def describe(self) -> str:
        peer = "any rank" if self.peer < 0 else f"rank {self.group.ranks[self.peer]}"
        op = f"send to {peer}" if self.is_send else f"recv from {peer}"
        tag = f" with tag {self.tag}" if self.tag else ""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{op} of {list(self.tensor.shape)} {dtype}{tag} in {self.group}"

    def fits(self, other: "Transfer") -> bool:
        """Say whether ``other`` is the far end."""
        return (
            other.is_send != self.is_send
            and other.group == self.group
            and other.tag == self.tag
            and other.peer in (self.own, -1)
            and self.peer in (other.own, -1)
        )

    def raise_failure(self, rank: int) -> None:
        """Raise on ``rank`` what is wrong with the message, if anything is."""
        if self.failure:
            raise DesyncError(self.failure, at=f"rank {rank}", fix="send and receive equal numbers of equal dtype")


class Board:
    """All that is under way between the ranks of one simulation."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[GroupKey, int], Meeting] = {}
        self._transfers: list[Transfer] = []
        self._groups: Counter[tuple[int, str, tuple[int, ...]]] = Counter()

    def key_of_new_group(self, rank: int, name: str, ranks: Sequence[int]) -> GroupKey:
        """Return the key of a group that ``rank`` makes; equal on all ranks that make it."""
        nth = self._groups[rank, name, tuple(ranks)]
        self._groups[rank, name, tuple(ranks)] += 1
        return GroupKey(name, tuple(ranks), nth)

    def ranks_without(self, group: GroupKey) -> list[int]:
        """Return the ranks of ``group`` that have not made it: with names that differ, ranks never meet."""
        return [rank for rank in group.ranks if self._groups[rank, group.name, group.ranks] <= group.nth]

    def meeting(self, group: GroupKey, number: int) -> Meeting:
        """Return the collective with that number in ``group``."""
        return self._meetings.setdefault((group, number), Meeting(group, number))

    def arrive(self, meeting: Meeting, group_rank: int, call: Call) -> None:
        """Add a rank's call to a meeting, which is forgotten here once all are there."""
        meeting.arrive(group_rank, call)
        if meeting.is_over:
            del self._meetings[meeting.group, meeting.number]

    def post(self, transfer: Transfer) -> None:
        """Add an end of a message; the second end moves it. First posted, first served."""
        far = next((other for other in self._transfers if transfer.fits(other)), None)
        if far is None:
            self._transfers.append(transfer)
            return
        self._transfers.remove(far)
        send, recv = (transfer, far) if transfer.is_send else (far, transfer)
        if send.tensor.numel() != recv.tensor.numel() or send.tensor.dtype != recv.tensor.dtype:
            send.failure = recv.failure = f"a message does not fit: {send.describe()} meets {recv.describe()}"
        else:
            move(recv.tensor, send.tensor)
        recv.peer = send.own
        send.is_over = recv.is_over = True
