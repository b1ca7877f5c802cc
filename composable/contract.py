"""Which APIs annotate a module, and where their state is kept.

``@contract(state_cls=...)`` turns ``fn(module_or_modules, ...)`` into an annotation. The
decorator makes one state object per call, enters it in a registry on the module before
``fn`` runs (so ``fn`` reads it with ``fn.state(module)``), and checks afterwards that ``fn``
changed no FQN. An API is known by its function's name; several may annotate one module.

The registry is one entry in ``module.__dict__``: it follows the object when its class is
swapped, is no parameter, buffer or submodule, and never shows in a state dict. A deep copy
of a module gets a deep copy of its states, so that two models never share one by accident;
a state that cannot be copied says so in its own ``__deepcopy__``.

A module may also be a *member* of an annotation: managed by the state of an ancestor whose
policy picked it, without being annotated itself.
"""

import functools
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast, overload

import torch
from torch import nn

from composable.errors import ConfigError, located, place_of_rank

__all__ = [
    "SUCCESSOR",
    "Annotation",
    "AnnotationFn",
    "contract",
    "describe_module",
    "get_registry",
    "managing_state",
    "promote_member",
    "remove_annotation",
    "remove_member",
    "set_member",
]

_P = ParamSpec("_P")
_State = TypeVar("_State")
_State_co = TypeVar("_State_co", covariant=True)
_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])

_RECORD_KEY = "_composable_record"
_MAX_NAMES_SHOWN = 10
# On a meta buffer of which an annotation has taken other names: the tensor with memory that took its place there.
SUCCESSOR = "_composable_successor"


@dataclass(frozen=True)
class Annotation:
    """One API on one module.

    Attributes:
        name: The API, by its function's name.
        state: What it remembers; one object for all modules of one call.
        incompatible: APIs that may not annotate the same module.
    """

    name: str
    state: object
    incompatible: frozenset[str]


class AnnotationFn(Protocol[_P, _State_co]):
    """What ``@contract`` makes of a function."""

    __name__: str

    def __call__(self, module: _Modules, *args: _P.args, **kwargs: _P.kwargs) -> _Modules:
        """Annotate ``module``, or every module of a sequence, and return it."""
        ...

    def state(self, module: nn.Module) -> _State_co | None:
        """Return the state of this API on ``module``, or ``None``; leaves no trace on it."""
        ...

    def member_state(self, module: nn.Module) -> _State_co | None:
        """Return the state that manages ``module``: its own, or that of the annotation it is a member of."""
        ...


@dataclass
class _Record:
    annotations: dict[str, Annotation] = field(default_factory=dict)
    members: dict[str, object] = field(default_factory=dict)


def get_registry(module: nn.Module) -> Mapping[str, Annotation]:
    """Return the APIs on ``module`` in the order they were applied; a read-only view."""
    record = _record_of(module)
    return MappingProxyType(record.annotations if record is not None else {})


def managing_state(module: nn.Module, api_name: str) -> object | None:
    """Return the state of ``api_name`` that manages ``module``: its own, or that of which it is a member."""
    record = _record_of(module)
    if record is None:
        return None
    own = record.annotations.get(api_name)
    return own.state if own is not None else record.members.get(api_name)


def set_member(module: nn.Module, api_name: str, state: object) -> None:
    """Note that ``state``, of an annotation further up, manages ``module``.

    Raises:
        ConfigError: ``module`` carries this API or one incompatible with it, or is a member of another state.
    """
    record = _record_of(module)
    if record is not None:
        for annotation in record.annotations.values():
            if annotation.name == api_name or api_name in annotation.incompatible:
                raise ConfigError(
                    f"{api_name} cannot manage this module: {annotation.name} is on it", at=describe_module(module)
                )
        if record.members.get(api_name, state) is not state:
            raise ConfigError(
                f"{api_name} already manages this module for another ancestor", at=describe_module(module)
            )
    _record_for_write(module).members[api_name] = state


def remove_member(module: nn.Module, api_name: str) -> None:
    """Forget that ``module`` is a member; no error if it is not one."""
    record = _record_of(module)
    if record is not None:
        record.members.pop(api_name, None)
        _drop_if_empty(module, record)


