"""Optimizer steps on few flat tensors.

Between steps ``param_groups`` and ``state`` hold ragged tensors. A *run* is what lies side by side in a flat buffer and
is stepped as one tensor. Where a run cannot be, such as without the gradient of one parameter, that step goes over its
parameters one by one.

Source: the flat step of ZeRO, arXiv 1910.02054.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, TypeVar

import torch
from torch import nn

import _traversal_utils
from composable.dtensor import RaggedDTensor, memory_of, note_written
from composable.engine import ELEMENT_WISE, handle_of, stepper_of
from composable.errors import ConfigError, UsageError, place_of_rank
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
    lend_grad,
    local_grad,
    state_like,
)

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
# The longest vector of fused optimizers' kernels; they compute elements after the last full vector in another way.
_VECTOR_BYTES = 64


def accelerate_optimizer(optimizer: OptimizerT, model: nn.Module) -> OptimizerT:
    """Make ``optimizer.step()`` run on few plain local tensors: the same results to the bit, in less time.

    No communication, now or in a step. Everything else stays as it was: parameters, state, state dicts, schedulers,
    scalers, closures. Parameters that are not sharded may be among the others.

    Neighbours in a handle's shard that share a param group are stepped as one flat tensor ``[elements]``, in the dtype
    of the parameters, while all their gradients lie in memory as backward left them; others one by one. A state tensor
    is then a view of a flat one; state tensors made before the first step are replaced.

    Args:
        optimizer: One of torch's element-wise optimizers, of exactly that class: ASGD, Adadelta, Adagrad, Adam, AdamW,
            Adamax, NAdam, RAdam, RMSprop, Rprop or SGD.
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
            fix="leave accelerate_optimizer out, or call remove() on the result of step_in_backward",
        )
    check_replaced(optimizer)
    _check_options(optimizer.param_groups)
    handles = _traversal_utils._get_fsdp_handles(model, is_everywhere=True)
    own = {id(param.sharded) for handle in handles for param in handle.params}
    if own.isdisjoint(map(id, params)):
        raise ConfigError(
            "the optimizer holds no sharded parameter of this model",
            at=place_of_rank(),
            fix="pass the model that the optimizer was built for, after fully_shard",
        )
    step = FlatStep(type(optimizer))
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


def _check_options(groups: Sequence[Mapping[str, Any]]) -> None:
    for index, group in enumerate(groups):
        if group.get("differentiable"):
            raise ConfigError(f"param group {index} is differentiable", fix="leave the optimizer unaccelerated")


