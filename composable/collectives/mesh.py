"""Which ranks share a shard, which hold copies of it, and all of them together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable.collectives.ranks import Ranks, device_for
from composable.errors import ConfigError, UsageError, place_of_rank

__all__ = ["Grid", "resolve_mesh", "resolve_ranks"]


@dataclass(frozen=True)
class Grid:
    """The ranks of one annotation.

    Attributes:
        shard: Those that share each shard between them.
        replicas: Those that hold the same shard as this rank; ``None``: this rank alone.
        everyone: All whose gradients are averaged.
    """

    shard: Ranks
    replicas: Ranks | None
    everyone: Ranks

    @property
    def divisor(self) -> int:
        """What the sum of all ranks' gradients is divided by. Nothing else in the library decides it."""
        return self.everyone.size

    @staticmethod
    def of(mesh: DeviceMesh) -> "Grid":
        """Return the ranks of a 1-D mesh: all share the shards."""
        ranks = Ranks.of_mesh(mesh)
        return Grid(ranks, None, ranks)

    @staticmethod
    def whole(ranks: Ranks) -> "Grid":
        """Return ranks that all hold everything, as ``replicate`` has them."""
        alone = Ranks(None, ranks.device, 0, 1, (ranks.numbers[ranks.rank],))
        return Grid(alone, ranks, ranks)


def resolve_mesh(mesh: DeviceMesh | None, params: Iterable[nn.Parameter], *, caller: str) -> DeviceMesh:
    """Check the mesh that the user gave, or make one over all ranks.

    Args:
        mesh: 1-D mesh of the ranks that share the parameters, or ``None``: all ranks.
        params: What will be sharded; decides the device type of the default mesh.
        caller: The public function, for error messages.

    Raises:
        UsageError: No process group is initialised.
        ConfigError: ``mesh`` is no mesh, not 1-D, or of another device type than the parameters.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            f"{caller} needs a process group, and none is initialised",
            fix="call torch.distributed.init_process_group() first, and start the script with torchrun",
        )
    device_types = {param.device.type for param in params} - {"meta"}
    if mesh is None:
        device_type = "cuda" if "cuda" in device_types or _has_nccl() else "cpu"
        return init_device_mesh(device_type, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh is a {type(mesh).__name__}, not a DeviceMesh", at=place_of_rank(), fix="pass init_device_mesh(...)"
        )
    if mesh.ndim != 1:
        raise ConfigError(
            f"mesh has {mesh.ndim} dims {tuple(mesh.mesh.shape)}; {caller} shards over exactly one",
            at=place_of_rank(),
            fix="pass one dim of it, such as mesh['dp']",
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            "this rank is not in the mesh",
            at=place_of_rank(),
            fix=f"call {caller} only on the ranks of the mesh {mesh.mesh.tolist()}",
        )
    if mesh.device_type == "cpu" and "cuda" in device_types:
        raise ConfigError(
            "the mesh is on cpu and a parameter on cuda",
            at=place_of_rank(),
            fix="pass a mesh of device type 'cuda', or move the module to the CPU first",
        )
    return mesh


def resolve_ranks(
    mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None, params: Sequence[nn.Parameter]
) -> Ranks:
    """Return the ranks that ``replicate`` was given, or all, and the device of what they exchange.

    Raises:
        UsageError: No process group is initialised.
        ConfigError: They do not fit. Without a group there is nobody to tell, so this rank raises alone.
    """
    if mesh is not None and process_group is not None:
        raise ConfigError("both mesh and process_group are given", fix="pass one of them")
    if mesh is not None or not dist.is_available() or not dist.is_initialized():
        return Ranks.of_mesh(resolve_mesh(mesh, params, caller="replicate"))
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group is {process_group!r}, not a ProcessGroup that this rank is in",
            fix="pass what torch.distributed.new_group() returned, and call replicate only on the ranks of the group",
        )
    device_type = next((param.device.type for param in params if not param.is_meta), "cpu")
    if device_type == "cpu" and dist.get_backend(group) == "nccl":
        raise ConfigError(
            "the module is on cpu and the process group on nccl, which moves CUDA tensors only",
            fix="move the module to the GPU, or pass a process_group of backend 'gloo'",
        )
    return Ranks.of(group, device_for(device_type))


def _has_nccl() -> bool:
    return torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
