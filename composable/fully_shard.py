"""The annotation ``fully_shard``: each rank keeps a shard.

``fully_shard`` checks, plans, builds handles and installs hooks, in that order: an error
leaves the module as it was.

Source: ZeRO, arXiv 1910.02054; FSDP, arXiv 2304.11277.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import ref

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import _traversal_utils
from composable.annotation import (
    FullyShardState,
    check_not_joined,
    check_own_memory,
    check_ranks_below,
    mark_memory,
    register_fully_shard_hooks,
)
from composable.comm import (
    DataParallelMeshDims,
    GroupOrPair,
    ModelRanks,
    Ranks,
    annotating,
    choose_transport_for,
    joined_mesh,
    resolve_grid,
)
from composable.dtensor import RaggedDTensor
from composable.engine import (
    FlatBuffer,
    Handle,
    ParamLabel,
    RestingPlace,
    give_torch_optimizers,
    has_stepped,
    step_torch_optimizers,
)
from composable.errors import ComposableError, ConfigError, UsageError, located, made_alike
from composable.features import (
    ClassGatheredBuffer,
    FirstValues,
    ParamInitFn,
    describe_buffers,
    follow_inputs,
    move_buffers,
)
from composable.fsdp_module import add_mixin
from composable.ground.casts import keep_dtype
from composable.ground.contract import contract, set_member
from composable.ground.names import (
    check_bool,
    check_outside_inference,
    describe_module,
    described,
    list_text,
    readable_twice,
)
from composable.ground.ownership import ignore, mark_managed
from composable.ground.torch_private import ranks_of_mesh
from composable.planning import (
    NO_CASTS,
    NO_OFFLOAD,
    AlignLike,
    HandleMembers,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    ShardOptions,
    ShardPlacementFn,
    SplitNode,
    is_hybrid,
    make_plan,
    make_useless,
    managed_modules,
    mark_replaced,
    name_modules,
    skipped_modules,
)
from composable.policies import PolicyLike
from composable.saving import register_load_check, register_room

ModuleT = TypeVar("ModuleT", nn.Module, Sequence[nn.Module])


@dataclass(frozen=True)
class HandleOptions:
    """Options for how handles cut, gather and reduce their parameters. The defaults suit most models.

    Attributes:
        align: Where a parameter may be cut: a name for all, a dict from FQN below the module to a value, or a function
            of the FQN and the parameter that returns a value or ``None`` (the default). ``"row"``, the default:
            between rows if that costs at most 1 % of padding, else anywhere. ``"element"``: anywhere. ``"matrix"``:
            nowhere if an order of the handle's parameters and at most 1 % of padding allow that, for parameters of two
            or more dims. ``"tensor"``: nowhere, one rank holds it whole. A number n: between blocks of n rows. The last
            two hold however much padding they cost; the plan shows it.
        transport: How bytes travel: ``"auto"``, ``"process_group"`` or ``"shared_memory"``.
        follows_parent: Gather, free and reduce the module with the fully sharded module around it, whether it is called
            or not: ranks may call it or leave it out, and call several in any order. ``None``: only where it is
            annotated on fewer ranks than the root, as experts are. If no module around it has parameters of its own, or
            it is called from elsewhere, it is gathered when it is called. See docs/experts.md.
        unused_gradients: The gradient of a parameter that no rank has a gradient for. ``"none"``: its ``grad`` stays as
            it is, as in one process. ``"zero"``: zeros; optimizers then move the parameter by momentum and weight
            decay.
    """

    align: AlignLike | None = None
    transport: str = "auto"
    follows_parent: bool | None = None
    unused_gradients: str = "none"


NO_OPTIONS = HandleOptions()


@contract(FullyShardState, incompatible=("replicate",))
@annotating("fully_shard")
def fully_shard(
    module: ModuleT,
    *,
    policy: PolicyLike | None = None,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    process_group: GroupOrPair | None = None,
    strategy: ShardingStrategy | str | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = NO_CASTS,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    param_init_fn: ParamInitFn | None = None,
    sync_module_states: bool = False,
    options: HandleOptions = NO_OPTIONS,
) -> ModuleT:
    """Shard the parameters of ``module`` over the ranks of ``mesh``.

    Every rank of the mesh calls it, with equal arguments on an equal module. From then on ``module.parameters()`` are
    ``RaggedDTensor`` objects of the full shape and the same dtype that hold the piece of this rank; only forward and
    backward see whole parameters. Each rank keeps its piece of its own values: with other seeds on other ranks, rows of
    one parameter are draws of different seeds, which no rank can see. Seed all ranks alike, load afterwards, or use
    ``sync_module_states``. The module may be on the meta device, and get its values now or later: docs/memory.md.

    A handle owns the parameters that are gathered and freed together. Without ``policy`` one handle owns every
    parameter below ``module`` that no earlier annotation manages: call it on submodules first and on the root, the
    outermost module, last. With ``policy`` each picked submodule gets a handle, ``module`` gets one for the rest, and
    submodules that were annotated before stay as they are.

    Collective with ``param_init_fn``, ``sync_module_states`` or a mesh of two dims: all ranks of the mesh, and
    the ranks with other blocks of parameters that tensor parallelism has split. Otherwise it does not communicate.

    Args:
        module: The module to annotate, or several modules that share one handle.
        policy: Which submodules get handles: a set of classes, a function of a module that returns a bool,
            ``ModuleWrapPolicy``, ``CustomPolicy`` or ``SizePolicy``; or an ``auto_wrap_policy`` of torch's
            ``FullyShardedDataParallel``, except torch's own class ``CustomPolicy``.
        mesh: 1-D mesh of the ranks that share the parameters; default: all ranks. Of two named dims: those along the
            second share the parameters, those along the first hold copies of their shards (hybrid sharding).
        dp_mesh_dims: Which dims of a mesh of any number of dims are for shards and for copies.
        process_group: In place of a mesh: the group of ranks that share the parameters; or a pair of this group and the
            group of ranks that hold copies of this rank's shard.
        strategy: ``FULL_SHARD`` or ``SHARD_GRAD_OP``, with copies ``HYBRID_SHARD`` or ``HYBRID_SHARD_ZERO2``; or the
            strategy of torch with that name. Instead of ``reshard_after_forward``. A hybrid strategy without a mesh
            keeps a copy of all parameters on each host; torchrun says how many ranks a host has.
        reshard_after_forward: Free the unsharded parameters between forward and backward. ``None``: free them, except
            those of the root, which backward needs first. ``False``: keep them, also after forwards without gradients;
            the next forward gathers again only parameters that were written since. A number n that divides the number
            of ranks that share the parameters: forward leaves a secondary shard on each rank, and backward gathers from
            n consecutive ranks, such as those of a host; 1 is the same as ``False``, all ranks the same as ``True``.
        mp_policy: Dtypes of computation and reduction; a policy of torch will do too.
        offload_policy: ``CPUOffloadPolicy()``: shards, gradients and optimizer state rest in host memory, and the
            device holds only unsharded parameters; a policy of torch will do too. See docs/memory.md.
        ignored_params: Parameters to leave alone. They may be outside of ``module`` too, so one list may serve several
            calls; the plan names those that are ignored.
        ignored_modules: Modules to leave alone with all modules below them; they may be outside of ``module`` too.
        shard_placement_fn: A function of a parameter that returns ``Shard(dim)`` or ``None``, as in torch's
            ``fully_shard``, or a ``ShardPlacementResult`` with the mesh of this call. The parameter is cut between
            slices of that dim only, and lies in memory with that dim outermost: the unsharded parameter
            is a view of its shape that is not contiguous unless the dim is 0. Its placement is a ``RaggedShard``; see
            docs/ragged.md.
        param_init_fn: Called with each module that itself owns a parameter or buffer on the meta device, in
            ``modules()`` order. It gives values, on the device of the mesh, to the tensors that the module owns itself.
            Only that module's parameters are whole at that time; a shared parameter until its last owner had its turn.
            With equal seeds on all ranks it draws the values of one process. It must not communicate.
        sync_module_states: Every rank takes the parameters and buffers, persistent or not, of the first rank of the
            mesh. Other ranks may be on the meta device, and then never hold a whole parameter; ``param_init_fn``, if it
            is given, runs there too. Ignored modules and modules annotated before keep their values.
        options: How handles cut, gather and reduce.

    Returns:
        ``module``, the same object. It and every fully sharded module below it are now also ``FSDPModule`` objects.

    Raises:
        UsageError: No process group is initialised, parameters have gradients already, inference mode is on, or the
            model is inside of torch's ``Join``.
        ConfigError: An argument is wrong, or something else manages a parameter; the message names the module, the
            parameter and the fix. With ``param_init_fn`` or ``sync_module_states`` every rank raises, also if only
            one is wrong.
        DesyncError: With either of these options: the ranks differ in options, plan or buffers.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    state = next(found for one in modules if (found := fully_shard.state(one)) is not None)
    state.modules = modules
    check_not_joined(modules, "fully_shard")
    params = [param for one in modules for param in one.parameters()]
    state.mesh, state.grid = resolve_grid(
        mesh, dp_mesh_dims, process_group, params, is_hybrid=is_hybrid(strategy), caller="fully_shard"
    )
    check_ranks_below(state, state.grid)
    _check_pairs(state)
    state.transport_choice = options.transport if isinstance(options, HandleOptions) else "auto"
    transport_name = choose_transport_for(state.grid.shard, state.transport_choice)
    ignored_params, ignored_modules = readable_twice(ignored_params), readable_twice(ignored_modules)

    def plan_members() -> Sequence[HandleMembers]:
        check_outside_inference("fully_shard")
        if not isinstance(options, HandleOptions):
            raise ConfigError(f"options is {described(options)}", fix="pass a composable.HandleOptions")
        if param_init_fn is not None and not callable(param_init_fn):
            raise ConfigError(f"param_init_fn is {described(param_init_fn)}", fix="pass a function of a module")
        check_bool("sync_module_states", sync_module_states)
        check_bool("follows_parent", options.follows_parent, or_none=True)
        state.follows_parent = options.follows_parent
        chosen = ShardOptions(
            world_size=state.grid.shard.size,
            replicas=1 if (copies := state.grid.replicas) is None else copies.size,
            policy=policy,
            strategy=strategy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=ignored_params,
            ignored_modules=ignored_modules,
            unused_gradients=options.unused_gradients,
            align=options.align,
            shard_placement_fn=_on_one_mesh(shard_placement_fn, state.mesh),
            transport=transport_name,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            hosts=state.grid.hosts,
            is_queued=state.grid.shard.device.type != "cpu",
        )
        made, members = make_plan(module, chosen)
        state.plan = replace(made, left_out=state.grid.left_out)
        state.ignored_modules = frozenset(ignored_modules or ())
        managed = _managed(state)
        state.skipped_modules = skipped_modules(managed, state.plan.mp_policy)
        ignore(ignored_params or ())
        ignore(param for one in state.ignored_modules for param in one.parameters())
        ignored = set(map(id, ignored_params or ()))
        state.ignored_slots = {
            (ref(one), name) for one in managed for name, own in one._parameters.items() if id(own) in ignored
        }
        _check_meshes(members, state.mesh)
        _check_params(members, is_synced=sync_module_states)
        return members

    if sync_module_states is False and param_init_fn is None:
        members = plan_members()
        built = _build(state, members)
    else:
        is_synced, everyone = sync_module_states, _model_ranks(state).everyone
        members = made_alike(
            plan_members,
            lambda _, failure: _compare_calls(state, everyone, param_init_fn, failure, is_synced=is_synced),
        )
        built = _build_filled(state, everyone, members, param_init_fn, is_synced=is_synced)
    _execute(state, members, built)
    return module