class _Run:
    """Neighbours in a flat buffer that share a param group, stepped as one flat tensor, with pieces of no elements.

    Args:
        group: Index of the param group.
        params: Those with elements come first, in memory order.

    Attributes:
        locals: Their local tensors.
        tensor: The flat one [elements] over all of these.
        state: Its state, of which the state tensors of the parameters are parts.
    """

    def __init__(self, group: int, params: Sequence[RaggedDTensor]) -> None:
        self.group, self.params = group, params
        self.locals = [memory_of(param._local_tensor) for param in params]
        owned = [one for one in self.locals if one.numel()] or self.locals[:1]
        first = owned[0].storage_offset()
        self._starts = [int(one.storage_offset() - first) for one in owned]
        self.tensor = owned[0].as_strided((self._starts[-1] + owned[-1].numel(),), (1,), first)
        self.state: dict[Any, Any] = {}
        # The state of the parameters after the last step: values, and vectors of numbers [params] with their versions.
        self._shown: list[Any] = []
        self._numbers: dict[Any, tuple[torch.Tensor, int]] = {}
        self._known: dict[Any, torch.Tensor] = {}  # The same as ``state``, until a step makes or replaces some.

    def lend(self, state: State) -> bool:
        """Give the flat tensor its gradient and state; ``False``: these parameters have to be stepped one by one.

        That is where a gradient is missing or lies elsewhere than backward left it, or where state numbers differ.
        """
        grads = [grad for param in self.params if (grad := local_grad(param)) is not None]
        if len(grads) < len(self.params):
            return False
        flat = self._over(grads)
        if flat is None:
            return False
        entries = [state.get(param, {}) for param in self.params]
        are_known = all(numbers._version == version for numbers, version in self._numbers.values())
        if not (are_known and _are_same(_values_of(entries), self._shown)) and not self._join(entries):
            return False
        lend_grad(self.tensor, flat)
        return True

    def _over(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return a flat view [elements] over tensors that lie in memory as the pieces do; ``None``: they do not."""
        first = tensors[0]
        for start, tensor in zip(self._starts, tensors):
            is_next = tensor.data_ptr() == first.data_ptr() + start * first.element_size()
            if not is_next or tensor.dtype is not first.dtype or not tensor.is_contiguous():
                return None
        try:
            return first.as_strided(self.tensor.shape, (1,))
        except RuntimeError:  # past the end of the storage
            return None

    def _join(self, entries: Sequence[dict[Any, Any]]) -> bool:
        """Move the state of all parameters into flat tensors; ``False``: it differs, and nothing was moved."""
        for entry, param in zip(entries, self.params):
            cut_state(entry, param)
        signatures = set(map(_signature_of, entries))
        if len(signatures) > 1 or None in signatures:
            return False
        self.state, self._known, self._numbers = {}, {}, {}
        for key, value in list(entries[0].items()):
            if type(value) is RaggedDTensor:
                parts = [entry[key]._local_tensor for entry in entries]
                value = self._over(parts)
                if value is None:
                    # Elements between pieces are padding, zero like the padding of parameters and gradients.
                    value = parts[0].new_zeros(self.tensor.shape)
                    for part, own in zip(self._cut(value), parts):
                        part.copy_(own)
            self._show(key, value, entries)
        self._shown = _values_of(entries)
        return True

    def _show(self, key: Any, value: torch.Tensor, entries: Sequence[dict[Any, Any]]) -> None:
        """Make ``value`` state of the flat tensor, and give each parameter its part: a view, or a number of its own."""
        parts: Iterable[torch.Tensor]
        if value.shape == self.tensor.shape:
            parts = map(state_like, self.params, self._cut(value))
        else:
            # Torch steps the first number, which is then copied to the others.
            numbers = value.detach().reshape(1).expand(len(entries)).clone()
            self._numbers[key] = numbers, numbers._version
            value, *_ = parts = numbers.unbind()
        self.state[key] = self._known[key] = value
        for entry, part in zip(entries, parts):
            entry[key] = part

    def _cut(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield for each parameter its part of ``flat`` [elements], in its shape; views, where there are elements."""
        for start, local in zip(self._starts, self.locals):
            yield flat[start : start + local.numel()].view(local.shape)
        for local in self.locals[len(self._starts) :]:
            yield flat.new_empty(local.shape)

    def end(self, state: State) -> None:
        """Take the gradient away, and give the parameters their parts of state that the step made or replaced."""
        self.tensor.grad = None
        if not self.state:
            return
        entries = [state[param] for param in self.params]
        for key, value in list(self.state.items()):
            if value is not self._known.get(key):
                self._show(key, value, entries)
        for key, (numbers, _) in self._numbers.items():
            numbers[1:].copy_(numbers[0])
            self._numbers[key] = numbers, numbers._version
        self._shown = _values_of(entries)


def _values_of(entries: Iterable[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, entries)))


def _are_same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


def _signature_of(entry: Mapping[Any, Any]) -> object:
    """Return a value that is equal for the states of two parameters if they may be stepped as one; ``None``: never."""
    found: list[object] = []
    for key, value in entry.items():
        if type(value) is RaggedDTensor:
            found.append((key, value.dtype))
        elif isinstance(value, torch.Tensor) and value.dim() == 0:
            found.append((key, value.dtype, value.device, value.item()))
        else:
            return None
    return tuple(found)


