"""Whether ranks that wait will ever go on: a pure function of the status of each of them.

On all ranks of a group the same things are started in the same order. So a rank that waits for something
which another has not started yet is ahead of that one. If ranks are ahead of each other in a circle, or if the
one behind has left the forward or backward in which the other waits, what is waited for will never come. A rank
that is behind and still under way is slow, which is no error. Nor will anything come where all ranks of a group
wait in it for longer than any transfer lasts: something has come between their collectives on one of them.

Ranks need not be asked at one moment: who waits in a circle stays where it is, so a circle made of answers
from different moments is a circle at the last of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from composable.ground.names import ranks_text

__all__ = ["COUNTED", "MAIN_LANE", "ORDERED", "Diagnosis", "RankStatus", "Tree", "Wait", "diagnose"]


# Of the thread that trains. Other threads are told apart by their names, which are the same on all ranks.
MAIN_LANE = "main"
# In place of a tag: what a transport starts in the order of its group, and what torch.distributed counts in a group.
ORDERED = -1
COUNTED = -2
# Where all ranks wait in one group.
_HINT = (
    "    all of them wait in one process group, where other calls came between on some rank: those of a second thread, "
    'such as dcp.async_save (give it process_group=dist.new_group(backend="gloo")), or ranks use groups in other orders'
)


@dataclass(frozen=True)
class Wait:
    """What a thread waits for.

    Attributes:
        lane: Which thread.
        text: What it waits for, for people.
        here: Where in the user's code.
        group: Name of the process group; empty where it is not known, and nothing can be said.
        ranks: Its global ranks.
        tag: Of messages that have one; else ``ORDERED`` or ``COUNTED``.
        number: Which it is, from 1 on, of its tag, of what transports start in the group, or of all in the group.
        kind: What it is: ranks that meet in one collective must mean the same; empty: not known.
        sequence: Which it is of all in the group; 0: not known.
        tree: The annotation that waits.
        groups: What has to be closed to end the wait.
        is_call: It is waited for while modules are annotated, or compared before their first forward.
        is_overdue: It has lasted longer than what travels, and nothing was started in the group meanwhile.
    """

    lane: str
    text: str
    here: str
    group: str
    ranks: tuple[int, ...]
    tag: int
    number: int
    kind: str = ""
    sequence: int = 0
    tree: str = ""
    groups: tuple[str, ...] = ()
    is_call: bool = False
    is_overdue: bool = False


@dataclass(frozen=True)
class Tree:
    """Where the modules of one annotation are.

    Attributes:
        name: What they are called.
        forwards: How many forwards they have begun.
        backwards: How many backwards.
        is_inside: The last of all these is under way.
        is_backward: The last of all these is a backward.
        was_stopped: It is one, and an exception has stopped it.
        failure: What the last forward has raised.
        settings: What users set, of what decides when ranks communicate, by module; for people.
    """

    name: str
    forwards: int
    backwards: int
    is_inside: bool = False
    is_backward: bool = False
    was_stopped: bool = False
    failure: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Where they are, for people: "in forward 3 of Sequential"."""
        step = f"backward {self.backwards}" if self.is_backward else f"forward {self.forwards}"
        if self.is_inside:
            return f"in {step} of {self.name}"
        if self.was_stopped:
            return f"has left {step} of {self.name} by an exception"
        if self.failure:
            return f"has left {step} of {self.name}: {self.failure}"
        return f"has ended {step} of {self.name}" if self.forwards else f"has not begun a forward of {self.name}"


@dataclass(frozen=True)
class RankStatus:
    """What a rank waits for, and what it has started so far.

    Attributes:
        waits: Of each thread that waits.
        started: By group and tag, how much this rank has started there.
        recent: By group, the kinds of what was started last in its order.
        trees: By the names that annotations have on all ranks.
        failed_call: What the last call that annotates has raised.
        text: What it does, for people, if it does not wait.
    """

    waits: tuple[Wait, ...] = ()
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


