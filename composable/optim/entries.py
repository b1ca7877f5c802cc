"""One parameter's optimizer state, between whole tensors and this rank's pieces.

Most optimizers keep tensors of the parameter's shape, which are cut as the parameter is, and
numbers such as the step counter, which every rank holds.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from composable.errors import UsageError
from composable.ragged import RaggedDTensor, RaggedLayout, slice_full

__all__ = ["cut_state", "is_per_element", "whole_state"]

# What torch's optimizers keep once a parameter. By name: a scalar parameter's other state is a scalar too.
_PER_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})


def is_per_element(key: object, value: object, shape: torch.Size) -> bool:
    """Say whether ``value``, the state called ``key`` of a parameter of ``shape``, has a number for each element."""
    return isinstance(value, torch.Tensor) and value.shape == shape and (bool(shape) or key not in _PER_PARAMETER)


def cut_state(entry: dict[Any, Any], param: RaggedDTensor) -> None:
    """Make the state of ``param`` ragged, in place: whole tensors of its shape become this rank's pieces.

    No communication: every rank holds whatever is whole. Tensors of other shapes become
    replicated DTensors, numbers stay plain.

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


def whole_state(entry: dict[Any, Any]) -> None:
    """Make every tensor of a parameter's state whole and plain, in place.

    Collective: the ranks of each tensor's mesh, with values in the same order.
    """
    for key, value in entry.items():
        if isinstance(value, DTensor):
            entry[key] = value.full_tensor()


def _foreign(key: object, value: DTensor, layout: RaggedLayout) -> UsageError:
    return UsageError(
        f"optimizer state {key!r} is placed {value.placements}, its parameter {layout.placements}",
        at=f"rank {layout.global_rank}, parameter of shape {list(layout.shape)}",
        fix="load the state with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict",
    )
