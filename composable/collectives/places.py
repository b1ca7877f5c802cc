"""Where this process is, read from outside while it runs: what its threads wait for, how far its annotations are.

Threads note nothing on the way. What a thread waits for is seen in its frames: the innermost one is in a wait of
this folder, or in torch.distributed. What collectives count, and what annotations know of their own steps anyway,
is read here from another thread, so it must be cheap to read, and may be a moment old.
"""

import contextlib
import math
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from composable.collectives.base import Started, Transport
from composable.collectives.verdict import COUNTED, MAIN_LANE, ORDERED, Place, Tree, Wait
from composable.torch_private import backward_code, groups_of_process, started_in, tree_leaves

__all__ = [
    "Told",
    "Waiting",
    "bytes_before",
    "call_in",
    "described",
    "frame_of_wait",
    "name_of",
    "notice_transport",
    "notice_tree",
    "place_here",
    "transports",
    "waiting_threads",
]

# With the separator: others' packages may begin with the same name.
_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_WAITS = (str(Path(__file__).resolve().parent) + os.sep, dist.distributed_c10d.__file__, torch.futures.__file__)
# What the watch itself does in a thread that it holds up is no wait.
_WATCH = str(Path(__file__).resolve().with_name("watch.py"))
_NOT_THE_USERS = (str(Path(torch.__file__).parent) + os.sep, _OURS, threading.__file__, contextlib.__file__)
# Calls in which modules are annotated, or compared before their first forward, or ranks meet inside of Join.
_CALLS = frozenset({"fully_shard", "replicate", "adopt", "_notify", "meet_in_join"})
# What stands between a call of the user and the function that it is for.
_AROUND = frozenset({"annotate", "annotate_on_rank", "pre_forward", "post_forward"})
# What calls hooks and collectives of users.
_CALL_HOOKS = tuple(
    os.path.join(_OURS, *parts)
    for parts in (("storage", "hook_paths.py"), ("storage", "gather_path.py"), ("replication", "exchange.py"))
)
_COLLECTIVES = frozenset(
    {
        *("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_into_tensor", "_swap"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter_in"),
        *("all_to_all", "all_to_all_single", "all_gather_single", "wait_for_work"),
    }
)


@dataclass(frozen=True)
class Told:
    """What an annotation tells of itself.

    Attributes:
        name: Equal on all ranks, and no other annotation's.
        tree: Where its modules are.
        transport: Of its ranks.
        groups: Names of all process groups that it talks in: where ranks have diverged, none of them serves any more.
    """

    name: str
    tree: Tree
    transport: Transport
    groups: tuple[str, ...] = ()


class Annotated(Protocol):
    """An annotation that can be asked from another thread."""

    def tell(self, *, in_backward: bool) -> Told | None:
        """Return where it is; ``in_backward``: some thread of this process runs a backward."""
        ...

    def name_of(self, started: Started) -> str | None:
        """Return what it calls a collective of its own; ``None`` for others'."""
        ...

    def is_run_by(self, runner: object) -> bool:
        """Say whether ``runner`` is the object whose methods run its steps."""
        ...


_TRANSPORTS: "WeakSet[Transport]" = WeakSet()
_TREES: "WeakSet[Any]" = WeakSet()


def notice_transport(transport: Transport) -> None:
    """Let places tell what ``transport`` has started, as long as it lives."""
    _TRANSPORTS.add(transport)


def notice_tree(tree: Annotated) -> None:
    """Let places tell where ``tree`` is, as long as it lives."""
    _TREES.add(tree)


def described(error: BaseException, where: str = "") -> str:
    """Return how other ranks are told what was raised here, in one line.

    Args:
        error: What was raised.
        where: By what, where that is known.
    """
    where = f" in {where}" if where else ""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}{where}{': ' if text else ''}{text}"


def transports() -> list[Transport]:
    return _all_of(_TRANSPORTS)


@dataclass(frozen=True)
class Waiting:
    """A thread that waits.

    Attributes:
        frame: Its innermost frame.
        mark: Differs from that of its next wait.
        group: In which it waits, where that is known.
    """

    thread: int
    frame: FrameType
    mark: tuple[object, ...]
    group: dist.ProcessGroup | None


def waiting_threads() -> list[Waiting]:
    """Return the threads that wait for other ranks in a call of this package."""
    return [found for found in _in_waits() if _is_ours(found.frame)]


