"""One parameter's optimizer state, between whole tensors and this rank's pieces.

Most optimizers keep tensors of the parameter's shape, which are cut as the parameter is, and
numbers such as the step counter, which every rank holds.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from composable.collectives import Ranks
from composable.errors import UsageError
from composable.ragged import RaggedDTensor, RaggedLayout, slice_block, slice_full

__all__ = ["cut_state", "is_per_element", "split_state", "whole_state"]

# What torch's optimizers keep once a parameter. By name: a scalar parameter's other state is a scalar too.
_PER_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})


def is_per_element(key: object, value: object, shape: torch.Size) -> bool:
    """Say whether ``value``, the state called ``key`` of a parameter of ``shape``, has a number for each element."""
    return isinstance(value, torch.Tensor) and value.shape == shape and (bool(shape) or key not in _PER_PARAMETER)


def cut_state(entry: dict[Any, Any], param: RaggedDTensor) -> None:
    """Make the state of ``param`` ragged, in place: whole tensors of its shape become this rank's pieces.

    No communication: every rank holds whatever is whole, or its block of what tensor parallelism has split as
    ``param``. Tensors of other shapes become replicated DTensors, numbers stay plain.

    Raises:
        UsageError: A tensor is cut in another way than ``param``.
    """
    layout = param._spec.layout
    for key, value in entry.items():
        if not isinstance(value, torch.Tensor):
            continue
        if type(value) is RaggedDTensor:
            if not value._spec.layout.matches(layout):
                raise _foreign(key, value, layout)
            continue
        if isinstance(value, DTensor) and _is_block(value, layout):
            piece = slice_block(value._local_tensor.detach(), layout).to(param.device, copy=True)
            entry[key] = RaggedDTensor.wrap(piece, param._spec.cast(value.dtype))
            continue
        if isinstance(value, DTensor):
            if any(not placement.is_replicate() for placement in value.placements):
                raise _foreign(key, value, layout)
            value = value._local_tensor
        if is_per_element(key, value, layout.shape):
            spec = param._spec.cast(value.dtype)
            entry[key] = RaggedDTensor.wrap(slice_full(value.detach(), layout).to(param.device, copy=True), spec)
        elif value.dim():
            replicas = [Replicate()] * layout.mesh.ndim
            entry[key] = DTensor.from_local(value.to(param.device), layout.mesh, replicas, run_check=False)
        else:
            entry[key] = value


def split_state(entry: dict[Any, Any], param: DTensor) -> None:
    """Make the whole state of ``param``, which tensor parallelism has split, DTensors beside it, in place.

    No communication: every rank holds whatever is whole.
    """
    for key, value in entry.items():
        if isinstance(value, torch.Tensor) and value.dim():
            same = is_per_element(key, value, param.shape)
            placements = param.placements if same else [Replicate()] * param.device_mesh.ndim
            entry[key] = distribute_tensor(value, param.device_mesh, placements, src_data_rank=None)


def whole_state(entry: dict[Any, Any]) -> None:
    """Make every tensor of a parameter's state whole and plain, in place.

    Collective: the ranks of each tensor's mesh, with values in the same order.
    """
    for key, value in entry.items():
        if isinstance(value, DTensor):
            entry[key] = value.full_tensor()


def _is_block(value: DTensor, layout: RaggedLayout) -> bool:
    """Say whether a DTensor has the block of this rank, as a parameter's state before the parameter was cut."""
    others = [dim for dim in range(layout.mesh.ndim) if dim != layout.mesh_dim]
    ranks = [Ranks.of_mesh(layout.mesh, dim).numbers for dim in others]
    return (
        bool(others)
        and value.shape == layout.shape
        and value.placements == tuple(layout.placements[dim] for dim in others)
        and ranks == [Ranks.of_mesh(value.device_mesh, dim).numbers for dim in range(value.device_mesh.ndim)]
    )


def _foreign(key: object, value: DTensor, layout: RaggedLayout) -> UsageError:
    return UsageError(
        f"optimizer state {key!r} is placed {value.placements}, its parameter {layout.placements}",
        at=f"rank {layout.global_rank}, parameter of shape {list(layout.shape)}",
        fix="load the state with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict",
    )
