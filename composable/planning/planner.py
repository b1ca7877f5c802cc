"""Makes the plan of an annotation.

No process group is needed, and parameters may be on the meta device. First comes the *structure*: which modules get a
handle, and which parameters each handle owns. Then the *cuts*, from ``align`` and ``shard_placement_fn``: where each
parameter may be cut. A flat range of a parameter is a slice of the dim that is outermost in memory; so, for a cut along
another dim, the parameter is laid out in another order. Then the *layout* of each handle's buffers, which depends on
the number of ranks. ``fully_shard`` executes the plan that ``plan`` shows.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Shard

from composable.errors import ConfigError
from composable.ground.contract import get_registry
from composable.ground.names import answer_of, class_name, described, list_text, plain_fqn, readable_twice
from composable.ground.outer_rooms import outer
from composable.planning.layout import Align, Promise, layout_of_rows, order_of, plan_layout
from composable.planning.options import (
    NO_CASTS,
    NO_OFFLOAD,
    AlignLike,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamDtypes,
    ShardingStrategy,
    ShardOptions,
    ShardPlacementFn,
    skipped_modules,
)
from composable.planning.shard_plan import BufferPlan, HandlePlan, ParamPlan, ShardPlan
from composable.planning.structure import FoundParam, HandleMembers, find_structure, managed_modules, named_roots
from composable.policies import PolicyLike


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
    step: Callable[[nn.Module], object] | None = None,
) -> ShardPlan:
    """Return the plan of ``fully_shard`` with the same arguments. Nothing is changed or communicated.

    Args:
        module: An unannotated module, or several that share one handle; may be on the meta device.
        world_size: Ranks that would share the parameters.
        replicas: Ranks that would hold each shard. If there is more than one, ``world_size`` times as many ranks train.
        ranks_per_host: Ranks on each host, from which bytes between hosts follow: ranks are numbered host by host, and
            ranks that share parameters are neighbours.
        policy: Which submodules get handles of their own, as ``fully_shard`` takes it.
        strategy: The sharding strategy, or its name; instead of ``reshard_after_forward``.
        reshard_after_forward: Free the parameters between forward and backward, as ``fully_shard`` takes it.
        ignored_params: Parameters to leave alone, under all their names.
        ignored_modules: Modules to leave alone with all below them.
        unused_gradients: The gradient of a parameter that no rank has a gradient for: ``"none"`` or ``"zero"``.
        align: Where each parameter may be cut, as ``HandleOptions`` takes it.
        shard_placement_fn: Which dim of a parameter is cut, as ``fully_shard`` takes it.
        transport: The name to print.
        mp_policy: Dtypes of computation and reduction.
        offload_policy: Where shards, gradients and optimizer state rest.
        step: Runs forward and backward of the module that it is given, on batches that it makes: the plan then has the
            peak with activations, as ``composable.rehearsal.rehearse`` counts it. It is called once, with a copy of
            fake tensors. An optimizer that it makes, and steps twice, counts.

    Returns:
        The plan; ``print`` shows its handles.

    Raises:
        ConfigError: An argument is wrong; the message names the module or parameter and the fix.
        UsageError: There is a ``step``, and torch.distributed is initialised in this process.
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
    )
    made = make_plan(module, options)[0]
    if step is not None:
        made = replace(made, step=outer("plan(step=)")(module, made, options, step, ranks_per_host))
    return made if ranks_per_host is None else made.on_hosts(ranks_per_host)