def _on_one_mesh(function: ShardPlacementFn | None, mesh: DeviceMesh) -> ShardPlacementFn | None:
    """Return ``function``, with the placement in place of torch's ``ShardPlacementResult`` that names ``mesh`` too."""

    def ask(param: nn.Parameter) -> Any:
        found: Any = function(param)  # type: ignore[misc]  # not None
        info = getattr(found, "mesh_info", None)
        is_here = (
            info is not None
            and info.mesh.device_type == mesh.device_type
            and ranks_of_mesh(info.mesh) == ranks_of_mesh(mesh)
        )
        return found.placement if is_here else found

    return ask if callable(function) else function


def _check_pairs(state: FullyShardState) -> None:
    """Refuse a mesh that pairs ranks in another way than the mesh of an annotation below."""
    for module in state.modules:
        for below in _traversal_utils._get_fsdp_states(module):
            own, other = state.grid.columns, below.grid.columns if below is not state else ()
            if own and other not in ((), own) and below.grid.everyone == state.grid.everyone:
                raise ConfigError(
                    f"a module below has copies of shards on ranks {list(other)}, this one on {list(own)}",
                    at=describe_module(below.modules[0]),
                    fix="annotate all modules on one mesh of two dims, or some on one dim",
                )


def _check_meshes(members: Sequence[HandleMembers], mesh: DeviceMesh) -> None:
    """Refuse parameters that are split over a mesh which cannot be joined with ``mesh``."""
    found: list[object] = []  # joined meshes, held so that each is made once
    for fqn, one in (pair for member in members for pair in member.params.items()):
        if one.form is not None and isinstance(one.form.node, SplitNode):
            with located(f"parameter {fqn!r} {list(one.form.node.spec.shape)}"):
                found.append(joined_mesh(mesh, one.form.node.spec.mesh))


