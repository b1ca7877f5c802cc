"""How far a running ``copy.deepcopy`` reaches: which modules it takes along."""

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from composable.errors import UsageError, place_of_rank
from composable.ground.frames import copied_values
from composable.ground.names import describe_module

__all__ = ["is_part_of_module", "modules_of_copy", "reaches_out"]


_MEMO_KEY = "composable extent"
# What holds no module that a copy would take along, and much else.
_OPAQUE = (type, torch.Tensor, str, bytes, types.ModuleType, types.FunctionType, types.MethodType)


def modules_of_copy(memo: dict[Any, Any]) -> dict[nn.Module, None]:
    """Return the modules that the running ``copy.deepcopy`` takes along, as a set that keeps order.

    What the user asked to copy is known to the outermost call only: it is read from that call's frame.

    Args:
        memo: Of that ``deepcopy``.
    """
    outermost = next(reversed(list(copied_values(memo))), None)
    known: tuple[object, dict[nn.Module, None]] | None = memo.get(_MEMO_KEY)
    if known is None or known[0] is not outermost:
        known = memo[_MEMO_KEY] = (outermost, _modules_in(outermost))
    return known[1]


def is_part_of_module(memo: dict[Any, Any]) -> bool:
    """Say whether what is being copied right now is copied as part of a module."""
    return any(isinstance(value, nn.Module) for value in copied_values(memo))


def reaches_out(verb: str, modules: Iterable[nn.Module], fix: str) -> UsageError:
    """Return the error for a handle of ``modules`` that lies only partly in what is to be, say, "copied"."""
    names = " and ".join(describe_module(module) for module in modules)
    return UsageError(
        f"a part of a model is to be {verb}, but a handle owns parameters inside and outside of it",
        at=f"{place_of_rank()}, handle of {names}",
        fix=fix.format(names=names),
    )


def _modules_in(value: object) -> dict[nn.Module, None]:
    found: dict[nn.Module, None] = {}
    stack: list[object] = [value]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _OPAQUE):
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            for visited in item.modules():
                found[visited] = None
                stack.extend(_hidden_in(visited))
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).values())
    return found


def _hidden_in(module: nn.Module) -> list[object]:
    """Return attributes that may hold modules which are no submodules: a copy takes them along too."""
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, (nn.Module, list, tuple, dict, set)) and not name.endswith(("_hooks", "_parameters"))
    ]
