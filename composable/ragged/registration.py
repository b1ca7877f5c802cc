"""Makes torch's lists and operations know ``RaggedDTensor``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from composable.errors import UsageError
from composable.planning import RaggedShard
from composable.ragged.spec import RaggedSpec, rebuild_spec
from composable.ragged.tensor import RaggedDTensor, rebuild_ragged
from composable.torch_private import (
    DTensorSpec,
    OpOverload,
    TensorMeta,
    all_op_names,
    dtensor_new,
    optim_foreach_types,
    utils_foreach_types,
)

__all__ = ["register_ragged"]


def _is_dispatched_here() -> bool:
    meta = TensorMeta(torch.Size([1]), (1,), torch.float32)
    spec = DTensorSpec(None, (RaggedShard((0, 1)),), tensor_meta=meta)  # type: ignore[arg-type]  # no mesh needed
    probe = dtensor_new(RaggedDTensor, torch.zeros(1), spec, requires_grad=False)
    try:
        return type(probe.detach()) is RaggedDTensor
    except RuntimeError:
        return False  # torch's own path, which wants a mesh


def _register_every_op(dispatch: Any) -> None:
    """Give every operation of torch's own a rule for this class by name; takes 0.2 s.

    For torch 2.11, whose C++ path for DTensor takes subclasses along and skips their ``__torch_dispatch__``.
    """

    def rule(cls: Any, op: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return dispatch(RaggedDTensor, op, types, args, kwargs)

    for name in all_op_names():
        if name.startswith(("aten::", "prims::")):
            torch.library.register_torch_dispatch(name, RaggedDTensor, rule)


def register_ragged() -> None:
    """Let torch run operations, optimizers and safe loading on ``RaggedDTensor``; more than once changes nothing."""
    if not _is_dispatched_here():
        _register_every_op(RaggedDTensor.__dict__["__torch_dispatch__"].__func__)
        if not _is_dispatched_here():
            raise UsageError(
                f"torch {torch.__version__} gives operations on a DTensor subclass to DTensor",
                fix="install torch 2.12 or newer",
            )
    # torch compares parameter types with these lists; one that is missing gets the slow loop.
    for types in (optim_foreach_types, utils_foreach_types):
        if RaggedDTensor not in types:
            types.append(RaggedDTensor)
    torch.serialization.add_safe_globals([RaggedDTensor, RaggedShard, RaggedSpec, rebuild_ragged, rebuild_spec])
