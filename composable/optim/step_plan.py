"""How an accelerated optimizer steps: what stands in for its parameters, with which gradients and which state.

What is remembered from one step to the next is checked before it is used: that the state holds the
same tensors, and that gradients lie as they lay. Whatever differs (a loaded checkpoint, a
parameter without gradient) is planned anew.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from composable.optim.census import Census, LocalGrads
from composable.optim.entries import cut_state, is_per_element
from composable.optim.units import Piece, Unit, plan_units, signature_of
from composable.optim.watch import Change, Lockstep, Snapshot, WatchedEntry
from composable.ragged import RaggedDTensor

__all__ = ["Group", "State", "StepPlan", "join_state", "lend_to", "make_stand_in", "plan_step", "show_unit"]

Group: TypeAlias = dict[str, Any]
State: TypeAlias = defaultdict[Any, Any]
Pattern: TypeAlias = tuple[list[bool] | None, Sequence[bool]]


@dataclass(frozen=True)
class StepPlan:
    """A step with gradients of one pattern.

    Attributes:
        pattern: Which pieces have a gradient unless all do, and which gradients lie as their pieces do.
        units: What the optimizer sees of the sharded parameters.
        flat_units: Those over several pieces, with the position of the first piece's gradient.
        single_units: Tensors of one piece, with the position of its gradient.
        idle_units: Tensors without elements.
        params: Of each param group, what the optimizer sees, in lists that may not be mixed.
        state: The state of what the optimizer sees.
        seen: What ``state`` was before the step.
        locksteps: Numbers in the state of pieces that are stepped together.
        entries: The optimizer's own state, by parameter, as it was.
        change: Whether others changed an entry since.
    """

    pattern: Pattern
    units: Sequence[Unit]
    flat_units: Sequence[tuple[Unit, int]]
    single_units: Sequence[tuple[torch.Tensor, int]]
    idle_units: Sequence[torch.Tensor]
    params: Sequence[Sequence[list[torch.Tensor]]]
    state: State
    seen: Snapshot
    locksteps: Sequence[Lockstep]
    entries: Sequence[object]
    change: Change

    def is_of(self, state: State) -> bool:
        """Say whether the optimizer has the state that it was planned for, or that steps made of it."""
        return (
            not self.change.is_made
            and len(state) == len(self.entries)
            and all(map(is_, state.values(), self.entries))
            and all(numbers.is_untouched for numbers in self.locksteps)
        )

    def lend(self, grads: LocalGrads) -> bool:
        """Give the units their gradients; ``False``: those of a unit do not lie in one storage any more."""
        for tensor, position in self.single_units:
            lend_to(tensor, grads[position])
        for tensor in self.idle_units:
            tensor.grad = torch.empty_like(tensor, dtype=tensor.grad_dtype)
        for unit, position in self.flat_units:
            first = grads[position]
            assert first is not None, "pieces without gradient are not merged"
            try:
                lend_to(unit.tensor, first.as_strided((unit.numel,), (1,)))
            except RuntimeError:
                return False  # past the end of the storage
        return True

    def drop_gradients(self) -> None:
        """Take the units' gradients away."""
        for unit in self.units:
            unit.tensor.grad = None

    def follow(self) -> bool:
        """Bring the optimizer's own state up to date after a step; ``False``: the step made or replaced some."""
        if not self.seen.is_of(self.state):
            return False
        for numbers in self.locksteps:
            numbers.follow()
        return True

    def show(self, members: Iterable[Sequence[torch.Tensor]], state: State) -> None:
        """Show in ``state`` what a step made or replaced.

        Args:
            members: The parameters of each group.
            state: The optimizer's own.
        """
        units = [unit for unit in self.units if unit.tensor in self.state]
        ours = {id(piece.param) for unit in units for piece in unit.pieces}
        for param in chain.from_iterable(members):
            if id(param) in ours:
                if param not in state:  # entries come in the order of the parameters
                    state[param] = WatchedEntry({}, self.change)
            elif param in self.state:
                state[param] = self.state[param]
        for unit in units:
            show_unit(unit, self.state[unit.tensor], state)


def plan_step(census: Census, grads: LocalGrads, pattern: Pattern, state: State) -> StepPlan:
    """Plan this step and those that follow.

    Args:
        census: What the optimizer holds.
        grads: Local gradients of the pieces with elements.
        pattern: Theirs.
        state: The optimizer's own. What is stepped as one tensor is moved into one.
    """
    for piece in census.pieces:
        if piece.param in state:
            cut_state(state[piece.param], piece.param)
    signatures = [signature_of(state.get(piece.param), piece) for piece in census.pieces]
    units = plan_units(census.pieces, _grads_of_pieces(census, grads, pattern[0]), signatures, census.chains)
    locksteps = list(_lock_steps(census, units, state, signatures))
    local_state = _local_state(census, units, state)
    position = {index: position for position, index in enumerate(census.owned)}
    owning = [(unit, position[unit.indices[0]]) for unit in units if unit.numel]
    change = Change()
    _watch(census.params, state, change)
    return StepPlan(
        pattern=pattern,
        units=units,
        flat_units=[(unit, position) for unit, position in owning if unit.is_flat],
        single_units=[(unit.tensor, position) for unit, position in owning if not unit.is_flat],
        idle_units=[unit.tensor for unit in units if not unit.numel],
        params=[_params_of_group(index, members, units) for index, members in enumerate(census.members)],
        state=local_state,
        seen=Snapshot(local_state),
        locksteps=locksteps,
        entries=list(state.values()),
        change=change,
    )