def make_plan(
    module: nn.Module | Sequence[nn.Module], options: ShardOptions
) -> tuple[ShardPlan, tuple[HandleMembers, ...]]:
    """Make the plan, and for each of its handles the modules and parameters that it names; errors as in ``plan``.

    The registry of the annotated modules may have this annotation already, which is entered before it plans.
    """
    handles, kept_fqns, ignored_fqns = find_structure(
        module, options.policy, options.ignored_params, options.ignored_modules
    )
    params = [found for handle in handles for found in handle.params.values()]
    wishes = _wishes(params, options.align)
    cuts = {one: _cut_of(one, wishes.get(one), _ask_dim(options.shard_placement_fn, one)) for one in params}
    roots = [root for _, root in named_roots(module)]
    managed = dict.fromkeys(managed_modules(roots, frozenset(options.ignored_modules or ())))
    scripted = [class_name(root) for root in roots if isinstance(root, torch.jit.ScriptModule)]
    scripted += [
        f"parameter {found.fqns[0]!r}" for found in params if isinstance(found.owners[0][0], torch.jit.ScriptModule)
    ]
    if scripted:
        raise ConfigError(
            "a scripted or traced module keeps its parameters whole: no others can be put in their place",
            at=scripted[0],
            fix="shard the plain module, which torch.compile takes; or leave it out: ignored_modules=[...]",
        )
    _check_secondary(params, options.frees)
    skipped = skipped_modules(managed, options.mp_policy).keys()
    dtypes = {found: _dtypes_of(found, options.mp_policy, skipped) for found in params}
    handle_plans = tuple(
        HandlePlan(
            module_fqns=handle.fqns,
            class_names=tuple(class_name(one) for one in handle.modules),
            reason=handle.reason,
            params=tuple(_plan_param(found, cuts[found].promise) for found in handle.params.values()),
            buffers=_plan_buffers(handle.params.values(), dtypes, options.world_size, cuts),
            reshard_after_forward=True if options.frees is None and handle.is_picked else options.frees,
            unused_gradients=options.unused_gradients,
        )
        for handle in handles
    )
    shard_plan = ShardPlan(
        world_size=options.world_size,
        replicas=options.replicas,
        transport=options.transport,
        class_names=tuple(class_name(root) for root in roots),
        handles=handle_plans,
        kept_fqns=kept_fqns,
        ignored_fqns=ignored_fqns,
        mp_policy=options.mp_policy,
        offload_policy=options.offload_policy,
        hosts=options.hosts,
        is_queued=options.is_queued,
    )
    return shard_plan, handles


def _check_secondary(params: Sequence[FoundParam], frees: bool | int | None) -> None:
    """Refuse secondary shards of parameters that their class gathers: a class gathers only rows of its shard."""
    names = [found.fqns[0] for found in params if found.kind == "gathered"]
    if names and type(frees) is int:
        raise ConfigError(
            f"reshard_after_forward={frees} cannot be used for parameters that their own class gathers",
            at=f"parameter {list_text(names)}",
            fix="annotate their modules in a call of their own with reshard_after_forward=True or False",
        )


def _dtypes_of(found: FoundParam, policy: MixedPrecisionPolicy, skipped: Collection[nn.Module]) -> ParamDtypes:
    if found.kind == "bytes":
        # Bytes stay what they are, whatever dtype the class calls them.
        return ParamDtypes(found.storage.dtype, found.storage.dtype)
    is_skipped = any(owner in skipped for owner, _ in found.owners)
    return policy.dtypes_of(found.param, found.fqns[0], is_skipped=is_skipped)


class _Cut(NamedTuple):
    """The arguments of ``plan_layout`` for one parameter, beside its shape."""

    align: Align  # Where the parameter may be cut.
    order: tuple[int, ...]  # Its dims from the outermost in memory; empty: as they are numbered.
    promise: Promise | None  # The places for cuts that hold at any cost in padding.


def _plan_param(found: FoundParam, promise: Promise | None) -> ParamPlan:
    (fqn, *others), (shape, dtype) = found.fqns, (found.storage.shape, found.storage.dtype)
    subclass = None if found.form is None or found.kind == "marked" else found.form.subclass
    return ParamPlan(fqn, shape, dtype, found.param.requires_grad, tuple(others), promise, subclass)


def _plan_buffers(
    params: Iterable[FoundParam],
    dtypes: Mapping[FoundParam, ParamDtypes],
    world_size: int,
    cuts: Mapping[FoundParam, _Cut],
) -> tuple[BufferPlan, ...]:
    classes: dict[tuple[torch.dtype, bool, ParamDtypes], list[FoundParam]] = {}
    gathered: list[BufferPlan] = []
    for found in params:
        alike = (found.storage.dtype, found.param.requires_grad, dtypes[found])
        if found.kind == "gathered":
            layout = layout_of_rows(found.fqns[0], found.storage.shape, world_size)
            gathered.append(BufferPlan(*alike[:2], *alike[2], layout, is_gathered_by_class=True))
        else:
            classes.setdefault(alike, []).append(found)
    plain = []
    for (dtype, requires_grad, used), members in classes.items():
        layout = plan_layout(
            [(found.fqns[0], found.storage.shape) for found in members],
            world_size,
            align={found.fqns[0]: cuts[found].align for found in members},
            orders={found.fqns[0]: cuts[found].order for found in members},
        )
        plain.append(BufferPlan(dtype, requires_grad, *used, layout))
    return (*plain, *gathered)


