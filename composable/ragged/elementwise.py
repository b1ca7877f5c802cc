"""Element-wise operations on ragged tensors: the same operation on the local pieces.

Whether an operation runs locally depends only on what all ranks know (types, shapes,
bounds), never on the length of a piece: else one rank would enter a gather alone.

Lists (``_foreach_*``, ``_fused_*``) are the optimizer's hot path. They are unwrapped whole,
layouts are compared by the identity of their specs, and elements of which this rank owns
nothing are dropped from the call.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composable.ragged.fallback import GatheredView, gather_and_run, is_replicated, wrap, written
from composable.ragged.fallback_log import count_fallback
from composable.ragged.lockstep import confirm
from composable.ragged.spec import RaggedLayout, RaggedSpec, gather_full, slice_full
from composable.torch_private import OpOverload, dtensor_new, tree_leaves

__all__ = [
    "copy_in_place",
    "foreach",
    "foreach_by_scalar",
    "foreach_in_place",
    "idle_in_place",
    "masked_put_in_place",
    "pointwise",
    "pointwise_in_place",
    "pointwise_out",
    "zero_in_place",
    "zero_list",
]

_NUMBERS = frozenset({float, int, bool, type(None)})


def _piece(value: torch.Tensor, layout: RaggedLayout) -> torch.Tensor | None:
    """Return the part of a replicated or plain operand that meets this rank's piece; ``None``: there is none."""
    full = value
    if isinstance(value, DTensor):
        if not is_replicated(value, layout):
            return None
        if isinstance(value, GatheredView):
            value.check_fresh()
        full = value._local_tensor
    if full.dim() == 0:
        return full
    if full.dim() > len(layout.shape):
        return None
    if full.shape != layout.shape:
        if any(size not in (1, whole) for size, whole in zip(reversed(full.shape), reversed(layout.shape))):
            return None
        full = full.expand(layout.shape)
    return slice_full(full, layout)


def _local_operands(cls: Any, values: Sequence[Any], spec: RaggedSpec) -> list[Any] | None:
    """Return what meets the local piece of ``spec``, for every operand; ``None`` if one has no such part."""
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
            # Scalars of two dtypes promote on equal terms; the local piece of a scalar is 1-D and would win.
            return None
        else:
            operand = _piece(value, spec.layout)
            if operand is None:
                return None
            found.append(operand)
    return found


