"""The registry of a module's annotations, and their states.

``@contract(state_cls=...)`` turns ``fn(module_or_modules, ...)`` into an annotation. The
decorator makes one state object per call, enters it in a registry on the module before
``fn`` runs (so ``fn`` reads it with ``fn.state(module)``), and checks afterwards that ``fn``
changed no FQN. An API has the name of its function; several APIs may annotate one module.

The registry is one entry in ``module.__dict__``: it follows the object when its class is
swapped, is no parameter, buffer or submodule, and never shows in a state dict. A deep copy
of a module gets a deep copy of its states, so that two models never share one by accident;
a state that cannot be copied raises in its own ``__deepcopy__``.

A module may also be a *member* of an annotation: managed by the state of an ancestor whose
policy picked it, without being annotated itself.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType, SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import torch
from torch import nn

from composable.errors import ConfigError, located, place_of_rank
from composable.ground.names import SUCCESSOR, check_call, check_module, describe_module, described

_P = ParamSpec("_P")
_State = TypeVar("_State")
_State_co = TypeVar("_State_co", covariant=True)
_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])

_RECORD_KEY = "_composable_record"


@dataclass(frozen=True)
class Annotation:
    """One annotation of one module."""

    name: str  # The name of the function that annotates.
    state: object  # The state of the annotation; one object for all modules of one call.
    incompatible: frozenset[str]  # Names of annotations that may not be on the same module.


class AnnotationFn(Protocol[_P, _State_co]):
    """A function that ``@contract`` has decorated."""

    __name__: str

    def __call__(self, module: _Modules, *args: _P.args, **kwargs: _P.kwargs) -> _Modules:
        """Annotate ``module``, or every module of a sequence, and return it."""
        ...

    def state(self, module: nn.Module) -> _State_co | None:
        """Return the state of this annotation on ``module``, or ``None``; does not change the module."""
        ...


@dataclass
class _Record:
    """The entry in a module: its annotations, and the states of ancestors that manage it, by the name of the API."""

    annotations: dict[str, Annotation] = field(default_factory=dict)
    members: dict[str, object] = field(default_factory=dict)


# The record of a module without an entry.
_NOTHING = _Record()


def get_registry(module: nn.Module) -> Mapping[str, Annotation]:
    """Return the annotations of ``module``, by name, in the order of their calls; a read-only view.

    Args:
        module: Any module.

    Raises:
        ConfigError: It is no module.
    """
    check_module("module", module)
    return MappingProxyType(_record_of(module).annotations)


def is_parallel(module: nn.Module) -> bool:
    """Say whether ``fully_shard`` or ``replicate`` annotates ``module`` itself; ``checkpoint`` does not count."""
    return not get_registry(module).keys().isdisjoint(("fully_shard", "replicate"))


def excludes(module: nn.Module, api_name: str) -> bool:
    """Say whether an annotation of ``module`` excludes ``api_name``, from this module and from all modules below it."""
    annotations = _record_of(module).annotations  # Most modules have none.
    return bool(annotations) and any(api_name in one.incompatible for one in annotations.values())


def managing_state(module: nn.Module, api_name: str) -> object | None:
    """Return the state of ``api_name`` that manages ``module``: the module's own or an ancestor's; else ``None``."""
    record = _record_of(module)
    own = record.annotations.get(api_name)
    return own.state if own is not None else record.members.get(api_name)


def set_member(module: nn.Module, api_name: str, state: object) -> None:
    """Register ``module`` as a member of ``state``, the state of an ancestor's annotation.

    Raises ``ConfigError`` if it has this annotation or an incompatible one, or is a member of another state.
    """
    record = _record_of(module)
    why = [f"{one.name} is on it" for one in record.annotations.values() if api_name in {one.name, *one.incompatible}]
    if record.members.get(api_name, state) is not state:
        why.append("it manages it for another ancestor")
    if why:
        raise ConfigError(f"{api_name} cannot manage this module: {why[0]}", at=describe_module(module))
    _record_for_write(module).members[api_name] = state


def remove_member(module: nn.Module, api_name: str) -> None:
    """Remove ``module`` from the members of the annotation ``api_name``; no error if it is no member."""
    _remove(module, _record_of(module).members, api_name)


def remove_annotation(module: nn.Module, api_name: str) -> None:
    """Remove ``api_name`` from the registry of ``module``; the annotation must undo its own changes to the module."""
    _remove(module, _record_of(module).annotations, api_name)


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
    """Turn a function of a module, or of a sequence of modules, into an annotation, with a state on each module.

    The function reads the state by ``function.state(module)``. If a sequence holds a module and one inside of it, the
    outer module gets the state. Not collective.

    Args:
        state_cls: Called with no arguments, once per call of the annotation; its result is the state.
        incompatible: Names of annotations that may not be on the same module, before or after.

    The annotation raises ``ConfigError``, and leaves no registry entry, when the module carries this annotation or an
    incompatible one, or when the function changed an FQN, or returned something else than its argument or ``None``:
    an annotation cannot put a wrapper in the place of a module. A function that fails undoes its own changes.
    """
    if isinstance(incompatible, str):
        raise ConfigError("incompatible is a str", fix=f"pass the names in a tuple: ({incompatible!r},)")
    rivals = frozenset(incompatible)
    if not callable(state_cls):
        raise ConfigError(f"state_cls is {state_cls!r}", fix="pass a class, or a function that makes a state")

    def decorate(fn: Callable[Concatenate[Any, _P], object]) -> AnnotationFn[_P, Any]:
        if not callable(fn):
            raise ConfigError(f"contract is on {described(fn)}", fix="put it on a function: @contract() above its def")
        name = fn.__name__

        @functools.wraps(fn)
        def annotate(module: Any, *args: _P.args, **kwargs: _P.kwargs) -> Any:
            with located(place_of_rank()):
                try:
                    return annotate_on_rank(module, *args, **kwargs)
                except TypeError:
                    check_call(fn, module, *args, **kwargs)
                    raise

        def annotate_on_rank(module: Any, *args: _P.args, **kwargs: _P.kwargs) -> Any:
            target = module if isinstance(module, nn.Module) else _as_sequence(name, module)
            modules = [target] if isinstance(target, nn.Module) else list(target)
            _check_modules(name, rivals, modules)
            annotation = Annotation(name, state_cls(), rivals)
            before = {one: _names_in(one) for one in _outermost(modules)}
            for one in before:
                _check_below(name, rivals, one)
            for one in before:
                _record_for_write(one).annotations[name] = annotation
            try:
                result = fn(target, *args, **kwargs)
                is_list = isinstance(result, (list, tuple)) and len(result) == len(modules)
                is_same = is_list and all(map(operator.is_, cast("Sequence[object]", result), modules))
                if not (result is None or result is target or is_same):
                    text = f"{result!r:.60}"
                    if isinstance(result, nn.Module):
                        text = f"another module, {describe_module(result)}"
                    raise ConfigError(
                        f"{name} returned {text}, and callers would go on with the module that they passed",
                        at=describe_module(modules[0]),
                        fix=f"change the module in place in {name} and return it, or nothing; apply a wrapper by a "
                        "plain function, without contract",
                    )
                for one, names in before.items():
                    _check_same_names(name, one, names, _names_in(one))
            except BaseException:
                for one in before:
                    _forget(one, annotation)
                raise
            return target

        def state(module: nn.Module) -> object:
            annotation = get_registry(module).get(name)
            return annotation.state if annotation is not None else None

        annotate.state = state  # type: ignore[attr-defined]  # functions take attributes, their stub has none
        return cast("AnnotationFn[_P, Any]", annotate)

    return decorate


def _record_of(module: nn.Module) -> _Record:
    record: _Record = module.__dict__.get(_RECORD_KEY, _NOTHING)
    return record


def _record_for_write(module: nn.Module) -> _Record:
    record: _Record = module.__dict__.setdefault(_RECORD_KEY, _Record())
    return record


def _remove(module: nn.Module, held: dict[str, Any], api_name: str) -> None:
    held.pop(api_name, None)
    if _record_of(module) == _NOTHING:
        module.__dict__.pop(_RECORD_KEY, None)


def _forget(module: nn.Module, annotation: Annotation) -> None:
    """Remove the annotation, and every membership in its state at or below ``module``."""
    remove_annotation(module, annotation.name)
    for below in modules_in(module):
        if _record_of(below).members.get(annotation.name) is annotation.state:
            remove_member(below, annotation.name)


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that are inside no other of ``modules``: the outer one's annotation holds for inner ones."""
    if len(modules) < 2:
        return list(modules)
    inside = {below for module in modules for below in modules_in(module) if below is not module}
    return [module for module in modules if module not in inside]


