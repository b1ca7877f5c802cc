"""Whether every parameter and buffer of a model has values, before anything is computed with them.

Two ways to have none: still on the meta device, or in memory that ``to_empty`` made and nobody has
written to since. Modules that an annotation ignores are the user's own.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from composable.engine import META_FIX, Handle, is_unfilled
from composable.errors import UsageError
from composable.planning import PROTOCOL, managed_modules
from composable.wording import join_fqn, list_text

__all__ = ["Annotated", "check_on_device", "check_ready"]


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
    _check_not_extended(states, names)
    unfilled: list[str] = []
    marked = [flat for state in states for handle in state._handles for flat in handle.buffers if flat.is_marked]
    for flat in marked:
        unfilled += [_name_in(names, *param.owners[0]) for param in flat.params if is_unfilled(param.local)]
    buffers = [slot for state in states for slot in state.marked_buffers]
    for module, name in dict.fromkeys(buffers):
        buffer = module._buffers.get(name)
        if buffer is not None and is_unfilled(buffer):
            unfilled.append(_name_in(names, module, name))
    if unfilled:
        raise UsageError(
            "to_empty() made room for parameters or buffers, and nothing has filled it",
            at=list_text(unfilled),
            fix="initialise or load them; a buffer that __init__ computes has to be computed again, and assigned",
        )
    for flat in marked:
        flat.is_marked = False
    for state in states:
        state.marked_buffers = []


def check_on_device(states: Sequence[Annotated], names: Mapping[nn.Module, str]) -> None:
    """Raise ``UsageError`` if something that ``states`` manage is on the meta device on this rank."""
    handles = [handle for state in states for handle in state._handles]
    params = [
        _name_in(names, *param.owners[0]) for handle in handles for param in handle.params if param.ragged.is_meta
    ]
    buffers = [
        _name_in(names, module, name)
        for state in states
        for module in managed_modules(state.modules, state.ignored_modules)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    if params or buffers:
        kinds = [kind for kind, found in (("parameters", params), ("buffers", buffers)) if found]
        raise UsageError(
            f"{' and '.join(kinds)} are still on the meta device", at=list_text(params + buffers), fix=META_FIX
        )


def _check_not_extended(states: Sequence[Annotated], names: Mapping[nn.Module, str]) -> None:
    """Refuse functions of torch's extension of the all-gather that were set on a shard: torch asks those."""
    for param in (param for state in states for handle in state._handles for param in handle.params):
        held = {*param.sharded.__dict__, *param.ragged._local_tensor.__dict__}
        if not held.isdisjoint(PROTOCOL):
            raise UsageError(
                f"{' or '.join(PROTOCOL)} was set on the shard of a parameter, and its class is asked",
                at=f"parameter {_name_in(names, *param.owners[0])!r}",
                fix="define both in a subclass of torch.Tensor, and make the parameter of that before fully_shard",
            )


def _name_in(names: Mapping[nn.Module, str], module: nn.Module, name: str) -> str:
    return join_fqn(names.get(module, ""), name)