def promote_member(module: nn.Module, annotation: Annotation) -> None:
    """Make a member of ``annotation.state`` a module that carries the annotation itself."""
    remove_member(module, annotation.name)
    _record_for_write(module).annotations[annotation.name] = annotation


def remove_annotation(module: nn.Module, api_name: str) -> None:
    """Take ``api_name`` off ``module``'s registry; what the API did to the module is its own to undo."""
    record = _record_of(module)
    if record is not None:
        record.annotations.pop(api_name, None)
        _drop_if_empty(module, record)


@overload
def contract(
    *, incompatible: Iterable[str] = ()
) -> Callable[[Callable[Concatenate[Any, _P], object]], AnnotationFn[_P, SimpleNamespace]]: ...


@overload
def contract(
    state_cls: Callable[[], _State], *, incompatible: Iterable[str] = ()
) -> Callable[[Callable[Concatenate[Any, _P], object]], AnnotationFn[_P, _State]]: ...


def contract(
    state_cls: Callable[[], object] = SimpleNamespace, *, incompatible: Iterable[str] = ()
) -> Callable[[Callable[Concatenate[Any, _P], object]], AnnotationFn[_P, Any]]:
    """Make a function of a module, or of a sequence of modules, an annotation.

    Args:
        state_cls: Called with no arguments, once per call of the annotation.
        incompatible: Names of APIs that may not be on the same module, before or after.

    The annotation raises ``ConfigError``, and leaves no registry entry, when the module
    carries this API or an incompatible one, or when the function changed an FQN or
    returned another module. What else a failing function did is its own to undo.
    """
    if isinstance(incompatible, str):
        raise ConfigError("incompatible is a str", fix=f"pass the names in a tuple: ({incompatible!r},)")
    rivals = frozenset(incompatible)

    def decorate(fn: Callable[Concatenate[Any, _P], object]) -> AnnotationFn[_P, Any]:
        name = fn.__name__

        @functools.wraps(fn)
        def annotate(module: Any, *args: _P.args, **kwargs: _P.kwargs) -> Any:
            with located(place_of_rank()):
                return annotate_on_rank(module, *args, **kwargs)

        def annotate_on_rank(module: Any, *args: _P.args, **kwargs: _P.kwargs) -> Any:
            target = module if isinstance(module, nn.Module) else _as_sequence(name, module)
            modules = [target] if isinstance(target, nn.Module) else list(target)
            _check_modules(name, rivals, modules)
            annotation = Annotation(name, state_cls(), rivals)
            before = [_Snapshot.of(one) for one in modules]
            for one in modules:
                _record_for_write(one).annotations[name] = annotation
            try:
                result = fn(target, *args, **kwargs)
                _check_result(name, modules, result)
                for one, old in zip(modules, before, strict=True):
                    _check_fqns(name, one, old, _Snapshot.of(one))
            except BaseException:
                _forget(modules, annotation)
                raise
            return target

        def state(module: nn.Module) -> object:
            annotation = get_registry(module).get(name)
            return annotation.state if annotation is not None else None

        def member_state(module: nn.Module) -> object:
            return managing_state(module, name)

        annotate.state = state  # type: ignore[attr-defined]  # functions take attributes, their stub has none
        annotate.member_state = member_state  # type: ignore[attr-defined]
        return cast("AnnotationFn[_P, Any]", annotate)

    return decorate


def describe_module(module: nn.Module) -> str:
    """Name ``module`` for an error: its FQN below the outermost module that is alive, and its class.

    A module does not know its parents, so this looks through the live objects: slow, for
    errors only.
    """
    fqn = _find_fqn(module)
    cls = type(module).__name__
    return f"module '{fqn}' ({cls})" if fqn else f"module {cls}"


def _find_fqn(module: nn.Module) -> str:
    # By id: this must not fail on a module that cannot be hashed, and what is compared stays alive.
    parents: dict[int, tuple[nn.Module, str]] = {}
    for candidate in gc.get_objects():
        # Not isinstance: a proxy object answers it by running code of its own.
        if issubclass(type(candidate), nn.Module):
            for name, child in candidate.__dict__.get("_modules", {}).items():
                parents.setdefault(id(child), (candidate, name))
    names: list[str] = []
    seen = {id(module)}
    while id(module) in parents:
        module, name = parents[id(module)]
        if id(module) in seen:
            break
        seen.add(id(module))
        names.append(name)
    return ".".join(reversed(names))


