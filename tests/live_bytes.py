"""Counts the bytes of the tensors that a block of code makes, while they live."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation makes, to its end.

    Attributes:
        now: Bytes of the storages made since the start that are alive.
        peak: The most that ``now`` has been.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # What an operation is given and this has not seen was there before.
        for storage in _storages((args, kwargs)):
            self._follow(storage, 0)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._follow(storage, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _follow(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += nbytes
            weakref.finalize(storage, self._forget, storage._cdata, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _storages(value: Any) -> list[torch.UntypedStorage]:
    leaves = [getattr(leaf, "_local_tensor", leaf) for leaf in tree_leaves(value)]
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
