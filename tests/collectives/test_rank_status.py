"""Tests composable/comm/rank_status.py: what is on record of who waits, and what other ranks are told of it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import composable
from composable.comm.rank_status import Meeting, Waiting, local_status, waiting_threads


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
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@contextmanager
def thread_in(*made: tuple[dist.ProcessGroup | None, str]) -> Iterator[int]:
    """Let another thread enter such meetings, one inside of the other, and stay there; gives its number."""
    has_entered, may_leave = threading.Event(), threading.Event()

    def enter() -> None:
        with ExitStack() as stack:
            for group, what in made:
                stack.enter_context(Meeting(group, "kind", what))
            has_entered.set()
            may_leave.wait()

    thread = threading.Thread(target=enter)
    thread.start()
    has_entered.wait()
    try:
        yield thread.ident or 0
    finally:
        may_leave.set()
        thread.join()


def waits_of(thread: int) -> list[Waiting]:
    return [found for found in waiting_threads() if found.thread == thread]


def test_a_thread_waits_in_its_innermost_meeting_which_is_part_of_the_outermost_call(group: dist.ProcessGroup) -> None:
    with thread_in((None, "outer"), (None, "inner"), (group, "first"), (group, "second")) as thread:
        (found,) = waits_of(thread)
        assert isinstance(found.record, Meeting) and found.record.what == "second" and found.group is group
        assert found.around is not None and found.around.what == "outer" and found.is_ours
    assert not waits_of(thread)


def test_a_call_that_meets_nobody_is_no_wait(group: dist.ProcessGroup) -> None:
    with thread_in((None, "outer")) as thread:
        assert not waits_of(thread)


def test_what_an_exception_cuts_short_is_on_record_no_more(group: dist.ProcessGroup) -> None:
    is_asked, is_answered = threading.Event(), threading.Event()

    def enter_and_leave() -> None:
        Meeting(group, "kind").__enter__()  # and no further
        is_asked.set()
        is_answered.wait()

    thread = threading.Thread(target=enter_and_leave)
    thread.start()
    is_asked.wait()
    found = waits_of(thread.ident or 0)
    is_answered.set()
    thread.join()
    assert not found


def test_meetings_of_one_kind_are_told_apart(group: dist.ProcessGroup) -> None:
    marks = []
    for _ in range(3):
        with thread_in((group, "same")) as thread:
            marks += [found.mark for found in waits_of(thread)]
    assert len(marks) == len({mark[1:] for mark in marks}) == 3
