"""Checks before a root runs.

A tensor has no values if it is on the meta device, or in memory that ``to_empty`` made and nothing has filled since.
Modules that an annotation ignores are not checked. A frozen parameter may be added after the annotation: every rank
holds it whole.
"""

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import CellType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn

import _traversal_utils
from composable.annotation.states import take_over_optimizers
from composable.comm import Grid, ModelRanks, Ranks, compare_in_each
from composable.engine import Handle, attach, digest_of
from composable.errors import ConfigError, UsageError
from composable.ground.frames import is_functional_call
from composable.ground.names import join_fqn, list_text
from composable.ground.ownership import (
    CHANGES,
    check_added,
    check_callers,
    is_left_alone,
    is_managed,
    watch_registrations,
)
from composable.ground.torch_hooks import Contents, values_held_by
from composable.ground.torch_private import optimizers_in_backward
from composable.ground.unfilled import META_FIX, is_unfilled
from composable.planning import managed_modules, name_modules


class AnnotatedState(Protocol):
    """The attributes of an annotation's state that the checks read."""

    @property
    def modules(self) -> tuple[nn.Module, ...]: ...

    ignored_modules: frozenset[nn.Module]
    ignored_slots: set[tuple[weakref.ref[nn.Module], str]]
    grid: Grid
    _handles: list[Handle]


@torch.no_grad()
def check_values(
    states: Sequence[AnnotatedState], names: Mapping[nn.Module, str], models: Mapping[Ranks, ModelRanks]
) -> None:
    """Raise on every rank unless all that ``states`` manage has values, and copies of shards are equal. Collective.

    ``models`` has, for the ranks of each handle, the same ranks with those of tensor parallelism.

    Raises:
        UsageError: Some have no values; it has their FQNs.
        DesyncError: Copies differ; it has the first parameter in which they do.
    """
    failure: UsageError | None = None
    try:
        _check_filled(states, names)
    except UsageError as error:
        failure = error
    lines: dict[Ranks, list[str]] = {}
    for handle in [handle for state in states for handle in state._handles]:
        copies = handle.grid.replicas
        if copies is not None and copies.size > 1:
            has_values = handle.buffers[0].routes.carries_values
            named = [(one, f"parameter {handle.from_root(one.fqn)!r} {list(one.shape)}") for one in handle.params]
            own = [f"{name} has digest {has_values and digest_of(param.local)}" for param, name in named]
            lines.setdefault(copies, []).extend(own)
    for everyone in [state.grid.everyone for state in states]:
        lines.setdefault(everyone, [])
        if everyone in models:
            lines.setdefault(models[everyone].everyone, [])
    compare_in_each(
        lines,
        failure,
        what="ranks that hold copies of the same shards hold different values, and would never become equal",
        fix="call fully_shard(..., sync_module_states=True); or give all ranks the same seed, torch.manual_seed(0), "
        "before the model is built or initialised; or load the same values on all ranks",
    )


def _check_filled(states: Sequence[AnnotatedState], names: Mapping[nn.Module, str]) -> None:
    unfilled = [
        _name_in(names, *owner)
        for state in states
        for handle in state._handles
        for flat in handle.buffers
        for param in flat.params
        if flat.is_new and is_unfilled(param.local)
        for owner in param.owners[:1]
    ]
    unfilled += [_name_in(names, *slot) for slot, buffer in _buffers_of(states) if is_unfilled(buffer)]
    if unfilled:
        raise UsageError(
            "to_empty() made room for parameters or buffers, and nothing has filled it",
            at=list_text(unfilled),
            fix="initialise or load them; a buffer that __init__ computes has to be computed again, and assigned",
        )
    for flat in (flat for state in states for handle in state._handles for flat in handle.buffers):
        flat.is_new = False


