"""Which rule each aten operation follows on ragged tensors.

Chosen once per operation, then found by one dict lookup. Element-wise operations run on the
local pieces; norms reduce locally and add one all-reduce; random fills draw the full tensor,
so that one seed gives one model at any world size; views that change nothing alias; all else
gathers (``ragged_gather.py``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable.errors import UsageError
from composable.ragged_elementwise import (
    copy_in_place,
    foreach,
    foreach_by_scalar,
    foreach_in_place,
    fused,
    idle_in_place,
    pointwise,
    pointwise_in_place,
    pointwise_out,
)
from composable.ragged_gather import Rule, gather_and_run, replicate, wrap, written
from composable.ragged_spec import RaggedLayout, RaggedSpec, replicated_spec, slice_full
from composable.torch_private import OpOverload, dtensor_new, foreach_norm

__all__ = ["RULES", "rule_for"]

aten = torch.ops.aten

RULES: dict[OpOverload, Rule] = {}

# An unknown list operation gathers: new ones need not be element-wise (`_foreach_mm` is not).
_FOREACH_ELEMENTWISE = frozenset(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor "
    "frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh "
    "sqrt sub tan tanh trunc zero".split()
)
# In-place arithmetic of optimizers that floats never refuse: without elements there is nothing to do.
_IDLE = frozenset("add_ sub_ mul_ div_ addcmul_ addcdiv_ lerp_ sqrt_ zero_ neg_ reciprocal_".split())
# Element-wise in fact, but not tagged so.
_UNTAGGED_POINTWISE = frozenset("zero_ fill_ masked_fill_ masked_fill where nan_to_num".split())
# With numbers as one tensor instead: the CPU kernel is four times cheaper for small tensors, and bit-identical.
_BY_TENSOR = {
    aten._foreach_mul_.Scalar: aten._foreach_mul_.Tensor,
    aten._foreach_mul_.ScalarList: aten._foreach_mul_.Tensor,
    aten._foreach_div_.Scalar: aten._foreach_div_.Tensor,
    aten._foreach_div_.ScalarList: aten._foreach_div_.Tensor,
}
_LIKE = frozenset("clone zeros_like ones_like empty_like full_like _to_copy _pin_memory".split())
_NEW = frozenset("new_empty new_zeros new_ones new_full".split())
_FORBIDDEN = frozenset("set_ resize_ resize_as_ unsqueeze_ squeeze_ t_ transpose_ as_strided_ swapaxes_".split())


def rule_for(op: OpOverload) -> Rule:
    """Choose the rule of an operation and remember it."""
    rule = RULES[op] = _choose(op)
    return rule


def _choose(op: OpOverload) -> Rule:
    if op.namespace != "aten":
        return gather_and_run
    name = op._schema.name.removeprefix("aten::")
    changed = written(op)
    first = op._schema.arguments[0].name if op._schema.arguments else ""
    is_in_place = changed == [first]
    if name.startswith("_fused_"):
        if first not in changed or "List" not in str(op._schema.arguments[0].type):
            return gather_and_run
        names = [argument.name for argument in op._schema.arguments]
        return partial(fused, names.index("state_steps") if "state_steps" in names else -1)
    if op in _BY_TENSOR:
        return partial(foreach_by_scalar, _BY_TENSOR[op])
    if name.startswith("_foreach_"):
        if name == "_foreach_norm" and not changed:
            return _foreach_norm
        if name.removeprefix("_foreach_").rstrip("_") not in _FOREACH_ELEMENTWISE or (changed and not is_in_place):
            return gather_and_run
        return foreach_in_place if is_in_place else foreach
    if op in _SPECIAL:
        return _SPECIAL[op]
    if name in _FORBIDDEN or torch.Tag.inplace_view in op.tags:
        return _forbidden
    if name in _LIKE and not changed:
        return _like
    if name in _NEW and not changed:
        return _new
    if torch.Tag.nondeterministic_seeded in op.tags:
        if is_in_place:
            return _random_in_place
        return _random_like if name.endswith("_like") and not changed else gather_and_run
    if torch.Tag.pointwise in op.tags or name in _UNTAGGED_POINTWISE:
        returns = op._schema.returns
        if not returns or any(str(ret.type) != "Tensor" for ret in returns):
            return gather_and_run  # such as `equal`, which reduces
        if not changed:
            return pointwise
        if is_in_place:
            return idle_in_place if name in _IDLE else pointwise_in_place
        return pointwise_out if changed == ["out"] else gather_and_run
    return gather_and_run


# -- new tensors of the same cut, views that change nothing, metadata


def _like(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    this = args[0]
    if type(this) is not cls:
        return gather_and_run(cls, op, args, kwargs)
    # The whole has row-major strides for life, whatever memory format was asked for.
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    local = op(this._local_tensor, *args[1:], **kwargs)
    return wrap(cls, local, this._spec.cast(local.dtype))


def _new(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    this, size = args[0], torch.Size(args[1])
    spec: RaggedSpec = this._spec
    if size == spec.layout.shape:
        local = op(this._local_tensor, spec.layout.local_shape, *args[2:], **kwargs)
        return wrap(cls, local, spec.cast(local.dtype))
    return replicate(op(this._local_tensor, size, *args[2:], **kwargs), spec.layout)


def _alias(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    this = args[0]
    return wrap(cls, this._local_tensor, this._spec)


def _view(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    this, sizes = args[0], args[1]
    shape = this._spec.layout.shape
    if len(sizes) == len(shape) and all(size in (-1, whole) for size, whole in zip(sizes, shape)):
        return _alias(cls, op, args, kwargs)
    return gather_and_run(cls, op, args, kwargs)


def _has_same_size(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


def _local_property(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return op(args[0]._local_tensor, *args[1:], **kwargs)


def _forbidden(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise UsageError(
        f"{op} would change the shape or storage of a ragged tensor",
        at=f"ragged tensor of shape {list(args[0].shape)}",
        fix="copy values into it with copy_(), or work on full_tensor()",
    )


# -- random numbers


def _random_in_place(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Fill with this rank's piece of what one process would draw; equal seeds on all ranks assumed."""
    this = args[0]
    _check_draws_from_numbers(op, args[1:])
    full = _random_canvas(this)
    op(full, *args[1:], **kwargs)
    this._local_tensor.copy_(slice_full(full, this._spec.layout))
    return this


