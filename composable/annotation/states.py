"""What every annotation knows, and the index of annotations: what a walk finds at or below a module.

A *unit* reduces gradients: a handle of ``fully_shard``, or the reducer of one ``replicate``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.comm import Grid, Ranks, check_inside
from composable.engine import (
    Handle,
    Listeners,
    Rider,
    forget_torch_hooks,
    handle_of,
    refuse_steppers,
    step_torch_optimizers,
)
from composable.errors import UsageError
from composable.ground.contract import get_registry, managing_state
from composable.ground.frames import in_backward, modules_in_call
from composable.ground.names import class_name, count_text, describe_module
from composable.ground.ownership import HeldWeakly, claim_of
from composable.replication import Reducer, check_steppable

ReducingUnit: TypeAlias = Handle | Reducer


class AnnotationState(ABC):
    """The state of one call of ``fully_shard`` or ``replicate``."""

    modules = HeldWeakly[nn.Module]()

    def __init__(self) -> None:
        # The annotated module, or those of one call, as far as users hold them. They own this state, by their hooks,
        # and are freed without a collection.
        self.modules = ()
        self.grid: Grid  # The ranks of the annotation.
        self.listeners = Listeners()  # Hear of each event of its steps.
        # Handles of all hooks; once these are removed, the modules run as plain ones again.
        self.hook_handles: list[RemovableHandle] = []

    def __repr__(self) -> str:
        ranks = count_text(self.grid.everyone.size, "rank") if hasattr(self, "grid") else "ranks that are not known yet"
        return f"<{type(self).__name__} of {', '.join(map(class_name, self.modules))} over {ranks}>"

    @property
    @abstractmethod
    def is_joined(self) -> bool:
        """A ``Join`` has the modules: ranks without inputs follow them, as they were when the ``Join`` was made."""

    @abstractmethod
    def unit_of_module(self, module: nn.Module) -> ReducingUnit | None:
        """Return the unit that ``module``, which this state manages, runs with."""

    @abstractmethod
    def outermost(self) -> "AnnotationState":
        """Return the state of the root that this one is in, or will be in: a ``replicate`` is a root of its own."""

    @property
    @abstractmethod
    def riders(self) -> Sequence[Rider]:
        """The riders of the last ``carry``. Collective as that is."""

    @abstractmethod
    def carry(self, *riders: Rider) -> None:
        """Let ``riders``, in place of those so far, travel with the message that ends each backward of the root.

        Collective over the ranks of the root, which it decides, between two steps. No riders: ``carry()``. A twin of a
        model has none, and ``update_process_group`` drops them.
        """

    @abstractmethod
    def abandon_step(self) -> None:
        """Forget a step that an exception or Ctrl-C cut short. Nothing is running."""


def states_of(modules: Iterable[nn.Module]) -> list[AnnotationState]:
    """Return the states of the annotations that manage ``modules``, each once, in their order."""
    found = (managing_state(module, name) for module in modules for name in ("fully_shard", "replicate"))
    return list(dict.fromkeys(state for state in found if isinstance(state, AnnotationState)))


def states_below(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, AnnotationState]]:
    """Yield (module, state) for each annotation of each module at or below ``modules``."""
    for module in dict.fromkeys(below for one in modules for below in one.modules()):
        for annotation in get_registry(module).values():
            # An annotation that is being made is in the registry before it has ranks.
            if isinstance(annotation.state, AnnotationState) and hasattr(annotation.state, "grid"):
                yield module, annotation.state


def units_of(modules: Iterable[nn.Module]) -> dict[ReducingUnit, Ranks]:
    """Return the units that reduce gradients of ``modules``, in their order, with the ranks of each."""
    found = ((state, state.unit_of_module(module)) for module in modules for state in states_of([module]))
    return {unit: state.grid.everyone for state, unit in found if unit is not None}


def unit_of(param: torch.Tensor) -> tuple[ReducingUnit, Ranks] | None:
    """Return the unit that reduces the gradient of ``param``, of any shape, and its ranks; ``None``: there is none."""
    handle, claim = handle_of(param), claim_of(param)
    if handle is not None:
        return handle, handle.grid.everyone
    owner = None if claim is None else claim.owner
    if isinstance(owner, AnnotationState) and (reducer := owner.unit_of_module(owner.modules[0])) is not None:
        return reducer, owner.grid.everyone
    return None


def params_of(unit: ReducingUnit) -> list[str]:
    """Return the FQNs of the parameters whose gradients ``unit`` reduces."""
    if isinstance(unit, Handle):
        return [unit.from_root(param.fqn) for param in unit.params]
    return [item.fqn for item in unit.params]


def check_ranks_below(state: AnnotationState, grid: Grid) -> None:
    """Raise ``ConfigError`` for an annotation on ``grid`` that lacks ranks of one below it, with its place."""
    for module, other in states_below(state.modules):
        check_inside(other.grid, grid, partial(describe_module, module))


def check_not_joined(modules: Iterable[nn.Module], what: str) -> None:
    """Refuse the call ``what`` inside of torch's ``Join``: ranks without inputs would not see its changes.

    All ranks that have inputs raise ``UsageError`` alike, before they communicate.
    """
    for module, state in states_below(modules):
        if state.is_joined:
            raise UsageError(
                f"{what} inside of Join, but ranks without inputs know only annotations from before Join was made",
                at=describe_module(module),
                fix=f"call {what} before Join(...) is made, or after the context",
            )


def refuse_running(state: AnnotationState, units: Iterable[ReducingUnit], *, waits: bool = False) -> None:
    """Raise ``UsageError`` for a deep copy of ``state`` with ``units`` while they are at work, or have hooks.

    ``waits``: the end of a backward was put off.
    """
    what = fix = ""
    if in_backward() or any(module in state.modules for module in modules_in_call()):
        what, fix = "inside of a step", "copy it before or after"
    elif any(unit.comm_hooks for unit in units):
        what = "with a communication hook, whose state is one model's"
        fix = "copy it before register_comm_hook, or after remove(), and register a hook on each"
    elif waits or any(unit.keeps_gradients for unit in units):
        what = "while its gradients wait for other ranks"
        fix = "average them by reduce_gradients(), finalize_backward() or a backward without no_sync; or drop them"
    if what:
        raise UsageError(f"an annotated model cannot be copied {what}", at=describe_module(state.modules[0]), fix=fix)


def has_parts(modules: Sequence[nn.Module], ranks: Ranks) -> bool:
    """Say whether, on any of ``ranks``, a module at or below ``modules`` is annotated on a part of them. Collective."""
    own = any(state.grid.everyone.size < ranks.size for _, state in states_below(modules))
    return ranks.any_of([own])[0]


def nothing_annotated(caller: str, *modules: nn.Module) -> UsageError:
    """Return the error of a function that found no annotation at or below ``modules``."""
    return UsageError(
        f"{caller} found no annotated module",
        at=", ".join(map(describe_module, modules)),
        fix=f"call fully_shard or replicate first, or {caller} on a module around",
    )


def take_over_optimizers(unit: ReducingUnit) -> None:
    """Let the optimizers of ``_apply_optimizer_in_backward`` step as soon as the averaged gradients are there.

    Raises ``UsageError`` if there is a communication hook, and ``ConfigError`` if a gradient is sparse.
    """
    tensors = [one.sharded for one in unit.params] if isinstance(unit, Handle) else [one.param for one in unit.params]
    if not forget_torch_hooks(tensors) or step_torch_optimizers in unit.steppers:
        return
    if unit.comm_hooks:
        refuse_steppers([step_torch_optimizers], params_of(unit)[0])
    if isinstance(unit, Reducer):
        check_steppable(unit.params)
    unit.step_by([*unit.steppers, step_torch_optimizers])
