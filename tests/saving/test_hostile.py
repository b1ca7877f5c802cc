"""Checkpoints that hold code: none of it is run, and all ranks say the same."""

import io
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from composable import ConfigError, find_checkpoint, fully_shard, load_checkpoint, save_checkpoint
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


def reseal(folder: Path) -> None:
    """Make ``checkpoint.json`` say of every file what it is now, as whoever wrote the files can."""
    path = folder / "checkpoint.json"
    body = json.loads(path.read_text())
    for name in body["files"]:
        content = (folder / name).read_bytes()
        body["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    path.write_text(json.dumps(body))


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
