"""Whether ranks that wait will ever go on: a pure function of where each of them is.

On all ranks of a group the same things are started in the same order. So a rank that waits for something
which another has not started yet is ahead of that one. If ranks are ahead of each other in a circle, or if the
one behind has left the forward or backward in which the other waits, what is waited for will never come. A rank
that is behind and still under way is slow, which is no error. Nor will anything come where all ranks of a group
wait in it for longer than any transfer lasts: something has come between their collectives on one of them.

Ranks need not be asked at one moment: who waits in a circle stays where it is, so a circle made of answers
from different moments is a circle at the last of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from composable.wording import ranks_text

__all__ = ["COUNTED", "MAIN_LANE", "ORDERED", "Place", "Tree", "Verdict", "Wait", "judge", "place_from", "text_of"]

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
        forwards: How many forwards they have begun.
        backwards: How many backwards.
        is_inside: The last of all these is under way.
        has_failed: The last forward ended by an exception.
        text: The same for people: "in forward 3 of Sequential".
        settings: What users set, of what decides when ranks communicate, by module; for people.
    """

    forwards: int
    backwards: int
    is_inside: bool
    has_failed: bool
    text: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        name: str,
        forwards: int,
        backwards: int,
        *,
        is_inside: bool,
        is_backward: bool,
        was_stopped: bool,
        failure: str,
        settings: Mapping[str, str] | None = None,
    ) -> "Tree":
        """Return where they are, in words too.

        Args:
            name: What the modules are called.
            forwards: How many forwards they have begun.
            backwards: How many backwards.
            is_inside: The last of all these is under way.
            is_backward: The last of all these is a backward.
            was_stopped: It is one, and an exception has stopped it.
            failure: What the last forward has raised.
            settings: By module, what users set.
        """
        text = f"{'backward' if is_backward else 'forward'} {backwards if is_backward else forwards} of {name}"
        if is_inside:
            text = f"in {text}"
        elif was_stopped:
            text = f"has left {text} by an exception"
        elif failure:
            text = f"has left {text}: {failure}"
        else:
            text = f"has ended {text}" if forwards else f"has not begun a forward of {name}"
        return Tree(
            forwards, backwards, is_inside=is_inside, has_failed=bool(failure), text=text, settings=settings or {}
        )


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        waits: Of each thread that waits.
        counted: By group, how much this rank has started in it, by the count of torch.distributed.
        ordered: By group, how much its transports have, where messages have no tags.
        recent: By group, the kinds of the last of those.
        started_of_tag: By group, how much has been started for each tag.
        trees: By the names that annotations have on all ranks.
        failed_call: What the last call that annotates has raised.
        text: What it does, for people, if it does not wait.
    """

    waits: tuple[Wait, ...] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    ordered: Mapping[str, int] = field(default_factory=dict)
    recent: Mapping[str, Sequence[str]] = field(default_factory=dict)
    started_of_tag: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    trees: Mapping[str, Tree] = field(default_factory=dict)
    failed_call: str = ""
    text: str = ""

    def has_started(self, wait: Wait) -> bool:
        """Say whether this rank has started what another waits for."""
        return self._started_like(wait) >= wait.number

    def has_started_another(self, wait: Wait) -> bool:
        """Say whether this rank, in the place of what another waits for, has started something else."""
        back = self._started_like(wait) - wait.number
        recent = self.recent.get(wait.group, ()) if wait.tag == ORDERED else ()
        return 0 <= back < len(recent) and recent[-1 - back] != wait.kind

    def _started_like(self, wait: Wait) -> int:
        if wait.tag == ORDERED:
            return self.ordered.get(wait.group, 0)
        if wait.tag == COUNTED:
            return self.counted.get(wait.group, 0)
        return self.started_of_tag.get(wait.group, {}).get(wait.tag, 0)


@dataclass(frozen=True)
class Verdict:
    """What the ranks are told.

    Attributes:
        is_diverged: What is waited for will never come.
        groups: Names of those in which it is waited for.
        lines: Where each rank is.
    """

    is_diverged: bool
    groups: tuple[str, ...]
    lines: tuple[str, ...]


def judge(places: Mapping[int, Place | None]) -> Verdict:
    """Say whether ranks wait for what will never come.

    Args:
        places: Of every rank; ``None`` for one that does not answer.
    """
    doomed = _doomed(places)
    groups = {
        name for rank, index in doomed if (place := places[rank]) is not None for name in place.waits[index].groups
    }
    concerned = {
        other for rank, index in doomed if (place := places[rank]) is not None for other in place.waits[index].ranks
    }
    shown = {rank: places[rank] for rank in sorted(concerned & set(places) if doomed else places)}
    differences = _settings_that_differ(shown) if doomed else ()
    is_overdue = any(place.waits[index].is_overdue for rank, index in doomed if (place := places[rank]) is not None)
    hint = (_HINT,) if is_overdue else ()
    return Verdict(bool(doomed), tuple(sorted(groups)), (*_lines(shown), *differences, *hint))


def _settings_that_differ(places: Mapping[int, Place | None]) -> Iterator[str]:
    """Say which module has other settings on some ranks, if one has: the first of each tree."""
    names = dict.fromkeys(name for place in places.values() if place is not None for name in place.trees)
    for name in names:
        trees = {rank: tree for rank, place in places.items() if place is not None and (tree := place.trees.get(name))}
        for module in dict.fromkeys(module for tree in trees.values() for module in tree.settings):
            texts: dict[str, list[int]] = {}
            for rank, tree in trees.items():
                texts.setdefault(tree.settings.get(module, "as annotated"), []).append(rank)
            if len(texts) > 1:
                told = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in texts.items())
                yield f"    settings of {module} differ: {told}"
                break


_Node = tuple[int, int]  # A rank, and which of its waits.


def _doomed(places: Mapping[int, Place | None]) -> set[_Node]:
    """Return the waits that will never end."""
    ahead_of: dict[_Node, set[_Node]] = {}
    doomed: set[_Node] = set()
    for rank, place in places.items():
        for index, wait in enumerate(place.waits if place is not None else ()):
            node = (rank, index)
            ahead_of[node] = set()
            if wait.group and all(_is_overdue(places.get(other), wait) for other in wait.ranks):
                doomed.add(node)
            for other in wait.ranks:
                far = places.get(other)
                if other == rank or far is None:
                    continue
                lane = [number for number, own in enumerate(far.waits) if own.lane == wait.lane]
                mixed_up = {(other, number) for number in lane if _is_mixed_up(wait, far, far.waits[number])}
                if mixed_up or far.has_started_another(wait):
                    doomed |= {node, *mixed_up}
                elif far.has_started(wait):
                    continue
                else:
                    ahead_of[node] |= {(other, number) for number in lane}
                    if place is not None and _has_left(place, far, wait):
                        doomed.add(node)
    doomed |= {node for node in ahead_of if _reaches(ahead_of, node, {node})}
    # Who waits for one of them waits in vain too.
    return doomed | {node for node in ahead_of if doomed and _reaches(ahead_of, node, doomed)}


def _is_overdue(place: Place | None, wait: Wait) -> bool:
    """Say whether a rank waits in the group of ``wait`` too, and has for too long."""
    same = [one for one in place.waits if (one.group, one.lane) == (wait.group, wait.lane)] if place else []
    return any(one.is_overdue for one in same)


def _is_mixed_up(wait: Wait, far: Place, other: Wait) -> bool:
    """Say whether ``other`` of the rank ``far`` has come in the place of ``wait``, in the order of their group."""
    if wait.group != other.group or not wait.sequence or not other.sequence or not wait.kind or not other.kind:
        return False
    if wait.tag == ORDERED and other.tag == COUNTED:
        return not far.has_started(wait) and other.sequence >= wait.sequence
    return wait.tag == other.tag == COUNTED and wait.sequence == other.sequence and wait.kind != other.kind


def _has_left(own: Place, far: Place, wait: Wait) -> bool:
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
    if its.has_failed:
        return not mine.has_failed
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


def _lines(places: Mapping[int, Place | None]) -> Iterator[str]:
    texts: dict[str, list[int]] = {}
    for rank, place in places.items():
        texts.setdefault(_text_of_place(place), []).append(rank)
    for text, ranks in texts.items():
        yield f"    {ranks_text(ranks)}: {'each ' if len(ranks) > 1 else ''}{text}"


def _text_of_place(place: Place | None) -> str:
    if place is None:
        return "does not answer: it has annotated nothing, or its process has ended or is stopped"
    wait = next((wait for wait in place.waits if wait.lane == MAIN_LANE), next(iter(place.waits), None))
    if wait is None:
        return place.text
    tree = place.trees.get(wait.tree)
    inside = f", {tree.text}" if tree is not None else ""
    here = f", at {wait.here}" if wait.here else ""
    # Where the order decides what meets, two that are called alike may differ by their number.
    number = f", number {wait.number} of its group" if wait.tag == ORDERED else ""
    return f"waits for {wait.text}{inside}{number}{here}"


def text_of(place: Place) -> str:
    """Return ``place`` as text that ``place_from`` reads."""
    return json.dumps(asdict(place))


def place_from(text: str) -> Place:
    """Return what ``text_of`` wrote."""
    found = json.loads(text)
    waits = tuple(
        Wait(**{**wait, "ranks": tuple(wait["ranks"]), "groups": tuple(wait["groups"])}) for wait in found["waits"]
    )
    return Place(
        **{
            **found,
            "waits": waits,
            # JSON has no keys that are numbers.
            "started_of_tag": {
                group: {int(tag): number for tag, number in numbers.items()}
                for group, numbers in found["started_of_tag"].items()
            },
            "trees": {name: Tree(**tree) for name, tree in found["trees"].items()},
        }
    )
