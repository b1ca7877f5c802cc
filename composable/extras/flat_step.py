"""Optimizer steps on few flat tensors.

Between steps ``param_groups`` and ``state`` hold ragged tensors. The plan of one step serves the next as long as the
parameters, the options that choose kernels, the tensors in the state, and the places of gradients in memory are the
same.

Source: the flat step of ZeRO, arXiv 1910.02054.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import eq, is_
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import _traversal_utils
from composable.dtensor import RaggedDTensor, memory_of, note_written
from composable.engine import ELEMENT_WISE, handle_of, stepper_of
from composable.errors import ConfigError, UsageError
from composable.extras.matrix_step import AdafactorStep, MuonStep, WholeStep, check_matrices
from composable.ground.names import check_module
from composable.ground.ownership import CHANGES
from composable.ground.torch_hooks import around_optimizer
from composable.optim import (
    CHECKS_ITSELF,
    LentPieces,
    LocalStep,
    State,
    check_parameters,
    check_replaced,
    cut_state,
    is_per_element,
    lend_grad,
    local_grad,
    state_like,
)

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
# The local gradient of each piece.
_Grads: TypeAlias = Sequence[torch.Tensor | None]

# The optimizers that need whole parameters.
_WHOLE = MappingProxyType({torch.optim.Muon: MuonStep, torch.optim.Adafactor: AdafactorStep})

# The longest vector of fused optimizers' kernels; they compute elements after the last full vector in another way.
_VECTOR_BYTES = 64


def accelerate_optimizer(optimizer: OptimizerT, model: nn.Module) -> OptimizerT:
    """Make ``optimizer.step()`` run on few plain local tensors: the same results to the bit, in less time.

    No communication, now or in a step, except in steps of Muon and Adafactor. Everything else stays as it was:
    parameters, state, state dicts, schedulers, scalers, closures. Parameters that are not sharded may be among the
    others.

    Neighbours in a handle's shard that share a param group are stepped as one flat tensor ``[elements]``, in the dtype
    of the parameters, while their gradients lie in memory as backward left them; others piece by piece. A state tensor
    is then a view of a flat one; state tensors made before the first step are replaced.

    Muon steps a matrix where it lies whole, without communication. Of a matrix that is cut, one rank gets the pieces in
    bfloat16, orthogonalises it, and sends each rank its piece of the result: its ``step`` is then collective. Results
    are those of one process to the bit, if the gradients are. So does Adafactor with parameters of any dims, of which
    pieces of values and gradients travel, and the result; its moments rest at the rank that computes.

    Args:
        optimizer: One of torch's element-wise optimizers, of exactly that class: ASGD, Adadelta, Adagrad, Adam, AdamW,
            Adamax, NAdam, RAdam, RMSprop, Rprop or SGD; or Muon or Adafactor.
        model: The annotated model whose parameters it holds.

    Returns:
        ``optimizer``, the same object.

    Raises:
        ConfigError: The optimizer is of another class or differentiable, or holds no sharded parameter of ``model``; or
            it is Muon or Adafactor, and tensor parallelism has split a parameter.
        UsageError: It is accelerated already, or steps inside backward, or holds parameters that were replaced.
    """
    check_module("model", model)
    if type(optimizer) not in (*ELEMENT_WISE, *_WHOLE):
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be accelerated: its step may need more than local elements",
            fix=f"pass exactly one of {', '.join(kind.__name__ for kind in (*ELEMENT_WISE, *_WHOLE))}, or leave it as "
            "it is: every torch optimizer steps on sharded parameters",
        )
    if CHECKS_ITSELF in vars(optimizer):
        raise UsageError("the optimizer is accelerated already", fix="call accelerate_optimizer once")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(stepper_of(param) is not None for param in params):
        raise UsageError(
            "the optimizer steps inside backward, on some of its parameters at a time",
            fix="leave accelerate_optimizer out, or call remove() on the result of step_in_backward",
        )
    check_replaced(optimizer)
    _check_options(optimizer)
    handles = _traversal_utils._get_fsdp_handles(model, is_everywhere=True)
    own = {id(param.sharded) for handle in handles for param in handle.params}
    if own.isdisjoint(map(id, params)):
        raise ConfigError(
            "the optimizer holds no sharded parameter of this model",
            fix="pass the model that the optimizer was built for, after fully_shard",
        )
    kind = type(optimizer)
    if kind in _WHOLE:
        check_matrices(params)
    step: FlatStep | WholeStep = _WHOLE[kind](kind) if kind in _WHOLE else FlatStep(kind)
    vars(optimizer)[CHECKS_ITSELF] = step
    around_optimizer(
        optimizer,
        before_step=step.begin,
        after_step=lambda *_: step.end(),
        # A step that is not over by now has failed.
        before_state_dict=lambda _: step.end(),
        after_load=lambda _: step.forget(),
    )
    return optimizer


def _check_options(optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(f"param group {index} is differentiable", fix="leave the optimizer unaccelerated")


class _LocalPiece(NamedTuple):
    """This rank's piece of one parameter, in a param group.

    ``place`` is the id of a flat buffer, and the index among its pieces with elements here; ``None``: no neighbours.
    """

    param: RaggedDTensor
    local: torch.Tensor
    group: int
    place: tuple[int, int] | None

    def follows(self, other: "_LocalPiece") -> bool:
        """Say whether this piece comes next after ``other`` in a flat buffer."""
        return other.place is not None and self.place == (other.place[0], other.place[1] + 1)


class _Unit:
    """One parameter for the optimizer: a piece, or neighbours as one flat tensor, with pieces of no elements."""

    def __init__(self, pieces: Sequence[_LocalPiece], indices: Sequence[int]) -> None:
        # Pieces of one param group with equal state so far; those with elements come first, in memory order.
        self.pieces = pieces
        self.indices = indices  # Their indices among the plan's pieces.
        owned = [piece.local for piece in pieces if piece.local.numel()]
        self._starts = [int(local.storage_offset() - owned[0].storage_offset()) for local in owned]
        self._is_flat = len(owned) > 1
        # The local tensor of the one piece with elements, or a flat one [elements] over several.
        self.tensor = _joined(owned, self._starts) if self._is_flat else pieces[0].local
        # State numbers, such as step counters, in vectors [pieces], each with its version after the last step: torch
        # steps the first element, which is then copied to the others.
        self._numbers: list[tuple[torch.Tensor, int]] = []

    def lend(self, grads: _Grads) -> bool:
        """Set the gradient of ``tensor``; ``False``: gradients of the pieces no longer lie in one storage."""
        grad = grads[self.indices[0]]
        if grad is not None and self._is_flat:
            try:
                grad = grad.as_strided(self.tensor.shape, (1,))
            except RuntimeError:
                return False  # past the end of the storage
        lend_grad(self.tensor, grad)
        return True

    def _cut(self, value: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield for each piece its part of ``value``, a tensor like ``tensor``; views, where there are elements."""
        flat = value.reshape(-1)
        for piece, start in zip(self.pieces, self._starts):
            yield flat[start : start + piece.local.numel()].view(piece.local.shape)
        for piece in self.pieces[len(self._starts) :]:
            yield value.new_empty(piece.local.shape)

    def join_state(self, state: State) -> dict[Any, Any]:
        """Return the state of the unit in the memory of its pieces' states, which move into one tensor if needed."""
        entries = [state[piece.param] for piece in self.pieces]
        joined = dict(entries[0])
        for key, value in joined.items():
            if type(value) is RaggedDTensor:
                locals_ = [entry[key]._local_tensor for entry in entries[: len(self._starts) or 1]]
                if not self._is_flat:
                    joined[key] = locals_[0]
                elif all(map(_lies_at, self._starts, locals_, [locals_[0]] * len(locals_))):
                    joined[key] = _joined(locals_, self._starts)
                else:
                    # Elements between pieces are padding, zero like the padding of parameters and gradients.
                    joined[key] = flat = locals_[0].new_zeros(self.tensor.numel())
                    for entry, piece, part in zip(entries, self.pieces, self._cut(flat)):
                        entry[key] = state_like(piece.param, part.copy_(entry[key]._local_tensor))
            elif len(entries) > 1:
                numbers = value.detach().reshape(1).expand(len(entries)).clone()
                for entry, number in zip(entries, numbers.unbind()):
                    entry[key] = number
                joined[key] = entries[0][key]
                self._numbers.append((numbers, numbers._version))
        return joined

    def split_state(self, joined: Mapping[Any, Any]) -> list[dict[Any, Any]]:
        """Return the state of each piece's parameter, split from the state of the unit."""
        entries: list[dict[Any, Any]] = [{} for _ in self.pieces]
        for key, value in joined.items():
            parts: Iterable[Any] = [value]
            if isinstance(value, torch.Tensor) and value.shape == self.tensor.shape:
                parts = map(state_like, (piece.param for piece in self.pieces), self._cut(value))
            elif len(entries) > 1:
                parts = [value.clone() for _ in entries]
            for entry, part in zip(entries, parts):
                entry[key] = part
        return entries

    def has_own_numbers(self) -> bool:
        """Say whether only the last step has written to state numbers, so that all pieces have equal ones."""
        return all(numbers._version == version for numbers, version in self._numbers)

    def follow(self) -> None:
        """Copy the state numbers that were stepped to all pieces."""
        for numbers, _ in self._numbers:
            numbers[1:].copy_(numbers[0])
        self._numbers = [(numbers, numbers._version) for numbers, _ in self._numbers]


