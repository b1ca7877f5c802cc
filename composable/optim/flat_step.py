"""Let a torch optimizer step on plain local tensors, flat where that changes no bit, instead of ragged parameters.

Between steps everything is as before: ``param_groups`` and ``state`` hold ragged tensors. During
``step`` torch's own code runs on a *stand-in*, an optimizer of the same class that shares options,
and whose parameters and state are this rank's local tensors, in the same memory. The optimizer
itself is never changed for the time of a step, so there is nothing to restore after an exception.
What is planned for one step serves the next as long as everything is as it was: parameters, options that choose
kernels, the tensors in the state, and how the gradients lie.

Source: the flat step of ZeRO, arXiv 1910.02054.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import _traversal_utils
from composable.dtensor import RaggedDTensor, note_written, slice_full
from composable.engine import ELEMENT_WISE, stepper_of
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.ground.names import check_module
from composable.ground.ownership import CHANGES
from composable.ground.torch_hooks import around_optimizer
from composable.ground.torch_private import DisableTorchFunction
from composable.optim.rebind import (
    CHECKS_ITSELF,
    Grads,
    Group,
    Piece,
    State,
    Unit,
    check_parameters,
    check_replaced,
    cut_state,
    homes_of,
    is_per_element,
    lie_together,
    signature_of,
)

__all__ = ["PartStep", "accelerate_optimizer", "local_gradients"]

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
_grad_of: Any = RaggedDTensor.grad.fget
_local_of = attrgetter("_local_tensor")


def accelerate_optimizer(optimizer: OptimizerT, model: nn.Module) -> OptimizerT:
    """Make ``optimizer.step()`` run on few plain local tensors: same results to the bit, less time per parameter.

    No communication, now or in a step. Everything else stays as it was: parameters, state, state
    dicts, schedulers, scalers, closures. Parameters that are not sharded may be among the others.

    Neighbours in a handle's shard that share a param group are stepped as one flat tensor ``[elements]``, in the dtype
    of the parameters, in each step in which their gradients lie as backward left them; the rest piece by piece. A state
    tensor is then a view of a flat one; those made before the first step are replaced.

    Args:
        optimizer: One of torch's element-wise optimizers, of exactly that class: ASGD, Adadelta, Adagrad,
            Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop or SGD.
        model: The annotated model whose parameters it holds.

    Returns:
        ``optimizer``, the same object.

    Raises:
        ConfigError: The optimizer is of another class or differentiable, or holds no sharded parameter of ``model``.
        UsageError: It is accelerated already, or steps inside backward, or holds parameters that were replaced.
    """
    check_module("model", model)
    if type(optimizer) not in ELEMENT_WISE:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be accelerated: its step may need more than local elements",
            fix=f"pass exactly one of {', '.join(kind.__name__ for kind in ELEMENT_WISE)}, or leave it as it is: "
            "every torch optimizer steps on sharded parameters",
        )
    if CHECKS_ITSELF in vars(optimizer):
        raise UsageError("the optimizer is accelerated already", fix="call accelerate_optimizer once")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(stepper_of(param) is not None for param in params):
        raise UsageError(
            "the optimizer steps inside backward, on some of its parameters at a time",
            at=place_of_rank(),
            fix="leave accelerate_optimizer out, or remove() what step_in_backward returned",
        )
    check_replaced(optimizer)
    _check_options(optimizer)
    handles = _traversal_utils._get_fsdp_handles(model, is_everywhere=True)
    own = {id(param.sharded) for handle in handles for param in handle.params}
    if own.isdisjoint(map(id, params)):
        raise ConfigError(
            "the optimizer holds no sharded parameter of this model",
            at=place_of_rank(),
            fix="pass the model that the optimizer was built for, after fully_shard",
        )
    vars(optimizer)[CHECKS_ITSELF] = _AcceleratedStep(optimizer)
    return optimizer


def _check_options(optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(f"param group {index} is differentiable", fix="leave the optimizer unaccelerated")


class LocalGradients(NamedTuple):
    """Gradients of parameters that are cut over the same mesh dims.

    Attributes:
        param: One of the parameters.
        dtypes: Of all parameters, on every rank.
        tensors: What this rank has, with elements: flat ``[elements]`` or of a piece's shape, in the gradients' dtype.
    """

    param: RaggedDTensor
    dtypes: frozenset[torch.dtype]
    tensors: list[torch.Tensor]


def local_gradients(optimizer: torch.optim.Optimizer) -> list[LocalGradients] | None:
    """Return this rank's gradients of the sharded parameters as plain tensors, in the memory of ``.grad``.

    For arithmetic that treats all elements alike, such as a norm or scaling: they are as
    few as is stepped, and the padding between pieces, which is zero, is in them. No communication.

    Returns:
        One entry for each set of mesh dims that parameters are cut over, in the same order on every rank.
        ``None``: the optimizer is not accelerated.
    """
    step: _AcceleratedStep | None = vars(optimizer).get(CHECKS_ITSELF)
    if step is None:
        return None
    plan = step.plan_between_steps(optimizer)
    # Pieces without elements count: all ranks have the same cuts, in the same order.
    found: dict[object, list[torch.Tensor]] = {piece.cut: [] for piece in plan.pieces}
    params = {piece.cut: piece.param for piece in plan.pieces}
    for unit in plan.units:
        if unit.offsets and unit.tensor.grad is not None:
            found[unit.pieces[0].cut].append(unit.tensor.grad)
    plan.take_back()
    dtypes = frozenset(piece.local.dtype for piece in plan.pieces)
    return [LocalGradients(params[cut], dtypes, tensors) for cut, tensors in found.items()]


# -- what is remembered from one step to the next


_END = object()


class _Snapshot:
    """Which tensors a state consisted of, to notice any change but one of values."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._entries = list(state.values())
        # Views of the dicts show what is added to them later.
        self._views = [entry.values() for entry in self._entries if isinstance(entry, dict)]
        self._values = [*chain.from_iterable(self._views), _END]

    def is_of(self, state: Mapping[Any, Any]) -> bool:
        """Say whether ``state`` has the same entries with the same tensors."""
        if len(state) != len(self._entries) or not all(map(is_, state.values(), self._entries)):
            return False
        return all(map(is_, chain(chain.from_iterable(self._views), (_END,)), self._values))