def _record_of(module: nn.Module) -> _Record | None:
    return module.__dict__.get(_RECORD_KEY)


def _record_for_write(module: nn.Module) -> _Record:
    record: _Record = module.__dict__.setdefault(_RECORD_KEY, _Record())
    return record


def _drop_if_empty(module: nn.Module, record: _Record) -> None:
    if not record.annotations and not record.members:
        module.__dict__.pop(_RECORD_KEY, None)


def _as_sequence(name: str, modules: object) -> Sequence[nn.Module]:
    if not isinstance(modules, Iterable) or isinstance(modules, str | torch.Tensor):
        raise ConfigError(
            f"{name} got {type(modules).__name__}", fix="pass an nn.Module or a sequence of nn.Module instances"
        )
    sequence = modules if isinstance(modules, Sequence) else list(modules)
    if not sequence:
        raise ConfigError(f"{name} got an empty sequence", fix="pass at least one module")
    return sequence


def _check_modules(name: str, rivals: frozenset[str], modules: Sequence[object]) -> None:
    seen: set[nn.Module] = set()
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{name} got {type(module).__name__} at index {index} of the sequence",
                fix="pass nn.Module instances only",
            )
        if module in seen:
            raise ConfigError(f"{name} got the same module twice in one sequence", at=describe_module(module))
        seen.add(module)
        record = _record_of(module)
        if record is None:
            continue
        if name in record.annotations:
            raise ConfigError(
                f"{name} is already on this module", at=describe_module(module), fix=f"call {name} once per module"
            )
        if name in record.members:
            raise ConfigError(
                f"{name} already manages this module: the policy of an ancestor picked it",
                at=describe_module(module),
                fix=f"leave it to the policy, or call {name} on this module before the ancestor",
            )
        for other in record.annotations.values():
            if other.name in rivals or name in other.incompatible:
                raise ConfigError(
                    f"{name} and {other.name} cannot both be on one module",
                    at=describe_module(module),
                    fix=f"choose one of them for this module; {other.name} is on it already",
                )
        for member_of in record.members:
            if member_of in rivals:
                raise ConfigError(
                    f"{name} cannot be on this module: the policy of a {member_of} ancestor picked it",
                    at=describe_module(module),
                    fix=f"call {name} on this module before {member_of} on the ancestor",
                )


def _check_result(name: str, modules: Sequence[nn.Module], result: object) -> None:
    if result is None:
        return
    returned = [result] if isinstance(result, nn.Module) else list(cast("Iterable[object]", result))
    if len(returned) != len(modules) or any(a is not b for a, b in zip(returned, modules, strict=True)):
        raise ConfigError(
            f"{name} returned other modules than it was given",
            at=describe_module(modules[0]),
            fix="an annotation changes its modules in place",
        )


def _forget(modules: Sequence[nn.Module], annotation: Annotation) -> None:
    """Remove the annotation, and every membership in its state, below ``modules``."""
    for module in modules:
        remove_annotation(module, annotation.name)
        for visit in _Snapshot.of(module).modules:
            record = _record_of(visit)
            if record is not None and record.members.get(annotation.name) is annotation.state:
                remove_member(visit, annotation.name)


class _Visit(NamedTuple):
    """One place of a module tree: where it hangs and the names it holds."""

    parent: int
    name: str
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    is_alias: bool


