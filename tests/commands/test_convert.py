"""``convert`` makes safetensors of a checkpoint, a checkpoint of these, and one checkpoint of the folders of ranks."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from composable import ConfigError, find_checkpoint, fully_shard, load_checkpoint, save_checkpoint
from composable.__main__ import main
from composable.commands import convert
from composable.runs.storage import StoredFolder, _FsspecStorage, folder_at
from tests.commands.test_check import save
from tests.saving.test_hostile import reseal
from tests.world import run_threads, told

library = pytest.importorskip("safetensors.torch", reason="an extra")


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def loaded(run: Path | str) -> dict[str, torch.Tensor]:
    model = make()
    load_checkpoint(run, model)
    return model.state_dict()


def are_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("target", ["weights", "weights.safetensors", "memory://weights"])
def test_a_checkpoint_becomes_safetensors_and_these_a_checkpoint(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch for each value.
    monkeypatch.setattr(convert, "_BATCH_BYTES", 1)
    monkeypatch.chdir(tmp_path)
    run_threads(save, 2, "run")
    assert main(["convert", "run", target]) == 0
    assert capsys.readouterr().out == f"path              {target}\n"
    state = loaded("run")
    if "://" not in target:
        file = Path(target) if Path(target).is_file() else Path(target) / "model.safetensors"
        assert are_equal(library.load_file(file), state)
    back = "memory://back" if "://" in target else "back"
    assert main(["convert", target, back, "--step", "3", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["path"]
    assert "back/step-000003" in made
    assert are_equal(loaded(back), state)
    assert main(["check", back]) == 0
    assert sorted(os.listdir()) == sorted({"run"} | ({target, "back"} if "://" not in target else set()))


def test_the_names_of_tied_values_come_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    state = {name: value for name, value in model.state_dict().items() if name != "1.weight"}
    library.save_file(state, tmp_path / "w.safetensors", {"format": "pt", "1.weight": "0.weight"})
    assert main(["convert", str(tmp_path / "w.safetensors"), str(tmp_path / "run")]) == 0
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other[1].weight = other[0].weight
    load_checkpoint(tmp_path / "run", other)
    assert are_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("target", ["merged", "memory://merged"])
def test_the_folders_of_ranks_become_one(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_threads(save, 3, "parts", per_rank=True)
    run_threads(save, 3, "run")
    parts = [f"parts/rank{rank}" for rank in (2, 0, 1)]
    # A later save, that was not written to its end.
    Path("parts/rank1/step-000008").mkdir()
    assert main(["convert", *parts, target]) == 0
    assert "merged/step-000007" in capsys.readouterr().out
    assert are_equal(loaded(target), loaded("run"))
    assert main(["check", target]) == 0


def test_parts_that_are_no_whole_are_refused_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_threads(save, 3, "parts", per_rank=True)
    before = sorted(os.listdir())
    for sources, what in (
        (["parts/rank0", "parts/rank1"], "__2_0.distcp cannot be read: No such file or directory; rank 2 wrote it"),
        (["parts/rank1", "parts/rank2"], "of these folders 0 have checkpoint.json, not one"),
        (["parts/rank0", "parts/rank0"], "of these folders 2 have checkpoint.json, not one"),
        (["parts/rank0", "memory://x"], "of these folders 1 have checkpoint.json, not one"),
    ):
        assert main(["convert", *sources, "merged"]) == 1
        assert what in capsys.readouterr().err
        assert sorted(os.listdir()) == before
    Path("parts/rank1/step-000007/__1_0.distcp").write_bytes(b"")
    assert main(["convert", *(f"parts/rank{rank}" for rank in range(3)), "merged"]) == 1
    assert "__1_0.distcp has 0 bytes" in capsys.readouterr().err and sorted(os.listdir()) == before


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(str(tmp_path / "run"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "w.safetensors").touch()
    (tmp_path / "link").symlink_to("nowhere")
    save("memory://held")
    for target in ("full", "w.safetensors", "link", "memory://held"):
        place = target if "://" in target else str(tmp_path / target)
        assert main(["convert", str(tmp_path / "run"), place]) == 1
        assert f"error: {place} exists already; fix: pass the name of a new" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "empty")]) == 0
    assert os.listdir(tmp_path / "empty") == ["model.safetensors"]


def test_what_cannot_be_converted_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save("run")
    odd = nn.Linear(2, 2)
    odd.register_buffer("c", torch.zeros(2, dtype=torch.complex64))
    save_checkpoint("odd", 1, odd)
    Path("broken.safetensors").write_bytes(b"12345678")
    content = bytearray(Path("run/step-000007/__0_0.distcp").read_bytes())
    save("bad")
    content[-1] ^= 1
    Path("bad/step-000007/__0_0.distcp").write_bytes(content)
    before = sorted(os.listdir())
    for source, options, what in (
        ("odd", [], "values that safetensors cannot hold, by type or dtype: 'c'"),
        ("nowhere", [], "no checkpoint in "),
        ("bad", [], "bad/step-000007 is damaged: - "),
        ("broken.safetensors", [], "broken.safetensors cannot be read"),
        ("run", ["--step", "-1"], None),
    ):
        assert main(["convert", source, "new", *options]) == (0 if what is None else 1)
        if what is not None:
            assert what in capsys.readouterr().err
            assert sorted(os.listdir()) == before
    assert main(["convert", "new", "again", "--step", "-1"]) == 1
    assert "error: step is -1; fix: pass a number from 0" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["run", "w.safetensors", "parts"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_threads(save, 2, "parts", per_rank=True)
    save("run")
    library.save_file(make().state_dict(), "w.safetensors")
    before = sorted(os.listdir())
    full = OSError(28, "No space left on device")
    sources = ["parts/rank0", "parts/rank1"] if source == "parts" else [source]
    with mock.patch("os.fsync", side_effect=full):
        assert main(["convert", *sources, "new"]) == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err and err.count("\n") == 1
    assert sorted(os.listdir()) == before


def test_a_storage_that_fails_keeps_no_half_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save("memory://whole")
    library.save_file(make().state_dict(), tmp_path / "w.safetensors")
    run_threads(save, 2, str(tmp_path / "parts"), per_rank=True)
    parts = [str(tmp_path / "parts" / f"rank{rank}") for rank in (0, 1)]
    write = _FsspecStorage.write

    def write_and_fail(storage: _FsspecStorage, name: str, file: Path) -> None:
        write(storage, name, file)
        raise OSError(f"{name}: the store is down")

    for number, sources in enumerate([["memory://whole"], [str(tmp_path / "w.safetensors")], parts]):
        with mock.patch.object(_FsspecStorage, "write", write_and_fail):
            assert main(["convert", *sources, f"memory://half-{number}"]) == 1
        err = capsys.readouterr().err
        assert "the store is down" in err and err.count("\n") == 1
        left = folder_at("path", f"memory://half-{number}")
        assert isinstance(left, StoredFolder) and left.list() == {}


def test_what_another_process_puts_there_meanwhile_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save("run")

    def put(*_: object) -> list[str]:
        Path("new").mkdir()
        Path("new/mine").touch()
        return []

    monkeypatch.setattr(convert, "damage_of", put)
    assert main(["convert", "run", "new"]) == 1
    assert "new was not written: " in capsys.readouterr().err
    assert sorted(os.listdir()) == ["new", "run"] and os.listdir("new") == ["mine"]


# -- checkpoints of earlier versions


def make_old(folder: Path) -> None:
    """Make a checkpoint one of an earlier version, which had no ``pieces.json``."""
    (folder / "pieces.json").unlink()
    manifest = json.loads((folder / "checkpoint.json").read_text())
    del manifest["files"]["pieces.json"]
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def save_odd(run: str) -> dict[str, torch.Tensor]:
    """Save what has pieces of all kinds: uneven, of one rank, whole, empty, of no dims, and no tensors."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model.register_buffer("none", torch.zeros(0, 3))
    fully_shard(model, policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(run, 7, model, optimizer, extra={"at": 7})
    return whole(model, optimizer)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    values = dict(model.state_dict())
    for name, param in model.named_parameters():
        values |= {f"{name}.{key}": one for key, one in optimizer.state[param].items()}
    return {name: getattr(one, "full_tensor", one.clone)() for name, one in values.items()}


def load_after(run: str, command: list[str]) -> dict[str, torch.Tensor]:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model.register_buffer("none", torch.zeros(0, 3))
    fully_shard(model, policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters())
    for said in told(lambda: load_checkpoint(run, model, optimizer)):
        assert said.startswith(f"ConfigError: {run}/step-000007 was saved by an earlier version"), said
        assert f"`python -m composable {' '.join(command)}`" in said, said
    if dist.get_rank() == 0:
        assert main([command[0], command[1], f"{run}-new"]) == 0
    dist.barrier()
    found = load_checkpoint(f"{run}-new", model, optimizer)
    assert (found.step, found.extra, optimizer.param_groups[0]["lr"]) == (7, {"at": 7}, 0.25)
    return whole(model, optimizer)


def test_a_checkpoint_of_an_earlier_version_is_converted_by_the_line_in_the_error(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    expected = run_threads(save_odd, 3, run)[0]
    make_old(tmp_path / "run" / "step-000007")
    command = ["convert", f"{run}/step-000007", "NEW"]
    assert are_equal(run_threads(load_after, 2, run, command)[0], expected)
    assert main(["check", f"{run}-new"]) == 0


def test_checkpoints_of_earlier_versions_are_counted_and_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, make(), keep=3)
        make_old(tmp_path / f"step-{step:06d}")
    assert find_checkpoint(tmp_path).step == 3
    with pytest.raises(ConfigError, match="holds checkpoints of later steps than 2: step-000003"):
        save_checkpoint(tmp_path, 2, make())
    save_checkpoint(tmp_path, 3, make(), keep=2)
    assert load_checkpoint(tmp_path, make()).step == 3
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000003"]


def test_parts_and_buckets_of_an_earlier_version_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_threads(save, 2, "parts", per_rank=True)
    save("run")
    make_old(Path("parts/rank0/step-000007"))
    assert main(["convert", "parts/rank0", "parts/rank1", "memory://parts"]) == 0
    assert are_equal(loaded("memory://parts"), loaded("run"))
    make_old(Path("run/step-000007"))
    expected = loaded("memory://parts")
    fsspec.filesystem("memory").put("run/step-000007", "/old/step-000007", recursive=True)
    assert main(["convert", "memory://old", "new"]) == 0
    assert are_equal(loaded("new"), expected)


class Bomb:
    def __reduce__(self) -> Any:
        return eval, ("__import__('pathlib').Path('fuse').write_text('code was run')",)


def lies(found: Metadata) -> dict[str, Callable[[], object]]:
    """Ways in which a description of an earlier version may be wrong."""
    index = next(one for one in found.storage_data if one.fqn == "model.0.weight")
    place, entry = found.storage_data[index], found.state_dict_metadata["model.0.weight"]
    return {
        "code": lambda: found.planner_data.update(more=Bomb()),
        "no place": lambda: found.storage_data.pop(index),
        "another file": lambda: setattr(place, "relative_path", "../../secret"),
        "beyond its file": lambda: setattr(place, "length", 10**6),
        "a piece twice": lambda: entry.chunks.append(entry.chunks[0]),
        "no piece": entry.chunks.clear,
        "larger": lambda: setattr(entry, "size", torch.Size([6, 3])),
        "no path": lambda: found.planner_data.pop("model.0.weight"),
        "another path": lambda: found.planner_data.update({"model.0.weight": ("model", "0.bias")}),
        "transformed": lambda: setattr(place, "transform_descriptors", ["zstd"]),
    }


LIES = ["code", "no place", "another file", "beyond its file", "a piece twice", "no piece", "larger", "no path"]


@pytest.mark.parametrize("kind", [*LIES, "another path", "transformed", "a bomb", "no pickle"])
def test_what_others_made_up_as_of_an_earlier_version_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save("run")
    folder = Path("run/step-000007")
    make_old(folder)
    found = pickle.loads((folder / ".metadata").read_bytes())
    if kind in (ways := lies(found)):
        ways[kind]()
    content = {"a bomb": pickle.dumps(Bomb()), "no pickle": b"x"}.get(kind) or pickle.dumps(found)
    (folder / ".metadata").write_bytes(content)
    reseal(folder)
    assert main(["convert", "run", "new"]) == 1
    assert ".metadata does not describe a checkpoint: " in capsys.readouterr().err
    assert not Path("fuse").exists() and not Path("new").exists()
