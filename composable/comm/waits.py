"""The waits of this process, and whether they can end.

A ``Started`` exists from the start of a transport's collective until its end, a ``Meeting`` while a call waits for
other ranks; users' own calls of ``torch.distributed`` are read from frames. Each is told to other ranks as a ``Wait``.
The watchdog thread reads these records, and the steps of annotations, so both may be a moment old.

``diagnose`` is a pure function of the status of all ranks. All ranks of a group start the same collectives in the same
order. So a rank that waits for a collective which another rank has not started yet is ahead of that rank. If ranks are
ahead of each other in a circle, or if the rank behind has left the forward or backward in which the other waits, the
collective will never come. A rank that is behind and still under way is slow, which is no error. Ranks need not be
asked at the same moment: a rank that waits in a circle stays where it is.
"""

import itertools
import json
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from composable.comm.users_frames import (
    call_around,
    collective_in,
    count_in,
    is_in_our_call,
    is_torchs_wait,
    users_place,
)
from composable.ground.names import as_kind, ranks_text
from composable.ground.torch_hooks import any_backward_runs
from composable.ground.torch_private import groups_of_process, started_in

# In place of a tag: a transport's collective in the order of its group, and one that torch.distributed counts there.
ORDERED = -1
COUNTED = -2
# How many of the last started collectives are kept: a rank runs ahead by a few handles at most.
_RECENT = 64


@dataclass(frozen=True)
class Wait:
    """The wait of a thread for a collective or message."""

    text: str  # The collective and its place in the code, for messages to users.
    group: str  # Name of the process group; empty: not known, so the wait cannot be diagnosed.
    ranks: tuple[int, ...]  # Global ranks of the group.
    tag: int  # The tag, if its messages have one; else ``ORDERED`` or ``COUNTED``.
    number: int  # Its number from 1 on: in its tag, in the order of transports, or among all collectives of the group.
    # Kind of the collective: ranks that wait for the same one must have the same kind; empty: not known.
    kind: str = ""
    sequence: int = 0  # Its number among all collectives of the group; 0: not known.
    tree: str = ""  # Name of the annotation that waits.
    groups: tuple[str, ...] = ()  # Names of the groups to close, which ends the wait.
    is_call: bool = False  # The wait is in a call that annotates modules, or compares them before their first forward.


@dataclass(frozen=True)
class Tree:
    """The step that the modules of one annotation have reached."""

    name: str  # Name of the modules in messages.
    forwards: int  # How many forwards they have begun.
    backwards: int  # How many backwards they have begun.
    is_inside: bool = False  # The last forward or backward is under way.
    is_backward: bool = False  # The last one to begin was a backward.
    failure: str = ""  # The error that the last forward raised, as text.

    @property
    def text(self) -> str:
        """The step of the modules, for messages: "in forward 3 of Sequential"."""
        step = f"backward {self.backwards}" if self.is_backward else f"forward {self.forwards}"
        if self.is_inside:
            return f"in {step} of {self.name}"
        return f"has left {step} of {self.name}{': ' if self.failure else ''}{self.failure}"