def _check_params(members: Sequence[HandleMembers], *, is_synced: bool) -> None:
    """Refuse parameters with gradients, or with optimizer state from inside backward: neither can be cut."""
    originals = [(fqn, found.param) for one in members for fqn, found in one.params.items()]
    check_own_memory(originals)
    # They are this rank's own gradients: a slice of them is no slice of the mean.
    if names := [fqn for fqn, param in originals if param.grad is not None]:
        raise UsageError(
            "parameters have gradients already, which fully_shard would drop",
            at=f"parameter {list_text(names)}",
            fix="step with them first, or drop them: zero_grad()",
        )
    if names := [fqn for fqn, param in originals if has_stepped(param)]:
        raise ConfigError(
            "an optimizer has stepped on a parameter inside backward, and its state is not sharded",
            at=f"parameter {list_text(names)}",
            fix="call fully_shard before the first backward after _apply_optimizer_in_backward",
        )
    # Packed values would go to ranks that have other scales.
    if names := [fqn for one in members for fqn, found in one.params.items() if is_synced and found.kind == "bytes"]:
        raise ConfigError(
            "sync_module_states does not send the state of parameters that are sharded as bytes",
            at=f"parameter {list_text(names)}",
            fix="load and quantise them alike on every rank, and leave sync_module_states out",
        )


