"""Gradient reduction as a replaceable function: what such a hook is, and how it is copied."""

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

__all__ = ["CommHook", "copy_hook"]

# Of torch's ddp_comm_hooks: called with its state and a bucket.
CommHook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]


def copy_hook(hook: tuple[Any, CommHook] | None, memo: dict[int, Any]) -> tuple[Any, CommHook] | None:
    """Return a deep copy of a hook and its state that talks in the same process groups.

    Args:
        hook: State and function.
        memo: Of the running ``copy.deepcopy``.
    """
    if hook is None:
        return None
    state, function = hook
    groups = {
        name: value
        for name in (*getattr(state, "__slots__", ()), *getattr(state, "__dict__", ()))
        if isinstance(value := getattr(state, name, None), dist.ProcessGroup)
    }
    for group in (state, *groups.values()):
        if isinstance(group, dist.ProcessGroup):
            memo[id(group)] = group
    copied: tuple[Any, CommHook] = copy.deepcopy((state, function), memo)
    for name, group in groups.items():
        # States that can be pickled, such as that of PowerSGD, leave their group behind.
        setattr(copied[0], name, group)
    return copied
