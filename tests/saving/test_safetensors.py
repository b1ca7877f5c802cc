"""Weights in safetensors files, read and written with the library of that name as the judge."""

import json
import resource
import struct
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from composable import (
    ConfigError,
    DesyncError,
    UsageError,
    full_state_dict,
    fully_shard,
    load_safetensors,
    save_safetensors,
)
from composable.saving.entries import largest_handle_bytes
from tests.live_bytes import LiveBytes
from tests.models import Block, TinyGPT, make_model, seeded
from tests.saving.test_full_state import assert_like_plain, local_values, odd, sharded
from tests.saving.test_run_folder import KINDS
from tests.world import on_ranks, run_ranks, run_threads, told

NAMES = ["gpt_tied", "mixed_dtypes", "scalars", "empty_params", "with_buffers"]


def without_ties(plain: nn.Module) -> dict[str, torch.Tensor]:
    seen: set[int] = set()
    named = plain.state_dict(keep_vars=True).items()
    return {k: v.detach() for k, v in named if not (id(v) in seen or seen.add(id(v)))}  # type: ignore[func-returns-value]


def save(folder: str) -> None:
    for name in NAMES:
        model = sharded(name, 1)
        save_safetensors(model, f"{folder}/{name}.safetensors")
        save_safetensors(model, f"{folder}/{name}", max_shard_bytes=100)
        save_safetensors(model, f"{folder}/{name}-low", dtype=torch.bfloat16)


def load(folder: str) -> None:
    for name in NAMES:
        for path in (f"{folder}/{name}.safetensors", f"{folder}/{name}"):
            model = sharded(name, 2)
            assert load_safetensors(model, path if dist.get_rank() == 0 else "") == ([], [])
            found = full_state_dict(model)
            if dist.get_rank() == 0:
                assert_like_plain(found, make_model(name, 1))


