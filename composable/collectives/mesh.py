"""Names the shard dim of a device mesh and gives its process group."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable.errors import ConfigError, UsageError, place_of_rank

__all__ = ["device_of", "resolve_mesh"]


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


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank in the mesh."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _has_nccl() -> bool:
    return torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
