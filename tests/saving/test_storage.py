"""Checkpoints in storages: at URLs, and in objects of the user's, whole or not there as on a disk."""

import importlib
import importlib.util
import json
import os
import pickle
import re
import threading
import urllib.request
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from composable import (
    ConfigError,
    Storage,
    UsageError,
    find_checkpoint,
    fully_shard,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
    save_safetensors,
)
from tests.saving.storages import Shelf
from tests.world import run_ranks, run_threads, told

NUMBERS = iter(range(10**6))


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def make_both(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(make_model(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(one, "full_tensor", one.clone)() for name, one in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture(params=["memory", "shelf"])
def place(request: pytest.FixtureRequest) -> Any:
    """A new place for a run, or for weights."""
    name = f"run-{next(NUMBERS)}"
    return f"memory://{name}" if request.param == "memory" else Shelf(name)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket of an S3 server on this machine. No thread of it, or of its client, is left."""
    server_of = pytest.importorskip("moto.server", reason="needs moto, of the extra `storage`")
    pytest.importorskip("s3fs", reason="needs s3fs, of the extra `storage`")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        options = {"key": "k", "secret": "s", "endpoint_url": endpoint}
        with mock.patch.dict(fsspec.config.conf, {"s3": options}):
            with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/models", method="PUT")) as answer:
                assert answer.status == 200
            yield "s3://models"
    finally:
        server.stop()
        (loop,), (thread,) = fsspec.asyn.loop, fsspec.asyn.iothread
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            fsspec.asyn.reset_lock()
            fsspec.asyn.loop[0] = fsspec.asyn.iothread[0] = None


def listed(place: Any) -> set[str]:
    """The names of all files of a run."""
    if isinstance(place, Shelf):
        return set(place.files)
    files, root = fsspec.core.url_to_fs(place)
    files.invalidate_cache()
    return {name.removeprefix(root).lstrip("/") for name in files.find(root)}


def folders(place: Any) -> list[str]:
    return sorted({name.partition("/")[0] for name in listed(place) if "/" in name})


# -- there and back


def save_and_load(place: Any) -> None:
    model, optimizer = make_both(1)
    for step in (1, 2, 3):
        train(model, optimizer)
        path = save_checkpoint(place, step, model, optimizer, extra={"at": step}, asynchronous=step == 2).wait()
    expected = values_of(model)
    url = "" if isinstance(place, Shelf) else f"{place}/"
    assert isinstance(path, str) and re.fullmatch(re.escape(url) + r"step-000003-1-[0-9a-f]{8}", path)
    other, fresh = make_both(2)
    found = load_checkpoint(place, other, fresh)
    assert (found.step, found.path, found.extra) == (3, path, {"at": 3}) and found == find_checkpoint(place)
    assert_same(values_of(other), expected)
    train(model, optimizer), train(other, fresh)
    assert_same(values_of(other), values_of(model))
    dist.barrier()
    assert [name[:11] for name in folders(place)] == ["step-000002", "step-000003"]
    if url:
        assert find_checkpoint(f"{place}/step-000002").step == 2 and find_checkpoint(path).step == 3
        assert load_checkpoint(f"{place}/step-000002/", other, fresh).step == 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_is_saved_and_loaded(world_size: int, place: Any) -> None:
    run_threads(save_and_load, world_size, place)


def test_a_run_in_a_bucket_is_saved_and_loaded(bucket: str) -> None:
    run_threads(save_and_load, 3, f"{bucket}/run-{next(NUMBERS)}")


def test_torch_alone_reads_what_is_at_a_url_and_a_copy_on_a_disk(tmp_path: Path) -> None:
    run, model = f"memory://run-{next(NUMBERS)}", make_model(1)
    path = str(save_checkpoint(run, 4, model, extra=1).wait())
    state = {"model": make_model(2).state_dict()}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(state, storage_reader=reader_of_torch(path))
    assert_same(state["model"], values_of(model))
    # To a disk, and from there to another run.
    fsspec.filesystem("memory").get(path, str(tmp_path / "step-000004"), recursive=True)
    other = make_model(3)
    assert load_checkpoint(tmp_path, other).step == 4
    assert_same(values_of(other), values_of(model))
    again = f"memory://run-{next(NUMBERS)}"
    fsspec.filesystem("memory").put(str(tmp_path / "step-000004"), f"{again}/step-000004", recursive=True)
    assert load_checkpoint(again, make_model(4)).path == f"{again}/step-000004"
    save_checkpoint(again, 4, model)
    assert [name[:14] for name in folders(again)] == ["step-000004-1-"]


def test_a_url_of_a_file_is_the_local_path(tmp_path: Path) -> None:
    handle = save_checkpoint(f"file://{tmp_path}/run", 1, make_model())
    assert handle.wait() == tmp_path / "run" / "step-000001"
    assert load_checkpoint(f"file://{tmp_path}/run", make_model()).path == tmp_path / "run" / "step-000001"
    assert (tmp_path / "run" / "writer.lock").is_file()
    run_threads(write_weights, 1, f"file://localhost{tmp_path}/weights")
    assert (tmp_path / "weights" / "model.safetensors").is_file()


def write_weights(place: str) -> None:
    save_safetensors(fully_shard(make_model()), place)


# -- what is removed, and what is not


def replace_saves(place: Any) -> None:
    models = [make_model(seed) for seed in range(4)]
    for model in models[:3]:
        save_checkpoint(place, 7, model)
    (left,) = folders(place)
    assert left.startswith("step-000007-3-")
    loaded = make_model(9)
    load_checkpoint(place, loaded)
    assert_same(values_of(loaded), values_of(models[2]))
    for step in (8, 9, 10):
        save_checkpoint(place, step, models[3], keep=3)
    assert [name[5:11] for name in folders(place)] == ["000008", "000009", "000010"]
    with pytest.raises(ConfigError, match=r"holds checkpoints of later steps than 9: step-000010-1-"):
        save_checkpoint(place, 9, models[3])


def test_saves_of_one_step_replace_each_other_and_older_ones_go(place: Any) -> None:
    replace_saves(place)


def test_in_a_bucket_they_do(bucket: str) -> None:
    replace_saves(f"{bucket}/run-{next(NUMBERS)}")


def test_what_others_wrote_stays() -> None:
    shelf = Shelf(f"run-{next(NUMBERS)}")
    name = save_checkpoint(shelf, 1, make_model()).wait()
    mine = {f"{name}/notes.txt": b"the good one", "step-000002/weights.bin": b"mine", "step-000002.txt": b""}
    shelf.files.update(mine)
    for step in (2, 3, 4):
        save_checkpoint(shelf, step, make_model(), keep=1)
    assert mine.items() <= shelf.files.items() and len(folders(shelf)) == 3
    shelf.files["writer.lock"] = b"my own"
    before = dict(shelf.files)
    with pytest.raises(ConfigError, match=r"the Shelf/writer.lock is no file that save_checkpoint wrote"):
        save_checkpoint(shelf, 5, make_model())
    assert shelf.files == before


# -- two jobs


OTHER = b"process 7 on another.host 0123456789abcdef"


def test_a_job_whose_run_another_has_taken_over_is_told_before_it_commits() -> None:
    shelf = Shelf(f"run-{next(NUMBERS)}")
    save_checkpoint(shelf, 1, make_model())
    is_writing, may_end = threading.Event(), threading.Event()

    def held_back(self: Shelf, name: str, file: Path) -> None:
        is_writing.set()
        assert may_end.wait()
        self.files[name] = file.read_bytes()

    with mock.patch.object(Shelf, "write", held_back):
        handle = save_checkpoint(shelf, 2, make_model(), asynchronous=True)
        assert is_writing.wait()
        shelf.files["writer.lock"] = OTHER
        may_end.set()
        with pytest.raises(UsageError, match=r"another run writes to the Shelf") as caught:
            handle.wait()
    assert "there: process 7 on another.host" in str(caught.value) and len(folders(shelf)) == 1
    # And before it begins.
    with pytest.raises(UsageError, match="another run writes to the Shelf"):
        save_checkpoint(shelf, 2, make_model())
    assert shelf.files["writer.lock"] == OTHER and find_checkpoint(shelf).step == 1


def test_a_new_process_takes_a_run_over() -> None:
    shelf = Shelf(f"run-{next(NUMBERS)}")
    shelf.files["writer.lock"] = OTHER
    save_checkpoint(shelf, 1, make_model())
    assert shelf.files["writer.lock"].startswith(f"process {os.getpid()} on ".encode())
    del shelf.files["writer.lock"]
    save_checkpoint(shelf, 2, make_model())
    assert find_checkpoint(shelf).step == 2


# -- damage


def harm(files: dict[str, bytes], folder: str, kind: str) -> str:
    name = f"{folder}/__0_0.distcp"
    if kind == "missing":
        del files[name]
        return "is not there"
    if kind == "short":
        files[name] = files[name][:-3]
        return "were written"
    if kind == "changed":
        files[name] = bytes([files[name][0] ^ 1]) + files[name][1:]
        return "has changed"
    manifest = json.loads(files[f"{folder}/checkpoint.json"])
    files[f"{folder}/pieces.json"] = bomb = pickle.dumps(eval)
    manifest["files"]["pieces.json"] = {"bytes": len(bomb), "crc32": zlib.crc32(bomb)}
    files[f"{folder}/checkpoint.json"] = json.dumps(manifest).encode()
    return "does not describe a checkpoint"


def load_harmed(shelf: Shelf, kind: str) -> None:
    model, optimizer = make_both(1)
    folder = save_checkpoint(shelf, 1, model, optimizer, extra=1).wait()
    dist.barrier()
    expected = [""]
    if dist.get_rank() == 0:
        expected[0] = harm(shelf.files, str(folder), kind)
    dist.broadcast_object_list(expected)
    other, fresh = make_both(2)
    before = values_of(other)
    for said in told(lambda: load_checkpoint(shelf, other, fresh)):
        assert said.startswith("ConfigError: ") and f"{folder}" in said and expected[0] in said, said
    assert_same(values_of(other), before)


@pytest.mark.parametrize("kind", ["missing", "short", "changed", "made up"])
def test_damage_is_one_error_on_every_rank_and_nothing_is_loaded(kind: str) -> None:
    run_threads(load_harmed, 2, Shelf(f"run-{next(NUMBERS)}"), kind)


def test_small_values_are_read_together() -> None:
    shelf = Shelf(f"run-{next(NUMBERS)}")
    torch.manual_seed(0)
    # Three megabytes.
    model, other = (nn.ParameterList(torch.randn(15_000) for _ in range(50)) for _ in range(2))
    save_checkpoint(shelf, 1, model)
    with mock.patch.object(Shelf, "read", autospec=True, side_effect=Shelf.read) as read:
        load_checkpoint(shelf, other)
    assert_same(values_of(other), values_of(model))
    assert sum(call.args[1].endswith(".distcp") for call in read.call_args_list) < 10


# -- arguments and stores that refuse


def refuse(place: Any, error: str, *, is_told: bool = True) -> None:
    model = fully_shard(make_model())
    calls = [
        partial(save_checkpoint, place, 1, model),
        partial(load_checkpoint, place, model),
        partial(load_safetensors, model, place),
        partial(save_safetensors, model, place),
    ]
    # The first rank raises the cause of an error in writing weights.
    for call in calls if is_told else calls[:3]:
        for said in told(call):
            assert re.search(error, said), said


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("nosuch://bucket/run", r"ConfigError: nosuch://bucket/run cannot be reached: .*nosuch(.|\n)*fix: pass a path"),
        ("gs://bucket/run", r"ConfigError: gs://bucket/run cannot be reached: .*gcsfs(.|\n)*install the package"),
        (Path("s3://bucket/run"), r"ConfigError: \w+ is 's3:/bucket/run', which is no URL, and looks like one"),
        ("data:text/plain,abc", r"ConfigError: \w+ is 'data:text/plain,abc', which is no URL"),
        ("a b://x", r"ConfigError: \w+ is 'a b://x', which is no URL"),
        ("file:relative", r"ConfigError: \w+ is 'file:relative', which is no URL"),
        ("ftp://me:hidden@host/run", r"ConfigError: \w+ is a URL of ftp with a secret(?!(.|\n)*hidden)"),
        (
            "simplecache::ftp://me:hid@den@host",
            r"ConfigError: \w+ is a URL of simplecache with a secret(?!(.|\n)*den@)",
        ),
        (3, r"ConfigError: (folder|path) is 3\n"),
        (Storage, r"ConfigError: (folder|path) is the class Storage\n"),
    ],
)
def test_what_is_no_place_is_refused_on_every_rank(place: Any, error: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run_threads(refuse, 2, place, error)
    assert not list(tmp_path.iterdir())


def test_a_bucket_that_is_gone_is_an_error_on_every_rank(bucket: str) -> None:
    gone = f"{bucket}-gone/run"
    run_threads(refuse, 2, gone, rf"{gone}", is_told=False)


def reader_of_torch(url: str) -> Any:
    """Return torch's own reader of a URL, whose file torch 2.15 has renamed."""
    names = [f"torch.distributed.checkpoint.{name}" for name in ("fsspec_filesystem", "_fsspec_filesystem")]
    name = next(name for name in names if importlib.util.find_spec(name))
    return importlib.import_module(name).FsspecReader(url)


class Forbidden(Shelf):
    """A storage that may only be read."""

    def write(self, name: str, file: Path) -> None:
        raise PermissionError(f"AccessDenied: {name}")


def save_without_rights(name: str) -> None:
    model = fully_shard(make_model())
    save_checkpoint(Shelf(name), 1, model)
    place = Forbidden(name)
    for asynchronous in (False, True):
        for said in told(
            lambda asynchronous=asynchronous: save_checkpoint(place, 2, model, asynchronous=asynchronous).wait()
        ):
            assert re.match(r"UsageError: the Forbidden/step-000002-1-\w+ was not written to its end", said), said
            assert "PermissionError: AccessDenied: step-000002-1-" in said
    dist.barrier()
    assert find_checkpoint(place).step == 1 and len(folders(place)) == 1


def test_a_storage_that_refuses_is_an_error_on_every_rank_and_nothing_is_left() -> None:
    run_threads(save_without_rights, 2, f"run-{next(NUMBERS)}")


def save_to_own_memory(url: str) -> None:
    model = fully_shard(make_model())
    for said in told(lambda: save_checkpoint(url, 1, model)):
        assert re.match(r"ConfigError: memory://\S+ lacks files that other ranks wrote: __1_0.distcp", said), said
    assert not folders(url) or dist.get_rank() == 1


def test_a_storage_that_only_some_ranks_see_is_an_error() -> None:
    run_ranks(save_to_own_memory, 2, f"memory://run-{next(NUMBERS)}")


def mix_places(shelf: Shelf) -> None:
    model = fully_shard(make_model())
    is_first = dist.get_rank() == 0
    for said in told(lambda: save_checkpoint(shelf if is_first else "memory://other", 1, model)):
        assert "DesyncError: " in said and "folder='the Shelf'" in said, said
    save_checkpoint(shelf, 1, model)
    for said in told(lambda: load_checkpoint(shelf if is_first else "memory://other", model)):
        assert "ConfigError: path is 'memory://other', and a storage on the first rank" in said, said


def test_ranks_with_different_places_are_told() -> None:
    run_threads(mix_places, 2, Shelf(f"run-{next(NUMBERS)}"))


# -- weights for a hub


def exchange_weights(place: Any, *, max_shard_bytes: int) -> None:
    model = fully_shard(make_model(1))
    options = {"max_shard_bytes": max_shard_bytes}
    save_safetensors(model, place, **options)
    other = fully_shard(make_model(2))
    load_safetensors(other, place)
    assert_same(values_of(other), values_of(model))
    for said in told(lambda: save_safetensors(model, place, **options)):
        assert re.search("ConfigError: .* holds weights already: model", said), said
    if isinstance(place, str):
        for _ in range(2):
            save_safetensors(model, f"{place}/one.safetensors")
        other = fully_shard(make_model(2))
        load_safetensors(other, f"{place}/one.safetensors")
        assert_same(values_of(other), values_of(model))
        for said in told(lambda: load_safetensors(other, f"{place}/two.safetensors")):
            assert re.search(rf"ConfigError: {place}/two.safetensors cannot be read: .* is not there", said), said
        for said in told(lambda: load_checkpoint(f"{place}/one.safetensors", other)):
            assert f"no checkpoint in {place}/one.safetensors" in said and "to load_safetensors(" in said, said


@pytest.mark.parametrize("max_shard_bytes", [10**9, 40])
def test_weights_are_written_and_read(max_shard_bytes: int, place: Any) -> None:
    pytest.importorskip("safetensors")
    run_threads(exchange_weights, 2, place, max_shard_bytes=max_shard_bytes)


def test_weights_are_written_to_a_bucket_and_read(bucket: str) -> None:
    pytest.importorskip("safetensors")
    run_threads(exchange_weights, 2, f"{bucket}/run-{next(NUMBERS)}", max_shard_bytes=40)