def _cut_of(found: FoundParam, align: Align | None, dim: int | None) -> _Cut:
    """Return the cut that both arguments ask for; a cut along ``dim`` is between its slices."""
    if dim is not None:
        if align is None or (dim == 0 and align == "row"):
            align = 1
        elif dim or isinstance(align, str):
            raise ConfigError(
                f"align says {align!r} and shard_placement_fn says Shard({dim})",
                at=found.place,
                fix="leave it out of one of them; both are possible for a number of rows with Shard(0)",
            )
    if found.kind == "gathered":
        if align not in (None, "row", 1) or dim:
            raise ConfigError(
                f"{type(found.param).__name__} is gathered by its class, which wants equal numbers of rows on each "
                "rank",
                at=found.place,
                fix="leave it out of align, and return None for it from shard_placement_fn",
            )
        return _Cut(1, (), Promise(1))
    param = found.whole
    if align is None or isinstance(align, str):
        return _Cut(align or "row", order_of(param), Promise(None) if align == "tensor" else None)
    # A promise about slices of a dim holds only where that dim is the outermost.
    outermost, numbered = dim or 0, tuple(range(param.dim()))
    order = numbered
    if param.dim() and param.numel():
        order = (outermost, *(other for other in order_of(param) or numbered if other != outermost))
    return _Cut(align, () if order == numbered else order, Promise(align, outermost))


def _wishes(params: Sequence[FoundParam], align: AlignLike | None) -> dict[FoundParam, Align]:
    """Return the value of ``align`` for each parameter that it names or has an answer for."""
    if not isinstance(align, Mapping):
        if align is None:
            return {}
        if isinstance(align, str):
            return {found: _checked_align(found.fqns[0], align) for found in params if found.kind != "gathered"}
        answers = {found: _ask(align, "align", found, found.fqns[0], found.param) for found in params}
        return {found: _checked_align(found.fqns[0], wish) for found, wish in answers.items() if wish is not None}
    # FQNs in plans leave out the parts that wrappers add; users may write them.
    align = {plain_fqn(name): _checked_align(name, wish) for name, wish in align.items()}
    known = {name for found in params for name in found.fqns}
    if unknown := [name for name in align if name not in known]:
        raise ConfigError(
            f"align names parameters that no handle owns: {unknown}",
            fix="pass FQNs below the annotated module, as in named_parameters()",
        )
    wishes: dict[FoundParam, Align] = {}
    for found in params:
        named = {name: align[name] for name in found.fqns if name in align}
        if len(set(named.values())) > 1:
            raise ConfigError(
                f"align says different things of one parameter under its names: {named}",
                at=found.place,
                fix="use only one of these names in align",
            )
        if named:
            wishes[found] = next(iter(named.values()))
    return wishes


def _checked_align(fqn: str, align: Any) -> Align:
    is_name = isinstance(align, str) and align in ("row", "element", "tensor", "matrix")
    if not is_name and (not isinstance(align, int) or isinstance(align, bool) or align < 1):
        raise ConfigError(
            f"align of {fqn!r} is {align!r:.80}",
            fix="pass 'row', 'element', 'tensor', 'matrix' or a number of rows of at least 1",
        )
    aligned: Align = align
    return aligned


def _ask_dim(function: ShardPlacementFn | None, found: FoundParam) -> int | None:
    """Return the dim that ``shard_placement_fn`` asks to cut, counted from the first; ``None``: the default."""
    placement = None if function is None else _ask(function, "shard_placement_fn", found, found.param)
    if placement is None:
        return None
    dims = found.storage.dim()
    if type(placement) is not Shard or not -dims <= placement.dim < dims:
        what = f"Shard({placement.dim})" if type(placement) is Shard else described(placement)
        raise ConfigError(
            f"shard_placement_fn returned {what} for a parameter of {dims} dims",
            at=found.place,
            fix="call fully_shard on its module first, with mesh= its mesh, and without that mesh here"
            if hasattr(placement, "mesh_info")
            else "return Shard(dim) of a dim that it has, or None for the default",
        )
    return placement.dim % dims


def _ask(function: Callable[..., Any], name: str, found: FoundParam, *args: object) -> Any:
    return answer_of(name, function, *args, at=found.place, fix="return None for parameters that it has no wish for")
