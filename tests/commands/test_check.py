"""``check`` says whether a checkpoint is whole, and what is in it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard, save_checkpoint
from composable.__main__ import main
from tests.saving.test_hostile import reseal
from tests.world import run_threads


def save(run: str, *, per_rank: bool = False) -> None:
    """Save a model of 51 elements and its optimizer, on all ranks."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    if dist.is_initialized():
        fully_shard(model, policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    own = f"{run}/rank{dist.get_rank()}" if per_rank else run
    save_checkpoint(own, 7, model, optimizer, extra={"at": 7}, per_rank=per_rank)


def test_a_whole_checkpoint_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_threads(save, 2, str(tmp_path))
    assert main(["check", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.sub(r"(file bytes +).*", r"\1N", text) == (
        f"path              {tmp_path}/step-000007\n"
        "step              7\n"
        "ranks that wrote  2\n"
        "optimizers        AdamW with 1 param group\n"
        "extra             yes\n"
        "files             5\n"
        "file bytes        N\n"
        "not listed        none\n"
        "model             tensors 9\n"
        "                  elements 53\n"
        "                  bytes 216\n"
        "optimizer         tensors 18\n"
        "                  elements 90\n"
        "                  bytes 360\n"
        "problems          none\n"
        "is whole          yes\n"
    )
    (tmp_path / "step-000007" / "mine.txt").touch()
    assert main(["check", f"{tmp_path}/step-000007", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["is whole"], found["problems"], found["not listed"]) == (True, [], ["mine.txt"])
    assert found["model"] == {"tensors": 9, "elements": 53, "bytes": 216}


def test_everything_that_is_wrong_is_listed_and_is_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_threads(save, 2, str(tmp_path))
    folder = tmp_path / "step-000007"
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[-1] ^= 1
    (folder / "__0_0.distcp").write_bytes(content)
    (folder / "__1_0.distcp").unlink()
    (folder / "extra.pt").write_bytes(b"")
    assert main(["check", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text.endswith("is whole          no\n") and "tensors 9" in text
    assert f"problems          {folder}/__0_0.distcp has changed" in text
    assert f" {folder}/__1_0.distcp cannot be read: No such file or directory; rank 1 wrote it" in text
    assert f" {folder}/extra.pt has 0 bytes" in text
    assert main(["check", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["is whole"] is False and len(found["problems"]) == 3
    # Then what it describes is not read.
    (folder / "pieces.json").write_bytes(b"x")
    assert main(["check", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "tensors" not in text and f" {folder}/pieces.json has 1 bytes" in text


def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "step-000001").mkdir()
    for path, what in (
        ("nowhere", "error: no checkpoint in "),
        ("file", "error: no checkpoint in "),
        (".", "step-000001/checkpoint.json cannot be read: "),
        ("no-such-scheme://x", "cannot be reached: ValueError"),
    ):
        place = path if "://" in path else str(tmp_path / path)
        assert main(["check", place, "--json"]) == 1
        out, err = capsys.readouterr()
        assert out == "" and what in err and "; fix: " in err and err.count("\n") == 1


def test_a_url_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    save("memory://checked")
    assert main(["check", "memory://checked"]) == 0
    assert capsys.readouterr().out.startswith("path              memory://checked/step-000007-1-")
    assert main(["check", "memory://checked-not"]) == 1
    assert "error: no checkpoint in memory://checked-not; fix: " in capsys.readouterr().err


def test_the_folder_of_one_rank_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_threads(save, 2, str(tmp_path), per_rank=True)
    assert main(["check", str(tmp_path / "rank0")]) == 1
    assert "__1_0.distcp cannot be read: No such file or directory; rank 1 wrote it" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "rank1")]) == 1
    assert "of per_rank=True, copy the folders of all ranks together first" in capsys.readouterr().err
    shutil.copytree(tmp_path / "rank1", tmp_path / "rank0", dirs_exist_ok=True)
    assert main(["check", str(tmp_path / "rank0")]) == 0


def test_a_whole_checkpoint_is_one_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_threads(save, 2, str(tmp_path))
    folder = tmp_path / "step-000007"
    torch.save(print, folder / "extra.pt")
    reseal(folder)
    assert main(["check", str(tmp_path)]) == 1
    assert f"problems          {folder}/extra.pt cannot be read as data: it names " in capsys.readouterr().out


CLEAR = "\x1b[2J\r\n\udc80"


@pytest.mark.parametrize("as_json", [False, True])
def test_names_that_others_made_up_reach_no_terminal(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_threads(save, 2, str(tmp_path))
    folder = tmp_path / "step-000007"
    (folder / f"mine{CLEAR}").touch()
    path = folder / "checkpoint.json"
    body = json.loads(path.read_text())
    body["optimizers"][0]["kind"] = f"Adam{CLEAR}"
    path.write_text(json.dumps(body))
    assert main(["check", str(tmp_path), *["--json"] * as_json]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable() and out.count("x1b[2J") + out.count("u001b[2J") == 2
    body["files"][f"__9{CLEAR}"] = {"bytes": 1, "crc32": 1}
    path.write_text(json.dumps(body))
    assert main(["check", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "it lists '__9\\x1b[2J" in err and err.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"step": 7', '"step": -1', "its step is -1"),
        ('"step": 7', '"step": 7, "step": 9', "it has a key twice"),
        ('"extra.pt": {', '".metadata": {', "it has a key twice"),
    ],
)
def test_a_description_that_says_two_things_is_none(
    old: str, new: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_threads(save, 2, str(tmp_path))
    path = tmp_path / "step-000007" / "checkpoint.json"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    assert main(["check", str(tmp_path)]) == 1
    assert f"checkpoint.json cannot be read: {text}" in capsys.readouterr().err