class _Told:
    """A dataclass that travels through the store as JSON."""

    def as_text(self) -> str:
        """Return the value as text, which ``from_text`` reads."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]  # each subclass is a dataclass

    @classmethod
    def from_text(cls, text: str) -> Any:
        """Return the value that ``as_text`` wrote; raises ``ValueError`` for any other text."""
        return as_kind(cls, json.loads(text), "the answer")


@dataclass(frozen=True)
class RankStatus(_Told):
    """The wait of a rank, and the collectives that it has started so far."""

    wait: Wait | None = None  # Its wait; ``None``: it waits for no other rank.
    # How many collectives this rank has started, by the text of group and tag.
    started: Mapping[str, int] = field(default_factory=dict)
    # The kinds of the last collectives in the order of each group, by group.
    recent: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # The steps of annotations, by the names that these have on all ranks.
    trees: Mapping[str, Tree] = field(default_factory=dict)
    failed_call: str = ""  # The error that ended the last call that annotates, as text.
    text: str = ""  # The work of the rank, for messages, if it does not wait.
    history: str = ""  # What this rank knows of ranks that were late before.

    def has_started(self, wait: Wait) -> bool:
        """Say whether this rank has started the collective that another rank waits for."""
        return self.started.get(f"{wait.group} {wait.tag}", 0) >= wait.number

    def has_started_another(self, wait: Wait) -> bool:
        """Say whether this rank has started another collective in place of the one that another rank waits for."""
        back = self.started.get(f"{wait.group} {wait.tag}", 0) - wait.number
        recent = self.recent.get(wait.group, ()) if wait.tag == ORDERED else ()
        return 0 <= back < len(recent) and recent[-1 - back] != wait.kind


@dataclass(frozen=True)
class Diagnosis(_Told):
    """The answer of ``diagnose``, which all ranks get."""

    # Names of the groups in which a collective will never come; empty: the ranks are only slow.
    groups: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()  # The place of each rank, for messages.


class Order:
    """The collectives that this rank has started in one process group, where their order matches them, not a tag."""

    __slots__ = ("count", "digest", "keys_taken", "recent", "step")

    def __init__(self) -> None:
        # count: How many collectives there were.
        # digest: Digest of the tags since ranks last compared it: equal if all have started the same in one order.
        # keys_taken: How many keys the transports of the group have given out.
        self.count = self.digest = self.keys_taken = 0
        self.step: Any = None  # A weak reference to the ``Step`` that has begun last, of ranks on the host.
        self.recent: deque[int] = deque(maxlen=_RECENT)  # Tags of the last collectives.

    def is_taken(self) -> bool:
        """Say whether that step is under way in another thread, or waits there for its backward."""
        step = self.step and self.step()
        # A thread that has ended waits for nothing.
        if step is None or step.thread == threading.get_ident() or step.thread not in sys._current_frames():
            return False
        return step.is_under_way or (bool(step.forwards) and bool(step.forwards[-1][2]))

    def take_digest(self) -> int:
        """Return the digest and begin a new one."""
        digest, self.digest = self.digest, 0
        return digest


class Started:
    """A collective that a transport has started, and that no thread has waited for to the end.

    Attributes:
        transport: The transport that started it.
        tag: Twice the key of the buffer; one more for a reduce-scatter.
        number: Its number on this rank, from 1 on: in its tag where messages have tags, else in the order of the group.
        waiter: The thread that waits for it; 0: no thread waits any more; ``None``: no thread has waited so far.
        has_tag: Messages are matched by their tag, not by the order of all collectives of the group.
    """

    __slots__ = ("number", "tag", "transport", "waiter")

    has_tag = False
    transport: Any
    tag: int
    number: int
    waiter: int | None


class Meeting:
    """A call in which this rank waits for others, on record while the context lasts.

    Args:
        group: The group of the ranks; ``None``: the call contains other waits, which messages name after it.
        kind: Kind of the call: ranks that wait in the n-th collective of a group must have the same kind.
        what: Name of the call in messages; empty: the call of this package that the user made.
        ahead: How many collectives after the group's last one its first collective comes; ``None``: not known.
    """

    __slots__ = ("__weakref__", "group", "kind", "number", "serial", "thread", "what")

    def __init__(self, group: dist.ProcessGroup | None, kind: str, what: str = "", *, ahead: int | None = 1) -> None:
        self.group, self.kind, self.what = group, kind, what
        self.serial, self.thread, self.number = next(_RECORD.serials), threading.get_ident(), 0
        if group is not None and ahead is not None:
            with suppress(RuntimeError):  # Not every backend counts.
                self.number = started_in(group) + ahead

    def __enter__(self) -> "Meeting":
        _RECORD.meetings[self.serial] = self
        return self

    def before_in_another_thread(self) -> str:
        """Return the name of a call in another thread since before this one, in the same group or none; empty: none."""
        found = [one for one in _all_of(_RECORD.meetings.values()) if one.group is self.group]
        found = [one for one in found if one.thread != self.thread and one.serial < self.serial]
        return next((one.what or one.kind for one in found), "")

    def __exit__(self, *_: object) -> None:
        _RECORD.meetings.pop(self.serial, None)


@dataclass(frozen=True)
class AnnotationStatus:
    """The status of an annotation."""

    name: str  # Equal on all ranks, and different from the names of other annotations.
    tree: Tree
    transport: Any
    groups: tuple[str, ...] = ()  # Names of all its groups: once ranks have diverged, all of them are closed.


class _ProcessRecord:
    """The records of this process: meetings, transports, and annotations, each as long as it lives."""

    def __init__(self) -> None:
        self.serials = itertools.count()
        # In the order in which they began; a meeting that an exception has cut short is freed with its frame.
        self.meetings: weakref.WeakValueDictionary[int, Meeting] = weakref.WeakValueDictionary()
        self.transports: weakref.WeakSet[Any] = weakref.WeakSet()
        self.trees: weakref.WeakSet[Any] = weakref.WeakSet()
        self.histories: weakref.WeakSet[Any] = weakref.WeakSet()
        self.orders: weakref.WeakKeyDictionary[dist.ProcessGroup, Order] = weakref.WeakKeyDictionary()
        self.trainer: int | None = None  # The thread that has annotated last.


_RECORD = _ProcessRecord()


def notice_transport(transport: Any) -> None:
    """Record the collectives that ``transport`` starts, as long as it lives; see ``Transport``."""
    _RECORD.transports.add(transport)


def order_of(group: dist.ProcessGroup) -> Order:
    """Return the order of the collectives of ``group``, one for all its transports."""
    return _RECORD.orders.get(group) or _RECORD.orders.setdefault(group, Order())


def notice_tree(tree: Any) -> None:
    """Record an annotation, as long as it lives.

    Another thread calls ``tree.tell(in_backward=...)``, which gets whether a thread of this process runs a backward and
    returns an ``AnnotationStatus`` or ``None``; and ``tree.name_of(started)``, for the name of its collective.
    """
    _RECORD.trees.add(tree)
    _RECORD.trainer = threading.get_ident()


def notice_history(history: Any) -> None:
    """Record what knows of ranks that were late, as long as it lives; another thread calls ``history.text()``."""
    _RECORD.histories.add(history)


def history_here() -> str:
    """Return what is known here of ranks that were late; empty: nothing."""
    return next(filter(None, (one.text() for one in _all_of(_RECORD.histories))), "")


def is_training_thread() -> bool:
    """Say whether this is the thread that has annotated last."""
    return threading.get_ident() == _RECORD.trainer


def described(error: BaseException, where: str = "") -> str:
    """Return an error as one line, for messages on other ranks; ``where``: the code that raised it, if known."""
    where = f" in {where}" if where else ""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}{where}{': ' if text else ''}{text}"


class Waiting(NamedTuple):
    """A thread of this process that waits for other ranks."""

    mark: tuple[object, ...]  # Differs from the mark of the thread's next wait.
    is_ours: bool  # It waits in a call of this package.
    told: Callable[[Mapping[int, AnnotationStatus]], Wait]  # What other ranks are told, given ``annotations_here()``.


def waiting_here() -> Waiting | None:
    """Return the wait for other ranks of the training thread, or of a thread of autograd that works for it.

    Waits of other threads, such as a thread that writes a checkpoint, end by the timeouts of their groups.
    """
    others = {one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}
    others -= {_RECORD.trainer, threading.main_thread().ident}
    started = {one.waiter: one for transport in _all_of(_RECORD.transports) for one in list(transport.in_flight)}
    meetings = _all_of(_RECORD.meetings.values())
    for thread, frame in sys._current_frames().items():
        own = [one for one in meetings if one.thread == thread]
        around = next((one for one in own if one.group is None), None)
        record = started.get(thread) or next((one for one in own[::-1] if one.group is not None), None)
        if thread not in others and (record is not None or is_torchs_wait(frame)):
            if isinstance(record, Started):
                mark: tuple[object, ...] = id(record.transport), record.tag, record.number
            else:
                mark = (record.serial,) if record is not None else (id(frame), frame.f_lasti, count_in(frame))
            is_ours = bool(record or around) or is_in_our_call(frame)
            return Waiting((thread, *mark), is_ours, partial(_told, record, around, frame))
    return None


def _told(
    record: Started | Meeting | None, around: Meeting | None, frame: FrameType, trees: Mapping[int, AnnotationStatus]
) -> Wait:
    """Return the wait of ``record``, or of the user's call in ``frame``, inside of the call ``around``."""
    tree = next((one for one in trees.values() if around is None and one.tree.is_inside), None)
    tag = COUNTED
    if isinstance(record, Started):
        text, owner = name_of(record)
        tree = trees.get(id(owner))
        transport, number, kind = record.transport, record.number, str(record.tag)
        group, names = transport.groups[0], [one.group_name for one in transport.groups]
        names += () if tree is None else tree.groups
        # Less the collectives that the transport has started since: the group has counted each, and maybe others.
        sequence = 0 if record.has_tag else started_in(group) - (transport.order.count - number)
        tag = record.tag if record.has_tag else ORDERED
    else:
        group, kind = (record.group, record.kind) if record is not None else collective_in(frame)
        number = sequence = record.number if record is not None else count_in(frame)
        names = [] if group is None else [group.group_name]
        named = around or record
        called = f"torch.distributed.{kind}" if record is None and kind and tree is not None else call_around(frame)
        text = f"the other ranks in {(named is not None and named.what) or called}"
    place, known = users_place(frame), group if number else None
    return Wait(
        f"{text}{f', {tree.tree.text}' if tree is not None else ''}{f', at {place}' if place else ''}",
        "" if known is None else known.group_name,
        () if known is None else tuple(dist.get_process_group_ranks(known)),
        tag,
        number,
        kind,
        sequence,
        "" if tree is None else tree.name,
        tuple(dict.fromkeys(names)),
        is_call=around is not None,
    )


