"""Deep copies of sharded models.

``copy.deepcopy`` walks the modules. At the first module of a root, all states and handles of the root are copied, so
that hooks, registries and optimizers on the way find the copies in the memo; then its modules. A copy shares meshes and
process groups with the original and nothing else. It decides its root, and connects to a transport, at its own first
forward. Copying does not communicate.
"""

import copy
import weakref
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from composable.annotation.root import FullyShardState, handle_of_module, sharded_state_of
from composable.annotation.states import refuse_running
from composable.engine import FIX_COPY, Handle, Listeners, attach, handle_of
from composable.errors import UsageError
from composable.ground.frames import in_backward, modules_of_copy, reaches_out
from composable.ground.names import describe_module
from composable.ground.ownership import is_left_alone, leave_alone


def handles_within(modules: Collection[nn.Module], verb: str, fix: str) -> list[Handle]:
    """Return the handles of ``modules``, a part of a model, and of their parameters, in the order of the modules.

    ``verb`` is the operation on that part, as a word for errors: "copied". A handle with modules outside of the part is
    a ``UsageError`` with ``fix``, in which ``{names}`` stands for its modules; so are parameters that
    ``unshard_params`` shows.
    """
    found: dict[Handle | None, None] = {}
    for module in modules:
        params = (param for param in module._parameters.values() if param is not None)
        found.update(dict.fromkeys([handle_of_module(module), *map(handle_of, params)]))
    handles = [handle for handle in found if handle is not None]
    for handle in handles:
        if not all(module in modules for module in handle.modules):
            raise reaches_out(verb, handle.modules, fix)
        if handle.held_with is not None:
            raise UsageError(
                f"a model cannot be {verb} while unshard_params shows its parameters",
                at=handle.described,
                fix="leave the context first",
            )
    return handles


def copy_module(module: nn.Module, plain_class: type[nn.Module], memo: dict[Any, Any]) -> nn.Module:
    """Return the deep copy of a fully sharded module, with all that is below it.

    ``plain_class`` is its class before it was annotated, ``memo`` that of the running ``copy.deepcopy``.

    Raises:
        UsageError: A step is running; gradients wait, or have a hook that reduces them; the root module is not copied
            too; or the class defines its own way to be copied.
    """
    for base in plain_class.__mro__[: plain_class.__mro__.index(nn.Module)]:
        for name in ("__deepcopy__", "__reduce__", "__reduce_ex__"):
            if name in vars(base):
                raise UsageError(
                    f"{base.__name__} has a {name} of its own, which knows nothing of shards",
                    at=describe_module(module),
                    fix="copy it before fully_shard, and annotate both",
                )
    state = sharded_state_of(module)
    if state is not None and id(state) not in memo:
        _copy_root(module, state.outermost(), memo)
    if id(module) not in memo:
        twin: nn.Module = object.__new__(type(module))
        memo[id(module)] = twin
        # As `copy.deepcopy` does it, except that `__new__` of an annotated class makes a plain module.
        contents: Any = object.__reduce_ex__(module, 4)[2]
        twin.__setstate__(copy.deepcopy(contents, memo))
    copied: nn.Module = memo[id(module)]
    return copied


def _copy_root(module: nn.Module, outermost: FullyShardState, memo: dict[Any, Any]) -> None:
    """Put deep copies of all states and handles at or below the modules of a root into ``memo``."""
    roots = outermost.modules
    # `module.__deepcopy__(memo)` may be called without `copy.deepcopy`.
    copied = modules_of_copy(memo) or set(module.modules())
    if not all(root in copied for root in roots):
        fix = FIX_COPY.format(names=" and ".join(map(describe_module, roots)))
        raise UsageError("a part of a sharded model cannot be copied", at=describe_module(module), fix=fix)
    modules = dict.fromkeys(below for root in roots for below in root.modules())
    # A root inside of this one, below a replicated module, may have been copied already: one copy is enough.
    handles = [one for one in handles_within(modules, "copied", FIX_COPY) if id(one) not in memo]
    found = dict.fromkeys(state for below in modules if (state := sharded_state_of(below)) is not None)
    states = [state for state in found if id(state) not in memo]
    schedulers = dict.fromkeys(state.root.scheduler for state in states if state.root is not None)
    with torch.no_grad():
        for scheduler in schedulers:
            if scheduler.step.is_backward and not in_backward():
                scheduler.abandon_step()  # An exception has stopped it.
            scheduler.completion.notice_dropped()
        refuse_running(outermost, handles, waits=any(one.step.finalizer.is_deferred for one in schedulers))
        for handle in handles:
            attach(handle)
            twin = memo[id(handle)] = copy.copy(handle)
            twin.settings = copy.copy(handle.settings)
            twin.buffers = tuple(flat.copied(memo) for flat in handle.buffers)
    for state in states:
        own = memo[id(state)] = copy.copy(state)
        own.root, own.listeners = None, Listeners()
        own.count()
        own.settings = replace(state.settings, post_optim_event=None, streams=None, riders=())
    copy.deepcopy(roots, memo)
    for handle in handles:
        _adopt_modules(memo[id(handle)], memo)
    for state in states:
        _adopt_parts(memo[id(state)], modules, memo)
    leave_alone(copy.deepcopy(below, memo) for below in modules if is_left_alone(below))


def _adopt_parts(state: FullyShardState, copied: Collection[nn.Module], memo: dict[Any, Any]) -> None:
    """Give a copied state, which refers to the parts of the original, the copies of these parts."""
    for name in ("modules", "_handles", "skipped_modules", "hook_handles"):
        setattr(state, name, copy.deepcopy(getattr(state, name), memo))
    state._module_to_handle = weakref.WeakKeyDictionary(copy.deepcopy(dict(state._module_to_handle), memo))
    slots = [(module, name) for find, name in state.ignored_slots if (module := find()) is not None]
    state.ignored_slots = {(weakref.ref(memo[id(module)]), name) for module, name in slots}
    # The user may have named modules of other models as well.
    ignored = [module for module in state.ignored_modules if module in copied]
    state.ignored_modules = frozenset(copy.deepcopy(ignored, memo))
    around = [known for find in state.around if (known := find()) is not None]
    state.around = [weakref.ref(memo[id(known)]) for known in around if id(known) in memo]


def _adopt_modules(handle: Handle, memo: dict[int, Any]) -> None:
    """Let a copied handle manage the copies of the modules, and prefetch copied handles."""
    handle.modules = copy.deepcopy(handle.modules, memo)
    for param in handle.params:
        param.owners = copy.deepcopy(param.owners, memo)
        # Only now: a form may refer to modules.
        param.form = copy.deepcopy(param.form, memo)
    handle.start_sharded()
    settings = handle.settings
    for name in ("forward_prefetch", "backward_prefetch"):
        chosen = getattr(settings, name)
        if chosen is not None:
            setattr(settings, name, tuple(weakref.ref(memo[id(one())]) for one in chosen if id(one()) in memo))
