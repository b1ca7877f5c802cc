"""Annotations of a model and what reduces its gradients, of ``fully_shard`` and ``replicate`` in one reading.

A *unit* reduces gradients: a handle of ``fully_shard``, or the reducer of one ``replicate``.
"""

from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

from torch import nn

from composable.annotation import FullyShardState, handle_of_module, sharded_state_of
from composable.comm import Grid, Ranks, check_inside
from composable.engine import Handle, handle_of
from composable.errors import UsageError, place_of_rank
from composable.ground.contract import annotated_below
from composable.ground.names import describe_module
from composable.ground.ownership import claim_of
from composable.replication import Reducer, ReplicateState, replicate_state_of

__all__ = [
    "ReducingUnit",
    "State",
    "check_ranks_below",
    "nothing_annotated",
    "params_of",
    "states_of",
    "unit_of",
    "units_of",
]

ReducingUnit: TypeAlias = Handle | Reducer
State: TypeAlias = FullyShardState | ReplicateState


def states_of(modules: Iterable[nn.Module]) -> list[State]:
    """Return the states of the annotations that manage ``modules``, each once, in their order."""
    found: dict[State, None] = {}
    for module in modules:
        sharded, replicated = sharded_state_of(module), replicate_state_of(module)
        found.update((state, None) for state in (sharded, replicated) if state is not None)
    return list(found)


def units_of(modules: Iterable[nn.Module]) -> dict[ReducingUnit, Ranks]:
    """Return what reduces gradients of ``modules``, in their order, with the ranks of each."""
    found: dict[ReducingUnit, Ranks] = {}
    for module in modules:
        handle, replicated = handle_of_module(module), replicate_state_of(module)
        if handle is not None:
            found[handle] = handle.grid.everyone
        if replicated is not None:
            found[replicated.reducer] = replicated.grid.everyone
    return found


def unit_of(param: nn.Parameter) -> tuple[ReducingUnit, Ranks] | None:
    """Return what reduces the gradient of ``param``, of any shape, with its ranks; ``None``: no annotation does."""
    handle = handle_of(param)
    if handle is not None:
        return handle, handle.grid.everyone
    claim = claim_of(param)
    if claim is not None and isinstance(claim.owner, ReplicateState):
        return claim.owner.reducer, claim.owner.grid.everyone
    return None


def params_of(unit: ReducingUnit) -> list[str]:
    """Return the FQNs of the parameters whose gradients ``unit`` reduces."""
    if isinstance(unit, Handle):
        return [unit.fqn_of(param) for param in unit.params]
    return [item.fqn for item in unit.params]


def check_ranks_below(state: State, grid: Grid) -> None:
    """Refuse an annotation on ``grid`` that lacks ranks of another one below its modules, or pairs them otherwise.

    Raises:
        ConfigError: It names the module below.
    """
    for module, other in annotated_below(state.modules):
        if other is not state and isinstance(other, FullyShardState | ReplicateState):
            check_inside(other.grid, grid, partial(describe_module, module))


def nothing_annotated(caller: str, *modules: nn.Module) -> UsageError:
    """Return the error of a function that found no annotation at or below ``modules``."""
    return UsageError(
        f"{caller} found no annotated module",
        at=", ".join([place_of_rank(), *map(describe_module, modules)]),
        fix=f"call fully_shard or replicate first, or {caller} on a module around",
    )
