"""Checkpoints in a folder of each rank's own, for hosts that share no disk and for trainers that merge folders."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import find_checkpoint, fully_shard, load_checkpoint, save_checkpoint
from tests.saving.storages import Killed
from tests.world import RankErrors, on_ranks, run_threads, told


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 6)), policy={nn.Linear})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def save(root: Path, *, ranks_per_host: int = 1, asynchronous: bool = False) -> dict[str, torch.Tensor]:
    own = root / f"host-{dist.get_rank() // ranks_per_host}"
    model, optimizer = make(1)
    train(model, optimizer)
    path = save_checkpoint(own, 7, model, optimizer, extra={"at": 7}, per_rank=True, asynchronous=asynchronous).wait()
    assert path == own / "step-000007"
    dist.barrier()
    for said in told(lambda: save_checkpoint(own, 7, model, optimizer, per_rank=True)):
        assert "step-000007 exists already" in said and "pass a new folder for each save" in said, said
    return train(model, optimizer)


def load(merged: Path) -> dict[str, torch.Tensor]:
    model, optimizer = make(2)
    found = load_checkpoint(merged, model, optimizer)
    assert (found.step, found.extra, found.path) == (7, {"at": 7}, merged / "step-000007")
    return train(model, optimizer)


def merge(root: Path) -> Path:
    for host in sorted(root.glob("host-*"), reverse=True):
        shutil.copytree(host, root / "merged", dirs_exist_ok=True)
    return root / "merged"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_the_folders_of_all_ranks_are_the_checkpoint(asynchronous: bool, ranks_per_host: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"ranks_per_host": ranks_per_host, "asynchronous": asynchronous}
    expected = run_threads(save_with, 3, tmp_path, options)[0]
    names = [name for host in tmp_path.glob("host-*") for name in os.listdir(host / "step-000007")]
    assert len(names) == len(set(names)) == 7, names
    assert not list(tmp_path.rglob("writer.lock"))
    found = run_threads(load, 2, merge(tmp_path))[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def save_with(root: Path, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    return save(root, **options)


def load_what_lacks_a_rank(merged: Path) -> None:
    model, optimizer = make(2)
    for said in told(lambda: load_checkpoint(merged, model, optimizer)):
        assert (
            "step-000007 is damaged" in said
            and "__2_0.distcp cannot be read: No such file or directory; rank 2 wrote it" in said
        ), said


def load_a_part(part: Path) -> None:
    model, optimizer = make(2)
    for said in told(lambda: load_checkpoint(part, model, optimizer)):
        assert "checkpoint.json cannot be read" in said and "copy the folders of all ranks together" in said, said


def test_the_folder_of_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    run_threads(save_with, 3, tmp_path, {})
    run_threads(load_a_part, 2, tmp_path / "host-1")
    shutil.rmtree(tmp_path / "host-2")
    run_threads(load_what_lacks_a_rank, 2, merge(tmp_path))


@on_ranks(2)
def test_nothing_is_removed_from_the_folders_of_ranks(tmp_path: Path) -> None:
    own, (model, _) = tmp_path / f"host-{dist.get_rank()}", make(1)
    for step in range(4):
        save_checkpoint(own, step, model, keep=1, per_rank=True)
    assert sorted(os.listdir(own)) == [f"step-00000{step}" for step in range(4)]


def fail(root: Path) -> None:
    own = root / f"host-{dist.get_rank()}"
    model, optimizer = make(1)
    for said in told(lambda: save_checkpoint(own, 7, model, optimizer, extra=1, per_rank=True)):
        assert "step-000007 was not written to its end" in said and "No space left" in said, said
    assert not os.listdir(own)
    for said in told(lambda: save_checkpoint("memory://run", 7, model, optimizer, per_rank=True)):
        assert said.startswith("ConfigError: per_rank is True, and folder is memory://run"), said


def test_a_save_that_fails_leaves_nothing_on_any_rank(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    # Not in the ranks: threads that patch at once leave the patch behind.
    with mock.patch.object(os, "rename", side_effect=full):
        run_threads(fail, 2, tmp_path)


def test_a_kill_before_the_manifest_leaves_no_checkpoint(tmp_path: Path) -> None:
    with mock.patch.object(os, "rename", side_effect=Killed()), pytest.raises(RankErrors):
        run_threads(save_with, 2, tmp_path, {})
    merged = merge(tmp_path)
    # The other rank was told, and has removed its part.
    assert sorted(os.listdir(merged / "step-000007")) == [
        ".metadata",
        "__0_0.distcp",
        "checkpoint.json.tmp",
        "extra.pt",
        "pieces.json",
    ]
    with pytest.raises(Exception, match=r"checkpoint.json cannot be read"):
        find_checkpoint(merged)
