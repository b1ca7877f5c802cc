"""The rule of each aten operation.

A rule is chosen once per operation, then found by one dict lookup. Element-wise operations run on the local pieces;
random fills draw the full tensor, so that one seed gives one model at any world size; views of the same shape alias;
norms, truth values and the gradient scaler add one small all-reduce (``norms.py``); the rest gathers (``gather.py``).

Whether an operation runs locally depends only on facts that are equal on all ranks (types, shapes, bounds), never on
the length of a piece: else one rank would enter a gather alone. In list operations (``_foreach_*``, ``_fused_*``) of
optimizers, layouts are compared by the identity of specs, and tensors of which this rank owns nothing are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composable.dtensor.gather import (
    GatheredView,
    Rule,
    count_fallback,
    gather_and_run,
    gather_full,
    has_own_gradient,
    is_replicated,
    note_written,
    replicate,
    wrap,
    written,
)
from composable.dtensor.norms import any_or_all, norm_of_list, unscale, vector_norm
from composable.dtensor.spec import RaggedLayout, RaggedSpec, ragged_spec, slice_full
from composable.errors import UsageError
from composable.ground.torch_private import OpOverload, dtensor_new, tree_leaves

aten = torch.ops.aten

# An unknown list operation gathers: new ones need not be element-wise (`_foreach_mm` is not). torch's tags do not say
# which are: list operations have none, and `max` is tagged for two operands, while `_foreach_max` reduces.
_FOREACH_ELEMENTWISE = frozenset(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor "
    "frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh "
    "sqrt sub tan tanh trunc zero".split()
)
# Element-wise in fact, but not tagged so.
_UNTAGGED_POINTWISE = frozenset("zero_ fill_ masked_fill_ masked_fill where nan_to_num".split())
_LIKE = frozenset("clone zeros_like ones_like empty_like full_like _to_copy _pin_memory".split())
_NEW = frozenset("new_empty new_zeros new_ones new_full".split())
_FORBIDDEN = frozenset("set_ resize_ resize_as_ unsqueeze_ squeeze_ t_ transpose_ as_strided_ swapaxes_".split())
_NUMBERS = frozenset({float, int, bool, type(None)})


@cache
def rule_for(op: OpOverload) -> Rule:
    """Return the rule of an operation, which is chosen once."""
    rule, changed = _choose(op), written(op)
    places = [place for place, argument in enumerate(op._schema.arguments) if argument.name in changed]
    return partial(_noted, rule, () if changed == ["out"] else places) if changed else rule


def _noted(
    rule: Rule, places: Sequence[int], cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run an operation that writes to the arguments at ``places``, or to ``out``, and call ``note_written``."""
    result = rule(cls, op, args, kwargs)
    changed: list[torch.Tensor] = []
    for value in (args[place] for place in places if place < len(args)) if places else (kwargs["out"],):
        several = value if isinstance(value, (list, tuple)) else (value,)
        changed += [one._local_tensor for one in several if type(one) is cls]
    note_written(changed)
    return result


def _choose(op: OpOverload) -> Rule:
    if op.namespace != "aten":
        # For example `prims.fma`, which torch.compile makes of `addcmul`.
        return _pointwise if torch.Tag.pointwise in op.tags and not written(op) else gather_and_run
    name = op._schema.name.removeprefix("aten::")
    changed = written(op)
    first = op._schema.arguments[0].name if op._schema.arguments else ""
    is_in_place = changed == [first]
    if op in _SPECIAL:
        return _SPECIAL[op]
    if name.startswith("_fused_"):
        if first not in changed or "List" not in str(op._schema.arguments[0].type):
            return gather_and_run
        names = [argument.name for argument in op._schema.arguments]
        return partial(_foreach_in_place, plain_list=names.index("state_steps") if "state_steps" in names else -1)
    if name.startswith("_foreach_"):
        if name == "_foreach_norm" and not changed:
            return norm_of_list
        if name.removeprefix("_foreach_").rstrip("_") not in _FOREACH_ELEMENTWISE or (changed and not is_in_place):
            return gather_and_run
        return _foreach_in_place if is_in_place else _foreach
    if name in _FORBIDDEN or torch.Tag.inplace_view in op.tags:
        return _forbidden
    if name in _LIKE and not changed:
        return _like
    if name in _NEW and not changed:
        return _new
    if torch.Tag.nondeterministic_seeded in op.tags:
        return _random if is_in_place or (name.endswith("_like") and not changed) else gather_and_run
    returns = op._schema.returns
    is_pointwise = torch.Tag.pointwise in op.tags or name in _UNTAGGED_POINTWISE
    # Operations with other results reduce, such as `equal`.
    if is_pointwise and returns and all(str(ret.type) == "Tensor" for ret in returns):
        if not changed:
            return _pointwise
        return _pointwise_into if is_in_place or changed == ["out"] else gather_and_run
    return gather_and_run


