"""Other process groups for annotated modules, in a living process: when ranks have gone, or have come back."""

from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn

from composable.annotated_module import check_idle
from composable.annotation import (
    FullyShardState,
    ReplicateState,
    check_not_joined,
    handles_within,
    replicate_state_of,
    sharded_state_of,
    states_below,
)
from composable.comm import Grid, GroupOrPair, check_inside, other_grid, resolve_ranks
from composable.engine import refuse_waiting_copies
from composable.errors import ComposableError, ConfigError, UsageError
from composable.ground.names import check_module, describe_module, described

_CALL = "update_process_group"
_FIX_PART = "call update_process_group on {names} or a module around"


def update_process_group(module: nn.Module, process_group: GroupOrPair) -> None:
    """Give an annotated module another process group: when ranks have gone, or have come back.

    Nothing is sent to the ranks of before, which may be gone; their groups may be destroyed afterwards. Parameters,
    optimizers and hooks stay; a compiled module stays as it was compiled. A step that was stopped is forgotten, and may
    have left gradients of this rank alone: drop the gradients of that step. Names, shapes, dtypes, the arguments of the
    annotation and the hooks are compared. Values are not sent: copy them to ranks that come back. The states of
    communication hooks keep their process group.

    A replicated module learns the order of gradients anew. It averages over any number of ranks.

    A fully sharded module is the outermost one on its ranks; those inside on the same ranks move with it. Each rank
    keeps its shards, so the group of the ranks that share parameters has as many ranks as before, and this rank
    at the same place. The ranks that hold copies of shards may be others, and more or fewer, also this rank alone.
    The next forward decides the root anew, and compares the values of copies.

    Collective: all ranks of ``process_group``; of both groups of a pair, and of all groups that share ranks with them.

    Args:
        module: Annotated by ``replicate`` or ``fully_shard``; if modules share buckets or handles, any one of them.
        process_group: The group of ranks from now on; this rank is in it. For a sharded module with copies of shards,
            a pair: the group of the ranks that share parameters, and that of the ranks with copies of this shard.

    Raises:
        UsageError: ``module`` is not annotated, or inside of another sharded one; a step or torch's ``Join`` is
            running; ``unshard_params`` shows parameters; or gradients wait for a later backward of the step.
        ConfigError: ``process_group`` is none that this rank is in, has other shards at this rank's place, or lacks
            ranks of an annotation inside; tensor parallelism has split parameters, and the group of shards is another
            one; or ``module`` is no module.
        DesyncError: The ranks have different modules, arguments or hooks. After all these errors nothing is changed.
    """
    check_module("module", module)
    replicated, sharded = replicate_state_of(module), sharded_state_of(module)
    if replicated is not None:
        _move_replicated(replicated, process_group)
    elif sharded is not None:
        _move_sharded(module, sharded, process_group)
    else:
        raise UsageError(
            f"{_CALL} found no replicate or fully_shard on this module",
            at=describe_module(module),
            fix="call it on the module that was annotated",
        )


def _move_replicated(state: ReplicateState, process_group: object) -> None:
    check_idle(_CALL, [state], state.modules)
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group is {described(process_group)}, not a ProcessGroup that this rank is in",
            fix="pass what torch.distributed.new_group() returned, on the ranks of the group only",
        )
    ranks = resolve_ranks(None, process_group, [item.param for item in state.reducer.params])
    hook = state.reducer.exchange.hook
    text = f"{state.compared}\ncommunication hook: {'none' if hook is None else hook.name}"
    ranks.compare(
        text,
        shown=text,
        what="the ranks of the new process group have different modules, options or communication hooks",
        fix="replicate the same model with the same arguments on every rank of the group, and register the same hook",
    )
    state.move_to(Grid.whole(ranks))


def _move_sharded(module: nn.Module, state: FullyShardState, groups: GroupOrPair) -> None:
    states = state.states_on_same_ranks()
    failure: ComposableError | None = None
    try:
        _check_movable(module, state, states, groups)
    except ComposableError as error:
        failure = error
    mesh, grid = other_grid(state.mesh, state.grid, groups, _text_of(states), failure)
    try:
        for below, other in states_below(state.modules):
            if other not in states:
                check_inside(other.grid, grid, partial(describe_module, below))
    except ComposableError as error:
        failure = error
    grid.everyone.raise_together(failure)
    state.move_to(mesh, grid)


def _check_movable(
    module: nn.Module, state: FullyShardState, states: list[FullyShardState], groups: GroupOrPair
) -> None:
    """Raise unless this rank can move ``states`` to ``groups`` now. Not collective."""
    check_not_joined(state.modules, _CALL)
    check_idle(_CALL, states)
    outermost = state.outermost()
    if outermost is not state or module not in state.modules:
        raise UsageError(
            f"{_CALL} on a module inside of another sharded one",
            at=describe_module(module),
            fix=f"call it on the outermost module, {describe_module(outermost.modules[0])}",
        )
    for other in states:
        if other.grid.shard.numbers != state.grid.shard.numbers:
            raise ConfigError(
                f"a module inside shares parameters among ranks {[*other.grid.shard.numbers]}, this one among "
                f"{[*state.grid.shard.numbers]}",
                at=describe_module(other.modules[0]),
                fix="annotate a new model on the new groups, and load a checkpoint",
            )
    modules = dict.fromkeys(below for one in state.modules for below in one.modules())
    shard_group = groups[0] if isinstance(groups, tuple) else groups
    for handle in handles_within(modules, "moved to another process group", _FIX_PART):
        refuse_waiting_copies(_CALL, handle)
        split = [param.fqn for param in handle.params if param.layout.mesh.ndim > 1]
        if split and shard_group is not state.grid.shard.group:
            raise ConfigError(
                "tensor parallelism has split parameters over a mesh with the present group of shards",
                at=f"parameter {handle.from_root(split[0])!r}",
                fix="keep this group, mesh['shard'].get_group(), and replace that of the copies; or annotate anew",
            )


def _text_of(states: list[FullyShardState]) -> str:
    """Return the annotations as text, equal on all ranks that may share them, whatever the number of copies."""
    plans = [(replace(state.plan, replicas=1, transport="").digest(), state.follows_parent) for state in states]
    comms = [handle.comms.compared_text() for state in states for handle in state._handles]
    return "\n".join([*(f"{digest} {follows}" for digest, follows in plans), *comms])