class _Counters:
    """A state number, such as the step counter, of parameters that are stepped together, in one vector.

    Each unit counts in the element of its first piece; the others follow.

    Attributes:
        numbers: One 0-dim view for each parameter.
    """

    def __init__(self, number: torch.Tensor, count: int) -> None:
        self._vector = number.detach().reshape(1).expand(count).clone()
        self.numbers: Sequence[torch.Tensor] = self._vector.unbind()
        self._version = self._vector._version

    @property
    def is_untouched(self) -> bool:
        """Nobody has written to it since, so all its elements are equal."""
        return self._vector._version == self._version

    def follow(self) -> None:
        """Make all elements equal to those that were stepped."""
        self._vector.copy_(self.numbers[0].clone())
        self._version = self._vector._version


class _Plan:
    """How an optimizer steps with the parameters, gradients and state that it has now.

    Moves the state of pieces that are stepped as one tensor into one.

    Args:
        optimizer: What is planned for.
        merges: The plan serves for several steps, in which neighbours are stepped as one tensor, and pieces without
            elements go along with others.

    Attributes:
        units: What the optimizer sees of the sharded parameters.
        params: Of each param group, what the optimizer sees, in lists that may not be mixed.
        state: The state of what the optimizer sees.
        pieces: What this rank has of the sharded parameters, in order of the groups.
        locals: The pieces' local tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, merges: bool) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        self._members = [list(group["params"]) for group in groups]
        homes = homes_of(chain.from_iterable(self._members)) if merges else {}
        self._options = _options_of(groups)
        self.pieces = [
            Piece.of(param, index, homes.get(id(param)))
            for index, params in enumerate(self._members)
            for param in params
            if type(param) is RaggedDTensor
        ]
        self._params = [piece.param for piece in self.pieces]
        self.locals = [piece.local for piece in self.pieces]
        # Neighbours come one after another; what has no home is nobody's neighbour.
        at_home = sorted((piece.home, index) for index, piece in enumerate(self.pieces) if piece.home is not None)
        self._at_home = [index for _, index in at_home]
        self._starts = [home.start * self.pieces[index].local.element_size() for home, index in at_home]
        grads = self._grads()
        # Which pieces have no gradient, and which neighbours' gradients lie as the pieces do.
        self._pattern = self._pattern_of(grads)
        for param in self._params:
            if param in state:
                cut_state(state[param], param)
        signatures = [signature_of(state.get(p.param), p) if merges else i for i, p in enumerate(self.pieces)]
        self.units = self._make_units(groups, grads, signatures)
        self._counters = list(self._make_counters(state, signatures))
        self.params = [self._params_of_group(index, members) for index, members in enumerate(self._members)]
        self.state: State = defaultdict(dict)
        for param in chain.from_iterable(self._members):
            if type(param) is not RaggedDTensor and param in state:
                self.state[param] = state[param]
        for unit in self.units:
            if state.get(unit.pieces[0].param):
                self.state[unit.tensor] = unit.join_state(state)
        self._before = _Snapshot(self.state)
        # Of the optimizer's own, for who asks whether it is still that.
        self._shown = _Snapshot(state if merges else {})

    def _grads(self) -> Grads:
        """Return the local gradient of each piece."""
        with DisableTorchFunction():
            grads = list(map(_grad_of, self._params))
        if list(map(type, grads)).count(RaggedDTensor) == len(grads):
            return list(map(_local_of, grads))
        return [
            # What autograd leaves after operations that gathered: the whole gradient on every rank.
            slice_full(grad._local_tensor, param._spec.layout)
            if isinstance(grad, DTensor) and type(grad) is not RaggedDTensor
            else getattr(grad, "_local_tensor", None)
            for grad, param in zip(grads, self._params)
        ]

    def _pattern_of(self, grads: Grads) -> tuple[list[bool], list[bool]]:
        origins = [
            (-1 if (grad := grads[index]) is None else grad.data_ptr()) - start
            for index, start in zip(self._at_home, self._starts)
        ]
        return [grad is None for grad in grads], list(map(eq, origins, origins[1:]))

    def _make_units(self, groups: Sequence[Group], grads: Grads, signatures: Sequence[object]) -> list[Unit]:
        pieces = self.pieces
        runs = [[index] for index, piece in enumerate(pieces) if piece.numel and piece.home is None]
        runs += [[index] for index in self._at_home[:1]]
        for (index, start), (other, next_start) in pairwise(zip(self._at_home, self._starts)):
            here, there, first, second = pieces[index], pieces[other], grads[index], grads[other]
            if (
                first is not None
                and second is not None
                and signatures[index] == signatures[other]
                and here.may_precede(there, groups[here.group])
                and lie_together([first, second], [0, (next_start - start) // here.local.element_size()])
            ):
                runs[-1].append(other)
            else:
                runs.append([other])
        runs.sort(key=min)

        def kind_of(index: int) -> object:
            return pieces[index].group, pieces[index].local.dtype, pieces[index].local.device, signatures[index]

        leaders = {kind_of(run[0]): run for run in reversed(runs) if grads[run[0]] is not None}
        for index, piece in enumerate(pieces):
            if not piece.numel and grads[index] is not None:
                leader = leaders.get(kind_of(index))
                if leader is None:
                    leader = leaders[kind_of(index)] = []
                    runs.append(leader)
                leader.append(index)
        return [Unit([pieces[index] for index in run], run) for run in runs]

    def _make_counters(self, state: State, signatures: Sequence[object]) -> Iterator[_Counters]:
        """Put the numbers of parameters that are stepped together into vectors."""
        together: dict[object, list[int]] = {}
        for unit in self.units:
            if len(unit.pieces) > 1:
                together.setdefault((unit.pieces[0].group, signatures[unit.indices[0]]), []).extend(unit.indices)
        for indices in together.values():
            entries = [state.get(self._params[index]) or {} for index in indices]
            for key, value in list(entries[0].items()):
                if not is_per_element(key, value, self._params[indices[0]].shape):
                    counters = _Counters(value, len(indices))
                    for entry, number in zip(entries, counters.numbers):
                        entry[key] = number
                    yield counters

    def _params_of_group(self, index: int, members: Sequence[torch.Tensor]) -> list[list[Any]]:
        """Return what the optimizer sees of a param group, in one list or two: DTensors do not mix with others."""
        others = [param for param in members if type(param) is not RaggedDTensor]
        local: list[Any] = [unit.tensor for unit in self.units if unit.pieces[0].group == index]
        local += [param for param in others if not isinstance(param, DTensor)]
        dtensors = [param for param in others if isinstance(param, DTensor)]
        return [params for params in (local, dtensors) if params]

    def lend_if_fitting(self, optimizer: torch.optim.Optimizer) -> bool:
        """Give the units their gradients; ``False``: the optimizer is not as it was, or the gradients lie elsewhere."""
        groups = optimizer.param_groups
        if _options_of(groups) != self._options:
            return False
        for group, members in zip(groups, self._members):
            if len(group["params"]) != len(members) or not all(map(is_, group["params"], members)):
                return False
        # A cast gives a parameter another local tensor.
        if not all(map(is_, map(_local_of, self._params), self.locals)):
            return False
        is_shown = self._shown.is_of(optimizer.state) and all(counters.is_untouched for counters in self._counters)
        return is_shown and self.lend()

    def lend(self) -> bool:
        """Give the units their gradients; ``False``: these lie in another way."""
        grads = self._grads()
        return self._pattern_of(grads) == self._pattern and all(unit.lend(grads) for unit in self.units)

    def take_back(self) -> None:
        """Take the units' gradients away."""
        for unit in self.units:
            unit.tensor.grad = None

    def follow(self) -> bool:
        """Bring the optimizer's own state up to date after a step; ``False``: the step made or replaced some."""
        if not self._before.is_of(self.state):
            return False
        for counters in self._counters:
            counters.follow()
        return True

    def show(self, state: State) -> None:
        """Show in ``state``, the optimizer's own, what a step made or replaced."""
        units = [unit for unit in self.units if unit.tensor in self.state]
        ours = {id(piece.param) for unit in units for piece in unit.pieces}
        for param in chain.from_iterable(self._members):
            if id(param) in ours:
                if param not in state:  # entries come in the order of the parameters
                    state[param] = {}
            elif type(param) is not RaggedDTensor and param in self.state:
                state[param] = self.state[param]
        for unit in units:
            unit.show_state(self.state[unit.tensor], state)


