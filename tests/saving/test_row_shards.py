"""Sharded state as torch's own DTensors: the same values in the same memory, or an error that lists the other cuts."""

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable import ConfigError, HandleOptions, as_torch_shards, fully_shard
from tests.parity import full
from tests.world import on_ranks, run_ranks, run_threads

SHARDS = 3
ROWS = [9, 7, 4, 3, 1]  # Of three ranks: all alike; the last with fewer; with none; a row each; the first alone.


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = [5, *ROWS]
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in zip(sizes, ROWS)), nn.BatchNorm1d(1, affine=False))


def annotate(model: nn.Module, count: int = SHARDS, **options: Any) -> nn.Module:
    cuts = HandleOptions(align=lambda _, param: -(-len(param) // count))
    return fully_shard(model, policy={nn.Linear}, options=cuts, **options)


def assert_as_torch_cuts(found: Any, expected: DTensor, own: Any) -> None:
    assert type(found) is DTensor and found.placements == expected.placements and found.shape == expected.shape
    assert torch.equal(found.to_local(), expected.to_local()) and found.stride() == expected.stride()
    assert found.to_local().data_ptr() == own.to_local().data_ptr()


@pytest.mark.parametrize("copies", [1, 2])
def test_the_state_is_that_of_torch_in_the_memory_of_the_model(copies: int) -> None:
    run_threads(compare, copies * SHARDS, copies)


def compare(copies: int) -> None:
    mesh = init_device_mesh("cpu", (copies, SHARDS), mesh_dim_names=("copies", "shards"))
    plain, model = make_model(), annotate(make_model(), mesh=mesh if copies > 1 else mesh["shards"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    own = model.state_dict()
    shown = as_torch_shards(own)
    assert [*shown] == [*plain.state_dict()] and shown["5.running_mean"] is own["5.running_mean"]
    for name, param in plain.named_parameters():
        assert_as_torch_cuts(shown[name], distribute_tensor(param.detach(), mesh["shards"], [Shard(0)]), own[name])
    optimizer.step()
    _, nested = get_state_dict(model, optimizer)
    for name, states in as_torch_shards(nested)["state"].items():
        expected = distribute_tensor(full(nested["state"][name]["exp_avg"]), mesh["shards"], [Shard(0)])
        assert_as_torch_cuts(states["exp_avg"], expected, nested["state"][name]["exp_avg"])


@on_ranks(4)
def test_tensor_parallelism_stays_where_it_splits_other_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    annotate(model, 2, mesh=mesh["dp"])
    own = model.state_dict()
    shown = as_torch_shards({"1.weight": own["1.weight"]})["1.weight"]
    assert shown.placements == (Shard(0), Shard(1)) and torch.equal(shown.full_tensor(), own["1.weight"].full_tensor())
    with pytest.raises(ConfigError, match=r"- 0.weight \[6, 4\], cut of other dims, or twice, not at rows \(2,\)"):
        as_torch_shards(own)


def round_trip(folder: str) -> None:
    model, other = annotate(make_model(1)), annotate(make_model(2))
    dcp.save(as_torch_shards(model.state_dict()), checkpoint_id=folder)
    dcp.load(as_torch_shards(other.state_dict()), checkpoint_id=folder)
    assert all(torch.equal(full(one), full(two)) for one, two in zip(model.parameters(), other.parameters()))


def test_what_torch_loads_into_the_view_is_in_the_model(tmp_path: Any) -> None:
    run_ranks(round_trip, SHARDS, str(tmp_path))


@on_ranks(2)
def test_other_cuts_are_one_error_with_all_names() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4, bias=False))
    model.scale = nn.Parameter(torch.ones(()))
    fully_shard(model)
    with pytest.raises(ConfigError) as caught:
        as_torch_shards(model.state_dict())
    lines = re.findall(r"- (\S+) (\[.*?\]), cut at elements \(\d+,\), not at rows (\(.*?\))", str(caught.value))
    assert ("0.weight", "[3, 4]", "(2,)") in lines and "len(param) // world_size" in str(caught.value)
    assert dist.get_world_size() == 2 and math.prod(model.scale.shape) == 1
