"""Deep copies of modules that ``fully_shard`` manages, and whether a part of a model can be copied or undone alone.

``copy.deepcopy`` walks the modules; states and handles are made beforehand, so that whatever the
walk meets (hooks, registries, optimizers) finds them in its memo. A copy shares meshes and process
groups with the original and nothing else. It decides its root, and connects to a transport, at its
own first forward. Copying does not communicate.

A handle owns parameters of one module, or of several, and is copied or undone as a whole: a part that holds only some
of a handle's parameters can be neither. States and handles refer to modules outside of what is copied; those are never
followed.
"""

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from composable.annotation.root import FullyShardState, handle_of_module, sharded_state_of
from composable.engine import (
    FIX_COPY,
    AccumulatedGradients,
    Handle,
    attach,
    copied_registrations,
    handle_of,
    waits_for_copies,
)
from composable.errors import UsageError, place_of_rank
from composable.ground.contract import Annotation, get_registry, promote_member
from composable.ground.frames import in_backward, modules_of_copy, reaches_out
from composable.ground.names import class_name, describe_module, plain_fqn
from composable.ground.ownership import is_left_alone, leave_alone
from composable.planning import ShardPlan

__all__ = ["AnnotatedPart", "copy_module"]


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


_SESSION = "composable copies"


def copy_module(module: nn.Module, plain_class: type[nn.Module], memo: dict[Any, Any]) -> nn.Module:
    """Return the deep copy of a fully sharded module, with all that is below it.

    Args:
        module: The module.
        plain_class: Its class before it was annotated.
        memo: Of the running ``copy.deepcopy``.

    Raises:
        UsageError: Inside a backward; a handle owns parameters inside and outside of what is copied; or the
            class has a way of its own to be copied.
    """
    _check(module, plain_class)
    session: _Session | None = memo.get(_SESSION)
    if session is None or module not in session.part.modules:
        session = memo[_SESSION] = _Session(module, memo)
    return session.copy_of(module)


def _check(module: nn.Module, plain_class: type[nn.Module]) -> None:
    if in_backward():
        raise UsageError(
            "a sharded module cannot be copied inside a backward",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="copy it before or after",
        )
    state = sharded_state_of(module)
    if state is not None and state.root is not None and state.root.scheduler.is_deferred:
        raise UsageError(
            "a sharded module cannot be copied while its gradients wait for the last backward",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call finalize_backward(), or reset_iter_state() to drop them",
        )
    for base in plain_class.__mro__[: plain_class.__mro__.index(nn.Module)]:
        for name in ("__deepcopy__", "__reduce__", "__reduce_ex__"):
            if name in vars(base):
                raise UsageError(
                    f"{base.__name__} has a {name} of its own, which knows nothing of shards",
                    at=f"{place_of_rank()}, {describe_module(module)}",
                    fix="copy it before fully_shard, and annotate both",
                )


