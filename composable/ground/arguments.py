"""Checks of arguments that many functions take: what is wrong is an error that says what to write, before all else."""

import difflib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable.errors import ConfigError, SignatureError, UsageError, place_of_rank

__all__ = [
    "answer_of",
    "as_path",
    "check_bool",
    "check_call",
    "check_device",
    "check_module",
    "check_number",
    "check_optimizer",
    "check_outside_inference",
    "described",
    "list_of_tensors",
    "readable_twice",
]


def answer_of(name: str, function: Callable[..., Any], *args: object, at: str, fix: str) -> Any:
    """Return what a user's function, the argument ``name``, answers; what it raises is a ``ConfigError``."""
    try:
        return function(*args)
    except Exception as error:
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}", at=at, fix=fix) from error


def check_module(name: str, value: object) -> None:
    """Raise unless ``value`` is one module."""
    if not isinstance(value, nn.Module):
        raise ConfigError(f"{name} is {described(value)}, not a module", at=place_of_rank(), fix="pass an nn.Module")


def check_optimizer(name: str, value: object) -> None:
    """Raise unless ``value`` is an optimizer of torch's kind."""
    if not isinstance(value, torch.optim.Optimizer):
        what = f"{name} is {described(value)}, not an optimizer"
        raise ConfigError(what, at=place_of_rank(), fix="pass a torch.optim.Optimizer")


def check_bool(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise unless ``value`` is ``True`` or ``False`` itself: what is merely true is mostly an argument too early."""
    if not isinstance(value, bool) and not (or_none and value is None):
        choices = "True, False or None" if or_none else "True or False"
        raise ConfigError(f"{name} is {described(value)}, not a bool", at=place_of_rank(), fix=f"pass {choices}")


def check_number(
    name: str, value: object, *, fix: str, least: float | None = None, above: float | None = None
) -> float:
    """Return ``value`` as a float.

    Raises:
        ConfigError: It is no number, or a tensor of several, or NaN, or below ``least``, or not above ``above``.
    """
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(number, Real) and not isinstance(number, bool):
        found = float(number)
        if (least is None or found >= least) and (above is None or found > above) and found == found:
            return found
    raise ConfigError(f"{name} is {described(value)}", at=place_of_rank(), fix=fix)


def as_path(name: str, value: object) -> Path:
    """Return the path of a file or folder that the argument ``name`` is.

    Raises:
        ConfigError: It is none.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} is {described(value)}", at=place_of_rank(), fix="pass a path")
    return Path(text)


def check_device(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise unless ``value`` names a device, or is one, or the number of an accelerator that there is."""
    if isinstance(value, torch.device) or (or_none and value is None):
        return
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < torch.accelerator.device_count():
        return
    if isinstance(value, str):
        with suppress(RuntimeError):
            torch.device(value)
            return
    raise ConfigError(f"{name} is {described(value)}", at=place_of_rank(), fix="pass a torch.device or its name")


def readable_twice(value: Any) -> Any:
    """Return ``value``; of what can be read only once, such as ``module.parameters()``, a list."""
    return list(value) if isinstance(value, Iterator) else value


def list_of_tensors(name: str, value: object) -> list[torch.Tensor]:
    """Return one tensor, or all of an iterable of tensors, as a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    # A module may be iterable, and its class was meant for something else.
    is_list = isinstance(value, Iterable) and not isinstance(value, str | type | nn.Module)
    found: list[Any] = list(value) if is_list else [value]  # type: ignore[call-overload]  # it is iterable
    # By type: there are few, and clipping asks in every step.
    if not all(issubclass(kind, torch.Tensor) for kind in set(map(type, found))):
        wrong = next(one for one in found if not isinstance(one, torch.Tensor))
        what = f"{name} is or holds {described(wrong)}"
        raise ConfigError(what, at=place_of_rank(), fix="pass tensors, such as model.parameters()")
    return found


def described(value: object) -> str:
    """Name a value: short ones as they are written, others by their type."""
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ in {"builtins", "torch"} else f"a {kind.__module__}.{kind.__name__}"


def check_outside_inference(caller: str) -> None:
    """Raise ``UsageError`` in inference mode: no optimizer could ever write to parameters that are made there."""
    if torch.is_inference_mode_enabled():
        raise UsageError(
            f"{caller} is called in inference mode, and what is made there can never be trained",
            fix="annotate outside of torch.inference_mode(), and run in it as you like",
        )


# What to write in place of an argument that an annotation lacks. By the names that ``FullyShardedDataParallel``,
# ``DistributedDataParallel`` and torch's ``replicate`` have for them; of several the first that an annotation can take.
_IN_OPTIONS = "pass it inside of options=HandleOptions(...)"
_PLACES = {
    "align": (_IN_OPTIONS,),
    "auto_wrap_policy": ("pass it as policy=",),
    "backward_prefetch": ("leave it out, since gathers are prefetched always",),
    "batched_grad_copy": ("leave it out, since gradients are copied together always",),
    "bucket_cap_mb_list": ("pass one cap for all buckets as bucket_cap_mb=",),
    "check_reduction": ("leave it out, since every backward is checked",),
    "cpu_offload": ("pass it as offload_policy=",),
    "device_id": ("pass it in a list as device_ids=", "leave it out, since the device is that of the mesh"),
    "device_mesh": ("pass it as mesh=",),
    "dim": ("leave it out, since inputs are not split",),
    "dp_mesh_dims": ("pass the dim that averages as mesh=, such as mesh['dp']",),
    "follows_parent": (_IN_OPTIONS,),
    "forward_prefetch": ("leave it out, since gathers are prefetched always",),
    "ignored_states": ("pass its parameters as ignored_params=, its modules as ignored_modules=",),
    "limit_all_gathers": ("leave it out, since gathers are limited always",),
    "mixed_precision": ("pass it as mp_policy=",),
    "offload_policy": ("leave it out, or call fully_shard: copies rest on the device",),
    "output_device": ("leave it out, since outputs stay where the module makes them",),
    "shard_as_bytes": (_IN_OPTIONS,),
    "sharding_strategy": ("pass it as strategy=",),
    "skip_all_reduce_unused_params": ("pass static_graph=True, which leaves out what no rank uses",),
    "transport": (_IN_OPTIONS,),
    "unused_gradients": (_IN_OPTIONS,),
    "use_orig_params": ("leave it out, since parameters keep their names and shapes always",),
}
_PAGES = {"fully_shard": "docs/from_fsdp1.md", "replicate": "docs/replicate.md"}


def check_call(function: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Raise ``SignatureError``, which says what to write, unless ``function`` takes such arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        what, fixes = f"{function.__name__}: {error}", ["pass the module, and all else by name"]
        if unknown:
            what = f"{function.__name__} has no argument {', '.join(unknown)}"
            fixes = [f"{name}: {_place_in(name, signature.parameters)}" for name in unknown]
        fixes += [f"see {page}" for name, page in _PAGES.items() if name == function.__name__]
        raise SignatureError(what, fix="; ".join(fixes)) from None


def _place_in(name: str, known: Collection[str]) -> str:
    fitting: dict[str, str] = {}
    for one, places in _PLACES.items():
        can_take = [place for place in places if {*re.findall(r"(\w+)=", place)} <= {*known}]
        if can_take:
            fitting[one] = can_take[0]
    for near in difflib.get_close_matches(name, [*fitting, *known], n=1):
        return fitting.get(near, f"did you mean {near}=?")
    return "leave it out, there is nothing like it"