def _find_runs(groups: Sequence[Mapping[str, Any]]) -> list[_Run]:
    """Return the runs of all sharded parameters of an optimizer."""
    listed = ((one, at) for at, group in enumerate(groups) for one in group["params"])
    group_of: dict[Any, int] = {one: at for one, at in listed if type(one) is RaggedDTensor}
    handle_of_param = {param: handle_of(param) for param in group_of}
    runs = [[param] for param, handle in handle_of_param.items() if handle is None]
    for flat in (flat for handle in dict.fromkeys(handle_of_param.values()) if handle for flat in handle.buffers):
        found: list[list[Any]] = []
        previous: int | None = None
        owned = sorted((param for param in flat.params if param.start < param.stop), key=lambda param: param.start)
        for param in (one.sharded for one in owned):
            group = group_of.get(param)
            if group is not None and group == previous and _may_follow(param, found[-1], groups[group]):
                found[-1].append(param)
            elif group is not None:
                found.append([param])
            previous = group
        # A piece without elements needs no kernel: it joins a run, where its state numbers are stepped.
        for param in (one.sharded for one in flat.params if one.start == one.stop and one.sharded in group_of):
            run = next((run for run in found if group_of[run[0]] == group_of[param]), None)
            if run is None:
                found.append([param])
            else:
                run.append(param)
        runs += found
    return [_Run(group_of[run[0]], run) for run in runs]


def _may_follow(param: Any, run: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Say whether a neighbour with elements may be stepped as one with a run, which ends before it.

    Kernels for the CPU compute the elements after the last full vector in another way. In fp32 and fp64 the result is
    the same, except for fused kernels: their pieces must be whole vectors. In lower precision every operation rounds,
    so pieces are not joined.
    """
    first, last, local = (memory_of(one._local_tensor) for one in (run[0], run[-1], param))
    if local.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or not local.is_contiguous():
        return False
    if local.device.type != "cpu":
        return True
    vector = _VECTOR_BYTES // local.element_size() if options.get("fused") else 1
    start = local.storage_offset() - first.storage_offset()
    is_exact = local.dtype in (torch.float32, torch.float64)
    return is_exact and start % vector == 0 and last.numel() % vector == 0


class _FlatPieces(LentPieces):
    """Flat tensors where they can be stepped now, and local tensors of the other parameters, lent to one step."""

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[_Run]) -> None:
        self._flat = [run for run in runs if run.lend(optimizer.state)]
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        super().__init__(optimizer, left_out={param for run in self._flat for param in run.params})
        self.state.update((run.tensor, run.state) for run in self._flat)

    def tensors_of(self, group: int) -> list[torch.Tensor]:
        return [*(run.tensor for run in self._flat if run.group == group), *super().tensors_of(group)]

    def take_back(self) -> None:
        super().take_back()
        for run in self._flat:
            run.tensor.grad = None

    def end(self, state: State) -> None:
        known = set(state)
        super().end(state)
        for run in self._flat:
            note_written(run.locals)
            run.end(state)
        if len(state) > len(known):  # New entries come in the order of the parameters.
            new = [param for param in self._params if param in state and param not in known]
            state.update([(param, state.pop(param)) for param in new])


class FlatStep(LocalStep):
    """The steps of an optimizer on few flat tensors, which are made anew if parameters or options change."""

    _runs: Sequence[_Run] = ()
    # What the flat tensors were made of: parameters and local tensors, and what decides how they are cut.
    _held: Sequence[object] = ()
    _options: Sequence[object] = ()

    def forget(self) -> None:
        """Forget the flat tensors, and a step that an exception has cut short: the optimizer has loaded other state."""
        if self._lent is not None:
            self._lent.take_back()
            self._lent = None
        self._runs = self._held = self._options = ()

    def _lend(self, optimizer: torch.optim.Optimizer) -> LentPieces:
        groups = optimizer.param_groups
        _check_options(groups)
        params = [param for group in groups for param in group["params"]]
        # A cast gives a parameter another local tensor, and the number of marks changes when one is replaced.
        held = [*params, *(memory_of(one._local_tensor) for one in params if type(one) is RaggedDTensor)]
        options = [CHANGES.marks, *((len(group["params"]), group.get("fused")) for group in groups)]
        if options != self._options or not _are_same(held, self._held):
            check_parameters(optimizer)
            self._runs, self._held, self._options = _find_runs(groups), held, options
        return _FlatPieces(optimizer, self._runs)
