"""Tells memory that nothing was written to from memory that holds values.

New memory holds whatever was there before, and a model that trains on it is silently wrong. So what
has to be filled by others is marked when it is made, and looked at before it is used: floats are NaN,
which also shows in every result; in other types every byte is 0xA5, which no boolean has, and integers
get out of every range. A mark costs one write of the memory, a look at filled memory some bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composable.ground.torch_private import OpOverload, TorchDispatchMode

__all__ = ["META_FIX", "MarkedMemory", "is_unfilled", "mark_unfilled"]


META_FIX = (
    "model.to_empty(device=...) and then initialise or load; or fully_shard(..., param_init_fn=...); "
    "or fully_shard(..., sync_module_states=True) with values on the first rank"
)

_NAN_BYTE = 0xFF  # all ones is NaN in every format that torch has
_OTHER_BYTE = 0xA5
_FIRST_LOOK_BYTES = 64
_CHUNK_BYTES = 1 << 20


class MarkedMemory(TorchDispatchMode):
    """A context in which every tensor that is made without values is marked."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.startswith(("aten::empty", "aten::new_empty")) and isinstance(result, torch.Tensor):
            mark_unfilled(result._local_tensor if isinstance(result, DTensor) else result)
        return result


def mark_unfilled(tensor: torch.Tensor) -> None:
    """Overwrite a tensor of any shape with the mark; nothing happens on the meta device, and to what is not dense."""
    if not _has_plain_memory(tensor):
        return
    if tensor.is_contiguous():
        _as_bytes(tensor).fill_(_mark_of(tensor))
    else:
        marked = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        _as_bytes(marked).fill_(_mark_of(tensor))
        tensor.data.copy_(marked)


def is_unfilled(tensor: torch.Tensor) -> bool:
    """Say whether a tensor of any shape and dtype still holds the mark and nothing else."""
    if not _has_plain_memory(tensor):
        return False
    found = _as_bytes(tensor.detach().contiguous())
    mark = _mark_of(tensor)
    return bool((found[:_FIRST_LOOK_BYTES] == mark).all()) and all(
        bool((chunk == mark).all()) for chunk in found.split(_CHUNK_BYTES)
    )


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and tensor.numel() > 0
    )


def _mark_of(tensor: torch.Tensor) -> int:
    return _NAN_BYTE if tensor.is_floating_point() or tensor.is_complex() else _OTHER_BYTE


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.view(-1).view(torch.uint8)