@dataclass(frozen=True)
class _Snapshot:
    """The names of a module tree, in ``named_modules()`` order.

    Names are kept per module and joined to FQNs only for an error: FQNs of a deep tree add
    up to quadratic length. A module met again is one more visit without content, so the
    names of an alias count too. ``ties`` are the tensors met again, with where they were first.
    """

    visits: list[_Visit]
    ties: list[tuple[int, str, int, str]]
    modules: list[nn.Module] = field(compare=False)

    @staticmethod
    def of(root: nn.Module) -> "_Snapshot":
        visits: list[_Visit] = []
        ties: list[tuple[int, str, int, str]] = []
        modules: list[nn.Module] = []
        seen_modules: set[nn.Module] = set()
        first_slot: dict[int, tuple[int, str]] = {}
        stack = [(-1, "", root)]
        while stack:
            parent, name, module = stack.pop()
            index = len(visits)
            if module in seen_modules:
                visits.append(_Visit(parent, name, (), (), True))
                continue
            seen_modules.add(module)
            modules.append(module)
            params = tuple(key for key, param in module._parameters.items() if param is not None)
            buffers = tuple(key for key, buffer in module._buffers.items() if buffer is not None)
            visits.append(_Visit(parent, name, params, buffers, False))
            for key in params + buffers:
                tensor = module._parameters[key] if key in module._parameters else module._buffers[key]
                if tensor is not None and tensor.is_meta:
                    tensor = getattr(tensor, SUCCESSOR, tensor)
                first = first_slot.setdefault(id(tensor), (index, key))
                if first != (index, key):
                    ties.append((index, key, *first))
            stack.extend((index, key, child) for key, child in reversed(module._modules.items()) if child is not None)
        return _Snapshot(visits, ties, modules)

    def fqn(self, index: int, leaf: str = "") -> str:
        names = [leaf] if leaf else []
        while index > 0:
            names.append(self.visits[index].name)
            index = self.visits[index].parent
        return ".".join(reversed(names))

    def fqns(self) -> dict[str, list[str]]:
        named: dict[str, list[str]] = {"parameters": [], "buffers": [], "modules": []}
        for index, visit in enumerate(self.visits):
            named["modules"].append(self.fqn(index))
            named["parameters"] += [self.fqn(index, key) for key in visit.params]
            named["buffers"] += [self.fqn(index, key) for key in visit.buffers]
        return named

    def tied_fqns(self) -> list[str]:
        return [f"{self.fqn(i, key)} = {self.fqn(j, first)}" for i, key, j, first in self.ties]


def _check_fqns(name: str, module: nn.Module, old: _Snapshot, new: _Snapshot) -> None:
    if old == new:
        return
    old_fqns, new_fqns = old.fqns(), new.fqns()
    differences = [
        difference for kind in old_fqns for difference in _list_differences(kind, old_fqns[kind], new_fqns[kind])
    ]
    if not differences:
        # The same names, but other slots share a tensor or a module than before.
        differences = [
            *_list_differences("shared tensors", old.tied_fqns(), new.tied_fqns()),
            *_list_differences("shared modules", _alias_fqns(old), _alias_fqns(new)),
        ]
    raise ConfigError(
        "\n    ".join([f"{name} changed the FQNs of the module it annotates", *differences]),
        at=describe_module(module),
        fix="an annotation keeps every parameter, buffer and module under its name and in its place",
    )


def _alias_fqns(snapshot: _Snapshot) -> list[str]:
    return [snapshot.fqn(index) for index, visit in enumerate(snapshot.visits) if visit.is_alias]


def _list_differences(kind: str, old: Sequence[str], new: Sequence[str]) -> list[str]:
    old_set, new_set = set(old), set(new)
    parts = {
        "missing": [fqn for fqn in old if fqn not in new_set],
        "new": [fqn for fqn in new if fqn not in old_set],
        "moved": _moved(old, [fqn for fqn in new if fqn in old_set]),
    }
    return [f"{kind} {what}: {_shorten(fqns)}" for what, fqns in parts.items() if fqns]


def _moved(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the fewest names whose move explains the new order: those outside a longest increasing run."""
    position = {fqn: index for index, fqn in enumerate(old)}
    tails: list[int] = []  # tails[k]: least position that ends an increasing run of length k + 1
    tail_items: list[int] = []
    previous: list[int] = []
    for item, fqn in enumerate(new):
        length = bisect_left(tails, position[fqn])
        previous.append(tail_items[length - 1] if length else -1)
        tails[length : length + 1] = [position[fqn]]
        tail_items[length : length + 1] = [item]
    kept: set[int] = set()
    item = tail_items[-1] if tail_items else -1
    while item >= 0:
        kept.add(item)
        item = previous[item]
    return [fqn for item, fqn in enumerate(new) if item not in kept]


def _shorten(fqns: Sequence[str]) -> str:
    shown = ", ".join(repr(fqn) for fqn in fqns[:_MAX_NAMES_SHOWN])
    left_out = len(fqns) - _MAX_NAMES_SHOWN
    return f"{shown} and {left_out} more" if left_out > 0 else shown
