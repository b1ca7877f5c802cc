"""Makes plans, before anything is changed, from names and shapes alone.

No process group is needed, and parameters may be on the meta device. First the *structure*: which
modules get a handle and which parameters each handle owns. Then the *layout* of each handle's
buffers, which depends on the number of ranks. ``fully_shard`` executes the plan that ``plan`` shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from composable.contract import get_registry
from composable.errors import ConfigError
from composable.planning.cut import order_of
from composable.planning.layout import Align, plan_layout
from composable.planning.options import ShardingStrategy, ShardOptions
from composable.planning.shard_plan import BufferPlan, HandlePlan, ParamPlan, ShardPlan
from composable.planning.structure import FoundParam, find_structure, named_roots
from composable.policies import PolicyLike
from composable.wording import plain_fqn

__all__ = ["HandleMembers", "make_plan", "plan"]


@dataclass(frozen=True, eq=False)
class HandleMembers:
    """The objects that a ``HandlePlan`` names.

    Attributes:
        modules: The fully sharded modules.
        originals: The handle's parameters by FQN, in the plan's order.
        owners: For each FQN, every (module, attribute name) that holds the parameter.
    """

    modules: tuple[nn.Module, ...]
    originals: Mapping[str, nn.Parameter]
    owners: Mapping[str, tuple[tuple[nn.Module, str], ...]]


def plan(
    module: nn.Module | Sequence[nn.Module],
    *,
    world_size: int,
    policy: PolicyLike | None = None,
    strategy: ShardingStrategy | str | None = None,
    reshard_after_forward: bool | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    unused_gradients: str = "none",
    align: Mapping[str, Align] | None = None,
    transport: str = "auto",
) -> ShardPlan:
    """Say what ``fully_shard`` with the same arguments would do; nothing is changed or communicated.

    Args:
        module: An unannotated module, or several that share one handle; may be on the meta device.
        world_size: Ranks that would share the parameters.
        policy: Which submodules get handles of their own.
        strategy: ``FULL_SHARD`` or ``SHARD_GRAD_OP``, or its name; instead of ``reshard_after_forward``.
        reshard_after_forward: Free the parameters between forward and backward. ``None``: only
            where the module is not the root.
        ignored_params: Parameters to leave alone, under all their names.
        ignored_modules: Modules to leave alone with all below them.
        unused_gradients: What a parameter that no rank has a gradient for gets, ``none`` or ``zero``.
        align: What a cut may do to a parameter, by FQN: see ``plan_layout``.
        transport: The name to print.

    Raises:
        ConfigError: An argument is wrong; the message names the module or parameter and the fix.
    """
    for _, root in named_roots(module):
        for api in ("fully_shard", "replicate"):
            if api in get_registry(root):
                raise ConfigError(
                    f"{api} is already on this module",
                    at=f"module {type(root).__name__}",
                    fix="plan before annotating; an annotation keeps its own plan",
                )
    options = ShardOptions(
        world_size=world_size,
        policy=policy,
        strategy=strategy,
        reshard_after_forward=reshard_after_forward,
        ignored_params=ignored_params,
        ignored_modules=ignored_modules,
        unused_gradients=unused_gradients,
        align=align,
        transport=transport,
    )
    return make_plan(module, options)[0]


def make_plan(
    module: nn.Module | Sequence[nn.Module], options: ShardOptions
) -> tuple[ShardPlan, tuple[HandleMembers, ...]]:
    """Make the plan, and for each of its handles the objects that it names.

    The annotated modules may carry this annotation already: it is entered before it plans.

    Raises:
        ConfigError: As ``plan``.
    """
    structure = find_structure(module, options.policy, options.ignored_params, options.ignored_modules)
    handles = structure.handles
    align = {plain_fqn(fqn): found for fqn, found in (options.align or {}).items()}
    unknown = set(align) - {found.fqns[0] for handle in handles for found in handle.params}
    if unknown:
        raise ConfigError(
            f"align names parameters that no handle owns: {sorted(unknown)}",
            fix="pass FQNs below the annotated module, as in named_parameters()",
        )
    handle_plans = tuple(
        HandlePlan(
            module_fqns=handle.fqns,
            class_names=tuple(type(one).__name__ for one in handle.modules),
            reason=handle.reason,
            params=tuple(_plan_param(found) for found in handle.params),
            buffers=_plan_buffers(handle.params, options.world_size, align),
            reshard_after_forward=True if options.frees is None and handle.is_picked else options.frees,
            unused_gradients=options.unused_gradients,
        )
        for handle in handles
    )
    shard_plan = ShardPlan(
        world_size=options.world_size,
        transport=options.transport,
        class_names=tuple(type(root).__name__ for _, root in named_roots(module)),
        handles=handle_plans,
        kept_fqns=structure.kept_fqns,
        ignored_fqns=structure.ignored_fqns,
    )
    members = tuple(
        HandleMembers(
            handle.modules,
            {found.fqns[0]: found.param for found in handle.params},
            {found.fqns[0]: tuple(found.owners) for found in handle.params},
        )
        for handle in handles
    )
    return shard_plan, members


def _plan_param(found: FoundParam) -> ParamPlan:
    param = found.param
    return ParamPlan(found.fqns[0], param.shape, param.dtype, param.requires_grad, tuple(found.fqns[1:]))


def _order_of(found: FoundParam, align: Mapping[str, Align]) -> tuple[int, ...]:
    """Return the order in which a parameter's dims lie in memory, to be kept; empty: as they are numbered."""
    order = order_of(found.param)
    # A promise about rows holds only where rows are what lies together.
    is_promised = isinstance(align.get(found.fqns[0]), int)
    return () if is_promised and order and order[0] else order


def _plan_buffers(params: Sequence[FoundParam], world_size: int, align: Mapping[str, Align]) -> tuple[BufferPlan, ...]:
    classes: dict[tuple[torch.dtype, bool], list[tuple[str, torch.Size]]] = {}
    for found in params:
        key = (found.param.dtype, found.param.requires_grad)
        classes.setdefault(key, []).append((found.fqns[0], found.param.shape))
    orders = {found.fqns[0]: order for found in params if (order := _order_of(found, align))}
    return tuple(
        BufferPlan(
            dtype,
            requires_grad,
            plan_layout(
                shapes, world_size, align={fqn: align[fqn] for fqn, _ in shapes if fqn in align}, orders=orders
            ),
        )
        for (dtype, requires_grad), shapes in classes.items()
    )
