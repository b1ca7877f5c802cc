"""Let a torch optimizer step on plain local tensors instead of ragged parameters.

Between steps everything is as before: ``param_groups`` and ``state`` hold ragged tensors. During
``step`` torch's own code runs on a *stand-in*, an optimizer of the same class that shares options,
and whose parameters and state are this rank's local tensors, in the same memory. The optimizer
itself is never changed for the time of a step, so there is nothing to restore after an exception.

What is remembered from one step to the next is checked before it is used: that the groups hold
the same parameters, the state the same tensors, and that gradients lie as they lay. Whatever
differs (a loaded checkpoint, a new param group, a parameter without gradient) is planned anew.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import attrgetter, eq, is_, itemgetter, sub
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.errors import ConfigError, UsageError, place_of_rank
from composable.optim.checks import CHECKS_ITSELF, check_parameters, check_replaced
from composable.optim.entries import cut_state, is_per_element
from composable.optim.units import Piece, Unit, find_chains, homes_of, plan_units, sharded_params_of, signature_of
from composable.optim.watch import Change, Lockstep, Snapshot, WatchedEntry
from composable.planning import marks_made
from composable.ragged import RaggedDTensor, RaggedLayout, slice_full
from composable.torch_hooks import around_optimizer
from composable.torch_private import DisableTorchFunction

__all__ = ["accelerate_optimizer", "local_gradients"]

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
State: TypeAlias = defaultdict[Any, Any]
Group: TypeAlias = dict[str, Any]

# Each computes an element's update from the element's own parameter, gradient and state alone.
_ELEMENT_WISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

_grad_of: Any = RaggedDTensor.grad.fget
_local_of = attrgetter("_local_tensor")
_address_of: Any = torch.Tensor.data_ptr


def accelerate_optimizer(optimizer: OptimizerT, model: nn.Module, *, flat: bool = False) -> OptimizerT:
    """Make ``optimizer.step()`` run on plain local tensors: same results to the bit, less time per parameter.

    No communication, now or in a step. Everything else stays as it was: parameters, state, state
    dicts, schedulers, scalers, closures. Parameters that are not sharded may be among the others.

    Args:
        optimizer: One of torch's element-wise optimizers, of exactly that class: ASGD, Adadelta, Adagrad,
            Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop or SGD.
        model: The annotated model whose parameters it holds.
        flat: Also step neighbours in a handle's shard that share a param group as one flat tensor, in each
            step in which their gradients lie as backward left them. Costs nothing where it does not apply.
            A state tensor is then a view of a flat one; those made before the first step are replaced.

    Returns:
        ``optimizer``, the same object.

    Raises:
        ConfigError: The optimizer is of another class or differentiable, or holds no sharded parameter of ``model``.
        UsageError: It is accelerated already, or holds parameters that were replaced.

    Source: the flat step of ZeRO, arXiv 1910.02054.
    """
    if not isinstance(flat, bool):
        raise ConfigError(f"flat is {flat!r}, not a bool", fix="pass True or False")
    if type(optimizer) not in _ELEMENT_WISE:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be accelerated: its step may need more than local elements",
            fix=f"pass exactly one of {', '.join(kind.__name__ for kind in _ELEMENT_WISE)}, or leave it as it is: "
            "every torch optimizer steps on sharded parameters",
        )
    if _local_step_of(optimizer) is not None:
        raise UsageError("the optimizer is accelerated already", fix="call accelerate_optimizer once")
    check_replaced(optimizer)
    _check_options(optimizer)
    own = sharded_params_of(model)
    if not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            "the optimizer holds no sharded parameter of this model",
            at=place_of_rank(),
            fix="pass the model that the optimizer was built for, after fully_shard",
        )
    vars(optimizer)[CHECKS_ITSELF] = _LocalStep(optimizer, model, flat=flat)
    return optimizer


class LocalGradients(NamedTuple):
    """Gradients of parameters that are cut over one mesh dim.

    Attributes:
        layout: Of one of the parameters.
        dtypes: Of all of them, on every rank.
        tensors: What this rank has, with elements.
    """

    layout: RaggedLayout
    dtypes: set[torch.dtype]
    tensors: list[torch.Tensor]


def local_gradients(optimizer: torch.optim.Optimizer) -> list[LocalGradients] | None:
    """Return this rank's gradients of the sharded parameters as plain tensors, in the memory of ``.grad``.

    For arithmetic that treats all elements alike, such as a norm or scaling: with ``flat=True`` they
    are few, and the padding between pieces, which is zero, is in them. No communication.

    Returns:
        One entry for each mesh dim that parameters are cut over, in the same order on every rank.
        ``None``: the optimizer is not accelerated.
    """
    step = _local_step_of(optimizer)
    return None if step is None else step.gradients(optimizer)


def _local_step_of(optimizer: torch.optim.Optimizer) -> "_LocalStep | None":
    step: _LocalStep | None = vars(optimizer).get(CHECKS_ITSELF)
    return step


def _local_grad(grad: Any, piece: Piece) -> torch.Tensor | None:
    if grad is None:
        return None
    if type(grad) is RaggedDTensor:
        return grad._local_tensor
    # What autograd leaves after operations that gathered: the whole gradient on every rank.
    return slice_full(grad._local_tensor, piece.spec.layout)


def _cut_of(layout: RaggedLayout) -> object:
    return id(layout.mesh), layout.mesh_dim


def _kernels_of(groups: Sequence[Group]) -> list[object]:
    return [(group.get("fused"), group.get("differentiable")) for group in groups]


def _check_options(optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(f"param group {index} is differentiable", fix="leave the optimizer unaccelerated")


class _LocalStep:
    """What an accelerated optimizer knows beside itself.

    Attributes:
        is_flat: Pieces are merged where that is exact.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, *, flat: bool) -> None:
        self.is_flat = flat
        self._model = weakref.ref(model)
        self._stand_in = _make_stand_in(optimizer, self._local_groups)
        self._optimizer: torch.optim.Optimizer | None = None
        self._groups: list[Group] | None = None
        self._is_running = False
        self._forget()
        around_optimizer(
            optimizer,
            before_step=self._before_step,
            after_step=self._after_step,
            before_state_dict=self._finish_step,
            after_state_dict=_show_plain_entries,
            after_load=self._after_load,
        )

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[LocalGradients]:
        """See ``local_gradients``."""
        self._finish_step(optimizer)
        with torch.no_grad():
            self._prepare(optimizer)
        found = {_cut_of(layout): LocalGradients(layout, self._dtypes, []) for layout in self._layouts}
        for unit in self._units:
            grad = unit.tensor.grad
            if unit.numel and grad is not None:
                found[_cut_of(unit.pieces[0].spec.layout)].tensors.append(grad)
        self._drop_gradients()
        return list(found.values())

    # -- what torch calls

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._finish_step(optimizer)
        self._optimizer = optimizer
        self._groups = None
        for name in ("grad_scale", "found_inf"):  # what a scaler leaves for fused optimizers
            vars(self._stand_in).pop(name, None)
            if name in vars(optimizer):
                value = vars(optimizer)[name]
                vars(self._stand_in)[name] = value._local_tensor if isinstance(value, DTensor) else value
        if len(args) > 1 and args[1] is not None:
            return (self._stand_in, self._with_gradients(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            kwargs = {**kwargs, "closure": self._with_gradients(kwargs["closure"])}
        return (self._stand_in, *args[1:]), kwargs

    def _with_gradients(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._groups = None
            return loss

        return evaluate

    def _local_groups(self) -> list[Group]:
        """Return the stand-in's ``param_groups``; read when the gradients are those to step with."""
        if self._groups is None:
            assert self._optimizer is not None, "the stand-in exists within steps only"
            self._prepare(self._optimizer)
            self._is_running = True
            self._groups = [
                {**group, "params": params}
                for group, several in zip(self._optimizer.param_groups, self._local_params, strict=True)
                for params in several
            ]
        return self._groups

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._drop_gradients()
        self._is_running = False
        self._optimizer = self._groups = None
        if not self._local_seen.is_of(self._stand_in.state):
            self._show_state(optimizer)
            return
        for numbers in self._locksteps:
            numbers.follow()

    def _finish_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Show what a step did that ended in an exception."""
        if self._is_running:
            self._drop_gradients()
            self._is_running = False
            self._show_state(optimizer)

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_running = False
        self._forget()

    # -- the plan

    def _forget(self) -> None:
        self._is_planned = False
        self._pattern: object = None
        self._pieces: list[Piece] = []
        self._units: list[Unit] = []
        self._locksteps: list[Lockstep] = []
        self._drop_state()

    def _drop_state(self) -> None:
        """Forget the state: its tensors must not outlive it."""
        self._entries: list[object] = []
        self._change = Change()
        self._stand_in.state = defaultdict(dict)
        self._local_seen = Snapshot(self._stand_in.state)

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Have a plan for this step, and the units' gradients in place."""
        is_current = self._is_planned and self._holds(optimizer)
        if not is_current:
            self._collect(optimizer)
        grads, present = self._local_grads()
        pattern = present, self._alike_pairs(grads)
        if not is_current or pattern != self._pattern or not self._lend(grads):
            self._plan(optimizer, grads, present)
            self._pattern = pattern
            is_lent = self._lend(grads)
            assert is_lent, "units are made of gradients that lie in one storage"

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether the plan is of the parameters and the state that the optimizer has now."""
        groups, state = optimizer.param_groups, optimizer.state
        if len(groups) != len(self._members) or _kernels_of(groups) != self._kernels or marks_made() != self._marks:
            return False
        for group, members in zip(groups, self._members):
            params = group["params"]
            if len(params) != len(members) or not all(map(is_, params, members)):
                return False
        return (
            # A cast gives a parameter another local tensor.
            all(map(is_, map(_local_of, self._owned_params), self._owned_locals))
            and not self._change.is_made
            and len(state) == len(self._entries)
            and all(map(is_, state.values(), self._entries))
            and all(numbers.is_untouched for numbers in self._locksteps)
        )

    def _collect(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the pieces, and which of them may ever be merged."""
        groups = optimizer.param_groups
        check_parameters(optimizer)
        _check_options(optimizer)
        model = self._model()
        homes = homes_of(model) if model is not None and self.is_flat else {}
        self._members = [list(group["params"]) for group in groups]
        self._kernels, self._marks = _kernels_of(groups), marks_made()
        self._pieces = [
            Piece(param, index, homes.get(id(param)))
            for index, members in enumerate(self._members)
            for param in members
            if type(param) is RaggedDTensor
        ]
        self._params = [piece.param for piece in self._pieces]
        layouts = [piece.spec.layout for piece in self._pieces]
        self._layouts = list({_cut_of(layout): layout for layout in reversed(layouts)}.values())[::-1]
        self._dtypes = {piece.spec.dtype for piece in self._pieces}
        owned = [index for index, piece in enumerate(self._pieces) if piece.numel]
        self._owned = owned
        self._is_owned = [piece.numel > 0 for piece in self._pieces]
        self._owned_params = [self._params[index] for index in owned]
        self._owned_locals = [self._pieces[index].local for index in owned]
        self._position = {index: position for position, index in enumerate(owned)}
        self._chains = find_chains(self._pieces, groups)
        chained = [index for links in self._chains for index in links]
        self._chained = [self._position[index] for index in chained]
        self._starts = [self._pieces[index].start_bytes for index in chained]
        self._addresses: list[int] = []
        self._alike: list[bool] = []

    def _local_grads(self) -> tuple[Sequence[torch.Tensor | None], list[bool] | None]:
        """Return the local gradient of each piece with elements, and which pieces have one unless all do."""
        with DisableTorchFunction():
            grads = list(map(_grad_of, self._params))
        if list(map(type, grads)).count(RaggedDTensor) == len(grads):
            return list(map(_local_of, compress(grads, self._is_owned))), None
        present = [grad is not None for grad in grads]
        found = [_local_grad(grads[index], self._pieces[index]) for index in self._owned]
        return found, None if all(present) else present

    def _alike_pairs(self, grads: Sequence[torch.Tensor | None]) -> list[bool]:
        """Say for each piece that might be merged with the next whether their gradients lie as they do."""
        if not self._chained:
            return []
        chained = itemgetter(*self._chained)(grads)
        try:
            addresses = list(map(_address_of, chained))
        except TypeError:
            # What has no gradient lies nowhere, each piece somewhere else.
            addresses = [-(i + 1) << 60 if grad is None else grad.data_ptr() for i, grad in enumerate(chained)]
        # Allocators mostly give the memory of the step before.
        if addresses != self._addresses:
            origins = list(map(sub, addresses, self._starts))
            self._addresses, self._alike = addresses, list(map(eq, origins, origins[1:]))
        return self._alike

    def _plan(
        self, optimizer: torch.optim.Optimizer, grads: Sequence[torch.Tensor | None], present: list[bool] | None
    ) -> None:
        """Make the units of this step and those that follow, and give them their state."""
        self._is_planned = False
        self._drop_state()
        state: State = optimizer.state
        for piece in self._pieces:
            if piece.param in state:
                cut_state(state[piece.param], piece.param)
        signatures = [signature_of(state.get(piece.param), piece) for piece in self._pieces]
        of_pieces: list[torch.Tensor | None] = [piece.local for piece in self._pieces]
        for index, has_grad in enumerate(present or ()):
            if not has_grad:
                of_pieces[index] = None
        for index, grad in zip(self._owned, grads):
            of_pieces[index] = grad
        self._units = plan_units(self._pieces, of_pieces, signatures, self._chains)
        self._locksteps = []
        self._lock_steps(state, signatures)
        pieces = set(map(id, self._params))
        local_state = self._stand_in.state
        for param, entry in state.items():
            if id(param) not in pieces:
                local_state[param] = entry
        for unit in self._units:
            if state.get(unit.pieces[0].param):
                local_state[unit.tensor] = _join_state(unit, state)
        self._local_params = [self._params_of_group(index) for index in range(len(self._members))]
        owning = [(unit, self._position[unit.indices[0]]) for unit in self._units if unit.numel]
        self._flat_units = [(unit, position) for unit, position in owning if unit.is_flat]
        self._single_units = [(unit.tensor, position) for unit, position in owning if not unit.is_flat]
        self._idle_units = [unit.tensor for unit in self._units if not unit.numel]
        self._remember(state)
        self._is_planned = True

    def _remember(self, state: State) -> None:
        """Notice from now on what others do to the state."""
        self._local_seen = Snapshot(self._stand_in.state)
        for param in self._params:
            entry = state.get(param)
            if type(entry) is WatchedEntry:
                entry.change = self._change
            elif entry is not None:
                state[param] = WatchedEntry(entry, self._change)
        self._entries = list(state.values())

    def _lock_steps(self, state: State, signatures: Sequence[object]) -> None:
        """Put the numbers of parameters that are stepped together into vectors."""
        together: dict[object, list[int]] = {}
        for unit in self._units:
            if len(unit.pieces) > 1:
                together.setdefault((unit.group, signatures[unit.indices[0]]), []).extend(unit.indices)
        for indices in together.values():
            entries = [state.get(self._params[index]) or {} for index in indices]
            shape = self._pieces[indices[0]].spec.layout.shape
            for key, value in list(entries[0].items()):
                if not is_per_element(key, value, shape):
                    lockstep = Lockstep(value, len(indices))
                    for entry, number in zip(entries, lockstep.numbers):
                        entry[key] = number
                    self._locksteps.append(lockstep)

    def _params_of_group(self, index: int) -> list[list[torch.Tensor]]:
        """Return the stand-in's parameters of one param group, in one list or two: DTensors do not mix with others."""
        local: list[Any] = [unit.tensor for unit in self._units if unit.group == index]
        others = [param for param in self._members[index] if type(param) is not RaggedDTensor]
        dtensors: list[Any] = [param for param in others if isinstance(param, DTensor)]
        local += [param for param in others if not isinstance(param, DTensor)]
        return [params for params in (local, dtensors) if params]

    def _lend(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Give the units their gradients; ``False``: those of a unit do not lie in one storage any more."""
        for tensor, position in self._single_units:
            tensor.grad = grads[position]
        for tensor in self._idle_units:
            tensor.grad = torch.empty_like(tensor)
        for unit, position in self._flat_units:
            first = grads[position]
            assert first is not None, "pieces without gradient are not merged"
            try:
                unit.tensor.grad = first.as_strided((unit.numel,), (1,))
            except RuntimeError:
                return False  # past the end of the storage
        return True

    def _drop_gradients(self) -> None:
        for unit in self._units:
            unit.tensor.grad = None

    def _show_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Show state that the step made or replaced, and plan the next step anew."""
        local_state, state = self._stand_in.state, optimizer.state
        units = [unit for unit in self._units if unit.tensor in local_state]
        ours = {id(piece.param) for unit in units for piece in unit.pieces}
        for param in chain.from_iterable(self._members):
            if id(param) in ours:
                if param not in state:  # entries come in the order of the parameters
                    state[param] = WatchedEntry({}, self._change)
            elif param in local_state:
                state[param] = local_state[param]
        for unit in units:
            _show_unit(unit, local_state[unit.tensor], state)
        self._forget()


def _show_plain_entries(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {key: dict(entry) if type(entry) is WatchedEntry else entry for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _make_stand_in(optimizer: torch.optim.Optimizer, local_groups: Callable[[], list[Group]]) -> Any:
    """Return an optimizer of the same kind and options, whose parameters are found when they are asked for."""
    kind = type(optimizer)
    groups = property(lambda _: local_groups())
    stand_in: Any = object.__new__(type(f"Local{kind.__name__}", (kind,), {"param_groups": groups}))
    vars(stand_in).update(vars(optimizer))
    return stand_in


def _join_state(unit: Unit, state: State) -> dict[Any, Any]:
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


def _show_unit(unit: Unit, local_entry: dict[Any, Any], state: State) -> None:
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
