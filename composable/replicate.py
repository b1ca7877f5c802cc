"""The annotation ``replicate``: whole copies, averaged gradients.

``replicate`` checks, compares the ranks, broadcasts, builds buckets and installs hooks, in
that order: an error leaves the module as it was, on every rank.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable.annotation import ReplicateState, check_not_joined, check_ranks_below, has_parts, take_over_optimizers
from composable.comm import Grid, annotating, resolve_ranks
from composable.errors import ComposableError, ConfigError, made_alike
from composable.features import follow_inputs
from composable.ground.casts import keep_dtype
from composable.ground.contract import contract
from composable.ground.names import check_outside_inference, describe_module, described, readable_twice
from composable.ground.ownership import ignore
from composable.planning import MixedPrecisionPolicy, as_mixed_precision
from composable.replicate_module import add_replicate_mixin
from composable.replication import (
    BufferSync,
    ModulePrecision,
    Reducer,
    ReplicaPlan,
    ReplicateArguments,
    broadcast_params,
    choose_device,
    find_ignored,
    keep_grad_in,
    plan_replica,
)
from composable.saving import register_load_check

_LOG = logging.getLogger("composable")

ModuleT = TypeVar("ModuleT", nn.Module, Sequence[nn.Module])


@dataclass(frozen=True, eq=False)
class ReplicateOptions:
    """Options of ``replicate`` for what few models need. The names are those of ``DistributedDataParallel``.

    Attributes:
        init_sync: Give every rank the parameters and buffers of the first rank at annotation. ``False``: the caller
            makes values equal; names, shapes, dtypes and options are compared all the same.
        forward_sync_buffers: Like the argument ``broadcast_buffers``, but ``False`` still makes buffers equal at
            annotation.
        delay_all_reduce_named_params: (name, parameter) pairs. Their gradients travel in buckets of their own, after
            the gradient of ``param_to_hook_all_reduce`` is there, for example to stay away from other collectives.
        param_to_hook_all_reduce: The parameter whose gradient the delayed ones wait for.
        fixed_buckets: In every backward buckets follow the order of registration, from the last parameter to the first,
            and not that of the first backward. For hooks that average over ranks that come and go, as torchft's: ranks
            that have come back have the buckets of those that have stayed.
    """

    init_sync: bool = True
    forward_sync_buffers: bool | None = None
    delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None
    param_to_hook_all_reduce: nn.Parameter | None = None
    fixed_buckets: bool = False

    def __post_init__(self) -> None:
        # One value may be for several calls.
        object.__setattr__(self, "delay_all_reduce_named_params", readable_twice(self.delay_all_reduce_named_params))


NO_REPLICATE_OPTIONS = ReplicateOptions()


@contract(ReplicateState, incompatible=("fully_shard",))
@annotating("replicate")
def replicate(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    device_mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_params: Iterable[nn.Parameter | str] | None = None,
    bucket_cap_mb: float = 25,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool | None = None,
    gradient_as_bucket_view: bool = True,
    static_graph: bool = False,
    device_ids: Sequence[int | str | torch.device] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    options: ReplicateOptions = NO_REPLICATE_OPTIONS,
) -> ModuleT:
    """Keep a whole copy of ``module`` on every rank and average the gradients, as if one process had all batches.

    Collective over the ranks, with equal arguments on an equal module. Parameters and buffers get the values of the
    first rank; from then on every backward leaves in each ``param.grad``, of the shape and dtype of the parameter, the
    mean over the ranks, so that equal optimizers keep the ranks equal. Every rank must run the module in every step: if
    one rank skips it, the others wait.

    ``module`` gains the methods of ``ReplicateModule``: its class is swapped for a subclass.

    Submodules that carry ``fully_shard`` or ``replicate`` already stay as they are. So do parameters and buffers that
    ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` has marked on ``module``.

    Args:
        module: The module to annotate, or several modules that share buckets. A bucket is a buffer of gradients that
            travel together.
        mesh: 1-D mesh of the ranks; default: all ranks.
        device_mesh: The same, by the name that torch's ``replicate`` has for it.
        process_group: The ranks, instead of ``mesh``. Gradients travel in another group of the same ranks, where no
            other collective can come between them.
        ignored_modules: Modules to leave alone with all modules below them.
        ignored_params: Parameters, or names of parameters and buffers, to leave alone as well.
        bucket_cap_mb: Most MiB of gradients in a bucket. The first bucket holds 1 MiB, so that communication starts
            early.
        find_unused_parameters: Accept parameters without a gradient. A parameter that no rank has a gradient for
            keeps its ``grad``; if some ranks have one, it is zero on the others.
        broadcast_buffers: Give every rank the buffers of the first rank before each training forward; the default.
            ``False``: each rank keeps its own buffers, also at annotation.
        gradient_as_bucket_view: After backward ``param.grad`` is a view of a bucket, which the next backward
            overwrites. ``False``: it is a tensor of its own, at the price of that much memory and of a copy.
        static_graph: Promise that every backward of a rank is like its first one. Then a parameter may get several
            gradients in a backward, as with reentrant checkpoints. A different backward is an error that names the
            difference. Gradients of the first backward travel at its end.
        device_ids: The one device of this rank, in a list: checked against the parameters. Tensors among the inputs of
            ``module`` are moved there, unless it is the CPU.
        mp_policy: Dtypes of computation and reduction; default: those of the parameters. While a module runs, forward
            or backward, it holds copies of its parameters; optimizers and state dicts see the parameters themselves.
        options: Equal values at annotation, buffers, delayed gradients.

    Returns:
        ``module``, the same object.

    Raises:
        UsageError: No process group is initialised, or inference mode is on, here or on another rank; or a module
            below is inside of torch's ``Join``.
        ConfigError: An argument is wrong, here or on another rank; the message names the rank, the module, the
            parameter and the fix.
        DesyncError: The ranks have different modules or options.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    # If one module is inside another, the outer one has the state.
    ignored_modules, ignored_params = readable_twice(ignored_modules), readable_twice(ignored_params)
    annotated = {one: found for one in modules if (found := replicate.state(one)) is not None}
    state = next(iter(annotated.values()))
    modules = list(annotated)
    state.modules, state.is_of_several = modules, len(modules) > 1
    check_not_joined(modules, "replicate")
    if mesh is not None and device_mesh is not None:
        raise ConfigError("both mesh and device_mesh are given", fix="pass one of them")
    mesh = device_mesh if mesh is None else mesh
    ranks = resolve_ranks(mesh, process_group, [param for module in modules for param in module.parameters()])

    def make_plan() -> ReplicaPlan:
        check_outside_inference("replicate")
        if not isinstance(options, ReplicateOptions):
            what = f"options is {described(options)}"
            raise ConfigError(what, fix="pass a composable.ReplicateOptions")
        check_ranks_below(state, Grid.whole(ranks))
        arguments = ReplicateArguments(
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=options.forward_sync_buffers,
            init_sync=options.init_sync,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            fixed_buckets=options.fixed_buckets,
        )
        return plan_replica(
            modules,
            find_ignored(modules, ignored_modules, ignored_params),
            ranks.numbers,
            choose_device(device_ids, ranks.device.type),
            as_mixed_precision(mp_policy),
            arguments,
            (options.delay_all_reduce_named_params, options.param_to_hook_all_reduce),
        )

    def compare(planned: ReplicaPlan | None, failure: ComposableError | None) -> None:
        text = "" if planned is None else planned.text
        ranks.compare(
            text,
            failure,
            shown=text,
            what="the ranks call replicate on different modules or with different options",
            fix="build the same model and call replicate with the same arguments on every rank",
        )

    planned = made_alike(make_plan, compare)
    state.use(Grid.whole(ranks))
    state.has_parts = has_parts(modules, ranks)
    follow_inputs()
    if static_graph and _LOG.isEnabledFor(logging.INFO):
        _LOG.info("replicate of %s with static_graph=True", describe_module(modules[0]))
    _execute(state, planned)
    return module


def _execute(state: ReplicateState, planned: ReplicaPlan) -> None:
    """Change the modules; all checks have run before. Collective."""
    arguments, managed, precision = planned.arguments, planned.managed, planned.precision
    ranks = state.grid.everyone
    state.compared, state.ignored = planned.text, planned.ignored
    ignore(planned.ignored.all())
    state.transport.connect()
    if arguments.init_sync:
        broadcast_params([one.param for one in managed.params], ranks, min(ranks.numbers))
    if arguments.broadcast_buffers is not False:
        buffers = BufferSync(managed.buffers, state.transport, ranks.device)
        if arguments.init_sync:
            buffers.broadcast()
        if arguments.forward_sync_buffers is not False and managed.buffers:
            state.buffers = buffers
    state.frozen = [(one.fqn, one.param) for one in managed.params if not one.param.requires_grad]
    state.reducer = Reducer(planned.params, state.transport, state.grid, arguments)
    state.listeners = state.reducer.listeners
    if precision is not None:
        parts = [ModulePrecision.of(precision, module, planned.ignored.modules) for module in state.modules]
        state.precision = tuple(parts)
        for one in planned.params if precision.policy.keep_low_precision_grads else ():
            keep_grad_in(one.param, one.reduce_dtype or one.param.dtype)
    take_over_optimizers(state.reducer)
    state.register(planned.device)
    for module in {} if precision is None else dict.fromkeys(precision.skipped.values()):
        state.hook_handles += keep_dtype(module)
    for module in state.modules:
        state.hook_handles += register_load_check(module)
    state.watch()
    for module in state.modules:
        add_replicate_mixin(module)
        # An attribute set before is hidden by the property that the module has now.
        if not vars(module).pop("require_backward_grad_sync", True):
            state.reducer.requires_gradient_sync = False
