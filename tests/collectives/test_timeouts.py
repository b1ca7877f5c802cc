"""Timeouts: groups without a timeout of their own have that of the default group."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composable import fully_shard, replicate
from composable.ground.torch_private import groups_of_process, timeout_of
from tests.world import GROUP_S as WORLD_S
from tests.world import on_ranks, run_ranks

DEFAULT_S = 1800.0


def seconds_of_groups() -> dict[str, float]:
    return {name: timeout_of(group).total_seconds() for name, group in groups_of_process().items()}


@on_ranks(4, run=run_ranks, way=["replicate", "copies", "tensor parallelism"])
def test_all_groups_of_an_annotation_wait_as_long_as_the_world(way: str) -> None:
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "inner"))
    if way == "replicate":
        replicate(model, mesh=mesh["dp"])
    elif way == "copies":
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh["inner"], ColwiseParallel())
        fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(2, 4)).sum().backward()
    found = seconds_of_groups()
    assert len(found) > 3, "the world, two dims, and groups of transports"
    if way == "replicate":
        # What the annotation has nothing to do with is left alone.
        assert found.pop(mesh["inner"].get_group().group_name) == DEFAULT_S
    assert set(found.values()) == {WORLD_S}


@on_ranks(2, run=run_ranks)
def test_a_group_with_a_timeout_of_its_own_keeps_it() -> None:
    own = dist.new_group(timeout=timedelta(seconds=77))
    model = fully_shard(nn.Linear(4, 4), process_group=own)
    model(torch.ones(2, 4)).sum().backward()
    seconds = sorted(seconds_of_groups().values())
    assert (seconds[0], seconds[-1]) == (77.0, WORLD_S)
