"""Parameters that tensor parallelism has split, and what of them this rank has: replicate averages local tensors."""

from collections.abc import Collection

import torch
from torch.distributed.tensor import DTensor

from composable.claims import is_sharded

__all__ = ["is_split_elsewhere", "local_gradient", "local_of", "wrapped_like"]


def is_split_elsewhere(tensor: torch.Tensor, ranks: Collection[int]) -> bool:
    """Say whether ``tensor`` is split over other ranks than ``ranks``, by global number: only this one is in both."""
    if not isinstance(tensor, DTensor) or is_sharded(tensor):
        return False
    return len({*tensor.device_mesh.mesh.flatten().tolist()} & {*ranks}) == 1


@torch.no_grad()
def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, with its memory; of a plain one, itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, split as ``param`` is.

    Collective over the ranks of the parameter's own mesh, where the gradient is split in another way, such as a sum
    that is still to be taken.
    """
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_of(grad)


def wrapped_like(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as a tensor that is split as ``param`` is, on the same memory; of a plain one, itself."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
