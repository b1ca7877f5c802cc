"""Makes torch's lists and operations know ``RaggedDTensor``."""

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch

from composable.errors import UsageError
from composable.planning import RaggedShard
from composable.ragged.fallback import GatheredView, make_stale_view
from composable.ragged.tensor import RaggedDTensor
from composable.torch_private import (
    DTensorSpec,
    TensorMeta,
    dispatch_rule_holder,
    dtensor_new,
    optim_foreach_types,
    utils_foreach_types,
)

__all__ = ["register_ragged"]


def _is_dispatched_here() -> bool:
    """Say whether an operation on each of our classes reaches its ``__torch_dispatch__``."""
    meta = TensorMeta(torch.Size([1]), (1,), torch.float32)
    spec = DTensorSpec(None, (RaggedShard((0, 1)),), tensor_meta=meta)  # type: ignore[arg-type]  # no mesh needed
    ragged = dtensor_new(RaggedDTensor, torch.zeros(1), spec, requires_grad=False)
    view = make_stale_view(ragged)
    try:
        if type(ragged.detach()) is not RaggedDTensor:
            return False
        view.detach()
    except UsageError:
        return True  # ours, and only ours, refuses a stale view
    except RuntimeError:
        pass  # torch's own path, which wants a mesh
    return False


def _dispatch_every_op(rules: Mapping[type, Any]) -> None:
    """Let torch find the rule of a class whatever the operation, also one that is defined later.

    For torch 2.11, whose C++ path for DTensor takes subclasses along and skips their ``__torch_dispatch__``
    (pytorch#177878), and asks for a rule first. ``torch.library.register_torch_dispatch`` adds one to one operation
    that exists: those that users define later would go to DTensor, which knows nothing of ragged pieces.
    """
    holder = dispatch_rule_holder()
    find = holder.find

    @wraps(find)
    def find_ours_first(entry: Any, cls: type) -> Any:
        return rules.get(cls) or find(entry, cls)

    holder.find = find_ours_first


def register_ragged() -> None:
    """Let torch run operations and optimizers on ``RaggedDTensor``; more than once changes nothing."""
    if not _is_dispatched_here():
        _dispatch_every_op({cls: cls.__dict__["__torch_dispatch__"].__func__ for cls in (RaggedDTensor, GatheredView)})
        if not _is_dispatched_here():
            raise UsageError(
                f"torch {torch.__version__} gives operations on a DTensor subclass to DTensor",
                fix="install torch 2.12 or newer",
            )
    # torch compares parameter types with these lists; one that is missing gets the slow loop.
    for types in (optim_foreach_types, utils_foreach_types):
        if RaggedDTensor not in types:
            types.append(RaggedDTensor)