def _joined(tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> torch.Tensor:
    """Return a flat view [elements] over tensors in one storage; ``starts`` count from the first of them."""
    return tensors[0].as_strided((starts[-1] + tensors[-1].numel(),), (1,), tensors[0].storage_offset())


def _lies_at(start: int, tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Say whether ``tensor``, of any shape, is contiguous in the storage of ``first``, ``start`` elements after it."""
    return (
        tensor.storage_offset() == first.storage_offset() + start
        and tensor.dtype == first.dtype
        and tensor.is_contiguous()
        and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    )


def _places_of(params: Iterable[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """Return by id the place (see ``_LocalPiece``) of each parameter with elements, in all handles of ``params``."""
    handles = dict.fromkeys(handle for param in params if (handle := handle_of(param)) is not None)
    places: dict[int, tuple[int, int]] = {}
    for flat in (flat for handle in handles for flat in handle.buffers):
        owned = sorted((param for param in flat.params if param.start < param.stop), key=lambda param: param.start)
        places.update((id(param.sharded), (id(flat), place)) for place, param in enumerate(owned))
    return places


def _signature_of(entry: Mapping[Any, Any], piece: _LocalPiece) -> object:
    """Return a value that is equal for the states of two parameters if they may be stepped as one."""
    found: list[object] = []
    for key, value in entry.items():
        if isinstance(value, torch.Tensor) and is_per_element(key, value, piece.param.shape):
            found.append((key, value.dtype))
        elif isinstance(value, torch.Tensor) and value.dim() == 0:
            found.append((key, value.dtype, value.device, value.item()))
        else:
            return object()  # equal to no other
    return tuple(found)


def _values_of(state: Mapping[Any, dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, state.values())))


def _are_same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


class _Plan(LentPieces):
    """The plan of an optimizer's step with its current parameters, gradients and state.

    The constructor moves the state of pieces that are stepped as one tensor into one tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        self._members = [list(group["params"]) for group in groups]
        self._options = _options_of(groups)
        places = _places_of(chain.from_iterable(self._members))
        self._pieces = [
            _LocalPiece(param, memory_of(param._local_tensor), index, places.get(id(param)))
            for index, params in enumerate(self._members)
            for param in params
            if type(param) is RaggedDTensor
        ]
        self.locals = [piece.local for piece in self._pieces]  # The local tensors of the sharded parameters.
        # Neighbours follow each other here; a piece without a place has no neighbours.
        placed = sorted((piece.place, index) for index, piece in enumerate(self._pieces) if piece.place is not None)
        self._placed = [(index, self.locals[index].storage_offset()) for _, index in placed]
        grads = self._grads()
        # Which pieces have no gradient, and which neighbours' gradients lie in memory as the pieces do.
        self._pattern = self._pattern_of(grads)
        for piece in self._pieces:
            if piece.param in state:
                cut_state(state[piece.param], piece.param)
        self._units = [_Unit([self._pieces[index] for index in run], run) for run in self._runs(groups, grads, state)]
        self.state: State = defaultdict(dict)
        for param in chain.from_iterable(self._members):
            if type(param) is not RaggedDTensor and param in state:
                self.state[param] = state[param]
        for unit in self._units:
            if state.get(unit.pieces[0].param):
                self.state[unit.tensor] = unit.join_state(state)
        self._before = _values_of(self.state)
        self._shown = _values_of(state)
        self.is_current = True  # No step has made or replaced state since.

    def _grads(self) -> _Grads:
        """Return the local gradient of each piece."""
        return [local_grad(piece.param) for piece in self._pieces]

    def _pattern_of(self, grads: _Grads) -> tuple[list[bool], list[bool]]:
        origins = [
            -1 if (grad := grads[index]) is None else grad.data_ptr() - start * grad.element_size()
            for index, start in self._placed
        ]
        return [grad is None for grad in grads], list(map(eq, origins, origins[1:]))

    def _runs(self, groups: Sequence[Mapping[str, Any]], grads: _Grads, state: State) -> list[list[int]]:
        """Return lists of the pieces, by index, that are stepped together.

        Kernels for the CPU compute the elements after the last full vector in another way. In fp32
        and fp64 the result is the same, except for fused kernels: their pieces must be whole vectors.
        In lower precision every operation rounds, so pieces are not joined.
        """
        pieces = self._pieces
        # Pieces of equal kind may be joined; a piece without a gradient equals no other.
        kinds = [
            object()
            if grads[index] is None
            else (piece.group, piece.local.dtype, piece.local.device, _signature_of(state.get(piece.param, {}), piece))
            for index, piece in enumerate(pieces)
        ]

        def may_follow(run: Sequence[int], index: int) -> bool:
            first, last, piece = pieces[run[0]], pieces[run[-1]], pieces[index]
            if kinds[run[-1]] != kinds[index] or not piece.follows(last):
                return False
            start = int(piece.local.storage_offset() - first.local.storage_offset())
            grad, first_grad = grads[index], grads[run[0]]
            if grad is None or first_grad is None:
                return False
            if not (_lies_at(start, piece.local, first.local) and _lies_at(start, grad, first_grad)):
                return False
            vector = _VECTOR_BYTES // piece.local.element_size() if groups[piece.group].get("fused") else 1
            is_exact = piece.local.dtype in (torch.float32, torch.float64)
            are_whole = start % vector == 0 and last.local.numel() % vector == 0
            return piece.local.device.type != "cpu" or (is_exact and are_whole)

        runs: list[list[int]] = []
        for index, _ in self._placed:
            if runs and may_follow(runs[-1], index):
                runs[-1].append(index)
            else:
                runs.append([index])
        leaders = {kinds[run[0]]: run for run in runs}
        for index, piece in enumerate(pieces):
            if piece.place is None:
                # A piece without elements needs no kernel: it joins a run, where its state numbers are stepped.
                run = None if piece.local.numel() else leaders.get(kinds[index])
                if run is None:
                    run = leaders[kinds[index]] = []
                    runs.append(run)
                run.append(index)
        return runs

    def params_of(self, group: int) -> list[list[Any]]:
        """Return the tensors that the optimizer sees of a param group; DTensors are in a list of their own."""
        others = [param for param in self._members[group] if type(param) is not RaggedDTensor]
        local: list[Any] = [unit.tensor for unit in self._units if unit.pieces[0].group == group]
        local += [param for param in others if not isinstance(param, DTensor)]
        dtensors = [param for param in others if isinstance(param, DTensor)]
        return [params for params in (local, dtensors) if params]

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether the optimizer is as it was, except for values."""
        groups = optimizer.param_groups
        return (
            _options_of(groups) == self._options
            and all(_are_same(group["params"], members) for group, members in zip(groups, self._members))
            # A cast gives a parameter another local tensor.
            and _are_same([memory_of(piece.param._local_tensor) for piece in self._pieces], self.locals)
            and _are_same(_values_of(optimizer.state), self._shown)
            and all(unit.has_own_numbers() for unit in self._units)
        )

    def lend(self) -> bool:
        """Set the gradients of the units; ``False``: they lie in memory in another way than when the plan was made."""
        grads = self._grads()
        return self._pattern_of(grads) == self._pattern and all(unit.lend(grads) for unit in self._units)

    def take_back(self) -> None:
        """Take the units' gradients away."""
        for unit in self._units:
            unit.tensor.grad = None

    def end(self, state: State) -> None:
        """Take the gradients away, and bring ``state``, the optimizer's own, up to date."""
        note_written(self.locals)
        self.take_back()
        self.is_current = _are_same(_values_of(self.state), self._before)
        if self.is_current:
            for unit in self._units:
                unit.follow()
            return
        found = {param: entry for param, entry in self.state.items() if isinstance(param, nn.Parameter)}
        for unit in self._units:
            if unit.tensor in self.state:
                params: list[Any] = [piece.param for piece in unit.pieces]
                found.update(zip(params, unit.split_state(self.state[unit.tensor])))
        for param in chain.from_iterable(self._members):  # entries come in the order of the parameters
            if param in found:
                state[param].update(found[param])


def _options_of(groups: Sequence[Mapping[str, Any]]) -> list[object]:
    """Return the options of each group that choose kernels, and a number that changes when a parameter is replaced."""
    return [*((group.get("fused"), group.get("differentiable")) for group in groups), CHANGES.marks]


class FlatStep(LocalStep):
    """The steps of an optimizer on few flat tensors; the plan of one step serves the next."""

    _remembered: _Plan | None = None

    def forget(self) -> None:
        """Forget the plan, and a step that an exception has cut short: the optimizer has loaded other state."""
        self._remembered = None
        if self._lent is not None:
            self._lent.take_back()
            self._lent = None

    def _lend(self, optimizer: torch.optim.Optimizer) -> _Plan:
        plan = self._remembered
        if plan is None or not (plan.fits(optimizer) and plan.lend()):
            if plan is not None:
                plan.take_back()
            check_parameters(optimizer)
            _check_options(optimizer)
            plan = _Plan(optimizer)
            is_lent = plan.lend()
            assert is_lent, "units are made of gradients that lie in one storage"
        self._remembered = plan
        return plan

    def end(self) -> None:
        """End a step; if it made or replaced state, forget the plan, whose tensors must not outlive this state."""
        super().end()
        if self._remembered is not None and not self._remembered.is_current:
            self._remembered = None
