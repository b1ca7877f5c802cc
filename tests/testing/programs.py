"""Programs of ranks that several files of tests run."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

__all__ = ["all_reduces", "go_on_alone", "groups", "part_ways"]


def all_reduces(rank: int) -> list[float]:
    found = []
    for _ in range(3):
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor)
        found.append(tensor.item())
    return found


def groups() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    pair = dist.new_group([2, 3])
    # One on each rank: torch 2.15 names later groups by how many a rank has made.
    own = dist.new_group([1, 0] if rank < 2 else [3, 2], use_local_synchronization=True)
    for name, group in (("pair", pair), ("own", own)):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            assert name == "pair" and rank < 2
            continue
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=group)
        members = dist.get_process_group_ranks(group)
        found[name] = tensor, dist.get_rank(group), dist.get_world_size(group), members
    dist.destroy_process_group(own)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for name in ("replicate", "shard"):
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=mesh[name].get_group())
        found[name] = tensor, mesh[name].get_local_rank()
    full = torch.arange(20.0).view(10, 2)
    tensor = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    moved = tensor.redistribute(mesh, [Shard(1), Replicate()])
    found["dtensor"] = moved.to_local(), moved.full_tensor(), (tensor + 1).sum().full_tensor()
    return found


def part_ways(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    elif rank == 1:
        dist.recv(torch.empty(3), 2, tag=4)


def go_on_alone(rank: int) -> float:
    if rank == 0:
        raise ValueError("gone")
    tensor = torch.tensor(1.0)
    dist.all_reduce(tensor, group=dist.new_group([1, 2], use_local_synchronization=True))
    raise KeyError(rank)
