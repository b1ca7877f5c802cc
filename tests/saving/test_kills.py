"""A save that is killed, or that fails, at each of its calls in turn: a whole checkpoint is left, and the next works.

In a storage a call is one of its five; on a disk, whatever changes a name, reads a folder, or makes something last.
"""

import errno
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

from composable import ComposableError, find_checkpoint, fully_shard, load_checkpoint, save_checkpoint
from tests.saving.storages import Fault, FaultyShelf, Killed, Shelf
from tests.world import run_threads, told

# The events of Python's audit that change a name on the disk, or read a folder.
EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.scandir"}
DISK: list[Fault] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if DISK and (event in EVENTS or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))):
        DISK[-1].around(lambda: None, lambda: None)


sys.addaudithook(watch)


@contextmanager
def failing(place: Any, fault: Fault) -> Iterator[None]:
    """Let a call of a save to ``place`` fail."""
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(place, Path):
            # No event tells of it.
            sync = os.fsync
            patch.setattr(os, "fsync", lambda file: fault.around(lambda: sync(file), lambda: None))
            DISK.append(fault)
        else:
            patch.setattr(FaultyShelf, "fault", fault)
        try:
            yield
        finally:
            DISK.clear()


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if torch.distributed.is_initialized():
        fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def save(place: Any, step: int, seed: int, **options: Any) -> None:
    model, optimizer = make(seed)
    save_checkpoint(place, step, model, optimizer, extra=seed, **options).wait()


class Interrupted(BaseException):
    """As Ctrl-C is: the process goes on to do what it does at its end."""


def attempt(place: Any, step: int, asynchronous: bool) -> str:
    """Save with the seed 100; return what the caller of the save is told."""
    try:
        save(place, step, 100, keep=1, asynchronous=asynchronous)
    except ComposableError as error:
        return str(error)
    except (Killed, Interrupted):
        return "ended"
    return "saved"


def check(place: Any) -> int:
    """Load the latest checkpoint, which must have the values of its seed; return that."""
    model, optimizer = make(99)
    found = load_checkpoint(place, model, optimizer)
    expected, _ = make(found.extra)
    for value, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(value, other)
    return int(found.extra)


def names_of(place: Any) -> list[str]:
    """The beginnings of the names of folders, without random digits."""
    names = os.listdir(place) if isinstance(place, Path) else {name.partition("/")[0] for name in place.files}
    return sorted(name[:11] for name in names if name != "writer.lock")


class Way(NamedTuple):
    """How calls fail: the text of ``Fault.how``, the error, and whether all later calls fail too."""

    how: str
    error: type[BaseException]
    lasts: bool = False

    def __str__(self) -> str:
        return f"{self.how} {self.error.__name__}{' for ever' * self.lasts}"


ERRORS = (OSError, RuntimeError, Interrupted)
BEFORE = [
    *(Way("before", error, lasts=lasts) for error in ERRORS for lasts in (False, True)),
    Way("before", Killed, lasts=True),
]
WAYS = [
    *BEFORE,
    *(Way("after", error) for error in (RuntimeError, Interrupted)),
    Way("cut", OSError),
    *(Way(how, Killed, lasts=True) for how in ("after", "cut")),
]


def fail_everywhere(
    new_place: Callable[[str], Any],
    way: Way,
    step: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    asynchronous: bool = False,
) -> int:
    """Let a save of ``step``, after those of steps 1 and 2, fail at each call of ``rank``; return how many there are.

    Afterwards a checkpoint loads: that of the step if a rank was told that it is saved, the one before if all ranks
    were told that it is not, which then is as it was, with the one before it.
    """
    start = new_place("start")
    for earlier in (1, 2):
        save(start, earlier, earlier)
    for at in itertools.count(1):
        place = new_place(str(at))
        if isinstance(place, Path):
            shutil.copytree(start, place)
        else:
            place.files.update(start.files)
        fault = Fault(at, way.how, way.error, lasts=way.lasts, rank=rank)
        with failing(place, fault):
            if world_size == 1:
                said = [attempt(place, step, asynchronous)]
            else:
                said = run_threads(attempt, world_size, place, step, asynchronous)
        where, found = (way, at, said), check(place)
        failures = {text for text in said if text not in ("saved", "ended")}
        if "saved" in said:
            assert (found, failures) == (100, set()), where
        elif failures:
            assert found == 2 and {"step-000001", "step-000002"} <= {*names_of(place), *hidden_of(place)}, where
            # The last one is what simulated ranks say that wait for a rank which has ended.
            texts = ("earlier checkpoints are as they were", "cannot write to", "every rank that is")
            assert all(any(one in text for one in texts) for text in failures), where
        assert found in (2, 100), where
        # As if another process went on, with the next step.
        save(place, 4, 4)
        left = names_of(place)
        assert check(place) == 4 and left == [f"step-{2 if found == 2 else step:06d}", "step-000004"], (where, left)
        if fault.count < at:
            return at - 1
    raise AssertionError("a save never ends")


