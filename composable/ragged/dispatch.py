"""Which rule each aten operation follows on ragged tensors.

Chosen once per operation, then found by one dict lookup. Element-wise operations run on the
local pieces; norms reduce locally and add one all-reduce (``ragged_norms.py``); random fills draw the full tensor,
so that one seed gives one model at any world size; views that change nothing alias; all else
gathers (``ragged_gather.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from composable.errors import UsageError
from composable.ragged.elementwise import (
    copy_in_place,
    foreach,
    foreach_by_scalar,
    foreach_in_place,
    idle_in_place,
    masked_put_in_place,
    pointwise,
    pointwise_in_place,
    pointwise_out,
    zero_in_place,
    zero_list,
)
from composable.ragged.fallback import Rule, gather_and_run, replicate, wrap, written
from composable.ragged.norms import any_or_all, norm_of_list, unscale, vector_norm
from composable.ragged.spec import RaggedSpec, ragged_spec, slice_full
from composable.torch_private import OpOverload

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
    chosen = _choose(op)
    is_in_place = bool(op._schema.arguments) and op._schema.arguments[0].name in written(op)
    rule = RULES[op] = partial(_noted, chosen) if is_in_place else chosen
    return rule


def _noted(rule: Rule, cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let the version of a local tensor, which others share memory with, count what was written by its ragged one."""
    result = rule(cls, op, args, kwargs)
    changed = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
    increment_version([one._local_tensor for one in changed if type(one) is cls])
    return result


def _choose(op: OpOverload) -> Rule:
    if op.namespace != "aten":
        # Such as `prims.fma`, which torch.compile makes of `addcmul`.
        return pointwise if torch.Tag.pointwise in op.tags and not written(op) else gather_and_run
    name = op._schema.name.removeprefix("aten::")
    changed = written(op)
    first = op._schema.arguments[0].name if op._schema.arguments else ""
    is_in_place = changed == [first]
    if name.startswith("_fused_"):
        if first not in changed or "List" not in str(op._schema.arguments[0].type):
            return gather_and_run
        names = [argument.name for argument in op._schema.arguments]
        return partial(foreach_in_place, plain_list=names.index("state_steps") if "state_steps" in names else -1)
    if op in _SPECIAL:
        return _SPECIAL[op]
    if op in _BY_TENSOR:
        return partial(foreach_by_scalar, _BY_TENSOR[op])
    if name.startswith("_foreach_"):
        if name == "_foreach_norm" and not changed:
            return norm_of_list
        if name.removeprefix("_foreach_").rstrip("_") not in _FOREACH_ELEMENTWISE or (changed and not is_in_place):
            return gather_and_run
        return foreach_in_place if is_in_place else foreach
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
    if this._spec.layout.order and kwargs.get("memory_format", torch.preserve_format) != torch.preserve_format:
        return gather_and_run(cls, op, args, kwargs)
    # The whole has its strides for life, whatever memory format was asked for.
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    local = op(this._local_tensor, *args[1:], **kwargs)
    return wrap(cls, local, this._spec.cast(local.dtype))


def _new(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    this, size = args[0], torch.Size(args[1])
    spec: RaggedSpec = this._spec
    layout = spec.layout
    if size.numel() != layout.shape.numel() or (size != layout.shape and layout.splits):
        return replicate(op(this._local_tensor, size, *args[2:], **kwargs), layout)
    if size != layout.shape:
        # As many elements in another shape can be cut at the same places.
        spec = ragged_spec(layout.mesh, size, spec.dtype, layout.bounds, mesh_dim=layout.mesh_dim)
    local = op(this._local_tensor, spec.layout.local_shape, *args[2:], **kwargs)
    return wrap(cls, local, spec.cast(local.dtype))


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
        fix="work on a plain tensor (an initialiser: on torch.empty(parameter.shape)), "
        "then, under torch.no_grad(), parameter.copy_(plain)",
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
    canvas: torch.Tensor = this._spec.layout.empty_full(local.dtype, local.device)
    return canvas


def _check_draws_from_numbers(op: OpOverload, args: Sequence[Any]) -> None:
    if any(isinstance(value, torch.Tensor) for value in args):
        raise UsageError(
            f"{op} draws random numbers that depend on another tensor",
            fix="draw on full_tensor(), then copy_() the result into the parameter",
        )


_SPECIAL: dict[OpOverload, Callable[..., Any]] = {
    aten.copy_.default: copy_in_place,
    aten.zero_.default: zero_in_place,
    aten._foreach_zero_.default: zero_list,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.expand.default: _view,
    aten.is_same_size.default: _has_same_size,
    aten.is_pinned.default: _local_property,
    aten.record_stream.default: _local_property,
    aten.linalg_vector_norm.default: vector_norm,
    aten.any.default: any_or_all,
    aten.all.default: any_or_all,
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
    aten.index_put_.default: masked_put_in_place,
}
