"""A save that is killed, or that fails, at each of its calls in turn: a whole checkpoint is left, and the next works.

In a storage a call is one of its five; on a disk, whatever changes a name: a file that is made, a folder that is made or
removed, a rename.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable import ComposableError, find_checkpoint, fully_shard, load_checkpoint, save_checkpoint
from tests.saving.storages import Fault, FaultyShelf, Killed
from tests.world import RankErrors, run_threads

# The events of Python's audit that change a name on the disk.
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
DISK: list[Fault] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if DISK and (event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))):
        DISK[-1].around(lambda: None, lambda: None)


sys.addaudithook(watch)


@contextmanager
def failing(place: Any, fault: Fault) -> Iterator[None]:
    """Let a call of a save to ``place`` fail."""
    try:
        if isinstance(place, Path):
            DISK.append(fault)
        else:
            FaultyShelf.fault = fault
        yield
    finally:
        DISK.clear()
        FaultyShelf.fault = None


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if torch.distributed.is_initialized():
        fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def save(place: Any, step: int, seed: int, *, asynchronous: bool = False) -> None:
    model, optimizer = make(seed)
    save_checkpoint(place, step, model, optimizer, extra=seed, asynchronous=asynchronous).wait()


def check(place: Any, seed_of: dict[int, int]) -> int:
    """Load the latest checkpoint, which must have the values of its step; return the step."""
    model, optimizer = make(99)
    found = load_checkpoint(place, model, optimizer)
    seed = found.extra
    assert seed == 100 or seed_of[found.step] == seed, (found, seed_of)
    expected, _ = make(seed)
    for value, other in zip(model.parameters(), expected.parameters(), strict=True):
        full = getattr(value, "full_tensor", value.clone)(), getattr(other, "full_tensor", other.clone)()
        assert torch.equal(*full)
    return found.step


def names_of(place: Any) -> list[str]:
    names = os.listdir(place) if isinstance(place, Path) else {name.partition("/")[0] for name in place.files}
    return sorted(name for name in names if name != "writer.lock")


def on_ranks(world_size: int, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if world_size > 1:
        return run_threads(call, world_size, *arguments, **options)[0]
    return call(*arguments, **options)


def fail_everywhere(
    new_place: Callable[[str], Any], world_size: int, step: int, how: str, error: type[BaseException], **options: Any
) -> int:
    """Let a save of ``step``, after those of steps 1 and 2, fail at each of its calls; return how many there are."""
    start = new_place(f"{step}-{how}-{error.__name__}")
    for earlier in (1, 2):
        on_ranks(world_size, save, start, earlier, earlier)
    for at in range(1, 1000):
        place = new_place(f"{step}-{how}-{error.__name__}-{at}")
        if isinstance(place, Path):
            shutil.copytree(start, place)
        else:
            place.files.update(start.files)
        fault = Fault(at, how, error)
        with failing(place, fault), suppress(Killed, ComposableError, OSError, RankErrors):
            on_ranks(world_size, save, place, step, 100, **options)
        found = on_ranks(world_size, check, place, {1: 1, 2: 2})
        assert found in (2, step), (found, at)
        # As if another process went on, with the next step.
        on_ranks(world_size, save, place, 4, 4)
        assert on_ranks(world_size, check, place, {4: 4}) == 4
        left = names_of(place)
        assert len(left) == 2 and [name[:11] for name in left] == [f"step-{found:06d}", "step-000004"], (at, left)
        if fault.count < at:
            return at - 1
    raise AssertionError("a save never ends")


KINDS = [(how, error) for error in (Killed, OSError) for how in ("before", "after", "cut")]


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "the same step"])
@pytest.mark.parametrize(("how", "error"), KINDS)
def test_a_save_to_a_storage_that_fails_at_any_call_loses_nothing(
    how: str, error: type[BaseException], step: int
) -> None:
    count = fail_everywhere(lambda name: FaultyShelf(f"kills-{name}"), 1, step, how, error)
    print("calls:", count)
    assert count >= 15


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "the same step"])
@pytest.mark.parametrize("error", [Killed, OSError])
def test_a_save_to_a_disk_that_fails_at_any_change_loses_nothing(
    error: type[BaseException], step: int, tmp_path: Path
) -> None:
    count = fail_everywhere(lambda name: tmp_path / name, 1, step, "before", error)
    print("changes:", count)
    assert count >= 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_of_two_ranks_that_fails_at_any_call_loses_nothing(asynchronous: bool) -> None:
    def new_place(name: str) -> FaultyShelf:
        return FaultyShelf(f"two-{asynchronous}-{name}")

    count = fail_everywhere(new_place, 2, 3, "cut", OSError, asynchronous=asynchronous)
    print("calls:", count)
    assert count >= 15


def test_what_a_kill_left_is_never_found_and_removed_by_the_next_save() -> None:
    shelf = FaultyShelf("leftovers")
    save(shelf, 1, 1)
    with failing(shelf, Fault(5, "after", Killed)), pytest.raises(Killed):
        save(shelf, 2, 2)
    assert len(names_of(shelf)) == 2 and find_checkpoint(shelf).step == 1
    save(shelf, 3, 3)
    assert [name[:11] for name in names_of(shelf)] == ["step-000001", "step-000003"]