def annotations_here() -> dict[int, AnnotationStatus]:
    """Return the status of each annotation of this process whose groups still exist, by its ``id``."""
    groups = groups_of_process()
    found = {id(tree): tree.tell(in_backward=any_backward_runs()) for tree in _all_of(_RECORD.trees)}
    return {key: one for key, one in found.items() if one is not None and _is_alive(one.transport, groups)}


def local_status() -> RankStatus:
    """Return the status of this process."""
    groups, told, found = groups_of_process(), annotations_here(), waiting_here()
    talking = [one for one in _all_of(_RECORD.transports) if _is_alive(one, groups)]
    started = {f"{name} {COUNTED}": started_in(group) for name, group in groups.items()}
    for one in talking:
        name = one.groups[0].group_name
        started |= {f"{name} {tag}": number for tag, number in {ORDERED: one.order.count, **one.begun}.items()}
    return RankStatus(
        None if found is None else found.told(told),
        started=started,
        recent={one.groups[0].group_name: [str(tag) for tag in one.order.recent.copy()] for one in talking},
        trees={one.name: one.tree for one in told.values()},
        text=_doing([one.tree for one in told.values()]),
        history=history_here(),
    )


def _is_alive(transport: Any, groups: Mapping[str, dist.ProcessGroup]) -> bool:
    """Say whether the groups of ``transport`` still exist: a new world has other groups of the same names."""
    return any(groups.get(group.group_name) is group for group in transport.groups[:1])


