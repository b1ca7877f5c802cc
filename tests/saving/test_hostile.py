"""Files that are damaged or hostile: no code of theirs runs, nothing outside is read or touched, all ranks say the same."""

import io
import json
import os
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from composable import (
    ConfigError,
    find_checkpoint,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
    save_safetensors,
)
from composable.saving.files import check_inside, read_metadata
from tests.world import run_threads, told

EXTRA = {"position": torch.arange(3), "at": (1, "x", 2.5), "names": ["a", {"b": None}]}


class Bomb:
    """Unpickled, it writes a file that says so."""

    def __init__(self, fuse: Path) -> None:
        self.fuse = fuse

    def __reduce__(self) -> Any:
        return Path.write_text, (self.fuse, "code was run")


class Quiet(Bomb):
    """The same through a class that has nothing to do with files."""

    def __reduce__(self) -> Any:
        return eval, (f"__import__('pathlib').Path({str(self.fuse)!r}).write_text('code was run')",)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def make_both(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(make_model(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def write_checkpoint(run: Path) -> Path:
    model, optimizer = make_both(1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return save_checkpoint(run, 1, model, optimizer, extra=EXTRA).wait()


def reseal(folder: Path, change: Callable[[Any], None] = lambda body: None) -> None:
    """Make ``checkpoint.json`` say of every file what it is now, as whoever wrote the files can."""
    path = folder / "checkpoint.json"
    body = json.loads(path.read_text())["checkpoint"]
    for name, saved in body["files"].items():
        content = (folder / name).read_bytes()
        saved |= {"bytes": len(content), "crc32": zlib.crc32(content)}
    change(body)
    canonical = json.dumps(body, sort_keys=True).encode()
    path.write_text(json.dumps({"crc32": zlib.crc32(canonical), "checkpoint": body}))


def on_first(call: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        call()
    dist.barrier()


# -- code


def load_bombs(root: Path) -> None:
    folder = write_checkpoint(root / "run")
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    model, optimizer = make_both(2)
    fuse = root / "fuse"
    harms: list[tuple[str, bytes]] = [("extra.pt", good["extra.pt"][:-7]), ("extra.pt", b"x")]
    for kind in (Bomb, Quiet):
        metadata = pickle.loads(good[".metadata"])
        metadata.planner_data["more"] = kind(fuse)
        packed = io.BytesIO()
        torch.save({"a": kind(fuse)}, packed)
        harms += [(".metadata", pickle.dumps(kind(fuse))), (".metadata", pickle.dumps(metadata))]
        harms += [("extra.pt", packed.getvalue())]
    for name, content in harms:
        path = folder / name
        on_first(lambda path=path, content=content: (path.write_bytes(content), reseal(folder)))
        for said in told(lambda: load_checkpoint(root / "run", model, optimizer)):
            assert said.startswith(f"ConfigError: {path} "), said
            assert "weights_only" not in said and "add_safe_globals" not in said, said
        assert not fuse.exists()
        if name == "extra.pt":
            for said in told(lambda: find_checkpoint(root / "run")):
                assert said.startswith(f"ConfigError: {path} cannot be read as data"), said
        on_first(lambda path=path: (path.write_bytes(good[path.name]), reseal(folder)))
    load_checkpoint(root / "run", model, optimizer)
    assert not fuse.exists()


def test_no_file_of_a_checkpoint_runs_code(tmp_path: Path) -> None:
    run_threads(load_bombs, 2, tmp_path)


def test_what_says_in_a_setting_that_it_is_code_is_not_run(tmp_path: Path) -> None:
    """Settings of optimizers lie in the files of tensors."""
    model = make_model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    folder = save_checkpoint(tmp_path, 1, model, optimizer).wait()
    metadata = FileSystemReader(folder).read_metadata()
    place = next(info for index, info in metadata.storage_data.items() if index.fqn.endswith("0.lr"))
    packed = io.BytesIO()
    torch.save(Quiet(tmp_path / "fuse"), packed)
    path = folder / place.relative_path
    place.offset, place.length = path.stat().st_size, len(packed.getvalue())
    path.write_bytes(path.read_bytes() + packed.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(folder)
    with pytest.raises(
        ConfigError, match=r"step-000001, optimizer.param_groups.0.lr cannot be read as data: it names"
    ) as caught:
        load_checkpoint(tmp_path, model, optimizer)
    assert "weights_only" not in str(caught.value) and not (tmp_path / "fuse").exists()


# -- names that lead out


def lead_out(root: Path) -> None:
    folder = write_checkpoint(root / "run")
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    data = next(name for name in sorted(good) if name.endswith(".distcp"))
    model, optimizer = make_both(2)
    on_first(lambda: (root / "outside").write_bytes(good[data]))

    def rename_in_manifest(name: str) -> None:
        reseal(folder, lambda body: body["files"].update({name: body["files"][data]}))

    def rename_in_metadata(name: str) -> None:
        metadata = FileSystemReader(folder).read_metadata()
        for info in metadata.storage_data.values():
            if info.relative_path == data:
                info.relative_path = name
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        reseal(folder)

    def link(name: str) -> None:
        content = (folder / name).read_bytes()
        (root / "outside").write_bytes(content)
        (folder / name).unlink()
        (folder / name).symlink_to(root / "outside")

    outside = str(root / "outside")
    harms: list[Callable[[], None]] = []
    for name in ("../../outside", outside, "sub/../../../outside", "..", "a\\b", ""):
        harms += [lambda name=name: rename_in_manifest(name), lambda name=name: rename_in_metadata(name)]  # type: ignore[misc]
    harms += [lambda name=name: link(name) for name in good]  # type: ignore[misc]
    for harm in harms:
        on_first(harm)
        for said in told(lambda: load_checkpoint(folder, model, optimizer)):
            assert said.startswith("ConfigError: ") and str(folder) in said, said
        dist.barrier()
        if dist.get_rank() == 0:
            for name, content in good.items():
                (folder / name).unlink(missing_ok=True)
                (folder / name).write_bytes(content)
        dist.barrier()
    load_checkpoint(folder, model, optimizer)
    # A link within the folder is a matter of the folder.
    on_first(lambda: ((folder / data).rename(folder / "moved"), (folder / data).symlink_to("moved")))
    load_checkpoint(folder, model, optimizer)


def test_names_and_links_stay_inside_the_folder(tmp_path: Path) -> None:
    run_threads(lead_out, 2, tmp_path)


def lead_out_of_an_index(root: Path) -> None:
    pytest.importorskip("safetensors")
    model = fully_shard(make_model(1))
    folder = root / "hub" / "snapshots" / "main"
    save_safetensors(model, folder, max_shard_bytes=60)
    index = folder / "model.safetensors.index.json"
    good = index.read_text()
    name = next(iter(json.loads(good)["weight_map"].values()))
    on_first(lambda: shutil.copy(folder / name, root / "outside.safetensors"))
    for other in ("../../../outside.safetensors", str(root / "outside.safetensors"), 3, None, [], "", ".", "a\0b"):

        def change(other: Any = other) -> None:
            content = json.loads(good)
            content["weight_map"]["0.bias"] = other
            index.write_text(json.dumps(content))

        on_first(change)
        for said in told(lambda: load_safetensors(model, folder)):
            assert said.startswith("ConfigError: ") and str(folder) in said, said
    for content in ("[]", "{", "3", '{"weight_map": []}', '{"weight_map": 3}', "[" * 100_000):
        on_first(lambda content=content: index.write_text(content))
        for said in told(lambda: load_safetensors(model, folder)):
            assert said.startswith("ConfigError: ") and str(index) in said, said
    on_first(lambda: index.write_text(good))
    load_safetensors(model, folder)
    # As the cache of a hub has it: a link to a file beside the snapshots. Anywhere else it leads out.
    blobs = root / "hub" / "blobs"
    on_first(
        lambda: (blobs.mkdir(), (folder / name).rename(blobs / "1a2b"), (folder / name).symlink_to(blobs / "1a2b"))
    )
    load_safetensors(model, folder)
    on_first(lambda: ((folder / name).unlink(), (folder / name).symlink_to(root / "outside.safetensors")))
    for said in told(lambda: load_safetensors(model, folder)):
        assert said.startswith(f"ConfigError: {folder / name} is a link out of its folder"), said


def test_names_in_an_index_stay_inside_the_folder(tmp_path: Path) -> None:
    run_threads(lead_out_of_an_index, 2, tmp_path)


@pytest.mark.parametrize("nested", ["", "text_encoder", "a/b"])
def test_a_hub_cache_is_known_from_any_folder_in_a_snapshot(
    nested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub" / "snapshots" / "1a2b" / nested
    (tmp_path / "hub" / "blobs").mkdir(parents=True)
    folder.mkdir(parents=True)
    blob, outside = tmp_path / "hub" / "blobs" / "3c4d", tmp_path / "hub" / "other"
    for path in (blob, outside):
        path.write_bytes(b"")
    (folder / "good").symlink_to(os.path.relpath(blob, folder))
    (folder / "bad").symlink_to(os.path.relpath(outside, folder))
    monkeypatch.chdir(folder)
    for root in (folder, Path()):
        check_inside(root, root / "good")
        with pytest.raises(ConfigError, match="bad is a link out of its folder"):
            check_inside(root, root / "bad")


# -- descriptions


WEIGHT = "model.weight"


def entry_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata[WEIGHT]


def place_of(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == WEIGHT)


# What is done to a description, which it may replace, and why it is refused then.
REFUSALS: list[tuple[Callable[[Any], object], str]] = [
    (lambda it: {}, "'dict' object has no attribute"),
    (lambda it: b"Pnobody\n.", "it names objects outside of it"),
    (lambda it: it.planner_data.update(more=nn.Linear), "it names torch.nn.modules.linear.Linear"),
    (lambda it: it.planner_data.update(more=("model", "more")), "its values and their places have different names"),
    (lambda it: setattr(it, "planner_data", []), "'list' object has no attribute"),
    (lambda it: it.planner_data.update({WEIGHT: ("optimizer", "param_groups", 10**12)}), "'model.weight' has no place"),
    (lambda it: setattr(entry_of(it), "properties", None), "'NoneType' object has no attribute"),
    (lambda it: setattr(entry_of(it).properties, "dtype", "float32"), "'str' object has no attribute"),
    (lambda it: setattr(entry_of(it), "size", torch.Size([2**57])), "'model.weight' is larger than the files"),
    (lambda it: setattr(entry_of(it), "size", torch.Size([2000, 3])), "'model.weight' is larger than the files"),
    (lambda it: setattr(place_of(it), "relative_path", 3), "which is no file of the checkpoint"),
    (lambda it: setattr(place_of(it), "relative_path", ".metadata"), "which is no file of the checkpoint"),
]


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_a_description_that_cannot_be_is_refused(number: int, tmp_path: Path) -> None:
    change, reason = REFUSALS[number]
    model = nn.Linear(3, 2)
    folder = save_checkpoint(tmp_path, 1, model, torch.optim.SGD(model.parameters())).wait()
    path, file_bytes = folder / ".metadata", {"__0_0.distcp": (folder / "__0_0.distcp").stat().st_size}
    assert read_metadata(path, file_bytes).planner_data[WEIGHT] == ("model", "weight")
    metadata: Any = FileSystemReader(folder).read_metadata()
    replaced = change(metadata)
    if not isinstance(replaced, bytes):
        replaced = pickle.dumps(metadata if replaced is None else replaced)
    path.write_bytes(replaced)
    with pytest.raises(ConfigError, match=rf"\.metadata does not describe a checkpoint: .*{re.escape(reason)}.*\n"):
        read_metadata(path, file_bytes)


# -- at random


def flipped(draw: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    how = draw.randrange(5)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(data)) if data else 0
        if how == 0 and data:
            data[at] ^= 1 << draw.randrange(8)
        elif how == 1 and data:
            data[at] = draw.randrange(256)
        elif how == 2:
            data[at:at] = draw.randbytes(draw.randint(1, 9))
        elif how == 3:
            del data[at : at + draw.randint(1, 9)]
        else:
            other = draw.randrange(len(data)) if data else 0
            data[at : at + 8] = data[other : other + 8]
    return bytes(data[: draw.randrange(len(data))] if data and draw.random() < 0.1 else data)


def change_file(draw: random.Random, folder: Path, fuse: Path) -> None:
    """Damage one file of a checkpoint, and, as often as not, let ``checkpoint.json`` say that it is right."""
    names = [
        ".metadata",
        ".metadata",
        ".metadata",
        "extra.pt",
        "checkpoint.json",
        *(one.name for one in folder.glob("*.distcp")),
    ]
    path = folder / draw.choice(sorted(names))
    if draw.random() < 0.2:
        path.write_bytes(pickle.dumps(draw.choice([Bomb, Quiet])(fuse)))
    elif path.name == "extra.pt":
        torch.save({**EXTRA, "at": draw.choice([None, 2**70, "../outside", Bomb(fuse)])}, path)
    else:
        path.write_bytes(flipped(draw, path.read_bytes()))
    if draw.random() < 0.7 and path.suffix != ".distcp" and path.name != "checkpoint.json":
        reseal(folder)


def load_what_was_changed(root: Path, seeds: range) -> None:
    rank = dist.get_rank()
    folder = write_checkpoint(root / "run")
    canary = root / "outside"
    on_first(lambda: (shutil.copytree(folder, root / "good"), canary.write_text("outside")))
    source, _ = make_both(3)
    load_checkpoint(folder, source)
    expected = full_state_dict(source)
    outcomes = {"loaded": 0, "refused": 0}
    for seed in seeds:
        draw = random.Random(seed)
        model, optimizer = make_both(2)
        if rank == 0:
            change_file(draw, folder, root / "fuse")
            before = {path.name: path.read_bytes() for path in folder.iterdir()}
        dist.barrier()
        try:
            load_checkpoint(root / "run", model, optimizer)
            said = ["no error"]
        # What is made up, and fits its checksum, may fail in any way, but on every rank.
        except Exception as error:
            said = [str(error)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, said)
        assert len({one == ["no error"] for one in everyone}) == 1, (seed, everyone)
        assert "weights_only" not in said[0], (seed, said)
        outcomes["loaded" if said[0] == "no error" else "refused"] += 1
        values = full_state_dict(model)
        if rank == 0:
            assert not (root / "fuse").exists(), seed
            assert canary.read_text() == "outside" and sorted(p.name for p in root.iterdir()) == [
                "good",
                "outside",
                "run",
            ]
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, seed
            same_data = all(
                path.read_bytes() == (root / "good" / path.name).read_bytes() for path in folder.glob("*.distcp")
            )
            if said[0] == "no error" and same_data:
                assert all(torch.equal(value, expected[name]) for name, value in values.items()), seed
            shutil.rmtree(folder)
            shutil.copytree(root / "good", folder)
        dist.barrier()
    assert outcomes["refused"] > len(seeds) // 2 and outcomes["loaded"], outcomes


@pytest.mark.parametrize("start", range(0, 100, 50))
def test_random_changes_are_refused_on_every_rank_or_do_no_harm(start: int, tmp_path: Path) -> None:
    run_threads(load_what_was_changed, 2, tmp_path, range(start, start + 50))
