"""Accumulating gradients without synchronising them, for both annotations."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from composable.arguments import check_module
from composable.contract import get_registry
from composable.errors import UsageError, place_of_rank
from composable.fqns import describe_module
from composable.replication import Reducer, ReplicateState
from composable.runtime import handle_of_module
from composable.storage import Handle

__all__ = ["no_sync"]


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
    check_module("module", module)
    found: dict[Handle | Reducer, None] = {}
    for visited in module.modules():
        handle = handle_of_module(visited)
        if handle is not None:
            found[handle] = None
        annotation = get_registry(visited).get("replicate")
        if annotation is not None and isinstance(annotation.state, ReplicateState):
            found[annotation.state.reducer] = None
    if not found:
        raise UsageError(
            "no_sync found no annotated module",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call fully_shard or replicate on the module first",
        )
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


def _restore(before: Iterable[tuple[Handle | Reducer, bool, bool | None]]) -> None:
    for one, syncs, after in before:
        one.requires_gradient_sync, one.sync_after_context = syncs, after
