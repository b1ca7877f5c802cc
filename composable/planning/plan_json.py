"""Frozen dataclasses as JSON and back: by the types of their fields, so that a field more needs no line here.

Nothing is imported or run because a text says so: classes of modules are looked up among those that are loaded.
"""

import functools
import json
import sys
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from composable.arguments import described
from composable.errors import ConfigError, UsageError
from composable.planning.offload import CPUOffloadPolicy, OffloadPolicy
from composable.wording import dtype_text, list_text

__all__ = ["as_json", "misfit", "of_json"]

_FIX = "pass what ShardPlan.to_json() returned"
_OFFLOAD_POLICIES = (OffloadPolicy, CPUOffloadPolicy)
# Offsets and sizes are those of memory.
_MOST = 2**63 - 1


def misfit(what: str, where: str) -> ConfigError:
    """Return the error for what is wrong in a text, at the path of a field."""
    return ConfigError(what, at=where or "the whole text", fix=_FIX)


def as_json(value: object, format_number: int) -> str:
    """Return a dataclass as JSON.

    Raises:
        ConfigError: It holds a class of modules that no module of Python has by name.
    """
    return json.dumps({"format": format_number, **_data(value)})


def of_json(cls: type[Any], text: object, format_number: int) -> Any:
    """Return the dataclass that ``as_json`` wrote.

    Raises:
        ConfigError: The text is no JSON, of another format, or a field is missing, unknown or has a value that does
            not fit its type; the message names the field.
    """
    if not isinstance(text, str):
        raise ConfigError(f"the text is {described(text)}", fix=_FIX)
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the text is no JSON: {error}", fix=_FIX) from error
    if not isinstance(data, dict):
        raise misfit(f"the text is {described(data)}, no object", "")
    found = data.pop("format", None)
    if type(found) is not int or found != format_number:
        raise ConfigError(
            f"the format of the text is {described(found)}, and {format_number} is known",
            fix="read it with the version of the library that wrote it",
        )
    return _dataclass_of(cls, data, "")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name is there twice in {list_text([name for name, _ in pairs])}")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _data(value: Any) -> Any:
    """Return what ``json`` can write."""
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if is_dataclass(value) and type(value).__module__.rpartition(".")[0] != __package__:
        what = f"{described(value)} is of a class that a text cannot hold"
        raise ConfigError(what, fix="use a policy of the library itself")
    if isinstance(value, OffloadPolicy):
        return {"class": type(value).__name__, **_fields_of(value)}
    if is_dataclass(value):
        return _fields_of(value)
    if isinstance(value, tuple):
        return [_data(one) for one in value]
    if isinstance(value, type):
        return _path_of(value)
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return value


def _fields_of(value: Any) -> dict[str, Any]:
    return {one.name: _data(getattr(value, one.name)) for one in fields(value)}


def _path_of(cls: type) -> str:
    path = f"{cls.__module__}:{cls.__qualname__}"
    if _loaded(path) is not cls:
        raise ConfigError(
            f"the class {cls.__qualname__} of {cls.__module__} has no name that a text could have",
            fix="define it at the top level of a module",
        )
    return path


def _loaded(path: str) -> object:
    """Return what is at a path, in the modules that are loaded; ``None``: nothing is."""
    module, _, name = path.partition(":")
    found: object = sys.modules.get(module)
    for part in name.split("."):
        # Not with `getattr`, which modules may answer by importing others.
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _of(kind: Any, data: Any, where: str) -> Any:
    """Return the value of a type that ``data`` stands for."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), data, where)
    if origin is Literal:
        if data not in get_args(kind):
            raise misfit(f"{described(data)} is none of {list_text(get_args(kind))}", where)
        return data
    if kind is torch.Size or origin is tuple:
        item = int if kind is torch.Size else get_args(kind)[0]
        if not isinstance(data, list):
            raise misfit(f"{described(data)} is no list", where)
        items = tuple(_of(item, one, f"{where}[{index}]") for index, one in enumerate(data))
        return torch.Size(items) if kind is torch.Size else items
    if origin is type:
        return _module_class(data, where)
    if kind is torch.dtype:
        # Not with `getattr`, for which torch imports parts of it.
        found = torch.__dict__.get(data) if isinstance(data, str) else None
        if not isinstance(found, torch.dtype):
            raise misfit(f"{described(data)} is no dtype", where)
        return found
    if kind is OffloadPolicy:
        return _offload_policy(data, where)
    if origin is not None:
        # A function, which is needed to make a plan only.
        return _Forgotten(_of(str, data, where))
    if is_dataclass(kind):
        return _dataclass_of(kind, data, where)
    if type(data) is not kind:
        raise misfit(f"{described(data)} is no {kind.__name__}", where)
    if kind is int and not 0 <= data <= _MOST:
        raise misfit(f"{described(data)} is no size, offset or count", where)
    return data


def _one_of(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    # Of bool and int, that of the type itself.
    fitting = [kind for kind in others if kind is type(data)]
    return _of((fitting or others)[-1], data, where)


@functools.cache
def _kinds_of(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _dataclass_of(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise misfit(f"{described(data)} is no object", where)
    names = [one.name for one in fields(cls)]
    for missing in names:
        if missing not in data:
            raise misfit(f"the field {missing!r} is missing", where)
    for unknown in data:
        if unknown not in names:
            raise misfit(f"the field {unknown!r} is not known", where)
    kinds = _kinds_of(cls)
    values = {name: _of(kinds[name], data[name], f"{where}.{name}".lstrip(".")) for name in names}
    try:
        return cls(**values)
    except ConfigError as error:
        # What the class itself refuses, such as a dtype that nobody can reduce.
        raise misfit(error.what, where) from error


def _offload_policy(data: Any, where: str) -> OffloadPolicy:
    if not isinstance(data, dict):
        raise misfit(f"{described(data)} is no object", where)
    classes = {cls.__name__: cls for cls in _OFFLOAD_POLICIES}
    rest = dict(data)
    name = rest.pop("class", None)
    if not isinstance(name, str) or name not in classes:
        raise misfit(f"{described(name)} is none of {list_text(classes)}", f"{where}.class")
    found: OffloadPolicy = _dataclass_of(classes[name], rest, where)
    return found


def _module_class(data: Any, where: str) -> type[nn.Module]:
    found = _loaded(_of(str, data, where))
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ConfigError(
            f"no class of modules {described(data)} is loaded", at=where, fix="import the module that defines it first"
        )
    return found


class _Forgotten:
    """Stands for a function that a plan was made with, of which a text has the name alone."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object) -> NoReturn:
        raise UsageError(f"{self.__name__} is known by its name only, as the plan was read from a text")