def _in_waits() -> Iterator[Waiting]:
    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        file = frame.f_code.co_filename
        if thread == own or not file.startswith(_WAITS) or file == _WATCH:
            continue
        started = frame.f_locals.get("self")
        if isinstance(started, Started):
            mark: tuple[object, ...] = (thread, id(started.transport), started.tag, started.number)
            yield Waiting(thread, frame, mark, started.transport.groups[0])
        else:
            group = _group_in(frame)
            number = 0 if group is None else started_in(group)
            yield Waiting(thread, frame, (thread, id(frame), frame.f_lasti, number), group)


def bytes_before(found: Waiting) -> float:
    """Return how many bytes travel, at most, before a wait ends whose collective every rank has started.

    Infinite where that is not known, and where messages have tags: those of all ranks meet whatever comes between.
    """
    started = found.frame.f_locals.get("self")
    if isinstance(started, Started):
        return math.inf if started.has_tag else sum(one.nbytes for one in list(started.transport.in_flight))
    if found.frame.f_code.co_name not in _COLLECTIVES - {"_swap", "wait_for_work"}:
        return math.inf
    tensors = [one for one in tree_leaves(dict(found.frame.f_locals)) if isinstance(one, torch.Tensor)]
    return sum(one.nbytes if one.device.type == "cpu" else math.inf for one in tensors)


def place_here(overdue: Collection[tuple[object, ...]] = ()) -> Place:
    """Return where this process is; ``overdue``: marks of waits that have lasted longer than any transfer does."""
    frames = sys._current_frames()
    in_backward = any(frame.f_code is backward_code for start in frames.values() for frame in _outwards(start))
    del frames
    groups = groups_of_process()
    talking = [one for one in transports() if _is_alive(one, groups)]
    told: dict[int, Told] = {}
    for tree in (trees := _all_of(_TREES)):
        one = tree.tell(in_backward=in_backward)
        if one is not None and _is_alive(one.transport, groups):
            told[id(tree)] = one
    lanes = {
        thread.ident: thread.name for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)
    }
    lanes[threading.main_thread().ident] = MAIN_LANE
    waits = [(found.mark, _wait_of(found, trees, told, lanes.get(found.thread, MAIN_LANE))) for found in _in_waits()]
    return Place(
        waits=tuple(replace(wait, is_overdue=mark in overdue) for mark, wait in waits),
        counted={name: started_in(group) for name, group in groups.items()},
        ordered={one.groups[0].group_name: one.order.count for one in talking},
        recent={one.groups[0].group_name: [str(tag) for tag in one.order.recent.copy()] for one in talking},
        started_of_tag={one.groups[0].group_name: dict(one.begun) for one in talking if one.begun},
        trees={one.name: one.tree for one in told.values()},
        text=_doing(told),
    )


def _is_alive(transport: Transport, groups: Mapping[str, dist.ProcessGroup]) -> bool:
    """Say whether the groups of ``transport`` are: those of a world that was destroyed have the same names."""
    return any(groups.get(group.group_name) is group for group in transport.groups[:1])


def _doing(told: Mapping[int, Told]) -> str:
    main = threading.main_thread().ident or 0
    frame = sys._current_frames().get(main)
    # What is under way says more than what has ended, and that more than what never began.
    trees = sorted(
        (one.tree for one in told.values()), key=lambda tree: (tree.is_inside, tree.forwards + tree.backwards)
    )
    text = trees[-1].text if trees else "has nothing annotated that has run"
    # A triple before Python 3.12.
    handled = sys._current_exceptions().get(main)
    error = handled[1] if isinstance(handled, tuple) else handled
    if isinstance(error, BaseException):
        text = f"{text}; handles {described(error)}"
    here = _users_place(frame)
    return f"{text}; now at {here}" if here else text


def _wait_of(found: Waiting, trees: list[Any], told: Mapping[int, Told], lane: str) -> Wait:
    frame = found.frame
    here = _users_place(frame)
    is_call = any(
        each.f_code.co_name in _CALLS and each.f_code.co_filename.startswith(_OURS) for each in _outwards(frame)
    )
    started = frame.f_locals.get("self")
    if isinstance(started, Started):
        return _wait_for_started(started, trees, told, lane, here, is_call=is_call)
    name = frame.f_code.co_name
    tree = _tree_around(frame, trees, told)
    outer = "a communication hook" if tree else _call_around(frame) or f"torch.distributed.{name}"
    group = _group_in(frame)
    if group is None or name not in _COLLECTIVES:
        return Wait(lane, f"the other ranks in {outer}", here, "", (), COUNTED, 0, is_call=is_call)
    # A swap is two messages, of which the first is in the place of a collective.
    number = started_in(group) - (name == "_swap")
    return Wait(
        lane,
        f"the other ranks in {outer}",
        here,
        group.group_name,
        tuple(dist.get_process_group_ranks(group)),
        COUNTED,
        number,
        kind=name,
        sequence=number,
        tree=tree,
        groups=(group.group_name,),
        is_call=is_call,
    )


