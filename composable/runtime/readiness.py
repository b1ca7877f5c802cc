"""Whether every parameter and buffer of a model has values, before anything is computed with them.

Two ways to have none: still on the meta device, or in memory that ``to_empty`` made and nobody has
written to since. Modules that an annotation ignores are the user's own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import nn

from composable.contract import get_registry
from composable.errors import UsageError
from composable.storage.handle import Handle
from composable.storage.unfilled import META_FIX, is_unfilled

__all__ = ["Annotated", "check_on_device", "check_ready", "list_fqns", "managed_modules", "name_modules"]

_FQNS_SHOWN = 5


class Annotated(Protocol):
    """What is asked of the state of an annotation."""

    modules: tuple[nn.Module, ...]
    ignored_modules: frozenset[nn.Module]
    marked_buffers: list[tuple[nn.Module, str]]
    _handles: list[Handle]


def check_ready(states: Sequence[Annotated], names: Mapping[nn.Module, str]) -> None:
    """Raise unless all that ``states`` manage has values; looks at this rank only.

    Args:
        states: Of the annotations to look at.
        names: FQN of every module.

    Raises:
        UsageError: With the FQNs of what has none.
    """
    check_on_device(states, names)
    unfilled: list[str] = []
    marked = [flat for state in states for handle in state._handles for flat in handle.buffers if flat.is_marked]
    for flat in marked:
        unfilled += [_join(names, *param.owners[0]) for param in flat.params if is_unfilled(param.local)]
    buffers = [slot for state in states for slot in state.marked_buffers]
    for module, name in dict.fromkeys(buffers):
        buffer = module._buffers.get(name)
        if buffer is not None and is_unfilled(buffer):
            unfilled.append(_join(names, module, name))
    if unfilled:
        raise UsageError(
            "to_empty() made room for parameters or buffers, and nothing has filled it",
            at=list_fqns(unfilled),
            fix="initialise or load them; a buffer that __init__ computes has to be computed again, and assigned",
        )
    for flat in marked:
        flat.is_marked = False
    for state in states:
        state.marked_buffers = []


def check_on_device(states: Sequence[Annotated], names: Mapping[nn.Module, str]) -> None:
    """Raise ``UsageError`` if something that ``states`` manage is on the meta device on this rank."""
    handles = [handle for state in states for handle in state._handles]
    params = [_join(names, *param.owners[0]) for handle in handles for param in handle.params if param.ragged.is_meta]
    buffers = [
        _join(names, module, name)
        for state in states
        for module in managed_modules(state.modules, state.ignored_modules)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    if params or buffers:
        kinds = [kind for kind, found in (("parameters", params), ("buffers", buffers)) if found]
        raise UsageError(
            f"{' and '.join(kinds)} are still on the meta device", at=list_fqns(params + buffers), fix=META_FIX
        )


def name_modules(roots: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Return the FQN of every module at or below ``roots``; of several roots, by their position."""
    names: dict[nn.Module, str] = {}
    for position, root in enumerate(roots):
        prefix = str(position) if len(roots) > 1 else ""
        for fqn, module in root.named_modules(prefix=prefix):
            names.setdefault(module, fqn)
    return names


def managed_modules(roots: Iterable[nn.Module], ignored: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of one annotation, in ``modules()`` order, without those that others annotate or it ignores."""
    starts = tuple(roots)
    seen: set[nn.Module] = set()
    stack = [*reversed(starts)]
    while stack:
        module = stack.pop()
        if module in seen or module in ignored:
            continue
        seen.add(module)
        if module not in starts and not {"replicate", "fully_shard"}.isdisjoint(get_registry(module)):
            continue
        yield module
        stack.extend(child for child in reversed(module._modules.values()) if child is not None)


def list_fqns(fqns: Sequence[str]) -> str:
    """Return names for a message: the first few, and how many more."""
    shown = ", ".join(map(repr, fqns[:_FQNS_SHOWN]))
    return f"{shown} and {len(fqns) - _FQNS_SHOWN} more" if len(fqns) > _FQNS_SHOWN else shown


def _join(names: Mapping[nn.Module, str], module: nn.Module, name: str) -> str:
    fqn = names.get(module, "")
    return f"{fqn}.{name}" if fqn else name
