"""Walks over a module tree, depth first.

Every walk follows ``.modules()`` order with an explicit stack, visits a module once, and
does not enter a module annotated with an API that excludes ``fully_shard`` (``replicate``):
a sharded module below it is no part of the tree that runs from above, but a root of its own.
Optimizers and ``unshard_params`` need the parameters of that module too: they walk with
``is_everywhere``.

Use it as ``import _traversal_utils``, never with ``from``: the files of ``composable`` import
it, and it imports ``composable``.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import nn

from composable.ground.contract import excludes, get_registry, managing_state

__all__: list[str] = []

_API = "fully_shard"

# The state of a ``fully_shard``, whose class this file cannot import: the walks use its ``_module_to_handle``,
# ``_is_root`` and ``lazy_init()``.
FsdpState: TypeAlias = Any


def _get_modules(module: nn.Module, *, is_everywhere: bool = False) -> Iterator[nn.Module]:
    """Yield ``module`` and all modules below it, without the subtrees of incompatible APIs unless ``is_everywhere``."""
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        if is_everywhere or not excludes(module, _API):
            yield module
            stack.extend(child for child in reversed(module._modules.values()) if child is not None)


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[FsdpState], list[nn.Module]]:
    """Return the states at or below ``module``, each once, and for each the first module that has it."""
    found: dict[FsdpState, nn.Module] = {}
    for visited in _get_modules(module):
        if _API in (annotations := get_registry(visited)):
            found.setdefault(annotations[_API].state, visited)
    return list(found), list(found.values())


def _get_fsdp_states(module: nn.Module) -> list[FsdpState]:
    """Return the states at or below ``module``, each once."""
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_handles(module: nn.Module, *, is_everywhere: bool = False) -> list[Any]:
    """Return the handles of all fully sharded modules at or below ``module``, in the order of their modules."""
    visits = _get_modules(module, is_everywhere=is_everywhere)
    pairs: Iterator[tuple[nn.Module, Any]] = ((visited, managing_state(visited, _API)) for visited in visits)
    found = [state._module_to_handle.get(visited) for visited, state in pairs if state is not None]
    return list(dict.fromkeys(handle for handle in found if handle is not None))


def _get_root_fsdp_states_with_modules(module: nn.Module) -> tuple[list[FsdpState], list[nn.Module]]:
    """Return the root states at or below ``module`` and their modules.

    Lazy init decides which states are roots, so this function runs it before, outermost state
    first. Collective where a state has not been initialised.
    """
    roots: dict[FsdpState, nn.Module] = {}
    for state, visited in zip(*_get_fsdp_states_with_modules(module), strict=True):
        if state._is_root is None:
            state.lazy_init()
        if state._is_root:
            roots[state] = visited
    return list(roots), list(roots.values())


def _get_fsdp_root_states(module: nn.Module) -> list[FsdpState]:
    """Return the root states at or below ``module``, after lazy init."""
    return _get_root_fsdp_states_with_modules(module)[0]


def _get_fully_sharded_module_to_states(
    module: nn.Module, *, is_everywhere: bool = False
) -> dict[nn.Module, FsdpState]:
    """Return each annotated or policy-picked module at or below ``module``, with the state that manages it."""
    visits = _get_modules(module, is_everywhere=is_everywhere)
    states = {visited: managing_state(visited, _API) for visited in visits}
    return {visited: state for visited, state in states.items() if state is not None}
