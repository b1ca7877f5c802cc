"""Accumulating gradients without synchronising them, and synchronising them after all, for both annotations."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from composable.annotation import handle_of_module, sharded_state_of
from composable.arguments import check_module
from composable.engine import Handle
from composable.errors import UsageError, place_of_rank
from composable.fqns import describe_module
from composable.frames import in_backward
from composable.replication import Reducer, replicate_state_of

__all__ = ["no_sync", "reduce_gradients"]


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Let backwards in this context keep gradients on their rank.

    They add up, in full size, until the next backward outside the context synchronises all of them.
    What counts is where backward runs, not where forward ran. It applies to every module at or
    below ``module`` that ``fully_shard`` or ``replicate`` manages. Every rank enters alike.

    Raises:
        UsageError: There is none.
        ConfigError: ``module`` is no module.
    """
    found = _synchronised_by(module, caller="no_sync")
    before = [(one, one.requires_gradient_sync, one.sync_after_context) for one in found]
    try:
        for one, syncs, after in before:
            one.sync_after_context = syncs if after is None else after
            one.requires_gradient_sync = False
        yield
        _restore(before)
    except BaseException:
        # Also where Ctrl-C came into the line above.
        _restore(before)
        raise


def reduce_gradients(module: nn.Module) -> None:
    """Synchronise now what backwards without synchronisation have left, without another backward.

    For loops in which nothing knows the last backward, such as pipeline schedules: they run all of them in ``no_sync``
    and end with this. Gradients and parameters are then as after a backward that synchronised. What
    ``set_is_last_backward(False)`` or ``set_manual_backward_finalization`` left under way ends too. Where nothing was
    left, nothing changes. Modules that ``set_requires_gradient_sync(False)`` excludes stay as they are; of a part of
    a fully sharded model the whole takes part. Communication hooks of ``replicate`` do not run.

    Collective: all ranks of the meshes at or below ``module``.

    Raises:
        UsageError: There is no annotated module, it is inside ``no_sync`` or torch's ``Join``, a backward is running,
            or a forward of a sharded module is.
        ConfigError: ``module`` is no module.
    """
    found = _synchronised_by(module, caller="reduce_gradients")
    if any(one.sync_after_context is not None for one in found):
        raise UsageError(
            "reduce_gradients inside of no_sync, which keeps gradients on their rank",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call it after the context",
        )
    if any(isinstance(one, Reducer) and one.before_round is not None for one in found):
        raise UsageError(
            "reduce_gradients inside of Join, where ranks without inputs follow backwards only",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="let the last backward of a step average",
        )
    if in_backward():
        raise _is_running(module)
    states = [state for visited in module.modules() if (state := sharded_state_of(visited)) is not None]
    for state in states:
        # Before the first forward there is no root, and nothing was left, but for a deep copy.
        if any(handle.has_unsynced_gradients for handle in state._handles):
            state.lazy_init()
    schedulers = dict.fromkeys(state.root.scheduler for state in states if state.root is not None)
    if not all(scheduler.is_idle for scheduler in schedulers):
        raise _is_running(module)
    for scheduler in schedulers:
        scheduler.backwards.reduce_kept()
        if scheduler.is_deferred:
            # Backwards were told that they are not the last one: this is the end of all of them.
            scheduler.finalize()
            scheduler.end_finalize()
    for one in found:
        if isinstance(one, Reducer) and one.requires_gradient_sync:
            one.average_kept_gradients()


def _is_running(module: nn.Module) -> UsageError:
    return UsageError(
        "reduce_gradients while a forward or backward is running",
        at=f"{place_of_rank()}, {describe_module(module)}",
        fix="call it after the last backward",
    )


def _synchronised_by(module: nn.Module, *, caller: str) -> list[Handle | Reducer]:
    """Return what synchronises gradients at or below ``module``.

    Raises:
        UsageError: Nothing does.
        ConfigError: ``module`` is no module.
    """
    check_module("module", module)
    found: dict[Handle | Reducer, None] = {}
    for visited in module.modules():
        handle = handle_of_module(visited)
        if handle is not None:
            found[handle] = None
        replicated = replicate_state_of(visited)
        if replicated is not None:
            found[replicated.reducer] = None
    if not found:
        raise UsageError(
            f"{caller} found no annotated module",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call fully_shard or replicate on the module first",
        )
    return list(found)


def _restore(before: Iterable[tuple[Handle | Reducer, bool, bool | None]]) -> None:
    for one, syncs, after in before:
        one.requires_gradient_sync, one.sync_after_context = syncs, after
