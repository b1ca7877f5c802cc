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
from composable.comm.waits import Meeting, Wait, Waiting, annotations_here, local_status, waiting_here


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
