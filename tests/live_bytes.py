"""Counts the bytes of the tensors that a block of code makes, while they live."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation makes, to its end, also where its memory is freed and comes back.

    Attributes:
        peak: The most that ``now`` has been after an operation.
    """

    sees_hooks = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        # Every storage that operations have met, and whether one of them has made it.
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], bool]] = {}

    @property
    def now(self) -> int:
        """Bytes of the storages made since the start that are alive."""
        alive = [find() for find, is_new in list(self._known.values()) if is_new]
        return sum(one.nbytes() for one in alive if one is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # What an operation is given and this has not seen was there before.
        for storage in _storages((args, kwargs)):
            self._follow(storage, is_new=False)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._follow(storage, is_new=True)
        self.peak = max(self.peak, self.now)
        return result

    def _follow(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key)), is_new


def _storages(value: Any) -> list[torch.UntypedStorage]:
    leaves = [getattr(leaf, "_local_tensor", leaf) for leaf in tree_leaves(value)]
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
    return [leaf.untyped_storage() for leaf in found if not leaf.is_meta]
