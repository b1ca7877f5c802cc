"""Whether ranks that wait will ever go on: a pure function of the status of each of them.

On all ranks of a group the same things are started in the same order. So a rank that waits for something
which another has not started yet is ahead of that one. If ranks are ahead of each other in a circle, or if the
one behind has left the forward or backward in which the other waits, what is waited for will never come. A rank
that is behind and still under way is slow, which is no error.

Ranks need not be asked at one moment: who waits in a circle stays where it is, so a circle made of answers
from different moments is a circle at the last of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from composable.ground.names import ranks_text

__all__ = ["COUNTED", "ORDERED", "Diagnosis", "RankStatus", "Tree", "Wait", "diagnose"]


# In place of a tag: what a transport starts in the order of its group, and what torch.distributed counts in a group.
ORDERED = -1
COUNTED = -2


@dataclass(frozen=True)
class Wait:
    """What a thread waits for.

    Attributes:
        text: What it waits for and where, for people.
        group: Name of the process group; empty where it is not known, and nothing can be said.
        ranks: Its global ranks.
        tag: Of messages that have one; else ``ORDERED`` or ``COUNTED``.
        number: Which it is, from 1 on, of its tag, of what transports start in the group, or of all in the group.
        kind: What it is: ranks that meet in one collective must mean the same; empty: not known.
        sequence: Which it is of all in the group; 0: not known.
        tree: The annotation that waits.
        groups: What has to be closed to end the wait.
        is_call: It is waited for while modules are annotated, or compared before their first forward.
    """

    text: str
    group: str
    ranks: tuple[int, ...]
    tag: int
    number: int
    kind: str = ""
    sequence: int = 0
    tree: str = ""
    groups: tuple[str, ...] = ()
    is_call: bool = False


@dataclass(frozen=True)
class Tree:
    """Where the modules of one annotation are.

    Attributes:
        name: What they are called.
        forwards: How many forwards they have begun.
        backwards: How many backwards.
        is_inside: The last of all these is under way.
        is_backward: The last of all these is a backward.
        failure: What the last forward has raised.
    """

    name: str
    forwards: int
    backwards: int
    is_inside: bool = False
    is_backward: bool = False
    failure: str = ""

    @property
    def text(self) -> str:
        """Where they are, for people: "in forward 3 of Sequential"."""
        step = f"backward {self.backwards}" if self.is_backward else f"forward {self.forwards}"
        if self.is_inside:
            return f"in {step} of {self.name}"
        return f"has left {step} of {self.name}{': ' if self.failure else ''}{self.failure}"


@dataclass(frozen=True)
class RankStatus:
    """What a rank waits for, and what it has started so far.

    Attributes:
        wait: What it waits for; ``None``: for no other rank.
        started: By group and tag, how much this rank has started there.
        recent: By group, the kinds of what was started last in its order.
        trees: By the names that annotations have on all ranks.
        failed_call: What the last call that annotates has raised.
        text: What it does, for people, if it does not wait.
    """

    wait: Wait | None = None
    started: Mapping[tuple[str, int], int] = field(default_factory=dict)
    recent: Mapping[str, Sequence[str]] = field(default_factory=dict)
    trees: Mapping[str, Tree] = field(default_factory=dict)
    failed_call: str = ""
    text: str = ""

    def has_started(self, wait: Wait) -> bool:
        """Say whether this rank has started what another waits for."""
        return self.started.get((wait.group, wait.tag), 0) >= wait.number

    def has_started_another(self, wait: Wait) -> bool:
        """Say whether this rank, in the place of what another waits for, has started something else."""
        back = self.started.get((wait.group, wait.tag), 0) - wait.number
        recent = self.recent.get(wait.group, ()) if wait.tag == ORDERED else ()
        return 0 <= back < len(recent) and recent[-1 - back] != wait.kind


class Diagnosis(NamedTuple):
    """What all ranks are told.

    Attributes:
        groups: Names of those in which ranks wait for what will never come; empty: the ranks are only slow.
        lines: Where each rank is.
    """

    groups: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Return what ``from_text`` reads."""
        return "\n".join([" ".join(["1" if self.groups else "0", *self.groups]), *self.lines])

    @staticmethod
    def from_text(text: str) -> "Diagnosis":
        """Return what ``as_text`` wrote."""
        first, *lines = text.split("\n")
        return Diagnosis(tuple(first.split()[1:]), tuple(lines))


