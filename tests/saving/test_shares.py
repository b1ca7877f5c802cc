"""What each rank writes of a checkpoint, and says to the others: each value once, and no more at more ranks."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composable import fully_shard, load_checkpoint, replicate, save_checkpoint
from composable.comm import Ranks
from tests.world import on_ranks, run_threads

Messages = dict[int, list[tuple[str, int]]]
SENT: Messages = {}


def recorded(call: Callable[[], Any]) -> Messages:
    """Return the messages of each rank in ``save``: name of the collective, and bytes of what the rank gives."""
    compare = Ranks.are_alike

    def noted(name: str, original: Any) -> Any:
        def collective(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            given = args[0] if name == "all_gather" else tensor
            SENT.setdefault(dist.get_rank(), []).append((name, given.nbytes))
            return original(tensor, *args, **kwargs)

        return collective

    def are_alike(self: Ranks, key: str) -> bool:
        # Of 16 bytes in each of log2(ranks) rounds.
        SENT.setdefault(dist.get_rank(), []).append(("are_alike", 16))
        return compare(self, key)

    with ExitStack() as stack:
        for name in ("all_gather", "all_reduce", "broadcast", "gather"):
            stack.enter_context(mock.patch.object(dist, name, noted(name, getattr(dist, name))))
        stack.enter_context(mock.patch.object(Ranks, "are_alike", are_alike))
        call()
    return {rank: SENT.pop(rank) for rank in sorted(SENT)}


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of one row for each rank, or of two matrices that are cut, or whole, over two dims."""
    torch.manual_seed(0)
    size = dist.get_world_size()
    if kind == "sharded":
        model = fully_shard(nn.Linear(4, size, bias=False))
    else:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 128))
        for layer, placement in zip(model, (Shard(0), Replicate()), strict=True):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [placement]))
        if kind == "hybrid":
            fully_shard(model, mesh=mesh["dp"])
        elif kind == "replicated":
            replicate(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def save(folder: Path, kind: str = "sharded") -> None:
    model, optimizer = make(kind)
    step(model, optimizer)
    SENT.pop(dist.get_rank(), None)
    save_checkpoint(folder, 1, model, optimizer)


def test_a_rank_says_as_much_at_more_ranks(tmp_path: Path) -> None:
    few, many = (recorded(lambda size=size: run_threads(save, size, tmp_path / str(size))) for size in (2, 8))
    for messages in (*few.values(), *many.values()):
        assert [name for name, _ in messages] == [name for name, _ in few[1]]
        # Sums of files may have fewer digits.
        assert all(abs(nbytes - other) <= 16 for (_, nbytes), (_, other) in zip(messages, few[1], strict=True))
    assert [name for name, _ in few[1]].count("gather") == 1 and ("all_gather" not in dict(few[1]))


@pytest.mark.parametrize("kind", ["hybrid", "replicated", "split"])
def test_copies_are_written_once_by_all_that_have_them(kind: str, tmp_path: Path) -> None:
    sent = recorded(lambda: run_threads(save, 4, tmp_path, kind))
    assert not any(name == "all_gather" for name, _ in sent[0])
    files = json.loads((tmp_path / "step-000001" / "checkpoint.json").read_text())["files"]
    sizes = [files[f"__{rank}_0.distcp"]["bytes"] for rank in range(4)]
    # Each value is an archive of a kilobyte and more.
    nbytes = 4 * 3 * (256 * 128 * 2 + 128)
    assert nbytes < sum(sizes) < nbytes + 80_000 and min(sizes) > max(sizes) / 5, sizes


@on_ranks(3)
def test_state_that_only_one_rank_has_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 2:
        step(model[1], optimizer)
    expected = {name: value.clone() for name, value in optimizer.state.get(model[1].weight, {}).items()}
    save_checkpoint(tmp_path, 1, model, optimizer)
    load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.state.keys() == set(model[1].parameters())
    for name, value in expected.items():
        assert torch.equal(optimizer.state[model[1].weight][name], value)