# -- new tensors of the same cut, views that change nothing, metadata


def _like(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    this = args[0]
    is_reordered = kwargs.get("memory_format", torch.preserve_format) != torch.preserve_format
    if type(this) is not cls or (this._spec.layout.order and is_reordered):
        return gather_and_run(cls, op, args, kwargs)
    # The strides of the whole never change, whatever memory format the caller asks for.
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
        # Another shape with as many elements can be cut at the same places.
        spec = ragged_spec(layout.mesh, size, spec.dtype, layout.bounds, mesh_dim=layout.mesh_dim)
    local = op(this._local_tensor, spec.layout.local_shape, *args[2:], **kwargs)
    return wrap(cls, local, spec.cast(local.dtype))


def _alias(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return wrap(cls, args[0]._local_tensor, args[0]._spec)


def _view(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    sizes, shape = args[1], args[0]._spec.layout.shape
    is_same = len(sizes) == len(shape) and all(size in (-1, whole) for size, whole in zip(sizes, shape))
    return (_alias if is_same else gather_and_run)(cls, op, args, kwargs)


def _has_same_size(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


def _local_property(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return op(args[0]._local_tensor, *args[1:], **kwargs)


def _forbidden(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise UsageError(
        f"{op} would change the shape or storage of a ragged tensor",
        at=f"ragged tensor of shape {list(args[0].shape)}",
        fix="work on a plain tensor (an initialiser: on torch.empty(parameter.shape)), "
        "then, under torch.no_grad(), parameter.copy_(plain); for another shape: unannotate(model) first",
    )


# -- random numbers: this rank's piece of the numbers that one process would draw; all ranks need equal seeds


def _random(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that draws in place, or a new tensor of the same shape."""
    if any(isinstance(value, torch.Tensor) for value in args[1:]):
        raise UsageError(
            f"{op} draws random numbers that depend on another tensor",
            fix="draw on full_tensor(), then copy_() the result into the parameter",
        )
    this, layout = args[0], args[0]._spec.layout
    full = layout.empty_full(this._local_tensor.dtype, this._local_tensor.device)
    drawn = op(full, *args[1:], **{name: value for name, value in kwargs.items() if name != "memory_format"})
    piece = slice_full(drawn, layout)
    if drawn is full:
        this._local_tensor.copy_(piece)
        return this
    return wrap(cls, piece.clone(), this._spec.cast(piece.dtype))


# -- element-wise operations on one tensor


def _piece(value: torch.Tensor, layout: RaggedLayout) -> torch.Tensor | None:
    """Return the part of a replicated or plain operand that belongs to this rank's piece; ``None``: there is none."""
    full = value
    if isinstance(value, DTensor):
        if not is_replicated(value, layout):
            return None
        if isinstance(value, GatheredView):
            value.check_fresh()
        full = value._local_tensor
    if full.dim() == 0:
        return full
    if full.shape != layout.shape:
        pairs = zip(reversed(full.shape), reversed(layout.shape))
        if full.dim() > len(layout.shape) or any(size not in (1, whole) for size, whole in pairs):
            return None
        full = full.expand(layout.shape)
    return slice_full(full, layout)


def _local_operands(cls: Any, values: Sequence[Any], spec: RaggedSpec) -> list[Any] | None:
    """Return the part of each operand that belongs to the piece of ``spec``; ``None``: an operand has no such part."""
    found = []
    for value in values:
        kind = type(value)
        if kind is cls:
            if value._spec is not spec and not value._spec.layout.matches(spec.layout):
                return None
            found.append(value._local_tensor)
        elif kind in _NUMBERS or not isinstance(value, torch.Tensor):
            found.append(value)
        elif not spec.layout.shape and value.dtype != spec.dtype:
            # Scalars of two dtypes promote on equal terms; the local piece of a scalar is 1-D, and its dtype would win.
            return None
        else:
            operand = None if has_own_gradient(value, values) else _piece(value, spec.layout)
            if operand is None:
                return None
            found.append(operand)
    return found


def _pointwise(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    spec: Any = next((value._spec for value in args if type(value) is cls), None)
    local_args = None if spec is None else _local_operands(cls, args, spec)
    if local_args is None:
        return gather_and_run(cls, op, args, kwargs)
    result = op(*local_args, **kwargs)
    if isinstance(result, torch.Tensor):
        return dtensor_new(cls, result, spec.cast(result.dtype), requires_grad=False)
    return tuple(wrap(cls, part, spec.cast(part.dtype)) for part in result)


def _pointwise_into(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that writes to its first argument or to ``out``."""
    target: Any = kwargs.get("out", args[0])
    local_args = _local_operands(cls, args, target._spec) if type(target) is cls else None
    if local_args is None:
        return gather_and_run(cls, op, args, kwargs)
    op(*local_args, **({**kwargs, "out": target._local_tensor} if "out" in kwargs else kwargs))
    return target


def _copy_in_place(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Copy into a ragged tensor; from a tensor of another layout, gather the source only."""
    this, source = args[:2]
    if type(this) is cls and type(source) is cls and not this._spec.layout.matches(source._spec.layout):
        count_fallback(str(op), source._spec.layout)
        args = (this, gather_full(source._local_tensor, source._spec.layout), *args[2:])
    return _pointwise_into(cls, op, args, kwargs)


def _masked_put_in_place(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write one number where a mask of the same cut is true; other kinds of index need a gather."""
    this, indices, value, *accumulate = args
    is_masked = len(indices) == 1 and type(this) is cls and type(indices[0]) is cls and indices[0].dtype == torch.bool
    if is_masked and isinstance(value, torch.Tensor) and value.dim() == 0 and not any(accumulate) and not kwargs:
        operands = _local_operands(cls, [this, indices[0], value], this._spec)
        if operands is not None:
            local, mask, number = operands
            op(local, [mask], number)
            return this
    return gather_and_run(cls, op, args, kwargs)


def _zero_in_place(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Set one tensor or a list to zero, and mark the pieces: this drops a gradient that waits for later ones."""
    is_list = isinstance(args[0], (list, tuple))
    result = (_foreach_in_place if is_list else _pointwise_into)(cls, op, args, kwargs)
    for tensor in args[0] if is_list else args[:1]:
        if type(tensor) is cls:
            tensor._local_tensor._composable_zeroed = True
    return result


# -- element-wise operations on lists


def _local_lists(cls: Any, args: Sequence[Any], *, same_dtype: bool, plain_list: int = -1) -> list[Any] | None:
    """Return the arguments, their lists cut to tensors with local work; ``None``: run the elements one by one.

    ``same_dtype``: accept only operands that keep the first argument's dtype. ``plain_list``: the position of a list
    that has one plain tensor for each element.
    """
    try:
        specs: list[RaggedSpec] = [tensor._spec for tensor in args[0]]
        found: list[Any] = []
        for position, value in enumerate(args):
            if isinstance(value, (list, tuple)) and value:
                is_local = position != plain_list and isinstance(value[0], torch.Tensor)
                if is_local:
                    others = [tensor._spec for tensor in value]
                    if others != specs and (same_dtype or not _all_match(others, specs)):
                        return None
                elif same_dtype and any(type(number) is complex for number in value):
                    return None
                kept = [one for one, spec in zip(value, specs) if not spec.is_idle]
                found.append([tensor._local_tensor for tensor in kept] if is_local else kept)
                continue
            scalar = _number_of(value, specs[0].layout)
            is_tensor = isinstance(scalar, torch.Tensor)
            # The tensor is not one number for all elements.
            if is_tensor and (isinstance(scalar, DTensor) or scalar.dim()):
                return None
            if same_dtype and (scalar.is_complex() if is_tensor else type(scalar) is complex):
                return None
            found.append(scalar)
    except AttributeError:  # A list holds tensors without such specs.
        return None
    return found


def _all_match(specs: Sequence[RaggedSpec], others: Sequence[RaggedSpec]) -> bool:
    pairs = zip(specs, others)
    return len(specs) == len(others) and all(one.layout.matches(other.layout) for one, other in pairs)


def _number_of(value: Any, layout: RaggedLayout | None = None) -> Any:
    """Return the local tensor of a replicated number; return any other value as it is."""
    if isinstance(value, DTensor) and value.dim() == 0 and all(p.is_replicate() for p in value.placements):
        return value._local_tensor if layout is None or is_replicated(value, layout) else value
    return value


def _foreach_in_place(
    cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, plain_list: int = -1
) -> None:
    """Run a ``_foreach_*_`` or ``_fused_*_`` operation, whose argument ``plain_list`` holds plain step counters."""
    local_args = _local_lists(cls, args, same_dtype=False, plain_list=plain_list)
    if local_args is None:
        _one_by_one(cls, op, args, kwargs)
    elif local_args[0]:
        op(*local_args, **{name: getattr(value, "_local_tensor", value) for name, value in kwargs.items()})


def _foreach(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run a ``_foreach_*`` operation that returns new tensors."""
    # Results get the specs of the first argument, which are right only if the dtype stays.
    is_complex = any(type(value) is complex for value in kwargs.values())
    local_args = None if is_complex else _local_lists(cls, args, same_dtype=True)
    if local_args is None or not all(tensor._spec.dtype.is_floating_point for tensor in args[0]):
        return _one_by_one(cls, op, args, kwargs)
    results = iter(op(*local_args, **kwargs) if local_args[0] else ())
    # A result without elements may share the input's local tensor: no operation can show a difference.
    return [
        wrap(cls, tensor._local_tensor if tensor._spec.is_idle else next(results), tensor._spec) for tensor in args[0]
    ]


def _one_by_one(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run a list operation on one element at a time: locally where the operands allow it, else with a gather."""
    count = len(args[0])
    results: list[Any] = []
    for index in range(count):
        results += _run_one(cls, op, [_element(value, index, count) for value in args], kwargs) or ()
    return results


def _element(value: Any, index: int, count: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [value[index]] if len(value) == count else value
    if type(value) is torch.Tensor and value.dim() == 1 and value.numel() == count:
        return value[index : index + 1]
    return value


def _run_one(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    ragged = [leaf for leaf in tree_leaves(args) if type(leaf) is cls]
    if not ragged:
        # A plain tensor, or a tensor of another mesh, with a number for the whole list, such as a clipping factor.
        return op(*(_number_of(value) for value in args), **kwargs)
    if written(op) and type(args[0][0]) is not cls:
        return gather_and_run(cls, op, args, kwargs)
    spec: RaggedSpec = ragged[0]._spec
    local_args: list[Any] = []
    for argument, value in zip(op._schema.arguments, args):
        # Step counters and a tensor of scalars belong to the list, not to the elements' layout.
        if argument.name in ("state_steps", "scalars") or not isinstance(value, (list, tuple, torch.Tensor)):
            local_args.append(value)
            continue
        local = _local_operands(cls, [value] if isinstance(value, torch.Tensor) else value, spec)
        if local is None:
            return gather_and_run(cls, op, args, kwargs)
        local_args.append(local[0] if isinstance(value, torch.Tensor) else local)
    results = op(*local_args, **kwargs)
    return None if results is None else [wrap(cls, part, spec.cast(part.dtype)) for part in results]


_SPECIAL: dict[OpOverload, Callable[..., Any]] = {
    aten.copy_.default: _copy_in_place,
    aten.zero_.default: _zero_in_place,
    aten._foreach_zero_.default: _zero_in_place,
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
    aten.index_put_.default: _masked_put_in_place,
}