def _as_sequence(name: str, modules: object) -> Sequence[nn.Module]:
    if not isinstance(modules, Iterable) or isinstance(modules, str | torch.Tensor):
        fix = "pass an nn.Module or a sequence of nn.Module instances"
        raise ConfigError(f"{name} got {type(modules).__name__}", fix=fix)
    sequence = modules if isinstance(modules, Sequence) else list(modules)
    if not sequence:
        raise ConfigError(f"{name} got an empty sequence", fix="pass at least one module")
    return sequence


def _check_modules(name: str, rivals: frozenset[str], modules: Sequence[object]) -> None:
    seen: set[nn.Module] = set()
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            what = f"{name} got {type(module).__name__} at index {index} of the sequence"
            raise ConfigError(what, fix="pass nn.Module instances only")
        if module in seen:
            raise ConfigError(f"{name} got the same module twice in one sequence", at=describe_module(module))
        seen.add(module)
        record, what, fix = _record_of(module), "", ""
        excluding = (one.name for one in record.annotations.values() if one.name in rivals or name in one.incompatible)
        if name in record.annotations:
            what, fix = f"{name} is already on this module", f"call {name} once per module"
        elif name in record.members:
            what = f"{name} already manages this module: the policy of an ancestor picked it"
            fix = f"leave it to the policy, or call {name} on this module before the ancestor"
        elif other := next(excluding, None):
            what = f"{name} and {other} cannot both be on one module"
            fix = f"choose one of them for this module; {other} is on it already"
        elif other := next((one for one in record.members if one in rivals), None):
            what = f"{name} cannot be on this module: the policy of a {other} ancestor picked it"
            fix = f"call {name} on this module before {other} on the ancestor"
        if what:
            raise ConfigError(what, at=describe_module(module), fix=fix)