def _buffers_of(states: Sequence[AnnotatedState]) -> Iterator[tuple[tuple[nn.Module, str], torch.Tensor]]:
    for state in states:
        for module in managed_modules(state.modules, state.ignored_modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (module, name), buffer


def check_on_device(states: Sequence[AnnotatedState], names: Mapping[nn.Module, str]) -> None:
    """Raise ``UsageError`` if a parameter or buffer that ``states`` manage is on the meta device on this rank."""
    handles = [handle for state in states for handle in state._handles]
    owners = [param.owners[:1] for handle in handles for param in handle.params if param.ragged.is_meta]
    params = [_name_in(names, *owner) for first in owners for owner in first]
    buffers = [_name_in(names, *slot) for slot, buffer in _buffers_of(states) if buffer.is_meta]
    if params or buffers:
        kinds = [kind for kind, found in (("parameters", params), ("buffers", buffers)) if found]
        raise UsageError(
            f"{' and '.join(kinds)} are still on the meta device", at=list_text(params + buffers), fix=META_FIX
        )


def _name_in(names: Mapping[nn.Module, str], module: nn.Module, name: str) -> str:
    return join_fqn(names.get(module, ""), name)


class Additions:
    """Checks a module and all below it for added parameters, when something there has changed. The module owns it."""

    __slots__ = ("_look",)

    def __init__(self) -> None:
        # The tree and the counts, the contents, and the added parameters, which are frozen.
        self._look: tuple[object, Contents | None, list[nn.Parameter]] = None, None, []

    def __deepcopy__(self, memo: object) -> "Additions":
        return Additions()

    def check(self, module: nn.Module, tree: Any) -> None:
        """Raise if ``module``, whose forward begins, has parameters that no annotation manages or ignores.

        It is the outermost fully sharded module that runs, in the tree with the root ``tree``. Raises ``UsageError``,
        also if two things average gradients, or an optimizer in backward has a communication hook.
        """
        counts = (tree, CHANGES.registrations, len(optimizers_in_backward()))
        seen, contents, frozen = self._look
        is_as_before = seen == counts and contents is not None and not contents.have_changed()
        if is_as_before and not (frozen and any(param.requires_grad for param in frozen)):
            return
        if is_functional_call():
            return  # Parameters that are lent for one call were not added.
        check_callers()
        states: Collection[AnnotatedState] = tree.states
        for state in states:
            for handle in state._handles:
                attach(handle)  # A tensor assigned in the place of a sharded parameter is a value for it.
                take_over_optimizers(handle)
        added = dict(_unmanaged(module, states, is_left=False))
        check_added("fully_shard", added.items(), _unmanaged(module, states, is_left=True))
        modules = list(_traversal_utils._get_modules(module))
        watch_registrations(modules)
        counts = (*counts[:2], len(optimizers_in_backward()))
        self._look = counts, Contents(modules, dict.keys, owner=module), list(added.values())


def _unmanaged(
    root: nn.Module, states: Collection[AnnotatedState], *, is_left: bool
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters below ``root`` that no annotation manages or ignores; arguments as ``unmanaged_params``."""
    ignored = {below for state in states for module in state.ignored_modules for below in module.modules()}
    slots = {slot for state in states for slot in state.ignored_slots}
    names = name_modules([root])
    entered = dict.fromkeys(module for module in _traversal_utils._get_modules(root) if module not in ignored)
    left = {id(param) for module in names if module not in entered for param in module._parameters.values()}
    for module in entered:
        for name, param in module._parameters.items() if is_left_alone(module) is is_left else ():
            is_known = param is None or id(param) in left or (weakref.ref(module), name) in slots
            if param is not None and not is_known and not is_managed(param):
                yield join_fqn(names[module], name), param


# -- memory of parameters that something else looks into

_CUT = "_composable_cut"  # On a storage: names and places of trained parameters in it that an annotation has replaced.
_Place = tuple[str, tuple[int, ...], tuple[int, ...], int, int]


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a plain tensor; ``None``: it has none of its own."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    return tensor.untyped_storage() if is_plain and tensor.numel() else None


def _place_of(fqn: str, tensor: torch.Tensor) -> _Place:
    return fqn, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.element_size()


def _bytes_of(place: _Place) -> tuple[int, int]:
    _, shape, stride, offset, itemsize = place
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset * itemsize, (last + 1) * itemsize


def _overlap(first: _Place, second: _Place) -> bool:
    (start, stop), (other_start, other_stop) = _bytes_of(first), _bytes_of(second)
    if start >= other_stop or other_start >= stop or first[4] != second[4]:
        return start < other_stop and other_start < stop
    # Columns of one table, say, have no element in common.
    marks = torch.zeros(max(stop, other_stop) // first[4], dtype=torch.bool)
    marks.as_strided(*first[1:4]).fill_(True)
    return bool(marks.as_strided(*second[1:4]).any())


def check_own_memory(params: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse trained parameters, of any shapes, in the memory of another one; raises ``ConfigError``."""
    found: dict[int, list[tuple[_Place, bool]]] = {}
    for fqn, param in params:
        storage = _storage_of(param)
        if storage is not None:
            known = found.setdefault(storage.data_ptr(), [(one, True) for one in getattr(storage, _CUT, ())])
            known.append((_place_of(fqn, param), param.requires_grad))
    for known in found.values():
        known.sort(key=lambda one: _bytes_of(one[0]))
        for (first, is_trained), (second, is_other_trained) in pairwise(known):
            if (is_trained or is_other_trained) and _overlap(first, second):
                raise ConfigError(
                    "two parameters lie in one memory, and as shards they would drift apart",
                    at=f"parameter {list_text([first[0], second[0]])}",
                    fix="tie them, by one Parameter in both places; or give one of them memory of its own: "
                    "param.data = param.data.clone()",
                )


def mark_memory(param: nn.Parameter, fqn: str) -> None:
    """Note in the memory of a trained parameter, of any shape, that an annotation has replaced it."""
    storage = _storage_of(param) if param.requires_grad else None
    if storage is not None:
        setattr(storage, _CUT, [*getattr(storage, _CUT, ()), _place_of(fqn, param)])


def check_views(roots: Sequence[nn.Module]) -> None:
    """Refuse buffers and attributes, of any shapes, that are views of parameters from before the annotation.

    For the end of a first forward: what a module computes anew in each forward has been replaced by then. Raises
    ``UsageError``.
    """
    for module, fqn in name_modules(roots).items():
        values = {name: one for name, one in vars(module).items() if name not in _TORCHS}
        values.update(module._buffers.items())  # of a scripted module no dict
        for name, value in values.items():
            for tensor in _tensors_kept_in(value):
                storage = None if f"{name}_orig" in module._parameters else _storage_of(tensor)
                for place in getattr(storage, _CUT, ()):
                    if _overlap(place, _place_of("", tensor)):
                        raise UsageError(
                            f"{name!r} is a view of a parameter from before fully_shard, and keeps its first values",
                            at=f"module {fqn!r}, parameter {place[0]!r}",
                            fix="take the view in forward, or give it memory of its own before fully_shard: clone()",
                        )


# Torch's own attributes; it fills those of recurrent layers anew.
_TORCHS = frozenset({"_parameters", "_modules", "_buffers", "_flat_weights"})


def _tensors_kept_in(value: object) -> Iterator[torch.Tensor]:
    """Yield tensors in containers, partial functions and closures; not those in other objects, which may be large."""
    stack, seen = [value], set[int]()
    while stack:
        one = stack.pop()
        if isinstance(one, torch.Tensor):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, (dict, list, tuple, set, deque)):
                stack += values_held_by(one)
            elif isinstance(one, partial):
                stack += [one.func, *one.args, *one.keywords.values()]
            elif isinstance(one, FunctionType):
                stack += [cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY_CELL]


_EMPTY_CELL = CellType()
