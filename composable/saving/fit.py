"""What a state dict and a model differ in, found before anything is copied.

torch copies what fits and reports the rest afterwards, which leaves a model half-loaded. The check
here runs first, and one error lists every key that is missing, unexpected or of another shape.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from composable.contract import get_registry
from composable.errors import StateDictError, UsageError, place_of_rank
from composable.frames import is_strict_load
from composable.saving.quantized import state_of
from composable.torch_hooks import around_state_dict
from composable.torch_private import module_load
from composable.wording import dtype_text, list_text, plain_fqn

__all__ = ["Differences", "check_before_load", "entries_to_load", "find_differences", "register_load_check"]

_MAX_SHOWN = 20


@dataclass(frozen=True)
class Differences:
    """Keys of a state dict that do not fit a model.

    Attributes:
        missing: The model has them, the state dict does not.
        unexpected: The other way round.
        unfit: In both, with what is wrong.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()

    def error(self, *, strict: bool, loaded: str = "nothing was loaded") -> StateDictError | None:
        """Return the one error that lists them all; without ``strict`` only what fits nowhere counts."""
        lists = {"Of the wrong kind or shape": self.unfit}
        if strict:
            # In torch's words, which trainers look for.
            names = {"Missing key(s) in state_dict": self.missing, "Unexpected key(s) in state_dict": self.unexpected}
            lists = {name: tuple(f'"{key}"' for key in keys) for name, keys in names.items()} | lists
        lines = [f"\n    {name}: {list_text(keys, _MAX_SHOWN, write=str)}" for name, keys in lists.items() if keys]
        if not lines:
            return None
        return StateDictError(
            f"the state dict does not fit the model, and {loaded}{''.join(lines)}",
            at=place_of_rank(),
            fix="give each key its full tensor; strict=False permits missing and unexpected keys",
        )


def find_differences(
    expected: Mapping[str, Any],
    given: Collection[str],
    value_of: Callable[[str], Any],
    *,
    opaque: Collection[str] = (),
    is_sharded: bool = False,
) -> Differences:
    """Compare the entries of a model with the keys and values of a state dict.

    Args:
        expected: The model's tensors by key; ``None`` for what is no tensor.
        given: The keys of the state dict.
        value_of: Gives a tensor, or a ``torch.Size``, for a key that is in both.
        opaque: Prefixes of modules that load in a way of their own: only shapes are compared there.
        is_sharded: Values may be DTensors.
    """

    def is_open(key: str) -> bool:
        return not any(key.startswith(prefix) for prefix in opaque)

    keys = set(given)
    return Differences(
        missing=tuple(key for key in expected if key not in keys and is_open(key)),
        unexpected=tuple(key for key in given if key not in expected and is_open(key)),
        unfit=tuple(
            f"{plain_fqn(key)} {problem}"
            for key, target in expected.items()
            if target is not None and key in keys and (problem := _misfit(target, value_of(key), is_sharded))
        ),
    )


def register_load_check(module: nn.Module) -> list[RemovableHandle]:
    """Refuse a state dict that does not fit before anything of it is copied into an annotated module."""
    return around_state_dict(module, before_load=[_check_before_load])


def _check_before_load(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    check_before_load(module, state_dict, prefix, metadata)


def check_before_load(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any]
) -> None:
    """Refuse a ``load_state_dict`` that would stop half-way.

    Not collective: each rank checks what it was given, and equal state dicts raise alike.

    Args:
        module: An annotated module that is about to be loaded.
        state_dict: With keys that start with ``prefix``, and maybe others.
        prefix: Of the module in the state dict.
        metadata: What torch hands to the module about this load.

    Raises:
        StateDictError: Keys are missing, unexpected or of another shape; nothing was changed in ``module``.
        UsageError: ``assign=True`` would replace parameters that ``replicate`` holds.
    """
    expected, opaque = entries_to_load(module, prefix)
    is_assigned = bool(metadata.get("assign_to_params_buffers"))
    if is_assigned and any("replicate" in get_registry(below) for below in module.modules()):
        raise UsageError(
            "load_state_dict with assign=True would replace parameters that replicate and the optimizer hold",
            at=place_of_rank(),
            fix="leave assign out: values are copied into them",
        )
    given = [key for key in state_dict if key.startswith(prefix)]
    differences = find_differences(expected, given, lambda key: state_dict[key], opaque=opaque, is_sharded=True)
    error = differences.error(strict=is_strict_load())
    if error is not None:
        raise error


def _misfit(target: torch.Tensor, value: Any, is_sharded: bool) -> str:
    """Say why ``value`` cannot be copied into ``target``; empty if it can."""
    if isinstance(value, torch.Size):
        shape = value
    elif isinstance(value, torch.Tensor):
        shape = value.shape
    else:
        return f"is a {type(value).__name__}, not a tensor"
    # torch takes a one-element tensor for a scalar, as old checkpoints have it.
    if shape != target.shape and not (target.dim() == 0 and shape == (1,)):
        return f"has shape {list(shape)}, not {list(target.shape)}"
    if not isinstance(value, torch.Tensor):
        return ""
    if value.is_meta and not target.is_meta:
        return "is on the meta device"
    if isinstance(value, DTensor) and not is_sharded:
        return "is a DTensor, not a full tensor"
    if not is_sharded and value.is_floating_point() != target.is_floating_point():
        return f"is {dtype_text(value.dtype)}, not {dtype_text(target.dtype)}"
    if isinstance(value, DTensor) and not (isinstance(target, DTensor) and value.device_mesh == target.device_mesh):
        return "is a DTensor of another mesh"
    return ""


def entries_to_load(module: nn.Module, prefix: str = "") -> tuple[dict[str, torch.Tensor | None], list[str]]:
    """Return what ``module`` loads by key, and the prefixes of modules that do it in their own way.

    The tensors are those that the modules hold, on whatever device.
    """
    entries: dict[str, torch.Tensor | None] = {}
    opaque: list[str] = []
    for name, owner in module.named_modules(remove_duplicate=False):
        path = f"{prefix}{name}." if name else prefix
        tensors = {**owner._parameters, **owner._buffers}
        entries |= {
            path + key: tensor
            for key, tensor in tensors.items()
            if tensor is not None and key not in owner._non_persistent_buffers_set
        }
        entries |= {path + key: tensor for key, tensor in state_of(owner)}
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            entries[f"{path}_extra_state"] = None
        if _loads_its_own_way(owner):
            opaque.append(path)
    return entries, opaque


def _loads_its_own_way(module: nn.Module) -> bool:
    # torch keeps each hook in a wrapper that tells where it comes from.
    sources = [str(getattr(hook, "__module__", "")) for hook in module._load_state_dict_pre_hooks.values()]
    has_own = type(module)._load_from_state_dict is not module_load
    return has_own or any(not source.startswith("composable.") for source in sources)