@on_ranks(2)
def test_the_library_is_told_that_a_rank_has_a_piece_only(tmp_path: Path) -> None:
    model = sharded("mlp", 1)
    for write in (
        lambda: save_file(model.state_dict(), tmp_path / "w"),
        lambda: save_model(model, str(tmp_path / "w")),
    ):
        warnings.simplefilter("ignore")  # its own, about the call that fails
        with pytest.raises(UsageError, match="as safetensors wants") as caught:
            write()
        assert "save_safetensors(model, path)" in str(caught.value.fix)
    # Both fixes.
    save_safetensors(model, tmp_path / "ours.safetensors")
    values = full_state_dict(model)
    if dist.get_rank() == 0:
        save_file(values, tmp_path / "w.safetensors")
        for name in ("w", "ours"):
            torch.testing.assert_close(
                load_file(tmp_path / f"{name}.safetensors"), dict(make_model("mlp", 1).state_dict())
            )


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(1, 2), (2, 3), (3, 1)])
def test_the_library_reads_what_is_written_and_every_world_size_loads_it(
    tmp_path: Path, saved_at: int, loaded_at: int
) -> None:
    run_ranks(save, saved_at, str(tmp_path))
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    for name in NAMES:
        expected = without_ties(make_model(name, 1))
        single = load_file(tmp_path / f"{name}.safetensors")
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        parts = {file: load_file(tmp_path / name / file) for file in set(index["weight_map"].values())}
        assert len(parts) > 1 and single.keys() == index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
        assert all(sum(value.nbytes for value in part.values()) <= 100 or len(part) == 1 for part in parts.values())
        low = load_file(tmp_path / f"{name}-low" / "model.safetensors")
        for key, want in expected.items():
            assert torch.equal(single[key], want) and torch.equal(parts[index["weight_map"][key]][key], want), key
            assert torch.equal(low[key], want.bfloat16() if want.is_floating_point() else want)
    with safe_open(tmp_path / "gpt_tied.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "tokens.weight"}
    run_ranks(load, loaded_at, str(tmp_path))


def load_foreign(path: str) -> None:
    model = sharded("gpt_tied", 2)
    before = local_values(model)
    with pytest.raises(
        ConfigError, match=r'Missing key\(s\) in state_dict: "norm\.bias"\n.*Unexpected key\(s\) .*: "stranger"'
    ):
        load_safetensors(model, f"{path}/unfit.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(before, local_values(model), strict=True))
    # Whichever of the names of a tied weight the file has.
    assert load_safetensors(model, f"{path}/unfit.safetensors", strict=False) == (["norm.bias"], ["stranger"])
    for name, message in (
        ("truncated.safetensors", "truncated.safetensors cannot be read"),
        ("text.safetensors", "text.safetensors cannot be read"),
        ("absent", "absent cannot be read"),
        ("half", "model-2 cannot be read"),
        ("bad", "index.json cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_safetensors(model, f"{path}/{name}")
    with mock.patch.dict(sys.modules, {"safetensors": None}), pytest.raises(ConfigError, match="not installed"):
        load_safetensors(model, f"{path}/unfit.safetensors")
    after = full_state_dict(model)
    if dist.get_rank() == 0:
        want = make_model("gpt_tied", 1).state_dict() | {
            "norm.bias": make_model("gpt_tied", 2).state_dict()["norm.bias"]
        }
        assert all(torch.equal(value, want[key]) for key, value in after.items())


def test_files_of_others_and_broken_ones(tmp_path: Path) -> None:
    values = {k: v.clone() for k, v in make_model("gpt_tied", 1).state_dict().items()}
    del values["tokens.weight"], values["norm.bias"]
    save_file(values | {"stranger": torch.ones(2)}, tmp_path / "unfit.safetensors")
    whole = (tmp_path / "unfit.safetensors").read_bytes()
    (tmp_path / "truncated.safetensors").write_bytes(whole[:-100])
    (tmp_path / "text.safetensors").write_text("not weights" * 10)
    for name, text in (("half", '{"weight_map": {"a": "model-1", "b": "model-2"}}'), ("bad", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors.index.json").write_text(text)
    (tmp_path / "half" / "model-1").write_bytes(whole)
    run_ranks(load_foreign, 2, str(tmp_path))


def refuse(path: str) -> None:
    rank = dist.get_rank()
    model = sharded("mlp", 1)
    save_safetensors(model, f"{path}/folder")
    with pytest.raises(ConfigError, match="holds weights already"):
        save_safetensors(model, f"{path}/folder")
    with pytest.raises(ConfigError, match=r"cannot hold, by type or dtype: 'counter\._extra_state'"):
        save_safetensors(odd(1), f"{path}/odd")
    with pytest.raises(ConfigError, match="max_shard_bytes is 0"):
        save_safetensors(model, f"{path}/other", max_shard_bytes=0)
    strange = nn.Linear(2, 2)
    strange.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
    fully_shard(strange)
    with pytest.raises(ConfigError, match="by type or dtype: 'phase'"):
        save_safetensors(strange, f"{path}/strange")
    # A failure while writing leaves what was there.
    target = Path(path, "single.safetensors")
    save_safetensors(model, target)
    before = target.read_bytes() if rank == 0 else b""
    with (
        mock.patch("os.fsync", side_effect=OSError("disk is full")),
        pytest.raises(OSError if rank == 0 else DesyncError, match="disk is full"),
    ):
        save_safetensors(sharded("mlp", 2), target)
    if rank == 0:
        assert target.read_bytes() == before
        assert sorted(entry.name for entry in Path(path).iterdir()) == ["folder", "single.safetensors"]
    save_safetensors(sharded("mlp", 2), target)
    if rank == 0:
        assert target.read_bytes() != before
        (length,) = struct.unpack("<Q", target.read_bytes()[:8])
        assert length % 8 == 0


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    run_ranks(refuse, 2, str(tmp_path))


@on_ranks(2, run=run_ranks)
def test_a_full_disk_is_an_error_that_names_the_path_and_leaves_nothing(tmp_path: Path) -> None:
    target, rank = Path(tmp_path, "model.safetensors"), dist.get_rank()
    model = fully_shard(nn.Linear(300, 200))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError if rank == 0 else DesyncError, match="File too large"):
            save_safetensors(model, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert list(Path(tmp_path).iterdir()) == []


def count_bytes(path: str) -> None:
    model = fully_shard(seeded(lambda: TinyGPT(vocab=64, dim=160, layers=8), 1), policy={Block})
    limit = 2 * largest_handle_bytes(model.parameters())
    total = sum(param.numel() * 4 for param in model.parameters())
    with LiveBytes() as live:
        save_safetensors(model, path)
    assert live.peak <= limit < total / 3
    with LiveBytes() as live:
        load_safetensors(model, path)
    assert live.peak <= limit


def test_files_are_written_and_read_a_handle_at_a_time(tmp_path: Path) -> None:
    run_ranks(count_bytes, 2, str(tmp_path / "weights"))


def fill_a_disk(path: Path, folder: Path) -> list[str]:
    """Return what ranks get that write more than the system takes, by a limit that works as a full disk does."""
    model = fully_shard(nn.Linear(64, 64))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises((OSError, DesyncError)) as caught:
            save_safetensors(model, path)
    finally:
        dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(folder.iterdir())
    return [str(caught.value)]


@pytest.mark.parametrize("name", ["w", "w.safetensors"])
def test_an_error_of_the_disk_names_the_file(name: str, tmp_path: Path) -> None:
    for (said,) in run_threads(fill_a_disk, 2, tmp_path / name, tmp_path):
        assert f"[Errno 27] File too large: '{tmp_path}/.partial-{name}/model.safetensors'" in said


@pytest.mark.parametrize("kind", ["a pipe", "a link to a pipe", "a link to a device", "a folder", "a socket", "bytes"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    for name in ("w.safetensors", "w/model.safetensors", "w/model-2.safetensors"):
        place = tmp_path / "run" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        KINDS[kind](place)
        if name == "w/model-2.safetensors":
            (place.parent / "model.safetensors.index.json").write_text(
                '{"weight_map": {"weight": "model-2.safetensors"}}'
            )
        asked = place if name.startswith("w.") else place.parent
        for said in run_threads(load_one, 2, asked)[0]:
            assert said.startswith(f"ConfigError: {place}") and " cannot be read: " in said, said
        (tmp_path / "pipe").unlink(missing_ok=True)
        (tmp_path / "run" / "pipe").unlink(missing_ok=True)


def load_one(path: Path) -> list[str]:
    return told(lambda: load_safetensors(fully_shard(nn.Linear(2, 2)), path))


@on_ranks(2)
def test_a_link_to_a_file_is_followed_as_hubs_lay_out_weights(tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(2, 2))
    save_safetensors(model, tmp_path / "blob.safetensors")
    if dist.get_rank() == 0:
        (tmp_path / "snapshot").mkdir()
        (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob.safetensors")
    dist.barrier()
    load_safetensors(model, tmp_path / "snapshot")