@dataclass(frozen=True)
class Diagnosis:
    """What all ranks are told.

    Attributes:
        is_diverged: What is waited for will never come.
        groups: Names of those in which it is waited for.
        lines: Where each rank is.
    """

    is_diverged: bool = False
    groups: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Return what ``from_text`` reads."""
        return "\n".join([str(int(self.is_diverged)), " ".join(self.groups), *self.lines])

    @staticmethod
    def from_text(text: str) -> "Diagnosis":
        """Return what ``as_text`` wrote."""
        is_diverged, groups, *lines = text.split("\n")
        return Diagnosis(is_diverged == "1", tuple(groups.split()), tuple(lines))


def diagnose(ranks: Mapping[int, RankStatus | None]) -> Diagnosis:
    """Say whether ranks wait for what will never come.

    Args:
        ranks: The status of every rank; ``None`` for one that does not answer.
    """
    doomed = _doomed({rank: status for rank, status in ranks.items() if status is not None})
    waits = [status.waits[index] for rank, index in doomed if (status := ranks[rank]) is not None]
    concerned = {rank for wait in waits for rank in wait.ranks} & set(ranks) if doomed else set(ranks)
    shown = {rank: ranks[rank] for rank in sorted(concerned)}
    differences = _settings_that_differ(shown) if doomed else ()
    hint = [_HINT] if any(wait.is_overdue for wait in waits) else []
    groups = sorted({name for wait in waits for name in wait.groups})
    return Diagnosis(bool(doomed), tuple(groups), (*_lines(shown), *differences, *hint))


def _settings_that_differ(ranks: Mapping[int, RankStatus | None]) -> Iterator[str]:
    """Say which module has other settings on some ranks, if one has: the first of each tree."""
    for name in dict.fromkeys(name for status in ranks.values() if status is not None for name in status.trees):
        trees = {rank: tree for rank, one in ranks.items() if one is not None and (tree := one.trees.get(name))}
        for module in dict.fromkeys(module for tree in trees.values() for module in tree.settings):
            texts: dict[str, list[int]] = {}
            for rank, tree in trees.items():
                texts.setdefault(tree.settings.get(module, "as annotated"), []).append(rank)
            if len(texts) > 1:
                told = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in texts.items())
                yield f"    settings of {module} differ: {told}"
                break


_Node = tuple[int, int]  # A rank, and which of its waits.


def _doomed(ranks: Mapping[int, RankStatus]) -> set[_Node]:
    """Return the waits that will never end."""
    ahead_of: dict[_Node, set[_Node]] = {}
    doomed: set[_Node] = set()
    for rank, status in ranks.items():
        for index, wait in enumerate(status.waits):
            node = (rank, index)
            ahead_of[node] = set()
            if wait.group and all(_is_overdue(ranks.get(other), wait) for other in wait.ranks):
                doomed.add(node)
            for other in wait.ranks:
                far = ranks.get(other)
                if other == rank or far is None:
                    continue
                lane = [number for number, own in enumerate(far.waits) if own.lane == wait.lane]
                mixed_up = {(other, number) for number in lane if _is_mixed_up(wait, far, far.waits[number])}
                if mixed_up or far.has_started_another(wait):
                    doomed |= {node, *mixed_up}
                elif not far.has_started(wait):
                    ahead_of[node] |= {(other, number) for number in lane}
                    if _has_left(status, far, wait):
                        doomed.add(node)
    doomed |= {node for node in ahead_of if _reaches(ahead_of, node, {node})}
    # Who waits for one of them waits in vain too.
    return doomed | {node for node in ahead_of if doomed and _reaches(ahead_of, node, doomed)}


def _is_overdue(status: RankStatus | None, wait: Wait) -> bool:
    """Say whether a rank waits in the group of ``wait`` too, and has for too long."""
    waits = status.waits if status else ()
    return any(one.is_overdue for one in waits if (one.group, one.lane) == (wait.group, wait.lane))


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


def _reaches(edges: Mapping[_Node, set[_Node]], start: _Node, goals: set[_Node]) -> bool:
    seen: set[_Node] = set()
    stack = list(edges[start])
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        if node not in seen:
            seen.add(node)
            stack += edges[node]
    return False


def _lines(ranks: Mapping[int, RankStatus | None]) -> Iterator[str]:
    texts: dict[str, list[int]] = {}
    for rank, status in ranks.items():
        texts.setdefault(_text_of(status), []).append(rank)
    for text, numbers in texts.items():
        yield f"    {ranks_text(numbers)}: {'each ' if len(numbers) > 1 else ''}{text}"


def _text_of(status: RankStatus | None) -> str:
    if status is None:
        return "does not answer: it has annotated nothing, or its process has ended or is stopped"
    wait = next((wait for wait in status.waits if wait.lane == MAIN_LANE), next(iter(status.waits), None))
    if wait is None:
        return status.text
    tree = status.trees.get(wait.tree)
    inside = f", {tree.text}" if tree is not None else ""
    here = f", at {wait.here}" if wait.here else ""
    # Where the order decides what meets, two that are called alike may differ by their number.
    number = f", number {wait.number} of its group" if wait.tag == ORDERED else ""
    return f"waits for {wait.text}{inside}{number}{here}"