def _options_of(groups: Sequence[Group]) -> list[object]:
    """Return what decides how elements are computed, for each group; and how many parameters were ever replaced."""
    return [*((group.get("fused"), group.get("differentiable")) for group in groups), CHANGES.marks]


# -- who steps


class _LocalStep:
    """Steps in place of an optimizer, from ``begin`` to ``end``.

    Args:
        kind: The optimizer's class.
        merges: Neighbours are stepped as one tensor, and the plan of one step serves the next.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], *, merges: bool) -> None:
        groups = property(lambda _: self._local_groups())
        self._shell: Any = object.__new__(type(f"Local{kind.__name__}", (kind,), {"param_groups": groups}))
        self._merges = merges
        self._remembered: _Plan | None = None
        self._abandon()

    def _abandon(self) -> None:
        self._optimizer: Any = None
        self._groups: list[Group] | None = None
        self._plan: _Plan | None = None
        vars(self._shell).clear()

    def _begin(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return what torch's ``step`` is to run on."""
        self._optimizer = optimizer
        # As it is now: users set attributes of optimizers, and scalers leave DTensors for fused ones.
        vars(self._shell).update(
            {
                name: value._local_tensor if isinstance(value, DTensor) else value
                for name, value in vars(optimizer).items()
            },
            state=defaultdict(dict),
        )
        return self._shell

    def _local_groups(self) -> list[Group]:
        """Return the groups when they are asked for: hooks before a step, and closures, set gradients and options."""
        if self._groups is None:
            self._plan = self._lent_plan(self._optimizer)
            self._shell.state = self._plan.state
            self._groups = [
                {**group, "params": params}
                for group, several in zip(self._optimizer.param_groups, self._plan.params, strict=True)
                for params in several
            ]
        return self._groups

    def _lent_plan(self, optimizer: torch.optim.Optimizer) -> _Plan:
        """Return a plan for this step, with the units' gradients in place."""
        plan = self._remembered
        if plan is not None:
            if plan.lend_if_fitting(optimizer):
                return plan
            plan.take_back()
            self._remembered = None
        if self._merges:
            check_parameters(optimizer)
            _check_options(optimizer)
        plan = _Plan(optimizer, merges=self._merges)
        is_lent = plan.lend()
        assert is_lent, "units are made of gradients that lie in one storage"
        self._remembered = plan if self._merges else None
        return plan

    def end(self, *, has_failed: bool = False) -> None:
        """Take the gradients away, and bring what the step did to the optimizer; nothing where none has begun."""
        plan, optimizer = self._plan, self._optimizer
        self._abandon()
        if plan is not None:
            plan.take_back()
            note_written(plan.locals)
            if has_failed or not plan.follow():
                plan.show(optimizer.state)
                self._remembered = None  # With its state, whose tensors must not outlive that of the optimizer.


