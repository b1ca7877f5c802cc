"""Whose the folder of a run is: saves remove what they wrote and nothing else, and one run writes at a time."""

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from composable import (
    UsageError,
    full_state_dict,
    fully_shard,
    iter_full_params,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
    save_safetensors,
)
from tests.forked import Forked
from tests.world import run_ranks, run_threads, told


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("step-*"))


# -- later steps


def forget_to_resume(run: Path) -> None:
    model = fully_shard(make_model())
    for step in (10, 20, 30):
        save_checkpoint(run, step, model, keep=2)
    before = files_below(run)
    for asynchronous in (False, True):
        for said in told(partial(save_checkpoint, run, 1, model, asynchronous=asynchronous)):
            assert f"ConfigError: {run} holds checkpoints of later steps than 1: step-000020, step-000030" in said
            assert "load_checkpoint first" in said
    dist.barrier()
    assert files_below(run) == before
    # The latest again, and later ones, are no question.
    save_checkpoint(run, 30, model)
    save_checkpoint(run, 31, model)
    dist.barrier()
    assert steps_of(run) == [30, 31] and load_checkpoint(run, model).step == 31


def test_checkpoints_of_later_steps_are_an_error(tmp_path: Path) -> None:
    run_threads(forget_to_resume, 2, tmp_path)


# -- what others wrote


def take_the_name(run: Path) -> None:
    model = fully_shard(make_model())
    save_checkpoint(run, 1, model)
    if dist.get_rank() == 0:
        (run / "step-000002").mkdir()
        (run / "step-000002" / "weights.bin").write_bytes(b"mine")
        (run / "step-000001" / "notes.txt").write_text("the good one")
    dist.barrier()
    before = files_below(run)
    for said in told(lambda: save_checkpoint(run, 2, model)):
        assert f"ConfigError: {run}/step-000002 exists already, with files that save_checkpoint did not write" in said
    for said in told(lambda: save_checkpoint(run, 1, model)):
        assert f"ConfigError: {run}/step-000001 exists already, with files that save_checkpoint did not write" in said
    dist.barrier()
    assert files_below(run) == before
    # What is not ours is no later step either, nor the latest.
    save_checkpoint(run, 3, model, keep=1)
    assert load_checkpoint(run, model).step == 3
    dist.barrier()
    assert (run / "step-000001" / "notes.txt").read_text() == "the good one"
    assert (run / "step-000002" / "weights.bin").read_bytes() == b"mine"
    assert load_checkpoint(run / "step-000001", model).step == 1


def test_what_others_wrote_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    run_threads(take_the_name, 2, tmp_path)


# -- a full disk


@contextmanager
def full_disk(is_full: bool) -> Iterator[None]:
    """Let files of tensors be written to a device that is always full."""
    create_stream = FileSystem.create_stream

    def on_full_disk(self: FileSystem, path: Any, mode: str) -> Any:
        return create_stream(self, "/dev/full" if mode == "wb" and is_full else path, mode)

    with mock.patch.object(FileSystem, "create_stream", on_full_disk):
        yield


def fill_the_disk(run: Path) -> None:
    rank = dist.get_rank()
    model = fully_shard(make_model())
    save_checkpoint(run, 1, model)
    before = files_below(run)
    for asynchronous in (False, True):
        for full_on in (0, 1, 2):
            with full_disk(is_full=rank == full_on or full_on == 2):
                for said in told(
                    lambda asynchronous=asynchronous: save_checkpoint(run, 2, model, asynchronous=asynchronous).wait()
                ):
                    assert said.startswith(f"UsageError: {run}/.partial-000002-"), said
                    assert "earlier checkpoints are as they were" in said and "No space left on device" in said
            dist.barrier()
            assert files_below(run) == before, os.listdir(run)
    # The last bytes: those of the names.
    full = OSError(errno.ENOSPC, "No space left on device", "checkpoint.json")
    with mock.patch.object(os, "rename", side_effect=full):
        for said in told(lambda: save_checkpoint(run, 2, model)):
            assert said.startswith(f"UsageError: {run}/.partial-000002-"), said
    dist.barrier()
    assert files_below(run) == before
    save_checkpoint(run, 2, model)
    assert load_checkpoint(run, model).step == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run_ranks(fill_the_disk, 2, tmp_path)


def test_what_a_kill_left_makes_room_before_the_next_save(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, make_model())
    for kind in ("partial", "removed"):
        (tmp_path / f".{kind}-000002-01234567").mkdir()
        (tmp_path / f".{kind}-000002-01234567" / "__0_0.distcp").write_bytes(b"much")
    with (
        mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(UsageError, match="No space left on device"),
    ):
        save_checkpoint(tmp_path, 2, make_model())
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "writer.lock"]


# -- two runs


