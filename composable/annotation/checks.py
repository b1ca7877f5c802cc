"""What is looked at before a root runs: whether all has values, whether something was added, what is likely not meant.

Two ways to have no values: still on the meta device, or in memory that ``to_empty`` made and nobody has written to
since. Modules that an annotation ignores are the user's own. A frozen parameter that is added is none of our business:
every rank holds it whole.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from torch import nn

import _traversal_utils
from composable.comm import Ranks
from composable.engine import (
    META_FIX,
    Handle,
    attach,
    forget_torch_hooks,
    is_unfilled,
    refuse_steppers,
    step_torch_optimizers,
)
from composable.errors import UsageError, place_of_rank, warn_once
from composable.ground.contract import excludes
from composable.ground.frames import is_functional_call
from composable.ground.names import join_fqn, list_text
from composable.ground.ownership import (
    CHANGES,
    check_callers,
    is_left_alone,
    is_managed,
    watch_registrations,
)
from composable.ground.torch_hooks import Contents
from composable.ground.torch_private import optimizers_in_backward
from composable.planning import PROTOCOL, ShardPlan, managed_modules, name_modules

__all__ = [
    "Additions",
    "AnnotatedState",
    "check_on_device",
    "check_ready",
    "notice_experts",
    "notice_offload",
    "notice_plan",
    "notice_unset",
]


class AnnotatedState(Protocol):
    """What is asked of the state of an annotation."""

    modules: tuple[nn.Module, ...]
    ignored_modules: frozenset[nn.Module]
    marked_buffers: list[tuple[nn.Module, str]]
    _handles: list[Handle]


def check_ready(states: Sequence[AnnotatedState], names: Mapping[nn.Module, str]) -> None:
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


def check_on_device(states: Sequence[AnnotatedState], names: Mapping[nn.Module, str]) -> None:
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


def _check_not_extended(states: Sequence[AnnotatedState], names: Mapping[nn.Module, str]) -> None:
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


class _Annotated(Protocol):
    """What is asked of the state of an annotation."""

    ignored_modules: frozenset[nn.Module]
    ignored_slots: list[tuple[nn.Module, str]]
    _handles: list[Handle]


class Additions:
    """Looks at a tree of annotated modules when something in it has changed."""

    __slots__ = ("_looks",)

    def __init__(self) -> None:
        # By the module that ran: the counts, the contents, and what is frozen.
        self._looks: dict[nn.Module, tuple[tuple[int, int], Contents, list[nn.Parameter]]] = {}

    def check(self, module: nn.Module, states: Collection[_Annotated]) -> None:
        """Raise if ``module``, whose forward begins, has parameters that no annotation knows.

        Args:
            module: The outermost fully sharded module that runs.
            states: Every state of the tree.

        Raises:
            UsageError: It names them, or what else averages gradients; or an optimizer in backward beside a hook.
        """
        counts = (CHANGES.registrations, len(optimizers_in_backward()))
        seen, contents, frozen = self._looks.get(module, (None, None, ()))
        is_as_before = seen == counts and contents is not None and not contents.have_changed()
        if is_as_before and not (frozen and any(param.requires_grad for param in frozen)):
            return
        if is_functional_call():
            return  # What is lent for one call was not added.
        check_callers()
        for state in states:
            for handle in state._handles:
                attach(handle)  # What was assigned in the place of a sharded parameter is a value for it.
                _take_over_optimizers(handle)
        added = dict(_unmanaged(module, states))
        names = [fqn for fqn, param in added.items() if param.requires_grad]
        if names:
            raise UsageError(
                "parameters were added after fully_shard was called, and nothing averages their gradients",
                at=f"{place_of_rank()}, {list_text(names)}",
                fix="add modules first; or call fully_shard on the added module too; or unannotate, and annotate anew",
            )
        modules = list(_traversal_utils._get_modules(module))
        watch_registrations(modules)
        counts = (counts[0], len(optimizers_in_backward()))
        self._looks[module] = counts, Contents(modules, dict.keys), list(added.values())


def _take_over_optimizers(handle: Handle) -> None:
    """Step where the reduced gradients arrive, for optimizers that wait for autograd to reach a sharded parameter."""
    if forget_torch_hooks(param.sharded for param in handle.params):
        if handle.comm_hooks:
            refuse_steppers([step_torch_optimizers], handle.from_root(handle.params[0].fqn))
        handle.step_by(list(dict.fromkeys([*handle.steppers, step_torch_optimizers])))


def _unmanaged(root: nn.Module, states: Collection[_Annotated]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters below ``root`` that no annotation manages or ignores, with their names."""
    ignored = {module for state in states for module in state.ignored_modules}
    slots = {slot for state in states for slot in state.ignored_slots}
    names = name_modules([root])
    left: set[int] = set()
    entered: list[nn.Module] = []
    seen = {root}
    stack = [root]
    while stack:
        module = stack.pop()
        if module in ignored or excludes(module, "fully_shard"):
            left.update(map(id, module.parameters()))
            continue
        entered.append(module)
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    for module in entered:
        if is_left_alone(module):
            continue
        for name, param in module._parameters.items():
            if param is not None and id(param) not in left and (module, name) not in slots and not is_managed(param):
                yield join_fqn(names[module], name), param


# What users should know of their model and is no error: logged once


def notice_plan(plan: ShardPlan, ranks: Ranks) -> None:
    """Log what is likely not meant in the plan of a root, on the first of its ranks.

    Of a root only: of an annotation it is not known whether another one comes around it.
    """
    if ranks.rank == 0 and ranks.size > 1:
        for warning in plan.warnings:
            warn_once(f"{warning}\n  at:  {place_of_rank()}, module {' + '.join(plan.class_names)}")


def notice_offload(plan: ShardPlan, ranks: Ranks) -> None:
    """Log that a policy has nothing to offload, where everything is on the host anyway; on the first rank."""
    if plan.offload_policy.is_offloading and ranks.device.type == "cpu" and ranks.rank == 0:
        warn_once(
            "nothing is to be offloaded: the mesh is on cpu, where shards, gradients and optimizer state rest already"
            f"\n  at:  {place_of_rank()}, module {' + '.join(plan.class_names)}"
        )


def notice_unset(plan: ShardPlan, ranks: Ranks) -> None:
    """Log which attributes of weights that their class gathers stay unset, on the first rank."""
    found = dict.fromkeys(param.subclass for handle in plan.handles for param in handle.params if param.subclass)
    for subclass in found:
        if subclass.unset and ranks.rank == 0:
            warn_once(
                f"{subclass.name} gathers its rows without {list_text(subclass.unset)}: "
                "what is set on a sharded weight does not reach its class"
                f"\n  at:  {place_of_rank()}, module {' + '.join(plan.class_names)}"
                "\n  fix: leave out what computes them between steps, as precompute_float8_dynamic_scale_for_fsdp"
            )


def notice_experts(handles: Sequence[Handle], leaders: Mapping[Handle, Sequence[Handle]], ranks: Ranks) -> None:
    """Log that all experts are gathered with the root, where nothing else is annotated around them; on the first rank.

    Args:
        handles: Of the root.
        leaders: Of those that follow.
        ranks: Of the root.
    """
    others = [handle for handle in handles if handle not in leaders]
    if len(leaders) > 1 and len(others) == 1 and ranks.rank == 0 and ranks.size > 1:
        warn_once(
            f"the parameters of {len(leaders)} modules on a part of the ranks, such as experts, are gathered all at "
            f"once: only the root is annotated around them\n  at:  {place_of_rank()}, {others[0].described}"
            "\n  fix: annotate the blocks around them, before the root"
        )