def _wait_for_started(
    started: Started, trees: list[Any], told: Mapping[int, Told], lane: str, here: str, *, is_call: bool
) -> Wait:
    transport = started.transport
    group = transport.groups[0]
    text, own = _name_of(started, trees)
    tree = told[id(own)].name if id(own) in told else ""
    others = told[id(own)].groups if id(own) in told else ()
    # Of those that were started since, the group has counted as many as the transport has, or more.
    sequence = 0 if started.has_tag else started_in(group) - (transport.order.count - started.number)
    return Wait(
        lane,
        text,
        here,
        group.group_name,
        tuple(dist.get_process_group_ranks(group)),
        started.tag if started.has_tag else ORDERED,
        started.number,
        kind=str(started.tag),
        sequence=sequence,
        tree=tree,
        groups=tuple(dict.fromkeys([*(each.group_name for each in transport.groups), *others])),
        is_call=is_call,
    )


def name_of(started: Started) -> str:
    """Return what ``started`` is, for messages."""
    return _name_of(started, _all_of(_TREES))[0]


def _name_of(started: Started, trees: list[Any]) -> tuple[str, object]:
    for one in trees:
        name = one.name_of(started)
        if name is not None:
            return name, one
    return f"an exchange of {started.transport.world_size} ranks", None


def _tree_around(frame: FrameType, trees: list[Any], told: Mapping[int, Told]) -> str:
    """Return the name of the annotation for which a thread waits in what users put in place of a transport."""
    is_hook = False
    for each in _outwards(frame):
        is_hook |= each.f_code.co_filename.startswith(_CALL_HOOKS)
        if not is_hook:
            continue
        runner = each.f_locals.get("self") if each.f_code.co_filename.startswith(_OURS) else None
        if runner is not None:
            for one in trees:
                if id(one) in told and one.is_run_by(runner):
                    return told[id(one)].name
    return ""


def _group_in(frame: FrameType) -> dist.ProcessGroup | None:
    """Return the group that a function of torch.distributed, or of ``Ranks``, was called for."""
    for each, _ in zip(_outwards(frame), range(4)):
        values = each.f_locals
        group = values.get("group", getattr(values.get("self"), "group", None))
        if isinstance(group, dist.ProcessGroup):
            return group
        if "group" in values and group is None:
            return dist.group.WORLD
    return None


def _call_around(frame: FrameType) -> str:
    """Return the call of this package that a wait is part of, as users know it."""
    names = [each.f_code.co_name for each in _outwards(frame) if each.f_code.co_filename.startswith(_OURS)]
    if "adopt" in names:
        return "the comparison of plans before the first forward"
    return next((name for name in reversed(names) if not name.startswith("_") and name not in _AROUND), "")


def call_in(frame: FrameType | None) -> tuple[str, dist.ProcessGroup | None]:
    """Return the call that waits for other ranks in ``frame``, as users know it, and its group, where that is known."""
    if frame is None:
        return "a collective", None
    return _call_around(frame) or f"torch.distributed.{frame.f_code.co_name}", _group_in(frame)


def frame_of_wait(error: BaseException) -> FrameType | None:
    """Return the frame of torch.distributed that has raised ``error``; ``None``: something else has."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    frame = None if trace is None else trace.tb_frame
    return frame if frame is not None and frame.f_code.co_filename.startswith(_WAITS[1:]) else None


def _is_ours(frame: FrameType) -> bool:
    return any(each.f_code.co_filename.startswith(_OURS) for each in _outwards(frame))


def _users_place(frame: FrameType | None) -> str:
    """Return where in the user's code a thread is."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _all_of(found: "WeakSet[Any]") -> list[Any]:
    # Another thread may add one meanwhile.
    for _ in range(10):
        with contextlib.suppress(RuntimeError):
            return list(found)
    return []
