"""Keeps autograd from saving what will be gone: parameters that are not gathered for backward."""

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from composable.errors import UsageError, place_of_rank
from composable.storage import Handle
from composable.torch_private import top_saved_tensors_hooks

__all__ = ["SavingForbidden"]


class SavingForbidden:
    """From now until ``end``, saving a parameter of ``handle`` for backward is a ``UsageError``.

    What is saved otherwise goes to the hooks of who is around, such as checkpointing, as if this were not there.
    """

    __slots__ = ("_context", "_handle", "_outer")

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._outer = top_saved_tensors_hooks(False)
        self._context = saved_tensors_hooks(self._pack, self._unpack)
        self._context.__enter__()

    def end(self) -> None:
        """Allow it again."""
        self._context.__exit__()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._handle.lies_in_buffer(tensor):
            raise UsageError(
                "backward needs a parameter that set_unshard_in_backward(False) says it does not need",
                at=f"{place_of_rank()}, {self._handle.described}, tensor {list(tensor.shape)}",
                fix="leave the setting on for this module; it is for embeddings and the like",
            )
        if self._outer is not None:
            return self._outer[0](tensor)
        return tensor, tensor._version

    def _unpack(self, packed: Any) -> torch.Tensor:
        if self._outer is not None:
            unpacked: torch.Tensor = self._outer[1](packed)
            return unpacked
        tensor, version = packed
        if tensor._version != version:
            # As autograd does it where there are no hooks.
            raise RuntimeError(
                "a tensor needed for backward has been changed in place: "
                f"{list(tensor.shape)} is at version {tensor._version}, not {version}"
            )
        return tensor