SAVE_AND_STAY = """
import sys, torch
from composable import save_checkpoint
model = torch.nn.Linear(2, 2)
save_checkpoint(sys.argv[1], 1, model)
print("saved", flush=True)
sys.stdin.read()
"""


def meet_another_run(run: Path) -> list[str]:
    model = fully_shard(make_model())
    return told(lambda: save_checkpoint(run, 5, model))


def test_a_second_run_is_told_on_every_rank_until_the_first_has_ended(tmp_path: Path) -> None:
    other = Forked(SAVE_AND_STAY, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == "saved\n"
        before = files_below(tmp_path)
        for said in run_ranks(meet_another_run, 2, tmp_path)[0]:
            assert f"UsageError: another run writes to {tmp_path}" in said
            assert f"process {other.pid} on " in said and "fix: save to another folder" in said
        assert files_below(tmp_path) == before
        # However it ends.
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert run_ranks(meet_another_run, 2, tmp_path)[0] == ["no error"] * 2
    finally:
        other.kill()
        other.wait()
        for stream in (other.stdin, other.stdout):
            assert stream is not None
            stream.close()


def assert_whole(run: Path, saved: dict[int, nn.Module]) -> None:
    for step, model in saved.items():
        loaded = make_model()
        load_checkpoint(run / f"step-{step:06d}", loaded)
        assert torch.equal(loaded[0].weight, model[0].weight)  # type: ignore[index]
    assert not list(run.glob(".*"))


@contextmanager
def held_back(call: Callable[[], object]) -> Iterator[None]:
    """Run ``call`` in each save when its values are written, and its names are not."""
    create_stream = FileSystem.create_stream

    @contextmanager
    def stream(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with create_stream(self, path, mode) as file:
            yield file
        if mode == "wb":
            call()

    with mock.patch.object(FileSystem, "create_stream", stream):
        yield


def test_saves_of_two_models_may_end_at_once(tmp_path: Path) -> None:
    first, second, both = make_model(1), make_model(2), threading.Barrier(2)
    with held_back(both.wait):
        handles = [
            save_checkpoint(tmp_path, step, model, extra=step, keep=3, asynchronous=True)
            for step, model in ((1, first), (2, second))
        ]
        assert [handle.wait().name for handle in handles] == ["step-000001", "step-000002"]
    assert_whole(tmp_path, {1: first, 2: second})


def test_a_save_that_is_about_to_end_is_left_alone_by_that_of_another_model(tmp_path: Path) -> None:
    is_at_end, may_end = threading.Event(), threading.Event()
    first, second = make_model(1), make_model(2)
    with held_back(lambda: (is_at_end.set(), may_end.wait())):
        handle = save_checkpoint(tmp_path, 1, first, extra=1, asynchronous=True)
        assert is_at_end.wait()
    try:
        save_checkpoint(tmp_path, 2, second)
    finally:
        may_end.set()
    assert handle.wait() == tmp_path / "step-000001"
    assert_whole(tmp_path, {1: first, 2: second})


def test_a_disk_without_locks_stops_no_save(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with mock.patch.object(fcntl, "lockf", refuse):
        save_checkpoint(tmp_path, 1, make_model())
    assert (tmp_path / "writer.lock").read_text().startswith(f"process {os.getpid()} on ")


# -- a lock that is no lock, or is gone


KINDS = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link": lambda path: path.symlink_to(path.parent.parent / "precious"),
    "a link to nothing": lambda path: path.symlink_to(path.parent.parent / "nothing"),
    "a link to a folder": lambda path: path.symlink_to(path.parent.parent),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path: (os.mkfifo(path.parent.parent / "pipe"), path.symlink_to("../pipe")),
    "a socket": lambda path: bind(path),
    "a hard link": lambda path: path.hardlink_to(path.parent.parent / "precious"),
    "another text": lambda path: path.write_text("process of mine\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 40),
}


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(path.parent, os.O_RDONLY)
        # A path from the folder, as that of a socket is short.
        one.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def meet_a_lock(run: Path) -> list[str]:
    return told(lambda: save_checkpoint(run, 5, fully_shard(make_model())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_late", [False, True], ids=["at the first save", "between saves"])
def test_a_lock_that_is_not_ours_is_refused_and_left_as_it_is(kind: str, is_late: bool, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    lock = run / "writer.lock"
    if is_late:
        save_checkpoint(run, 1, make_model())
        lock.unlink()
    KINDS[kind](lock)
    before, was = files_below(tmp_path), lock.lstat()
    for said in run_threads(meet_a_lock, 2, run)[0]:
        assert re.fullmatch(
            f"ConfigError: {lock} is no file that save_checkpoint wrote\n  at:  .*\n  fix: move it away, or .*", said
        ), said
    assert files_below(tmp_path) == before and not (tmp_path / "nothing").exists()
    assert os.path.samestat(was, lock.lstat()) and was.st_mtime_ns == lock.lstat().st_mtime_ns


@pytest.mark.parametrize("text", ["", "process 7 on another.host"])
def test_what_a_run_left_that_was_killed_is_taken(text: str, tmp_path: Path) -> None:
    (tmp_path / "writer.lock").write_text(text)
    save_checkpoint(tmp_path, 1, make_model())
    assert (tmp_path / "writer.lock").read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("is_whole_folder", [False, True])
def test_a_run_whose_lock_was_removed_locks_anew(is_whole_folder: bool, tmp_path: Path, caplog: Any) -> None:
    run = tmp_path / "run"
    save_checkpoint(run, 1, make_model())
    shutil.rmtree(run) if is_whole_folder else (run / "writer.lock").unlink()
    save_checkpoint(run, 2, make_model())
    assert f"{run}/writer.lock was removed while this run writes there: it is locked anew" in caplog.text
    assert steps_of(run) == ([2] if is_whole_folder else [1, 2])
    # Another process is told, as before; and so is this one if the other was first.
    other = Forked(SAVE_AND_STAY, run, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert f"another run writes to {run}" in other.communicate("")[1]


def test_a_run_whose_lock_was_removed_gives_way_to_the_next(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, make_model())
    (tmp_path / "writer.lock").unlink()
    with Forked(SAVE_AND_STAY, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == "saved\n"
        with pytest.raises(UsageError, match=f"another run writes to {tmp_path}"):
            save_checkpoint(tmp_path, 2, make_model())
        other.kill()


# -- the current folder


def test_a_save_in_the_background_goes_where_the_call_was_made(tmp_path: Path, monkeypatch: Any) -> None:
    """The run of another process, in the folder that is the current one by then, stays as it is."""
    mine, others = tmp_path / "mine", tmp_path / "others"
    for step in (1, 2):
        save_checkpoint(others / "run", step, make_model())
    before = files_below(others)
    mine.mkdir()
    monkeypatch.chdir(mine)
    is_at_end, may_end = threading.Event(), threading.Event()
    model = make_model(3)
    with held_back(lambda: (is_at_end.set(), may_end.wait())):
        handle = save_checkpoint("run", 7, model, extra=1, keep=1, asynchronous=True)
        assert is_at_end.wait()
        monkeypatch.chdir(others)
        may_end.set()
        assert handle.wait() == mine / "run" / "step-000007"
    assert files_below(others) == before
    assert_whole(mine / "run", {7: model})
    monkeypatch.chdir(mine)
    found = load_checkpoint("run", make_model())
    monkeypatch.chdir(others)
    assert found.path == mine / "run" / "step-000007" and found.path.is_dir()


def test_a_link_that_leads_elsewhere_later_takes_no_save_along(tmp_path: Path) -> None:
    for name in ("mine", "others"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("mine")
    held, may_end = threading.Event(), threading.Event()
    with held_back(lambda: (held.set(), may_end.wait())):
        handle = save_checkpoint(link / "run", 1, make_model(), extra=1, asynchronous=True)
        assert held.wait()
        link.unlink()
        link.symlink_to("others")
        may_end.set()
        handle.wait()
    assert not files_below(tmp_path / "others") and steps_of(tmp_path / "mine" / "run") == [1]


# -- arguments


def misuse(run: Path) -> None:
    model = fully_shard(make_model())
    optimizer = torch.optim.SGD(model.parameters())
    # Wrong on one rank, an error on all.
    wrong = dist.get_rank() == 1
    for said in told(lambda: save_checkpoint(run, 1, 3 if wrong else model)):  # type: ignore[arg-type]
        assert said.startswith("ConfigError: model is 3"), said
    for said in told(lambda: save_checkpoint(run, 1, model, 3 if wrong else None)):  # type: ignore[arg-type]
        assert said.startswith("ConfigError: optimizer is or holds 3"), said
    for said in told(lambda: full_state_dict(model, dst=7 if wrong else 0)):
        assert said.startswith("ConfigError: dst is 7"), said
    for said in told(lambda: iter_full_params(model, dtype=torch.int8 if wrong else None)):
        assert said.startswith("ConfigError: dtype is torch.int8"), said
    for said in told(lambda: save_safetensors(model, run, dtype="bf16" if wrong else None)):  # type: ignore[arg-type]
        assert said.startswith("ConfigError: dtype is 'bf16'"), said
    for said in told(lambda: load_safetensors(model, run, strict=True if wrong else "no")):  # type: ignore[arg-type]
        assert said.startswith("ConfigError: strict is 'no'"), said
    assert not run.exists()
    save_checkpoint(run, 1, model, iter([optimizer]))
    assert load_checkpoint(str(run), model, optimizer).step == 1


def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_threads(misuse, 2, tmp_path / "run")