def _model_ranks(state: FullyShardState) -> ModelRanks:
    """Return the ranks of an annotation, and the ranks with other blocks of its parameters. Collective."""
    params = (param for module in state.modules for param in module.parameters())
    split = (param for param in params if isinstance(param, DTensor) and not isinstance(param, RaggedDTensor))
    meshes = dict.fromkeys(param.device_mesh for param in split)
    return ModelRanks.of(state.grid.everyone, [Ranks.of_mesh(mesh, dim) for mesh in meshes for dim in range(mesh.ndim)])


def _compare_calls(
    state: FullyShardState,
    everyone: Ranks,
    param_init_fn: ParamInitFn | None,
    failure: ComposableError | None,
    *,
    is_synced: bool,
) -> None:
    """Raise on every rank unless all have the same options, plan and buffers. Collective over ``everyone``."""
    options: list[str] = []
    plan_text, digest, buffers = "", "", []
    if failure is None:
        # With sync_module_states ranks may differ in param_init_fn: only values of the first rank stay.
        options = [f"sync_module_states={is_synced}" if is_synced else f"param_init_fn={param_init_fn is not None}"]
        options.append(f"on {state.mesh.device_type}")
        plan_text, digest, buffers = state.plan.compared_text(), state.plan.digest(), describe_buffers(_managed(state))
    try:
        state.grid.everyone.compare(
            "\n".join([*options, digest, *buffers]),
            failure,
            shown="\n".join([*options, plan_text, *buffers]),
            what="the ranks call fully_shard with different options or on different models",
            fix="call it with the same arguments on the same model, which may be on the meta device on some ranks",
        )
    except ComposableError as error:
        failure = error
    if everyone != state.grid.everyone:
        # Ranks with other blocks have another plan: they share failures only.
        everyone.raise_together(failure)
    if failure is not None:
        raise failure