def hidden_of(place: Any) -> set[str]:
    """The names of checkpoints of the same step that wait to be put back."""
    names = os.listdir(place) if isinstance(place, Path) else []
    return {f"step-{name[10:16]}" for name in names if name.startswith(".replaced-")}


# A new step, and the same one.
@pytest.mark.parametrize(
    ("way", "step"), [*((way, 3) for way in WAYS), *((way, 2) for way in WAYS if way.lasts)], ids=str
)
def test_a_save_to_a_storage_that_fails_at_any_call_loses_nothing(way: Way, step: int) -> None:
    count = fail_everywhere(lambda name: FaultyShelf(f"kills-{way}-{step}-{name}"), way, step)
    print("calls:", count)
    assert count >= 22


@pytest.mark.parametrize(("way", "step"), [(BEFORE[0], 3), (BEFORE[1], 3), *((way, 2) for way in BEFORE)], ids=str)
def test_a_save_to_a_disk_that_fails_at_any_change_loses_nothing(way: Way, step: int, tmp_path: Path) -> None:
    count = fail_everywhere(tmp_path.joinpath, way, step)
    print("changes:", count)
    assert count >= 40


@pytest.mark.parametrize(("rank", "least"), [(0, 22), (1, 1)])
@pytest.mark.parametrize("way", [Way("cut", OSError), *(Way("before", one) for one in (RuntimeError, Interrupted))])
def test_a_save_of_two_ranks_that_fails_at_any_call_loses_nothing(way: Way, rank: int, least: int) -> None:
    options: dict[str, Any] = {"rank": rank, "world_size": 2, "asynchronous": way.how == "cut"}
    count = fail_everywhere(lambda name: FaultyShelf(f"two-{way}-{rank}-{name}"), way, 3, **options)
    print("calls:", count)
    assert count >= least


def load_and_tell(place: Any) -> list[str]:
    model, optimizer = make(99)
    return told(lambda: load_checkpoint(place, model, optimizer))


@pytest.mark.parametrize(("rank", "least"), [(0, 10), (1, 5)])
def test_an_error_of_a_storage_at_any_call_of_a_load_is_told_on_every_rank(rank: int, least: int) -> None:
    place = FaultyShelf(f"loads-{rank}")
    run_threads(save, 2, place, 1, 1)
    for at in itertools.count(1):
        fault = Fault(at, "before", RuntimeError, rank=rank)
        with failing(place, fault):
            said = run_threads(load_and_tell, 2, place)[0]
        if fault.count < at:
            break
        assert all(re.match(r"(Config|Usage)Error: ", one) and f"RuntimeError: call {at}," in one for one in said), said
    assert said == ["no error"] * 2 and at > least, at


@pytest.mark.parametrize("is_disk", [False, True], ids=["storage", "disk"])
def test_what_cannot_be_removed_after_a_save_is_a_warning(
    is_disk: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "run" if is_disk else FaultyShelf("stuck")
    save(place, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        # As NFS does for a folder with a file that is open, and as a client of a bucket does.
        error = OSError(errno.EBUSY, "Device or resource busy") if is_disk else RuntimeError("AccessDenied")
        patch.setattr(*((os, "rmdir") if is_disk else (Shelf, "remove")), mock.Mock(side_effect=error))
        for step in (2, 3):
            save(place, step, 100, keep=1)
            assert find_checkpoint(place).step == step and check(place) == 100
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert str(error) in caplog.text and "could not be removed" in caplog.text
    save(place, 4, 100, keep=1)
    assert names_of(place) == ["step-000004"]


@pytest.mark.parametrize("is_disk", [False, True], ids=["storage", "disk"])
def test_a_commit_whose_answer_is_lost_is_a_checkpoint(is_disk: bool, tmp_path: Path) -> None:
    place = tmp_path / "run" if is_disk else FaultyShelf("answers")
    save(place, 1, 1)
    owner, name = (os, "rename") if is_disk else (Shelf, "commit")
    commit = getattr(owner, name)

    def lose_the_answer(*args: Any) -> None:
        commit(*args)
        # Of a file that is committed, as the server of a disk or of a bucket may say.
        if any(str(one).endswith("checkpoint.json") for one in args):
            raise OSError(errno.EIO, "Input/output error")

    with mock.patch.object(owner, name, lose_the_answer):
        save(place, 2, 100, keep=1)
    assert check(place) == 100 and names_of(place) == ["step-000002"]


def test_what_a_kill_left_is_never_found_and_removed_by_the_next_save() -> None:
    shelf = FaultyShelf("leftovers")
    save(shelf, 1, 1)
    with failing(shelf, Fault(5, "after", Killed, lasts=True)), pytest.raises(Killed):
        save(shelf, 2, 2)
    assert len(names_of(shelf)) == 2 and find_checkpoint(shelf).step == 1
    save(shelf, 3, 3)
    assert names_of(shelf) == ["step-000001", "step-000003"]
