"""Marks and finds memory that has no values yet.

New memory holds old bytes, and a model that trains on them is silently wrong. So memory that is to
be filled later is marked when it is made, and checked before it is used: floats are NaN, with bits
that no operation gives, which shows in every result; in other types every byte is 0xA5, which no
boolean has, and which takes integers out of every range.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composable.ground.torch_private import OpOverload, TorchDispatchMode

META_FIX = (
    "model.to_empty(device=...) and then initialise or load; or fully_shard(..., param_init_fn=...); "
    "or fully_shard(..., sync_module_states=True) with values on the first rank"
)


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


class WithoutValues:
    """What marks and finds tensors that have no values at all; registered by ``tell_without_values``."""

    def mark(self, tensor: torch.Tensor) -> None:
        """Mark a tensor of any shape, which is new."""

    def is_marked(self, tensor: torch.Tensor) -> bool:
        """Say whether nothing has been written to a tensor of any shape since it was marked."""
        return False


_OTHERS = [WithoutValues()]


def tell_without_values(others: WithoutValues) -> None:
    """Let ``others`` mark and find the tensors in whose memory no mark can be told."""
    _OTHERS[0] = others


def mark_unfilled(tensor: torch.Tensor) -> None:
    """Overwrite new memory of any shape with the mark; tensors on the meta device, or not dense, stay as they are."""
    if _can_be_told(tensor):
        tensor.untyped_storage().fill_(_mark_of(tensor))  # type: ignore[attr-defined]  # torch leaves it out
    else:
        _OTHERS[0].mark(tensor)


def is_unfilled(tensor: torch.Tensor) -> bool:
    """Say whether a tensor of any shape and dtype still holds the mark and nothing else."""
    if not _can_be_told(tensor):
        return _OTHERS[0].is_marked(tensor)
    found, mark = tensor.detach().contiguous().view(-1).view(torch.uint8), _mark_of(tensor)
    # A few bytes first: most tensors have values.
    return bool((found[:64] == mark).all()) and bool((found == mark).all())


def _can_be_told(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    # A few bytes may be the mark by chance.
    return (
        is_plain
        and not (tensor.is_meta or tensor.is_quantized)
        and tensor.numel() > (7 if tensor.dtype in (torch.uint8, torch.int8) else 0)
    )


def _mark_of(tensor: torch.Tensor) -> int:
    # Bits that are all ones are NaN in every format of torch.
    return 0xFF if tensor.is_floating_point() or tensor.is_complex() else 0xA5
