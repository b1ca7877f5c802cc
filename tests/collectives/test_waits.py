"""Tests composable/comm/waits.py: what is on record of who waits, and what other ranks are told of it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import composable
from composable.comm.waits import (
    ORDERED,
    AnnotationStatus,
    Meeting,
    Order,
    Started,
    Tree,
    Wait,
    Waiting,
    annotations_here,
    local_status,
    notice_transport,
    notice_tree,
    waiting_here,
)
from composable.ground.torch_private import started_in


def text_from(file: Path) -> str:
    """Return what a process is said to do while code of ``file`` runs."""
    found: dict[str, Any] = {}
    exec(compile("def work(call):\n    return call()", str(file), "exec"), found)
    return found["work"](local_status).text


@pytest.mark.parametrize("module", [torch, composable])
@pytest.mark.parametrize("ending", ["vision", "_other"])
def test_a_package_whose_name_begins_like_one_of_the_librarys_is_the_users(module: Any, ending: str) -> None:
    package = Path(module.__file__).resolve().parent
    other = package.with_name(f"{package.name}{ending}")
    assert text_from(other / "ops.py").endswith("; now at ops.py:2, in work")
    assert "ops.py" not in text_from(package / "ops.py")


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def seen_in(*made: tuple[dist.ProcessGroup | None, str]) -> tuple[Waiting, Wait] | None:
    """Return what another thread sees while this one is in such meetings, one inside of the other."""
    found: list[tuple[Waiting, Wait] | None] = []

    def look() -> None:
        seen = waiting_here()
        found.append(None if seen is None else (seen, seen.told(annotations_here())))

    with ExitStack() as stack:
        for group, what in made:
            stack.enter_context(Meeting(group, "kind", what))
        watch = threading.Thread(target=look)
        watch.start()
        watch.join()
    return found[0]


def test_a_thread_waits_in_its_innermost_meeting_which_is_part_of_the_outermost_call(group: dist.ProcessGroup) -> None:
    found = seen_in((None, "outer"), (None, "inner"), (group, "first"), (group, "second"))
    assert found is not None and found[0].is_ours
    wait = found[1]
    assert wait.text.startswith("the other ranks in outer, at test_waits.py:") and wait.is_call
    assert wait.groups == (group.group_name,)
    inner, alone = seen_in((group, "first"), (group, "second")), seen_in((group, "second"))
    assert inner is not None and inner[1].text.startswith("the other ranks in second, at ") and not inner[1].is_call
    assert alone is not None and alone[1].text == inner[1].text
    assert len({one[0].mark for _ in range(3) if (one := seen_in((group, "same")))}) == 3


def test_a_call_that_meets_nobody_and_what_an_exception_cuts_short_is_no_wait(group: dist.ProcessGroup) -> None:
    assert seen_in((None, "outer")) is None
    Meeting(group, "kind").__enter__()  # and no further
    assert seen_in() is None


class Transport:
    """Has started four collectives in the order of its group, the last two after the one that a thread waits for."""

    world_size, begun = 2, {}

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.groups, self.order, self.in_flight = (group,), Order(), dict[Started, None]()
        self.order.count = 4


class Annotation:
    """An annotation on two groups, of which a rank waits in the first one."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def tell(self, *, in_backward: bool) -> AnnotationStatus:
        return AnnotationStatus("name", Tree("Linear", 1, 0, is_inside=True), self.transport, ("another",))

    def name_of(self, started: Started) -> str | None:
        return "the all-gather of 'weight'" if started.transport is self.transport else None


def test_the_wait_for_a_collective_is_told_with_its_place_in_the_group_and_the_groups_of_its_annotation() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        before, transport = started_in(group), Transport(group)
        annotation, started = Annotation(transport), Started()
        notice_transport(transport)
        notice_tree(annotation)
        for _ in range(4):
            dist.all_reduce(torch.ones(()))
        started.transport, started.tag, started.number, started.waiter = transport, 6, 2, threading.get_ident()
        transport.in_flight[started] = None
        found = seen_in()
        transport.in_flight.clear()  # Not by garbage: the two hold each other.
        assert found is not None and found[0].is_ours
        wait = found[1]
        assert wait.text.startswith("the all-gather of 'weight', in forward 1 of Linear, at test_waits.py:")
        assert (wait.tag, wait.number, wait.kind, wait.tree) == (ORDERED, 2, "6", "name")
        assert wait.sequence == started_in(group) - 2 == before + 2
        assert wait.groups == (group.group_name, "another") and not wait.is_call
    finally:
        dist.destroy_process_group()


def test_a_wait_of_a_thread_beside_the_one_that_trains_is_not_watched(group: dist.ProcessGroup) -> None:
    notice_tree(Annotation(Transport(group)))  # From here on this is the thread that trains.
    is_inside, may_end = threading.Event(), threading.Event()

    def save() -> None:
        with Meeting(group, "kind"):
            is_inside.set()
            may_end.wait(60)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        assert is_inside.wait(60)
        assert waiting_here() is None
    finally:
        may_end.set()
        thread.join(60)