def pointwise(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that returns new tensors."""
    spec: Any = None
    for value in args:
        if type(value) is cls:
            spec = value._spec
            break
    local_args = None if spec is None else _local_operands(cls, args, spec)
    if local_args is None:
        return gather_and_run(cls, op, args, kwargs)
    result = op(*local_args, **kwargs)
    if isinstance(result, torch.Tensor):
        return dtensor_new(cls, result, spec.cast(result.dtype), requires_grad=False)
    return tuple(wrap(cls, part, spec.cast(part.dtype)) for part in result)


def pointwise_in_place(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that changes and returns its first argument."""
    this = args[0]
    local_args = _local_operands(cls, args, this._spec) if type(this) is cls else None
    if local_args is None:
        return gather_and_run(cls, op, args, kwargs)
    op(*local_args, **kwargs)
    return this


def idle_in_place(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As ``pointwise_in_place``, for arithmetic that floats cannot refuse: without elements, without work."""
    this = args[0]
    local_args = _local_operands(cls, args, this._spec) if type(this) is cls else None
    if local_args is None:
        return gather_and_run(cls, op, args, kwargs)
    if not this._spec.is_idle:
        op(*local_args, **kwargs)
    return this


def pointwise_out(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that writes to ``out=``."""
    out: Any = kwargs["out"]
    local_args = _local_operands(cls, args, out._spec) if type(out) is cls else None
    if local_args is None:
        return gather_and_run(cls, op, args, kwargs)
    op(*local_args, **{**kwargs, "out": out._local_tensor})
    return out


def copy_in_place(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Copy into a ragged tensor; from one of another layout only the source has to be whole."""
    this: Any = args[0]
    source: Any = args[1]
    if type(this) is cls and type(source) is cls and not this._spec.layout.matches(source._spec.layout):
        count_fallback(str(op), source._spec.layout)
        confirm(str(op), [source])
        args = (this, gather_full(source._local_tensor, source._spec.layout), *args[2:])
    return pointwise_in_place(cls, op, args, kwargs)


def masked_put_in_place(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Put one number where a mask of the same cut is true; other kinds of index gather."""
    this, indices, value, *accumulate = args
    is_masked = len(indices) == 1 and type(this) is cls and type(indices[0]) is cls and indices[0].dtype == torch.bool
    if is_masked and isinstance(value, torch.Tensor) and value.dim() == 0 and not any(accumulate) and not kwargs:
        operands = _local_operands(cls, [this, indices[0], value], this._spec)
        if operands is not None:
            local, mask, number = operands
            op(local, [mask], number)
            return this
    return gather_and_run(cls, op, args, kwargs)


class _Selection:
    """Which elements of a list have local work."""

    __slots__ = ("count", "dtype", "is_float", "pick", "specs")

    def __init__(self, specs: list[RaggedSpec]) -> None:
        kept = [index for index, spec in enumerate(specs) if not spec.is_idle]
        self.specs = specs
        self.count = len(kept)
        self.dtype = specs[0].dtype if len({spec.dtype for spec in specs}) == 1 else None
        self.is_float = all(spec.dtype.is_floating_point for spec in specs)
        self.pick: Callable[[Any], Sequence[Any]]
        if len(kept) == len(specs):
            self.pick = _all_of
        elif len(kept) > 1:
            self.pick = itemgetter(*kept)
        else:
            self.pick = itemgetter(slice(kept[0], kept[0] + 1) if kept else slice(0))


class _Selections:
    """Remembers the selections of the lists seen last.

    An optimizer passes the same few lists of specs several times a step. Comparing two lists of
    identical objects costs 1.4 ns an element, building a selection 60.
    """

    _CAPACITY = 64

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], _Selection] = {}

    def of(self, specs: list[RaggedSpec]) -> _Selection:
        key = (id(specs[0]), len(specs))
        selection = self._found.get(key)
        if selection is None or selection.specs != specs:
            if len(self._found) >= self._CAPACITY:
                self._found.clear()
            selection = self._found[key] = _Selection(specs)
        return selection


_SELECTIONS = _Selections()


def _all_of(values: Sequence[Any]) -> Sequence[Any]:
    return values


def _local_lists(
    cls: Any, args: Sequence[Any], selection: _Selection, *, same_dtype: bool, plain_list: int = -1
) -> list[Any] | None:
    """Return the arguments after the first, lists cut to what has local work; ``None``: take elements one by one.

    Args:
        cls: The tensor subclass.
        args: All arguments.
        selection: Of the first argument.
        same_dtype: Accept only operands that keep the first argument's dtype.
        plain_list: Position of a list of plain tensors that goes along with the elements.

    Raises:
        AttributeError: A list holds tensors that are not DTensors; take elements one by one, too.
    """
    specs, pick = selection.specs, selection.pick
    found: list[Any] = []
    for position, value in enumerate(args):
        kind = type(value)
        if position == 0:
            continue
        if kind is list or kind is tuple:
            if not value:
                found.append(value)
            elif position == plain_list or not isinstance(value[0], torch.Tensor):
                if same_dtype and any(type(number) is complex for number in value):
                    return None
                found.append(pick(value))
            else:
                others = [tensor._spec for tensor in value]
                if others != specs and (
                    same_dtype
                    or len(others) != len(specs)
                    or not all(other.layout.matches(spec.layout) for other, spec in zip(others, specs))
                ):
                    return None
                found.append([tensor._local_tensor for tensor in pick(value)])
        elif kind in _NUMBERS:
            found.append(value)
        elif isinstance(value, torch.Tensor):
            scalar = _scalar_operand(cls, value, specs[0].layout)
            if scalar is None or (same_dtype and scalar.is_complex()):
                return None
            found.append(scalar)
        elif kind is complex and same_dtype:
            return None
        else:
            found.append(value)
    return found


def _scalar_operand(cls: Any, value: torch.Tensor, layout: RaggedLayout) -> torch.Tensor | None:
    """Return a tensor that is one number for all elements of a list, or ``None``."""
    if type(value) is cls:
        return None
    scalar = value
    if isinstance(value, DTensor):
        if not is_replicated(value, layout):
            return None
        scalar = value._local_tensor
    return scalar if scalar.dim() == 0 else None


def foreach_in_place(
    cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, plain_list: int = -1
) -> None:
    """Run a ``_foreach_*_`` or ``_fused_*_`` operation, whose argument ``plain_list`` holds plain step counters."""
    tensors = args[0]
    try:
        selection = _SELECTIONS.of([tensor._spec for tensor in tensors])
        others = _local_lists(cls, args, selection, same_dtype=False, plain_list=plain_list)
    except AttributeError:
        others = None
    if others is None:
        _one_by_one(cls, op, args, kwargs)
    elif selection.count:
        local = {name: value._local_tensor if isinstance(value, DTensor) else value for name, value in kwargs.items()}
        op([tensor._local_tensor for tensor in selection.pick(tensors)], *others, **local)


def zero_in_place(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Set to zero, and note it on the local piece: a gradient may be one that others wait to be added to."""
    result = idle_in_place(cls, op, args, kwargs)
    _note_zero(cls, args[0])
    return result


def zero_list(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Do the same to a list."""
    foreach_in_place(cls, op, args, kwargs)
    for tensor in args[0]:
        _note_zero(cls, tensor)


def _note_zero(cls: Any, tensor: Any) -> None:
    if type(tensor) is cls:
        tensor._local_tensor._composable_zeroed = True


def foreach_by_scalar(
    by_tensor: OpOverload, cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Run ``_foreach_mul_`` or ``_foreach_div_`` by numbers; by one number on the CPU as ``by_tensor``."""
    tensors, number = args
    if type(number) is list and number and number.count(number[0]) == len(number):
        number = number[0]
    if type(number) is float:
        try:
            selection = _SELECTIONS.of([tensor._spec for tensor in tensors])
        except AttributeError:
            return foreach_in_place(cls, op, args, kwargs)
        if selection.dtype in (torch.float32, torch.float64) and tensors[0].device.type == "cpu":
            if selection.count:
                scalar = torch.tensor(number, dtype=selection.dtype)
                by_tensor([tensor._local_tensor for tensor in selection.pick(tensors)], scalar)
            return None
    return foreach_in_place(cls, op, args, kwargs)


def foreach(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run a ``_foreach_*`` operation that returns new tensors."""
    tensors = args[0]
    try:
        specs: list[RaggedSpec] = [tensor._spec for tensor in tensors]
        selection = _SELECTIONS.of(specs)
        others = _local_lists(cls, args, selection, same_dtype=True)
    except AttributeError:
        others = None
    # Results get the specs of the first argument, so only where the dtype stays.
    if others is None or not selection.is_float or any(type(value) is complex for value in kwargs.values()):
        return _one_by_one(cls, op, args, kwargs)
    new, pick = dtensor_new, selection.pick
    results = op([tensor._local_tensor for tensor in pick(tensors)], *others, **kwargs) if selection.count else []
    if selection.count == len(specs):
        return [new(cls, result, spec, requires_grad=False) for result, spec in zip(results, specs)]
    remaining = iter(results)
    # A result without elements may share the input's local tensor: there is nothing to tell them apart by.
    return [
        new(cls, tensor._local_tensor if spec.is_idle else next(remaining), spec, requires_grad=False)
        for tensor, spec in zip(tensors, specs)
    ]


def _one_by_one(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run a list operation as lists of one: local where the operands allow it, gathered elsewhere."""
    count = len(args[0])
    results: list[Any] = []
    for index in range(count):
        one = [_element(value, index, count) for value in args]
        results += _run_one(cls, op, one, kwargs) or ()
    return results


def _element(value: Any, index: int, count: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [value[index]] if len(value) == count else value
    if type(value) is torch.Tensor and value.dim() == 1 and value.numel() == count:
        return value[index : index + 1]
    return value


def _number_of(value: Any) -> Any:
    if isinstance(value, DTensor) and value.dim() == 0 and all(p.is_replicate() for p in value.placements):
        return value._local_tensor
    return value


def _run_one(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    ragged = [leaf for leaf in tree_leaves(args) if type(leaf) is cls]
    if not ragged:
        # A plain tensor, or one of another mesh, meets a number for the whole list, such as a clipping factor.
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