def lend_to(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Make ``grad`` the gradient of ``tensor``."""
    if grad is not None and grad.dtype is not tensor.dtype:
        tensor.grad_dtype = grad.dtype  # It stays in the dtype of the reduction, where a policy says so.
    tensor.grad = grad


def _grads_of_pieces(census: Census, grads: LocalGrads, present: Sequence[bool] | None) -> list[torch.Tensor | None]:
    """Return the local gradient of every piece, where it has elements; for others something, or ``None`` without."""
    found: list[torch.Tensor | None] = [piece.local for piece in census.pieces]
    for index, has_grad in enumerate(present or ()):
        if not has_grad:
            found[index] = None
    for index, grad in zip(census.owned, grads):
        found[index] = grad
    return found


def _local_state(census: Census, units: Sequence[Unit], state: State) -> State:
    """Return the state of what stands in for the parameters; moves that of pieces into flat tensors if needed."""
    local_state: State = defaultdict(dict)
    sharded = set(map(id, census.params))
    for param, entry in state.items():
        if id(param) not in sharded:
            local_state[param] = entry
    for unit in units:
        if state.get(unit.pieces[0].param):
            local_state[unit.tensor] = join_state(unit, state)
    return local_state


def _watch(params: Iterable[torch.Tensor], state: State, change: Change) -> None:
    """Notice from now on what others do to the state."""
    for param in params:
        entry = state.get(param)
        if type(entry) is WatchedEntry:
            entry.change = change
        elif entry is not None:
            state[param] = WatchedEntry(entry, change)


def _lock_steps(
    census: Census, units: Sequence[Unit], state: State, signatures: Sequence[object]
) -> Iterator[Lockstep]:
    """Put the numbers of parameters that are stepped together into vectors."""
    together: dict[object, list[int]] = {}
    for unit in units:
        if len(unit.pieces) > 1:
            together.setdefault((unit.group, signatures[unit.indices[0]]), []).extend(unit.indices)
    for indices in together.values():
        entries = [state.get(census.params[index]) or {} for index in indices]
        shape = census.pieces[indices[0]].spec.layout.shape
        for key, value in list(entries[0].items()):
            if not is_per_element(key, value, shape):
                lockstep = Lockstep(value, len(indices))
                for entry, number in zip(entries, lockstep.numbers):
                    entry[key] = number
                yield lockstep


def _params_of_group(index: int, members: Sequence[torch.Tensor], units: Sequence[Unit]) -> list[list[torch.Tensor]]:
    """Return what the optimizer sees of a param group, in one list or two: DTensors do not mix with others."""
    local: list[Any] = [unit.tensor for unit in units if unit.group == index]
    others = [param for param in members if type(param) is not RaggedDTensor]
    dtensors: list[Any] = [param for param in others if isinstance(param, DTensor)]
    local += [param for param in others if not isinstance(param, DTensor)]
    return [params for params in (local, dtensors) if params]


def make_stand_in(optimizer: torch.optim.Optimizer, local_groups: Callable[[], list[Group]]) -> Any:
    """Return an optimizer of the same kind and options, whose parameters are found when they are asked for."""
    kind = type(optimizer)
    groups = property(lambda _: local_groups())
    stand_in: Any = object.__new__(type(f"Local{kind.__name__}", (kind,), {"param_groups": groups}))
    vars(stand_in).update(vars(optimizer))
    return stand_in


def join_state(unit: Unit, state: State) -> dict[Any, Any]:
    """Return the state of a unit in the memory of its pieces' states; moves those into one flat tensor if needed."""
    entries = [state[piece.param] for piece in unit.pieces]
    shape = unit.pieces[0].spec.layout.shape
    joined: dict[Any, Any] = {}
    for key, value in entries[0].items():
        if type(value) is not RaggedDTensor or not is_per_element(key, value, shape):
            joined[key] = value
            continue
        joined[key], is_copy = unit.join([entry[key]._local_tensor for entry in entries])
        if is_copy:
            for entry, piece, part in zip(entries, unit.pieces, unit.cut(joined[key])):
                entry[key] = _wrap(part, piece)
    return joined


def show_unit(unit: Unit, local_entry: dict[Any, Any], state: State) -> None:
    """Make the state of a unit's parameters that of the unit."""
    for key, value in local_entry.items():
        if isinstance(value, torch.Tensor) and value.shape == unit.tensor.shape:
            for piece, part in zip(unit.pieces, unit.cut(value)):
                if not _is_shown_by(state[piece.param].get(key), part):
                    state[piece.param][key] = _wrap(part, piece)
        elif len(unit.pieces) == 1:
            state[unit.pieces[0].param][key] = value
        else:
            for piece in unit.pieces:
                state[piece.param][key] = value.clone()


def _is_shown_by(value: object, part: torch.Tensor) -> bool:
    if type(value) is not RaggedDTensor or value.dtype != part.dtype:
        return False
    return part.numel() == 0 or value._local_tensor.data_ptr() == part.data_ptr()


def _wrap(local: torch.Tensor, piece: Piece) -> RaggedDTensor:
    return RaggedDTensor.wrap(local, piece.spec.cast(local.dtype))
