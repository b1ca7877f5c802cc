"""Keep a whole copy of a module on every rank and average the gradients, without wrapping it.

``replicate`` checks, compares the ranks, broadcasts, builds buckets and installs hooks, in
that order: an error leaves the module as it was, on every rank.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from composable.arguments import check_module, check_outside_inference, readable_twice
from composable.collectives import Grid, annotating, resolve_ranks
from composable.comm_hooks import check_hook
from composable.contract import contract
from composable.errors import ComposableError, ConfigError, UsageError, located, place_of_rank
from composable.fqns import describe_module
from composable.planning import MixedPrecisionPolicy, as_mixed_precision
from composable.replication import (
    NO_PRECISION,
    BucketOptions,
    BufferSync,
    ManagedTensors,
    Precision,
    PrecisionPlan,
    ReducedParam,
    Reducer,
    ReplicateState,
    broadcast_tensors,
    check_memory,
    find_tensors,
    plan_precision,
    register_replicate_hooks,
)
from composable.saving import register_load_check
from composable.storage import HookFunction, Registration
from composable.torch_hooks import after_gradients, at_end_of_backward

__all__ = ["register_comm_hook", "replicate"]

ModuleT = TypeVar("ModuleT", nn.Module, Sequence[nn.Module])


@contract(ReplicateState, incompatible=("fully_shard",))
@annotating("replicate")
def replicate(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    bucket_cap_mb: float = 25,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> ModuleT:
    """Train ``module`` on every rank with its own data, as one process would on all of it.

    Collective over the ranks, with equal arguments on an equal module. Parameters and
    buffers become those of the first rank; from then on every backward leaves in each
    ``param.grad`` the mean over the ranks, so that equal optimizers keep the ranks equal.
    Every rank must run the module in every step: one that skips it makes the others wait.

    Submodules that carry ``fully_shard`` or ``replicate`` already stay as they are. So do parameters
    and buffers that are to be ignored by the mark of torch on ``module``
    (``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``).

    Args:
        module: What to annotate, or several modules that share buckets.
        mesh: 1-D mesh of the ranks; default: all ranks.
        process_group: The ranks, instead of ``mesh``. Its ranks only: gradients travel in a
            group of their own, where no other collective can come between them.
        ignored_modules: Modules to leave alone with all below them.
        bucket_cap_mb: Most MiB of gradients that are reduced in one piece. The first piece
            holds 1 MiB, so that communication starts early.
        find_unused_parameters: Accept parameters without a gradient. One that no rank has a
            gradient for keeps its ``grad``; else the ranks without one count as zero.
        broadcast_buffers: Before each training forward, give every rank the buffers of the
            first. If false, also at annotation each rank keeps its own.
        gradient_as_bucket_view: After backward ``param.grad`` is a view of a bucket, which
            the next backward overwrites. If false, it is a tensor of its own, at the price
            of that much memory and of a copy.
        mp_policy: In which dtypes to compute and to average. While a module runs, forward or backward, it holds
            copies of its parameters; the parameters themselves stay what optimizers and state dicts see.

    Returns:
        ``module``, the same object.

    Raises:
        UsageError: No process group is initialised, or inference mode is on, here or on another rank.
        ConfigError: An argument is wrong, here or on another rank; the message names the rank, the module, the
            parameter and the fix.
        DesyncError: The ranks have different modules or options.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    # Of a module and one inside it, the outer one has the state.
    ignored = readable_twice(ignored_modules)
    annotated = {one: found for one in modules if (found := replicate.state(one)) is not None}
    state = next(iter(annotated.values()))
    modules = list(annotated)
    state.modules = tuple(modules)
    ranks = resolve_ranks(mesh, process_group, [param for module in modules for param in module.parameters()])
    options = BucketOptions()
    managed: ManagedTensors = ManagedTensors()
    precision: PrecisionPlan = NO_PRECISION
    failure: ComposableError | None = None
    try:
        check_outside_inference("replicate")
        options = _check_options(bucket_cap_mb, find_unused_parameters, broadcast_buffers, gradient_as_bucket_view)
        managed = find_tensors(modules, ignored, ranks.device.type)
        state.ignored_modules = frozenset(ignored or ())
        precision = plan_precision(modules, state.ignored_modules, managed, as_mixed_precision(mp_policy))
    except ComposableError as error:
        # The other ranks are about to communicate: they must hear of it first.
        failure = error
    settings = (
        f"options: bucket_cap_mb={bucket_cap_mb}, find_unused_parameters={find_unused_parameters}, "
        f"broadcast_buffers={broadcast_buffers}"
    )
    text = "\n".join([settings, *managed.lines, *precision.lines])
    ranks.compare(
        text,
        failure,
        shown=text,
        what="the ranks call replicate on different modules or with different options",
        fix="build the same model and call replicate with the same arguments on every rank",
    )
    state.use(Grid.whole(ranks))
    _execute(state, managed, options, precision, broadcast_buffers=broadcast_buffers)
    return module