def _doing(trees: Sequence[Tree]) -> str:
    # A step that is under way says most; a step that has ended says more than an annotation that never ran.
    last = max(trees, key=lambda tree: (tree.is_inside, tree.forwards + tree.backwards), default=None)
    text = "has run no annotated module" if last is None else last.text
    frames, main = sys._current_frames(), threading.main_thread().ident or 0
    here = users_place(frames.get(_RECORD.trainer or main) or frames.get(main))
    return f"{text}; now at {here}" if here else text


def name_of(started: Started) -> tuple[str, object]:
    """Return the name of a collective, for messages, and the annotation that started it; ``None``: there is none."""
    for one in _all_of(_RECORD.trees):
        name = one.name_of(started)
        if name is not None:
            return name, one
    return f"an exchange of {started.transport.world_size} ranks", None


def transports_of(groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """Return the transports that use any of ``groups``."""
    found = list(groups)
    return [one for one in _all_of(_RECORD.transports) if any(group in found for group in one.groups)]


def _all_of(found: Any) -> list[Any]:
    # Another thread may add an element meanwhile.
    for _ in range(10):
        with suppress(RuntimeError):
            return list(found)
    return []


def diagnose(ranks: Mapping[int, RankStatus | None]) -> Diagnosis:
    """Return the groups in which ranks wait for a collective that will never come, and the place of each rank.

    The status of a rank is ``None`` if it does not answer.
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
    lines += [f"    before: {one.history}" for one in known.values() if one.history][:1]
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
    # A rank that waits for one of these ranks waits in vain too.
    return doomed | {rank for rank in waits if doomed & reached[rank]}


def _reached(edges: Mapping[int, set[int]], start: int) -> set[int]:
    """Return the ranks that ``start`` waits for, directly or through other ranks."""
    seen: set[int] = set()
    stack = list(edges[start])
    while stack:
        rank = stack.pop()
        if rank not in seen:
            seen.add(rank)
            stack += edges[rank]
    return seen


def _is_out_of_step(waits: Mapping[int, Wait], wait: Wait) -> bool:
    """Say whether all ranks wait for the same collective, which has different places in the order of their group.

    On one of the ranks another call has come first, such as a call by a second thread.
    """
    same = [waits[rank] for rank in wait.ranks if rank in waits]
    same = [one for one in same if (one.group, one.tag, one.number) == (wait.group, wait.tag, wait.number)]
    places = {one.sequence for one in same}
    return wait.tag == ORDERED and len(same) == len(wait.ranks) and len(places) > 1 and 0 not in places


def _is_mixed_up(wait: Wait, far: RankStatus, other: Wait) -> bool:
    """Say whether rank ``far`` waits for ``other`` in the place of ``wait``, in the order of their group."""
    if wait.group != other.group or not wait.sequence or not other.sequence:
        return False
    if wait.tag == ORDERED and other.tag == COUNTED:
        return not far.has_started(wait) and other.sequence >= wait.sequence
    return wait.tag == other.tag == COUNTED and wait.sequence == other.sequence and wait.kind != other.kind


def _has_left(own: RankStatus, far: RankStatus, wait: Wait) -> bool:
    """Say whether rank ``far`` has left the forward, backward or call in which ``own`` waits."""
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
