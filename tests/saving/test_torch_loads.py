"""Ragged tensors saved at one world size and read at another, bit for bit."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable.dtensor.gather import strict_mode
from composable.dtensor.spec import ragged_spec
from composable.dtensor.tensor import RaggedDTensor
from composable.errors import ConfigError, UsageError
from composable.planning.layout import RaggedShard, plan_layout
from tests.ragged_pairs import from_full
from tests.world import run_threads

CUTS = ["row", "element"]


class Model(nn.Module):
    """Parameters of one to four dims, a scalar, one without elements, one smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {
            "wide": (37, 8),
            "bias": (24,),
            "kernel": (5, 3, 3, 3),
            "row": (1, 8),
            "scalar": (),
            "none": (0, 4),
            "pair": (2,),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def make(cut: str) -> nn.Module:
    """Return a model with ragged parameters."""
    world_size = dist.get_world_size()
    model, mesh = Model(), init_device_mesh("cpu", (world_size,))
    named = [(name, param.shape) for name, param in model.named_parameters()]
    layout = plan_layout(named, world_size, align={name: cut for name, _ in named})  # type: ignore[misc]
    for (name, param), span in zip(named_parameters(model), layout.spans, strict=True):
        spec = ragged_spec(mesh, param.shape, param.dtype, layout.bounds(span))
        setattr(model, name, nn.Parameter(from_full(param.detach(), spec)))
    return model


def named_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator)
            param.grad = from_full(grad, param._spec) if isinstance(param, RaggedDTensor) else grad
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)


def reference(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    optimizer = adamw(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def assert_same(model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int) -> None:
    """Compare with one process after ``steps`` steps, to the bit."""
    expected, expected_optimizer = reference(steps)
    for (name, param), (_, plain) in zip(named_parameters(model), named_parameters(expected), strict=True):
        assert torch.equal(param.full_tensor(), plain), name  # type: ignore[attr-defined]
        if optimizer is not None:
            for key, value in expected_optimizer.state[plain].items():
                found = optimizer.state[param][key]
                assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, value), (name, key)


def save(path: str, cut: str) -> None:
    model = make(cut)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    states, optimizer_states = get_state_dict(model, optimizer)
    with strict_mode():
        dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=path)


def load(path: str, cut: str) -> None:
    model = make(cut)
    optimizer = adamw(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    params = list(model.parameters())
    states, optimizer_states = get_state_dict(model, optimizer)
    state = {"model": states, "optimizer": optimizer_states}
    with strict_mode():
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert_same(model, optimizer, 2)
    train(model, optimizer, range(2, 3))
    assert_same(model, optimizer, 3)


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "cut"),
    [(4, 2, "element"), (2, 3, "row")],
)
def test_training_goes_on_to_the_bit_at_another_world_size(
    tmp_path: Path, saved_at: int, loaded_at: int, cut: str
) -> None:
    # Everything that moves tensors, but for the planner's own pickled objects.
    with mock.patch.object(dist, "all_gather") as gather, mock.patch.object(dist, "broadcast") as send:
        run_threads(save, saved_at, str(tmp_path), cut)
    assert not gather.called and not send.called
    # The other cut reads it as well: a checkpoint knows boxes only.
    for other in CUTS:
        run_threads(load, loaded_at, str(tmp_path), other)


def read_in_place() -> None:
    spec = ragged_spec(init_device_mesh("cpu", (2,)), (4, 3), torch.float32, (0, 5, 12))
    ragged = from_full(torch.arange(12.0).view(4, 3), spec)
    chunks = ragged.__create_chunk_list__()
    # Flat [0, 5) and [5, 12) of four rows of three.
    expected = [[((0, 0), (1, 3)), ((1, 0), (1, 2))], [((1, 2), (1, 1)), ((2, 0), (2, 3))]][dist.get_rank()]
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks] == expected
    for chunk in chunks:
        view = ragged.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
        assert view.shape == chunk.sizes
        # Else torch would copy it, and keep the copies of all tensors until a file is written.
        assert view.untyped_storage().nbytes() == view.nbytes
        view.fill_(-1)
    assert torch.equal(ragged.to_local(), torch.full_like(ragged.to_local(), -1))
    with pytest.raises(ConfigError, match="no piece of 'w'"):
        ragged.__get_tensor_shard__(MetadataIndex("w", torch.Size([3, 1])))


def test_boxes_are_views_of_the_piece() -> None:
    run_threads(read_in_place, 2)


def cut_by_idiom() -> None:
    distribute_tensor = torch.distributed.tensor.distribute_tensor
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    full = torch.arange(12.0).view(4, 3)
    placements = [RaggedShard((0, 7, 12))]
    # The source rank's values count, as in torch.
    ragged = distribute_tensor(full if rank == 0 else full * 0, mesh, placements)
    assert type(ragged) is RaggedDTensor and torch.equal(ragged.full_tensor(), full)
    own = distribute_tensor(full + rank, mesh, placements, src_data_rank=None)
    assert torch.equal(own.to_local(), (full + rank).view(-1)[:7] if rank == 0 else (full + rank).view(-1)[7:])
    assert distribute_tensor(ragged, mesh, placements) is ragged
    assert torch.equal(distribute_tensor(full, mesh, [Shard(0)]).full_tensor(), full)
    assert distribute_tensor(full, mesh).placements == (Replicate(),)
    with pytest.raises(UsageError, match="already distributed"):
        distribute_tensor(ragged, mesh, [RaggedShard((0, 3, 12))])
    joined = init_device_mesh("cpu", (1, 2))
    assert torch.equal(distribute_tensor(full, joined, [Shard(0), *placements]).full_tensor(), full)
    with pytest.raises(ConfigError, match="one RaggedShard"):
        distribute_tensor(full, joined, [RaggedShard((0, 12)), *placements])


def test_distribute_tensor_takes_our_placement_and_torchs() -> None:
    run_threads(cut_by_idiom, 2)
