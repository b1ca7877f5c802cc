"""``convert`` makes safetensors of a checkpoint, a checkpoint of these, and one checkpoint of the folders of ranks."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from composable import load_checkpoint, save_checkpoint
from composable.__main__ import main
from composable.commands import convert
from composable.runs.storage import StoredFolder, _FsspecStorage, folder_at
from tests.commands.test_check import save
from tests.world import run_threads

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
