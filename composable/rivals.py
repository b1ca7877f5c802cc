"""Recognises what of torch averages gradients too, by the names of classes: nothing of it is imported."""

import sys
from collections.abc import Collection

from torch import nn

from composable.claims import is_managed

__all__ = ["WRAPPER", "averaged_twice", "averaged_twice_in", "keep_one", "names_left_alone", "rival_on"]

WRAPPER = "DistributedDataParallel"
_SHARDS = "torch's fully_shard"
# Where a class is defined, what it is called, and how messages call it.
_CLASSES = {
    ("torch.nn.parallel.distributed", WRAPPER): WRAPPER,
    ("torch.distributed._composable.replicate_with_fsdp", "ReplicateModule"): "torch's replicate",
    ("torch.distributed.fsdp", "FSDPModule"): _SHARDS,
}
# Where torch's own annotations have the key under which a module keeps their names; who uses none has not imported it.
_CONTRACT, _KEY = "torch.distributed._composable.contract", "REGISTRY_KEY"


def rival_on(module: nn.Module) -> str | None:
    """Return what of torch averages the gradients of ``module`` and all below it, in words; or ``None``."""
    found = _rival_class(type(module))
    if found is not None:
        return found
    key = getattr(sys.modules.get(_CONTRACT), _KEY, None)
    return "torch's replicate" if key in vars(module) and "replicate" in vars(module)[key] else None


def keep_one(rival: str) -> str:
    """Return what to do about a rival."""
    if rival == WRAPPER:
        return "keep one of them: docs/trainers.md has what to tell trainers that wrap by themselves"
    return f"keep one of them: import {rival.partition(' ')[2]} from composable everywhere, not from torch"


def names_left_alone(module: nn.Module) -> Collection[str]:
    """Return the parameters and buffers below ``module`` that users told DistributedDataParallel to leave alone."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", None) or ()


def averaged_twice(module: nn.Module) -> tuple[str, str] | None:
    """Return (what of torch is on ``module``, a parameter that an annotation manages as well), or ``None``."""
    rival = rival_on(module)
    return None if rival is None else averaged_twice_in(rival, module._modules.get("module") or module)


def averaged_twice_in(rival: str, wrapped: nn.Module) -> tuple[str, str] | None:
    """Do what ``averaged_twice`` does for what a wrapper holds."""
    if rival == _SHARDS:
        return None  # It may have been told to ignore any of them.
    left = names_left_alone(wrapped)
    for fqn, param in wrapped.named_parameters():
        if param.requires_grad and fqn not in left and is_managed(param):
            return rival, fqn
    return None


def _rival_class(cls: type[nn.Module]) -> str | None:
    keys = ((base.__module__, base.__qualname__) for base in cls.__mro__)
    return next((_CLASSES[key] for key in keys if key in _CLASSES), None)