def _execute(
    state: ReplicateState,
    managed: ManagedTensors,
    options: BucketOptions,
    precision: PrecisionPlan,
    *,
    broadcast_buffers: bool,
) -> None:
    transport, device = state.transport, state.grid.everyone.device
    transport.connect()
    broadcast_tensors([param for _, param, _ in managed.params], transport, device)
    if broadcast_buffers and managed.buffers:
        buffers = [tensor for owner, name in managed.buffers if (tensor := owner[name]) is not None]
        broadcast_tensors(buffers, transport, device)
        state.buffers = BufferSync(managed.buffers, transport, device)
    trainable = [
        ReducedParam(fqn, param, index, precision.reduce_dtype(param))
        for fqn, param, index in managed.params
        if param.requires_grad
    ]
    state.frozen = [(fqn, param) for fqn, param, _ in managed.params if not param.requires_grad]
    options = replace(options, has_policy=precision is not NO_PRECISION)
    state.reducer = Reducer(trainable, transport, state.grid, options, at_end_of_backward)
    if state.reducer.options.has_policy:
        state.precision = Precision(precision, state.modules, state.ignored_modules, trainable)
    state.follow()
    state.take_over_optimizers()
    state.hook_handles = after_gradients([item.param for item in trainable], state.reducer.arrivals())
    for index, module in enumerate(state.modules):
        state.hook_handles += _register_module_hooks(state, module, index)
        state.hook_handles += register_load_check(module)
    if state.precision is not None:
        state.hook_handles += state.precision.keep_skipped()
    state.watch()


def _register_module_hooks(state: ReplicateState, module: nn.Module, index: int) -> list[RemovableHandle]:
    before_backward = functools.partial(state.before_backward, index)
    if state.precision is not None:
        return state.precision.register(module, index, state.before_forward, state.after_forward, before_backward)
    return register_replicate_hooks(module, state.before_forward, state.after_forward, before_backward)


def register_comm_hook(module: nn.Module, state: object, hook: HookFunction) -> None:
    """Let ``hook`` average the gradients of the replicated ``module``, instead of an all-reduce.

    Every rank registers the same hook, before the first backward. ``composable.register_comm_hook`` takes hooks of
    sharded modules too, compares the ranks, and can be undone.

    Args:
        module: Annotated by ``replicate``.
        state: Handed to ``hook``.
        hook: Called as ``hook(state, bucket)`` for each full bucket, in the same order on all
            ranks. ``bucket`` has the methods of ``torch.distributed.GradBucket`` and holds
            this rank's gradients; the future it returns gives their mean over the ranks, flat.
            The hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` fit.

    Raises:
        ConfigError: ``hook`` is no function, or ``module`` no module; or a wrapper or a state does not fit.
        UsageError: The module is not replicated, has a hook already, or a backward is running.
    """
    check_module("module", module)
    if not callable(hook):
        raise ConfigError(f"hook is {hook!r:.80}", at=place_of_rank(), fix="pass a function of a state and a bucket")
    annotation = replicate.state(module)
    if annotation is None:
        raise UsageError(
            "register_comm_hook found no replicate on this module",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call it on the module that replicate was called on",
        )
    reducer = annotation.reducer
    has_one = any(one.module is module for one in reducer.comm_hooks)
    if has_one or reducer.is_running:
        raise UsageError(
            "a communication hook is registered already" if has_one else "a backward is running",
            at=place_of_rank(),
            fix="register one hook, before the first backward",
        )
    with located(place_of_rank()):
        check_hook(hook)
        check_memory(state, [reducer])
    reducer.register_comm_hooks([*reducer.comm_hooks, Registration(module, state, hook, takes_bucket=True)])


def _check_options(
    bucket_cap_mb: float, find_unused_parameters: bool, broadcast_buffers: bool, gradient_as_bucket_view: bool
) -> BucketOptions:
    switches = {
        "find_unused_parameters": find_unused_parameters,
        "broadcast_buffers": broadcast_buffers,
        "gradient_as_bucket_view": gradient_as_bucket_view,
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}", fix="pass True or False")
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)) or not bucket_cap_mb > 0:
        raise ConfigError(f"bucket_cap_mb is {bucket_cap_mb!r}", fix="pass a number of MiB above zero")
    return BucketOptions(
        cap_bytes=int(min(bucket_cap_mb, 2**40) * 2**20),
        find_unused=find_unused_parameters,
        grads_as_views=gradient_as_bucket_view,
    )