def _check_below(name: str, rivals: frozenset[str], module: nn.Module) -> None:
    """Refuse ``module`` if an ancestor's annotation, incompatible with ``name``, manages modules below it."""
    below = [_record_of(one) for one in modules_in(module)] if rivals else []
    own = {id(annotation.state) for record in below for annotation in record.annotations.values()}
    members = ((api, state) for record in below for api, state in record.members.items())
    if api := next((api for api, state in members if api in rivals and id(state) not in own), None):
        raise ConfigError(
            f"{name} cannot be on this module: the policy of a {api} ancestor picked modules below it",
            at=describe_module(module),
            fix=f"call {name} on this module before {api} on the ancestor",
        )


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of ``root.modules()`` at any depth: torch's method recurses, and fails at a thousand levels."""
    seen: set[nn.Module] = set()
    stack = [root]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen.add(module)
            yield module
            stack.extend(child for child in module._modules.values() if child is not None)


def _names_in(root: nn.Module) -> list[str]:
    """Return the names of all modules, parameters and buffers; a second name of one also says its first name."""
    names: list[str] = []
    places: dict[int, str] = {}
    stack = [("", root)]
    while stack:
        fqn, module = stack.pop()
        if id(module) in places:
            names.append(f"module {fqn} = {places[id(module)]}")
            continue
        places[id(module)] = fqn
        names.append(f"module {fqn}")
        prefix = f"{fqn}." if fqn else ""
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                held = getattr(tensor, SUCCESSOR, tensor) if tensor.is_meta else tensor
                first = places.setdefault(id(held), f"{prefix}{name}")
                names.append(f"{kind} {prefix}{name}{f' = {first}' if first != f'{prefix}{name}' else ''}")
        children = reversed(module._modules.items())
        stack.extend((f"{prefix}{name}", child) for name, child in children if child is not None)
    return names


def _check_same_names(name: str, module: nn.Module, old: list[str], new: list[str]) -> None:
    """Raise ``ConfigError`` if the annotation ``name`` changed a name in ``module`` from ``old`` to ``new``."""
    if old != new:
        was, now = next((was, now) for was, now in zip_longest(old, new, fillvalue="nothing") if was != now)
        raise ConfigError(
            f"{name} changed the FQNs of the module it annotates: {was} became {now}",
            at=describe_module(module),
            fix=f"change {name} so that every parameter, buffer and module keeps its name and its place",
        )
