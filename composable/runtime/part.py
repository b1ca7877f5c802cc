"""Which ``fully_shard`` annotations lie in a part of a model, and whether any of them reaches out of it.

A handle owns parameters of one module, or of several, and is copied or undone as a whole: a
part that holds only some of a handle's parameters can be neither.
"""

from collections.abc import Iterable

from torch import nn

from composable.errors import UsageError, place_of_rank
from composable.runtime.state import FullyShardState, handle_of_module, sharded_state_of
from composable.storage import Handle, handle_of, reaches_out

__all__ = ["AnnotatedPart"]


class AnnotatedPart:
    """What ``fully_shard`` manages among some modules.

    Args:
        modules: All modules of the part.
        verb: What is about to happen, for errors: "copied".
        fix: What to do about a handle that reaches out; ``{names}`` stands for its modules.

    Attributes:
        modules: The modules, as a set that keeps order.
        handles: Of every fully sharded module among them, in their order.
        states: That manage any of them.

    Raises:
        UsageError: A handle lies in the part, but not wholly; names the modules to take instead. Or
            ``unshard_params`` shows the parameters.
    """

    def __init__(self, modules: Iterable[nn.Module], verb: str, fix: str) -> None:
        self.modules = dict.fromkeys(modules)
        handles: dict[Handle, None] = {}
        states: dict[FullyShardState, None] = {}
        for module in self.modules:
            state, own = sharded_state_of(module), handle_of_module(module)
            if state is not None:
                states[state] = None
            if own is not None:
                handles[own] = None
            for param in module._parameters.values():
                handle = None if param is None else handle_of(param)
                if handle is not None:
                    handles.setdefault(handle, None)
        self.states = list(states)
        for handle in handles:
            if not all(module in self.modules for module in handle.modules):
                raise reaches_out(verb, handle.modules, fix)
            if handle.held_with is not None:
                raise UsageError(
                    f"a model is to be {verb} while unshard_params shows its parameters",
                    at=f"{place_of_rank()}, {handle.described}",
                    fix="leave the context first",
                )
        self.handles = list(handles)

    def handles_of(self, state: FullyShardState) -> list[Handle]:
        """Return those of the state's handles that lie in the part."""
        inside = set(self.handles)
        return [handle for handle in state._handles if handle in inside]

    def managed_by(self, state: FullyShardState) -> list[nn.Module]:
        """Return the modules of the part that ``state`` manages."""
        return [module for module in self.modules if sharded_state_of(module) is state]

    def roots_of(self, state: FullyShardState) -> tuple[nn.Module, ...]:
        """Return the outermost modules of the part that ``state`` manages: what it annotates, or members of it."""
        roots = [module for module in state.modules if module in self.modules]
        below = {module for root in roots for module in root.modules()}
        for module in self.managed_by(state):
            if module not in below:
                roots.append(module)
                below.update(module.modules())
        return tuple(roots)
