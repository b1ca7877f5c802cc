"""Tests composable/comm/rank_status.py: what is on record of who waits, and what other ranks are told of it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import composable
from composable.comm.rank_status import Meeting, Waiting, local_status, waiting_here


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


def seen_in(*made: tuple[dist.ProcessGroup | None, str]) -> Waiting | None:
    """Return what another thread sees while this one is in such meetings, one inside of the other."""
    found: list[Waiting | None] = []
    with ExitStack() as stack:
        for group, what in made:
            stack.enter_context(Meeting(group, "kind", what))
        watch = threading.Thread(target=lambda: found.append(waiting_here()))
        watch.start()
        watch.join()
    return found[0]


def test_a_thread_waits_in_its_innermost_meeting_which_is_part_of_the_outermost_call(group: dist.ProcessGroup) -> None:
    found = seen_in((None, "outer"), (None, "inner"), (group, "first"), (group, "second"))
    assert found is not None and found.around is not None and found.around.what == "outer" and found.is_ours
    assert isinstance(found.record, Meeting) and found.record.what == "second" and found.group is group
    assert len({one.mark for _ in range(3) if (one := seen_in((group, "same")))}) == 3


def test_a_call_that_meets_nobody_and_what_an_exception_cuts_short_is_no_wait(group: dist.ProcessGroup) -> None:
    assert seen_in((None, "outer")) is None
    Meeting(group, "kind").__enter__()  # and no further
    assert seen_in() is None