def _random_like(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    this = args[0]
    _check_draws_from_numbers(op, args[1:])
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    full = op(_random_canvas(this), *args[1:], **kwargs)
    local = slice_full(full, this._spec.layout).clone()
    return wrap(cls, local, this._spec.cast(local.dtype))


def _random_canvas(this: Any) -> torch.Tensor:
    local: torch.Tensor = this._local_tensor
    return torch.empty(this._spec.layout.shape, dtype=local.dtype, device=local.device)


def _check_draws_from_numbers(op: OpOverload, args: Sequence[Any]) -> None:
    if any(isinstance(value, torch.Tensor) for value in args):
        raise UsageError(
            f"{op} draws random numbers that depend on another tensor",
            fix="draw on full_tensor(), then copy_() the result into the parameter",
        )


# -- norms and the gradient scaler


def _foreach_norm(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    tensors = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    ragged = [tensor for tensor in tensors if type(tensor) is cls]
    if len(ragged) == len(tensors):
        return _norms(ragged, order, dtype)
    others = iter(op([tensor for tensor in tensors if type(tensor) is not cls], order, dtype=dtype))
    norms = iter(_norms(ragged, order, dtype))
    return [next(norms) if type(tensor) is cls else next(others) for tensor in tensors]


def _vector_norm(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    this, order, dims, keepdim = (*args, *(2, None, False)[len(args) - 1 :])[:4]
    if type(this) is not cls or dims is not None or keepdim:
        return gather_and_run(cls, op, args, kwargs)
    return _norms([this], order, kwargs.get("dtype"))[0]


def _norms(tensors: Sequence[Any], order: float, dtype: torch.dtype | None) -> list[DTensor]:
    """Return the norm of each tensor, replicated. Collective: one all-reduce for all tensors of one group.

    Within a piece low precision is accumulated in fp32; over pieces everything is in fp64.
    """
    groups: list[tuple[RaggedLayout, list[int]]] = []
    for index, tensor in enumerate(tensors):
        layout: RaggedLayout = tensor._spec.layout
        for known, members in groups:
            if layout.mesh_dim == known.mesh_dim and (layout.mesh is known.mesh or layout.mesh == known.mesh):
                members.append(index)
                break
        else:
            groups.append((layout, [index]))
    found: list[Any] = [None] * len(tensors)
    for layout, members in groups:
        whole = _norms_of_group(layout, [tensors[index] for index in members], order, dtype)
        dtypes = [dtype or _real_of(tensors[index]._spec.dtype) for index in members]
        kinds = {kind: whole.to(kind).unbind() for kind in set(dtypes)}
        specs = {kind: replicated_spec(layout.mesh, scalars[0]) for kind, scalars in kinds.items()}
        for position, (index, kind) in enumerate(zip(members, dtypes)):
            found[index] = dtensor_new(DTensor, kinds[kind][position], specs[kind], requires_grad=False)
    return found


def _norms_of_group(
    layout: RaggedLayout, tensors: Sequence[Any], order: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return the norms [len(tensors)] in fp64."""
    device = tensors[0]._local_tensor.device
    owned = [index for index, tensor in enumerate(tensors) if tensor._spec.layout.lo < tensor._spec.layout.hi]
    pieces = [tensors[index]._local_tensor for index in owned]
    if dtype is None and any(piece.dtype in (torch.bfloat16, torch.float16) for piece in pieces):
        dtype = torch.float32
    is_extreme, sign = math.isinf(order), -1.0 if order < 0 else 1.0
    identity = 0.0 if sign > 0 or not is_extreme else -math.inf
    summands = torch.full((len(tensors),), identity, dtype=torch.float64, device=device)
    if pieces:
        terms = torch.stack(foreach_norm(pieces, order, dtype=dtype)).double()
        terms = terms * sign if is_extreme else terms if order in (0, 1) else terms.pow(order)
        if len(owned) == len(tensors):
            summands = terms
        else:
            summands[torch.tensor(owned, device=device)] = terms
    if not is_extreme:
        total = _all_reduce(summands, layout, dist.ReduceOp.SUM)
        return total if order in (0, 1) else total.pow(1.0 / order)
    # A maximum over ranks need not propagate NaN: send along who saw one.
    is_nan = summands.isnan()
    both = torch.stack([summands.where(~is_nan, identity), is_nan.double()])
    extreme, saw_nan = _all_reduce(both, layout, dist.ReduceOp.MAX).unbind()
    return (extreme * sign).where(saw_nan == 0, math.nan)


def _any_or_all(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Reduce truth values to one; what in-place initialisers ask between draws."""
    this = args[0]
    layout: RaggedLayout = this._spec.layout
    local = op(this._local_tensor)
    reduce_op = dist.ReduceOp.MAX if op is aten.any.default else dist.ReduceOp.MIN
    return replicate(_all_reduce(local.to(torch.uint8), layout, reduce_op).to(local.dtype), layout)


def _all_reduce(tensor: torch.Tensor, layout: RaggedLayout, reduce_op: Any) -> torch.Tensor:
    if len(layout.bounds) == 2 or tensor.is_meta:
        return tensor
    # Offloaded tensors: the group talks in tensors of the mesh's device only.
    moved = tensor.to(layout.mesh.device_type)
    dist.all_reduce(moved, op=reduce_op, group=layout.group)
    return moved.to(tensor.device)


def _real_of(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _unscale(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Unscale gradients in place and tell every rank whether any rank found an inf or NaN."""
    grads, found_inf, inv_scale = args
    layouts = [grad._spec.layout for grad in grads if type(grad) is cls]
    locals_ = [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads]
    found, scale = (t._local_tensor if isinstance(t, DTensor) else t for t in (found_inf, inv_scale))
    locals_ = [local for local in locals_ if local.numel()]
    if locals_:
        op(locals_, found, scale)
    found.copy_(_all_reduce(found.clone(), layouts[0], dist.ReduceOp.MAX))


_SPECIAL: dict[OpOverload, Callable[..., Any]] = {
    aten.copy_.default: copy_in_place,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.expand.default: _view,
    aten.is_same_size.default: _has_same_size,
    aten.is_pinned.default: _local_property,
    aten.record_stream.default: _local_property,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.any.default: _any_or_all,
    aten.all.default: _any_or_all,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
