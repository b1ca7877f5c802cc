"""The undoing of annotations: modules become ordinary again.

All checks run first, with the same result on every rank. Then parameters are gathered handle by
handle, and each shard is freed once its parameters are whole, so memory holds at most the full
model and one handle's buffer.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.activation_checkpoint import forward_in_place
from composable.annotated_module import check_idle
from composable.annotation import (
    AnnotationState,
    FullyShardState,
    ReplicateState,
    check_not_joined,
    handles_within,
    model_ranks_of,
    nothing_annotated,
    sharded_state_of,
    states_of,
)
from composable.comm import Ranks, compare_in_each
from composable.dtensor import RaggedDTensor, collect_blocks
from composable.engine import Handle, attach, handle_of, refuse_waiting_copies
from composable.errors import ComposableError, ConfigError, UsageError, made_alike
from composable.fsdp_module import remove_mixin
from composable.ground.contract import get_registry, remove_annotation, remove_member
from composable.ground.frames import reaches_out
from composable.ground.names import check_bool
from composable.ground.ownership import leave_alone
from composable.planning import mark_replaced
from composable.replicate_module import remove_replicate_mixin

ModuleT = TypeVar("ModuleT", nn.Module, Sequence[nn.Module])

_FIX_PART = "call unannotate on {names} or a module around, in one call"


def unannotate(module: ModuleT, *, recurse: bool = True) -> ModuleT:
    """Undo ``fully_shard``, ``replicate`` and ``checkpoint``: parameters, classes, hooks and registry as before.

    Collective: all ranks of every annotation that is undone, same order. Sharded parameters are gathered
    into new ``nn.Parameter``s under the same names, with ties, ``requires_grad`` and the marks that users
    put on them; an optimizer that holds the sharded ones raises at its next step. Replicated parameters
    stay the same objects. A parameter with a gradient gets the full gradient, averaged over the ranks
    also if ``no_sync`` had kept it on its rank. The module may be annotated anew, by any API.

    Part of a sharded model may be undone if every handle lies wholly inside or outside of it; the rest
    decides its root anew at the next forward, which is collective.

    Memory: at most the full model and one handle's buffer, besides what an optimizer holds.

    Args:
        module: A module, or several that share handles.
        recurse: Undo every annotation at and below ``module``. If false, only those made by a call on
            ``module`` itself, with the modules that their policy picked.

    Returns:
        ``module``, the same object.

    Raises:
        UsageError: No module there is annotated; a forward, a backward or torch's ``Join`` is running; a handle owns
            parameters both inside and outside of ``module``, and the message names its modules; parameters are on
            another device than the ranks communicate on, such as meta; or the ``forward`` of a checkpointed module
            was replaced. Nothing is changed.
        DesyncError: The ranks have different annotations or gradients there. Nothing is changed.
        ConfigError: ``module`` is no module, or ``recurse`` no bool.
    """
    roots = [module] if isinstance(module, nn.Module) else module
    if not isinstance(roots, (list, tuple)) or not roots or not all(isinstance(one, nn.Module) for one in roots):
        raise ConfigError(f"unannotate got {type(module).__name__}", fix="pass a module or a list of modules")
    check_bool("recurse", recurse)
    check_not_joined(roots, "unannotate")
    states = states_of(one for root in roots for one in (root.modules() if recurse else (root,)))

    def compare(removal: _Removal | None, failure: ComposableError | None) -> None:
        lines = {} if removal is None else removal.lines()
        compare_in_each(
            {ranks: lines.get(ranks, ()) for ranks in _everyone(roots, states)},
            failure,
            what="the ranks call unannotate on different parameters or gradients",
            fix="do the same on every rank: the same module, and gradients set or dropped everywhere",
        )

    removal = made_alike(lambda: _Removal(roots, states, recurse=recurse), compare)
    with torch.no_grad():
        removal.run()
    return module


def _everyone(roots: Sequence[nn.Module], states: Sequence[AnnotationState]) -> Iterable[Ranks]:
    """Return the groups of ranks that must agree."""
    found = [state.grid.everyone for state in states]
    handles = [handle for state in states if isinstance(state, FullyShardState) for handle in state._handles]
    found += [model.everyone for model in model_ranks_of(handles).values()]
    owners = [handle_of(param) for root in roots for param in root.parameters()]
    found += [handle.grid.everyone for handle in owners if handle is not None]
    return dict.fromkeys(found)


class _Removal:
    """The annotations to undo; the constructor raises ``UsageError`` if they cannot be undone."""

    def __init__(self, roots: Sequence[nn.Module], states: Sequence[AnnotationState], *, recurse: bool) -> None:
        self._sharded = [state for state in states if isinstance(state, FullyShardState)]
        self._replicated = [state for state in states if isinstance(state, ReplicateState)]
        self._modules = modules = dict.fromkeys(module for root in roots for module in root.modules())
        inside = set(handles_within(modules, "unannotated", _FIX_PART))
        reached = modules if recurse else dict.fromkeys(roots)
        checkpointed = [module for module in reached if "checkpoint" in get_registry(module)]
        self._handles = [handle for state in self._sharded for handle in state._handles if handle in inside]
        if not states and not checkpointed:
            raise nothing_annotated("unannotate", *roots)
        for annotation in self._replicated:
            if not all(module in modules for module in annotation.modules):
                raise reaches_out("unannotated", annotation.modules, _FIX_PART)
        self._check_idle({*modules})
        self._checkpointed = list(map(forward_in_place, checkpointed))
        for one in states:
            one.abandon_step()
        for handle in self._handles:
            refuse_waiting_copies("unannotate", handle)
            attach(handle)
            for flat in handle.buffers:
                flat.check_usable()

    def _check_idle(self, involved: set[nn.Module]) -> None:
        check_idle("unannotate", self._sharded, involved)
        stepped = [handle.from_root(handle.params[0].fqn) for handle in self._handles if handle.steppers]
        stepped += [state.reducer.params[0].fqn for state in self._replicated if state.reducer.steppers]
        if stepped:
            raise _untimely(
                "an optimizer steps inside backward",
                f"parameter {stepped[0]!r}",
                "call remove() on the result of step_in_backward; hooks of torch's _apply_optimizer_in_backward "
                "cannot be removed",
            )

    def lines(self) -> dict[Ranks, list[str]]:
        """Return a line for each parameter, by the ranks that have it; the ranks go on only if all have equal lines."""
        lines: dict[Ranks, list[str]] = {}
        for handle in self._handles:
            kept = " kept by no_sync" if handle.is_unsynced else ""
            lines.setdefault(handle.grid.everyone, []).extend(
                f"{handle.from_root(param.fqn)} {list(param.shape)} {param.sharded.dtype}"
                f"{'' if param.sharded.grad is None else ' with a gradient'}{kept}"
                for param in handle.params
            )
        for one in self._replicated:
            lines.setdefault(one.grid.everyone, []).extend(f"replicated {item.fqn}" for item in one.reducer.params)
        return lines

    def run(self) -> None:
        """Change the modules; all checks have run before. Collective."""
        for handle in self._handles:
            handle.requires_gradient_sync = True
        for state in self._sharded:
            if any(handle.is_unsynced for handle in state._handles):
                state.lazy_init()
        for root in {state.root: None for state in self._sharded if state.root is not None}:
            root.scheduler.reduce_kept()
            root.close()
        for state in self._sharded:
            for handle in [handle for handle in state._handles if handle in self._handles]:
                _make_whole(handle)
            self._take_off(state)
        for annotation in self._replicated:
            annotation.close()
            for module in annotation.modules:
                remove_annotation(module, "replicate")
                remove_replicate_mixin(module)
        for forward in self._checkpointed:
            forward.remove()
            remove_annotation(forward.module, "checkpoint")

    def _take_off(self, state: FullyShardState) -> None:
        modules = [module for module in self._modules if sharded_state_of(module) is state]
        own_dicts = {id(value) for module in modules for value in vars(module).values()}
        for hook in [hook for hook in state.hook_handles if id(hook.hooks_dict_ref()) in own_dicts]:
            hook.remove()
            state.hook_handles.remove(hook)
        state.modules = tuple(module for module in state.modules if module not in self._modules)
        state.plan = state.plan.without([handle.plan for handle in state._handles if handle in self._handles])
        state._handles = [handle for handle in state._handles if handle not in self._handles]
        for module in modules:
            state._module_to_handle.pop(module, None)
            remove_mixin(module)
            remove_annotation(module, "fully_shard")
            remove_member(module, "fully_shard")


def _untimely(while_: str, place: str, fix: str) -> UsageError:
    return UsageError(f"unannotate while {while_}", at=place, fix=fix)


def _make_whole(handle: Handle) -> None:
    """Replace the handle's parameters by ordinary ones and free its shards. Collective."""
    buffers = list(handle.buffers)
    handle.close()
    while buffers:
        flat = buffers.pop(0)
        # Every rank gets the values.
        values = collect_blocks([param.ragged for param in flat.params])
        for param, value in zip(flat.params, values or (), strict=True):
            # A policy may keep gradients in low precision; the plain parameter gets one in its own dtype.
            held, grad = param.sharded.grad, None
            if isinstance(held, RaggedDTensor):
                grad = held.gather_block().to(param.sharded.dtype)
            elif isinstance(held, DTensor):
                grad = param.layout.block_of(held.full_tensor()).to(param.sharded.dtype)
            param.place(param.plain_copy(value, None if grad is None else param.around_grad(grad)))
            param.sharded.grad = None
            mark_replaced(param.sharded, handle.from_root(param.fqn), *param.owners[0])
            leave_alone(module for module, _ in param.owners)