class PartStep(_LocalStep):
    """Stands in for an optimizer that steps some of its parameters at a time: nothing is merged or remembered.

    Args:
        optimizer: Of any class; without effect unless it computes each element from that element alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(type(optimizer), merges=False)
        self._whole = optimizer

    def begin(self) -> Any:
        """Return what is to step in place of the optimizer, on the parameters that this has now.

        ``None``: the optimizer itself is, since not all of them are sharded. ``end`` has to follow.
        """
        params = (param for group in self._whole.param_groups for param in group["params"])
        if type(self._whole) not in ELEMENT_WISE or any(type(param) is not RaggedDTensor for param in params):
            return None
        return self._begin(self._whole)


class _AcceleratedStep(_LocalStep):
    """What an accelerated optimizer knows beside itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(type(optimizer), merges=True)
        around_optimizer(
            optimizer,
            before_step=self._before_step,
            after_step=lambda *_: self.end(),
            # Had a step ended well, it would be over.
            before_state_dict=lambda _: self.end(has_failed=True),
            after_load=lambda _: self._forget(),
        )

    @torch.no_grad()
    def plan_between_steps(self, optimizer: torch.optim.Optimizer) -> _Plan:
        """Return the plan of the next step, with gradients lent."""
        self.end(has_failed=True)
        return self._lent_plan(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self.end(has_failed=True)
        stand_in = self._begin(optimizer)
        if len(args) > 1 and args[1] is not None:
            return (stand_in, self._with_gradients(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            kwargs = {**kwargs, "closure": self._with_gradients(kwargs["closure"])}
        return (stand_in, *args[1:]), kwargs

    def _with_gradients(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._groups = None  # The closure has made other gradients.
            return loss

        return evaluate

    def _forget(self) -> None:
        """Forget all: the optimizer has another state."""
        if self._plan is not None:
            self._plan.take_back()
        self._abandon()
        self._remembered = None