def _managed(state: FullyShardState) -> dict[nn.Module, str]:
    names = name_modules(state.modules)
    return {module: names[module] for module in managed_modules(state.modules, state.ignored_modules)}


def _build(
    state: FullyShardState, members: Sequence[HandleMembers], *, is_deferred: bool = False
) -> list[list[FlatBuffer]]:
    device = state.grid.shard.device
    offload = state.plan.offload_policy
    home = RestingPlace.of(device, on_host=offload.is_offloading, pins=offload.pins)
    return [
        [
            (ClassGatheredBuffer if buffer_plan.is_gathered_by_class else FlatBuffer)(
                buffer_plan,
                fqn,
                member,
                state.mesh,
                device,
                is_deferred=is_deferred,
                home=home,
                mp_policy=state.plan.mp_policy,
            )
            for buffer_plan in handle_plan.buffers
        ]
        for handle_plan, member in zip(state.plan.handles, members, strict=True)
        # FQNs of parameters start below their module; with several modules, with the position of the module.
        for fqn in [handle_plan.module_fqns[0] if len(member.modules) == 1 else ""]
    ]


def _build_filled(
    state: FullyShardState,
    everyone: Ranks,
    members: Sequence[HandleMembers],
    param_init_fn: ParamInitFn | None,
    *,
    is_synced: bool,
) -> list[list[FlatBuffer]]:
    """Build every shard with its values; after an error on any rank of ``everyone`` the modules are as before.

    Collective.
    """
    ranks = state.grid.everyone
    first: FirstValues | None = None
    try:
        with everyone.agreed():
            built = _build(state, members, is_deferred=True)
            first = FirstValues(_managed(state), members, built)
            if is_synced:
                first.prepare(param_init_fn, is_source=ranks.rank == 0)
            else:
                first.make(param_init_fn)
        if is_synced:
            first.send(state.grid)
    except BaseException:
        if first is not None:
            first.undo()
        raise
    first.finish()
    return built


def _execute(state: FullyShardState, members: Sequence[HandleMembers], built: Sequence[Sequence[FlatBuffer]]) -> None:
    """Change the modules; all checks have run before."""
    for handle_plan, member, buffers in zip(state.plan.handles, members, built, strict=True):
        handle = Handle(handle_plan, member.modules, buffers, state.grid)
        for param in handle.params:
            param.layout.label = ParamLabel(param, handle)
        state._handles.append(handle)
        for fqn, found in member.params.items():
            original, (owner, name) = found.param, found.owners[0]
            mark_replaced(original, fqn, owner, name)
            mark_memory(original, fqn)
            make_useless(original)
            new = owner._parameters[name]
            if new is not None and give_torch_optimizers(original, new):
                handle.step_by([step_torch_optimizers])
        for module in member.modules:
            state._module_to_handle[module] = handle
            if module not in state.modules:
                set_member(module, "fully_shard", state)
    follow_inputs()
    state.count()
    state.enclose()
    for module in state.modules:
        state.hook_handles += register_load_check(module)
    for module in dict.fromkeys((*state.modules, *state._module_to_handle)):
        state.hook_handles += register_fully_shard_hooks(module, state, state._module_to_handle.get(module))
        state.hook_handles += register_room(module)
        add_mixin(module)
    managed = _managed(state)
    for module in dict.fromkeys(skipped_modules(managed, state.plan.mp_policy).values()):
        state.hook_handles += keep_dtype(module)
    mark_managed(managed)
    if state.mesh.device_type != "cpu":
        move_buffers(managed, state.grid.shard.device)