def diagnose(ranks: Mapping[int, RankStatus | None]) -> Diagnosis:
    """Say whether ranks wait for what will never come.

    Args:
        ranks: The status of every rank; ``None`` for one that does not answer.
    """
    known = {rank: status for rank, status in ranks.items() if status is not None}
    waits = {rank: status.wait for rank, status in known.items() if status.wait is not None}
    doomed = [waits[rank] for rank in _in_vain(known, waits)]
    concerned = {rank for wait in doomed for rank in wait.ranks} or ranks.keys()
    texts: dict[str, list[int]] = {}
    for rank, status in sorted(ranks.items()):
        if rank in concerned:
            texts.setdefault(_text_of(status), []).append(rank)
    lines = [f"    {ranks_text(told)}: {'each ' * (len(told) > 1)}{text}" for text, told in texts.items()]
    return Diagnosis(tuple(sorted({name for wait in doomed for name in wait.groups})), tuple(lines))


def _in_vain(ranks: Mapping[int, RankStatus], waits: Mapping[int, Wait]) -> set[int]:
    """Return the ranks that will wait for ever."""
    ahead_of: dict[int, set[int]] = {rank: set() for rank in waits}
    doomed: set[int] = set()
    for rank, wait in waits.items():
        if _is_out_of_step(waits, wait):
            doomed.add(rank)
        for other in wait.ranks:
            far = ranks.get(other)
            if other == rank or far is None:
                continue
            is_mixed_up = far.wait is not None and _is_mixed_up(wait, far, far.wait)
            if is_mixed_up or far.has_started_another(wait):
                doomed |= {rank, other} if is_mixed_up else {rank}
            elif not far.has_started(wait):
                if far.wait is not None:
                    ahead_of[rank].add(other)
                if _has_left(ranks[rank], far, wait):
                    doomed.add(rank)
    reached = {rank: _reached(ahead_of, rank) for rank in waits}
    doomed |= {rank for rank in waits if rank in reached[rank]}
    # Who waits for one of them waits in vain too.
    return doomed | {rank for rank in waits if doomed & reached[rank]}


def _reached(edges: Mapping[int, set[int]], start: int) -> set[int]:
    """Return the ranks that ``start`` waits for, also by way of others."""
    seen: set[int] = set()
    stack = list(edges[start])
    while stack:
        rank = stack.pop()
        if rank not in seen:
            seen.add(rank)
            stack += edges[rank]
    return seen


def _is_out_of_step(waits: Mapping[int, Wait], wait: Wait) -> bool:
    """Say whether all ranks wait for what is the same to them, and has different places in the order of their group.

    On one of them a call has come between, such as that of a second thread.
    """
    same = [waits[rank] for rank in wait.ranks if rank in waits]
    same = [one for one in same if (one.group, one.tag, one.number) == (wait.group, wait.tag, wait.number)]
    places = {one.sequence for one in same}
    return wait.tag == ORDERED and len(same) == len(wait.ranks) and len(places) > 1 and 0 not in places


def _is_mixed_up(wait: Wait, far: RankStatus, other: Wait) -> bool:
    """Say whether ``other`` of the rank ``far`` has come in the place of ``wait``, in the order of their group."""
    if wait.group != other.group or not wait.sequence or not other.sequence:
        return False
    if wait.tag == ORDERED and other.tag == COUNTED:
        return not far.has_started(wait) and other.sequence >= wait.sequence
    return wait.tag == other.tag == COUNTED and wait.sequence == other.sequence and wait.kind != other.kind


def _has_left(own: RankStatus, far: RankStatus, wait: Wait) -> bool:
    """Say whether ``far`` has left what ``own`` waits in."""
    if wait.is_call and far.failed_call:
        return not own.failed_call
    mine, its = own.trees.get(wait.tree), far.trees.get(wait.tree)
    if mine is None or its is None or not mine.is_inside:
        return False
    if its.forwards > mine.forwards or its.backwards > mine.backwards:
        return True
    if its.forwards < mine.forwards:
        return False
    if its.failure:
        return not mine.failure
    return its.backwards == mine.backwards and not its.is_inside


def _text_of(status: RankStatus | None) -> str:
    if status is None:
        return "does not answer: it has annotated nothing, or its process has ended or is stopped"
    return status.text if status.wait is None else f"waits for {status.wait.text}"
