"""Makes plans, before anything is changed, from names and shapes alone.

No process group is needed, and parameters may be on the meta device. First the *structure*: which
modules get a handle and which parameters each handle owns. Then the *layout* of each handle's
buffers, which depends on the number of ranks. ``fully_shard`` executes the plan that ``plan`` shows.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from composable.arguments import readable_twice
from composable.contract import get_registry
from composable.errors import ConfigError
from composable.planning.alignment import Cut, choose_cuts
from composable.planning.handle_plan import BufferPlan, HandlePlan, ParamPlan
from composable.planning.layout import layout_of_rows, plan_layout
from composable.planning.offload import NO_OFFLOAD, OffloadPolicy
from composable.planning.options import AlignLike, ShardingStrategy, ShardOptions, ShardPlacementFn
from composable.planning.precision import NO_CASTS, MixedPrecisionPolicy, ParamDtypes, skipped_modules
from composable.planning.shard_plan import ShardPlan
from composable.planning.structure import FoundHandle, FoundParam, find_structure, named_roots
from composable.planning.subclasses import Form
from composable.planning.tree import managed_modules
from composable.policies import PolicyLike
from composable.wording import class_name, list_text

__all__ = ["HandleMembers", "make_plan", "plan"]


@dataclass(frozen=True, eq=False)
class HandleMembers:
    """The objects that a ``HandlePlan`` names.

    Attributes:
        modules: The fully sharded modules.
        originals: The handle's parameters by FQN, in the plan's order.
        owners: For each FQN, every (module, attribute name) that holds the parameter.
        forms: How those of tensor subclasses are sharded.
    """

    modules: tuple[nn.Module, ...]
    originals: Mapping[str, nn.Parameter]
    owners: Mapping[str, tuple[tuple[nn.Module, str], ...]]
    forms: Mapping[str, Form] = field(default_factory=dict)


def plan(
    module: nn.Module | Sequence[nn.Module],
    *,
    world_size: int,
    replicas: int = 1,
    ranks_per_host: int | None = None,
    policy: PolicyLike | None = None,
    strategy: ShardingStrategy | str | None = None,
    reshard_after_forward: bool | int | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    unused_gradients: str = "none",
    align: AlignLike | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    transport: str = "auto",
    mp_policy: MixedPrecisionPolicy = NO_CASTS,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    shard_as_bytes: Collection[type[torch.Tensor]] = (),
) -> ShardPlan:
    """Say what ``fully_shard`` with the same arguments would do; nothing is changed or communicated.

    Args:
        module: An unannotated module, or several that share one handle; may be on the meta device.
        world_size: Ranks that would share the parameters.
        replicas: Ranks that would hold each shard: with more than one, as many times ``world_size`` ranks train.
        ranks_per_host: Ranks on each host, which say what crosses between hosts: ranks are numbered host by host, and
            those that share parameters are neighbours.
        policy: Which submodules get handles of their own.
        strategy: ``FULL_SHARD``, ``SHARD_GRAD_OP``, ``HYBRID_SHARD``, ``HYBRID_SHARD_ZERO2`` or
            ``HYBRID_SHARD_OPTIM``, or its name; instead of ``reshard_after_forward``.
        reshard_after_forward: Free the parameters between forward and backward. ``None``: only
            where the module is not the root. An int: but for secondary shards over as many ranks.
        ignored_params: Parameters to leave alone, under all their names.
        ignored_modules: Modules to leave alone with all below them.
        unused_gradients: What a parameter that no rank has a gradient for gets, ``none`` or ``zero``.
        align: Where each parameter may be cut, as ``fully_shard`` takes it.
        shard_placement_fn: Which dim of a parameter is cut, as ``fully_shard`` takes it.
        transport: The name to print.
        mp_policy: Dtypes of computation and reduction.
        offload_policy: Where shards, gradients and optimizer state rest.
        shard_as_bytes: Classes of quantised, frozen parameters, as ``fully_shard`` takes them.

    Raises:
        ConfigError: An argument is wrong; the message names the module or parameter and the fix.
    """
    for _, root in named_roots(module):
        for api in ("fully_shard", "replicate"):
            if api in get_registry(root):
                raise ConfigError(
                    f"{api} is already on this module",
                    at=f"module {class_name(root)}",
                    fix="plan before annotating; an annotation keeps its own plan",
                )
    options = ShardOptions(
        world_size=world_size,
        replicas=replicas,
        policy=policy,
        strategy=strategy,
        reshard_after_forward=reshard_after_forward,
        ignored_params=readable_twice(ignored_params),
        ignored_modules=readable_twice(ignored_modules),
        unused_gradients=unused_gradients,
        align=align,
        shard_placement_fn=shard_placement_fn,
        transport=transport,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        shard_as_bytes=shard_as_bytes,
    )
    made = make_plan(module, options)[0]
    return made if ranks_per_host is None else made.on_hosts(ranks_per_host)


def make_plan(
    module: nn.Module | Sequence[nn.Module], options: ShardOptions
) -> tuple[ShardPlan, tuple[HandleMembers, ...]]:
    """Make the plan, and for each of its handles the objects that it names.

    The annotated modules may carry this annotation already: it is entered before it plans.

    Raises:
        ConfigError: As ``plan``.
    """
    structure = find_structure(
        module, options.policy, options.ignored_params, options.ignored_modules, tuple(options.shard_as_bytes)
    )
    handles = structure.handles
    cuts = choose_cuts([found for handle in handles for found in handle.params], options)
    roots = [root for _, root in named_roots(module)]
    managed = dict.fromkeys(managed_modules(roots, frozenset(options.ignored_modules or ())))
    _check_secondary(handles, options)
    dtypes = _dtypes_of(handles, managed, options.precision)
    handle_plans = tuple(
        HandlePlan(
            module_fqns=handle.fqns,
            class_names=tuple(class_name(one) for one in handle.modules),
            reason=handle.reason,
            params=tuple(_plan_param(found, cuts) for found in handle.params),
            buffers=_plan_buffers(handle.params, dtypes, options.shard_ranks, cuts),
            reshard_after_forward=True if options.frees is None and handle.is_picked else options.frees,
            unused_gradients=options.unused_gradients,
        )
        for handle in handles
    )
    shard_plan = ShardPlan(
        world_size=options.shard_ranks,
        replicas=1 if options.is_spread else options.replicas,
        host_ranks=options.world_size if options.shard_ranks > options.world_size else None,
        transport=options.transport,
        class_names=tuple(class_name(root) for root in roots),
        handles=handle_plans,
        kept_fqns=structure.kept_fqns,
        ignored_fqns=structure.ignored_fqns,
        mp_policy=options.precision,
        offload_policy=options.offload,
        hosts=options.hosts,
    )
    members = tuple(
        HandleMembers(
            handle.modules,
            {found.fqns[0]: found.param for found in handle.params},
            {found.fqns[0]: tuple(found.owners) for found in handle.params},
            {found.fqns[0]: found.form for found in handle.params if found.form is not None},
        )
        for handle in handles
    )
    return shard_plan, members


def _check_secondary(handles: Iterable[FoundHandle], options: ShardOptions) -> None:
    """Refuse secondary shards of what only a class knows how to gather: it makes them of rows of its shard.

    And optimizer state that is spread over more ranks of what tensor parallelism has split.

    Raises:
        ConfigError: There are such parameters.
    """
    what = "HYBRID_SHARD_OPTIM" if options.is_spread else f"reshard_after_forward={options.frees}"
    for kind, is_asked, why in (
        ("gathered", options.is_spread or type(options.frees) is int, "whose class says what ranks exchange"),
        ("split", options.is_spread, "that tensor parallelism has split"),
    ):
        names = [
            found.fqns[0]
            for handle in handles
            for found in handle.params
            if found.form is not None and found.form.kind == kind
        ]
        if names and is_asked:
            other = "HYBRID_SHARD" if options.is_spread else "reshard_after_forward=True or False"
            raise ConfigError(
                f"{what} on parameters {why}",
                at=f"parameter {list_text(names)}",
                fix=f"annotate their modules in a call of their own with {other}",
            )


def _plan_param(found: FoundParam, cuts: Mapping[str, Cut]) -> ParamPlan:
    storage, fqn, form = found.storage, found.fqns[0], found.form
    shared_fqns, promise = tuple(found.fqns[1:]), cuts[fqn].promise
    subclass = None if form is None or form.kind == "marked" else form.subclass
    return ParamPlan(fqn, storage.shape, storage.dtype, found.param.requires_grad, shared_fqns, promise, subclass)


def _dtypes_of(
    handles: Iterable[FoundHandle], managed: Collection[nn.Module], policy: MixedPrecisionPolicy
) -> dict[FoundParam, ParamDtypes]:
    skipped = skipped_modules(managed, policy)
    return {
        # Bytes stay what they are, whatever dtype the class calls them.
        found: ParamDtypes(found.storage.dtype, found.storage.dtype)
        if found.form is not None and found.form.kind == "bytes"
        else policy.dtypes_of(found.param, found.fqns[0], is_skipped=any(owner in skipped for owner, _ in found.owners))
        for handle in handles
        for found in handle.params
    }


def _plan_buffers(
    params: Sequence[FoundParam],
    dtypes: Mapping[FoundParam, ParamDtypes],
    world_size: int,
    cuts: Mapping[str, Cut],
) -> tuple[BufferPlan, ...]:
    classes: dict[tuple[torch.dtype, bool, ParamDtypes], list[tuple[str, torch.Size]]] = {}
    gathered: list[BufferPlan] = []
    for found in params:
        storage, requires_grad, used = found.storage, found.param.requires_grad, dtypes[found]
        if found.form is not None and found.form.kind == "gathered":
            layout = layout_of_rows(found.fqns[0], storage.shape, world_size)
            gathered.append(BufferPlan(storage.dtype, requires_grad, *used, layout, is_gathered_by_class=True))
        else:
            classes.setdefault((storage.dtype, requires_grad, used), []).append((found.fqns[0], storage.shape))
    plain = (
        BufferPlan(
            dtype,
            requires_grad,
            used.compute,
            used.reduce,
            plan_layout(
                shapes,
                world_size,
                align={fqn: cuts[fqn].align for fqn, _ in shapes},
                orders={fqn: cuts[fqn].order for fqn, _ in shapes},
            ),
        )
        for (dtype, requires_grad, used), shapes in classes.items()
    )
    return (*plain, *gathered)