class _Session:
    """States and handles of one ``copy.deepcopy``."""

    def __init__(self, module: nn.Module, memo: dict[Any, Any]) -> None:
        # `module.__deepcopy__(memo)` may be called without `copy.deepcopy`.
        self.part = AnnotatedPart(modules_of_copy(memo) or module.modules(), "copied", FIX_COPY)
        self._memo = memo
        self._depth = 0
        self._is_complete = False
        self._roots = {state: self.part.roots_of(state) for state in self.part.states}
        with torch.no_grad():
            for handle in self.part.handles:
                _copied(handle, memo)
        for state in self.part.states:
            self._copy_state(state)

    def _copy_state(self, state: FullyShardState) -> None:
        handles = self.part.handles_of(state)
        roots = self._roots[state]
        twin = self._memo[id(state)] = copy.copy(state)
        twin.root = None
        twin.settings = state.settings.copied()
        twin.around = []
        twin._handles = [self._memo[id(handle)] for handle in handles]
        twin.modules = ()
        twin.marked_buffers = []
        twin.skipped_modules = {}
        twin.ignored_slots = []
        twin.ignored_modules = frozenset()
        twin._module_to_handle = {}
        twin.hook_handles = []
        if roots != state.modules:
            twin.plan = self._plan_of_part(state, roots)
            for handle, plan in zip(twin._handles, twin.plan.handles, strict=True):
                handle.plan = plan
                for flat, buffer_plan in zip(handle.buffers, plan.buffers, strict=True):
                    flat.plan = buffer_plan

    def _plan_of_part(self, state: FullyShardState, roots: tuple[nn.Module, ...]) -> ShardPlan:
        names: dict[nn.Module, str] = {}
        for position, module in enumerate(state.modules):
            prefix = str(position) if len(state.modules) > 1 else ""
            for name, submodule in module.named_modules(prefix=prefix):
                names.setdefault(submodule, plain_fqn(name))
        renamed = {names[root]: "" if len(roots) == 1 else str(index) for index, root in enumerate(roots)}
        handles = [handle.plan for handle in self.part.handles_of(state)]
        class_names = [class_name(root) for root in roots]
        return state.plan.part(handles, renamed, class_names)

    def copy_of(self, module: nn.Module) -> nn.Module:
        memo = self._memo
        twin: nn.Module = object.__new__(type(module))
        memo[id(module)] = twin
        self._depth += 1
        # As `copy.deepcopy` does it, except that `__new__` of an annotated class makes a plain module.
        contents: Any = object.__reduce_ex__(module, 4)[2]
        twin.__setstate__(copy.deepcopy(contents, memo))
        self._depth -= 1
        if not self._depth and not self._is_complete:
            self._is_complete = True
            self._complete()
        return twin

    def _complete(self) -> None:
        """Let states and handles know the copied modules, also those that the walk has yet to meet."""
        memo = self._memo
        for handle in self.part.handles:
            _adopt_modules(memo[id(handle)], memo)
        leave_alone(self._twin_of(module) for module in self.part.modules if is_left_alone(module))
        for state in self.part.states:
            twin = memo[id(state)]
            twin.modules = tuple(self._twin_of(root) for root in self._roots[state])
            twin.ignored_modules = frozenset(map(self._twin_of, filter(self._is_inside, state.ignored_modules)))
            twin.marked_buffers = [
                (self._twin_of(module), name) for module, name in state.marked_buffers if self._is_inside(module)
            ]
            twin.skipped_modules = {
                self._twin_of(module): self._twin_of(around)
                for module, around in state.skipped_modules.items()
                if self._is_inside(module) and self._is_inside(around)
            }
            twin.ignored_slots = [
                (self._twin_of(module), name) for module, name in state.ignored_slots if self._is_inside(module)
            ]
            outer = [known for around in state.around if (known := around()) is not None]
            twin.around = [weakref.ref(memo[id(known)]) for known in outer if known in self.part.states]
            managed = self.part.managed_by(state)
            for module in managed:
                own = state._module_to_handle.get(module)
                if own is not None:
                    twin._module_to_handle[self._twin_of(module)] = memo[id(own)]
            for root, copied in zip(self._roots[state], twin.modules, strict=True):
                if root not in state.modules:
                    annotation = get_registry(state.modules[0])["fully_shard"]
                    promote_member(copied, Annotation(annotation.name, twin, annotation.incompatible))
            own_dicts = {id(value) for module in managed for value in vars(module).values()}
            twin.hook_handles = [
                copy.deepcopy(hook, memo) for hook in state.hook_handles if id(hook.hooks_dict_ref()) in own_dicts
            ]

    def _is_inside(self, module: nn.Module) -> bool:
        return module in self.part.modules

    def _twin_of(self, module: nn.Module) -> nn.Module:
        return copy.deepcopy(module, self._memo)


def _copied(handle: Handle, memo: dict[int, Any]) -> Handle:
    """Return a deep copy with shards of its own; ``_adopt_modules`` completes it."""
    if handle.accumulated.awaits_copies:
        raise waits_for_copies("deepcopy", handle.described)
    attach(handle)
    twin = memo[id(handle)] = copy.copy(handle)
    handle.copies += 1
    twin.copy_key, twin.copies = f"{handle.copy_key}.{handle.copies}", 0
    if handle.sync_after_context is not None:
        # The context that runs ends for this handle only.
        twin.requires_gradient_sync, twin.sync_after_context = handle.sync_after_context, None
    kept = handle.accumulated
    twin.settings = copy.copy(handle.settings)
    twin.buffers = tuple(flat.copied(memo, with_kept_gradients=kept.is_unsynced) for flat in handle.buffers)
    twin.accumulated = AccumulatedGradients(twin.buffers, is_unsynced=kept.is_unsynced, is_kept=kept.is_kept)
    twin.register_comm_hooks(copied_registrations(handle.comm_hooks, memo))
    return twin


def _adopt_modules(handle: Handle, memo: dict[int, Any]) -> None:
    """Let a copied handle manage the copies of the modules, and prefetch copied handles."""
    handle.modules = tuple(copy.deepcopy(module, memo) for module in handle.modules)
    for param in handle.params:
        param.owners = tuple((copy.deepcopy(module, memo), name) for module, name in param.owners)
        # Not before: it may refer to modules.
        param.form = copy.deepcopy(param.form, memo)
    handle.start_sharded()
    for one in handle.comm_hooks:
        one.place_copy(memo)
    settings = handle.settings
    settings.forward_prefetch = _copies_of(settings.forward_prefetch, memo)
    settings.backward_prefetch = _copies_of(settings.backward_prefetch, memo)


def _copies_of(handles: tuple[Handle, ...] | None, memo: dict[int, Any]) -> tuple[Handle, ...] | None:
    return None if handles is None else tuple(memo[id(handle)] for handle in handles if id(handle) in memo)
