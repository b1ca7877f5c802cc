"""The move of an optimizer to sharded parameters, and the checks before its steps.

Most optimizers keep tensors of the parameter's shape, which are cut as the parameter is, and
numbers such as the step counter, which every rank holds. Steps that would be lost are refused: on parameters that
were replaced, that have no values, or whose gradients are still being reduced.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from composable.annotation import unit_of
from composable.comm import watch_ranks
from composable.dtensor import RaggedDTensor, check_finished, slice_full
from composable.engine import StepCount, handle_of, has_torch_optimizer, stepper_of
from composable.errors import ConfigError, UsageError, place_of_rank, warn_once
from composable.ground.frames import in_backward
from composable.ground.modes import unseen
from composable.ground.names import check_module, check_optimizer, list_text
from composable.ground.ownership import FORGOTTEN_FIX, is_forgotten, is_managed
from composable.ground.torch_hooks import after_loads, before_every_step
from composable.ground.unfilled import META_FIX
from composable.planning import first_replacement, replacement_of
from composable.replication import Reducer

_is_meta = attrgetter("is_meta")

# The attribute of an optimizer that has stepped.
_COUNTS = "_composable_step_counts"
# An optimizer with an attribute of this name decides itself when to check its parameters.
CHECKS_ITSELF = "_composable_local_step"


def check_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UsageError`` if the optimizer was built before an annotation, or inside forward or backward."""
    for group in optimizer.param_groups:
        replacement = first_replacement(group["params"])
        if replacement is not None:
            raise UsageError(
                "the optimizer holds a parameter that no module has any more, so its step would be lost",
                at=f"parameter {replacement.fqn_in_model()!r}",
                fix="rebind_optimizer(optimizer, model) after annotating the model, or build the optimizer then",
            )


def check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UsageError`` for parameters that an annotation has replaced, or that are on the meta device."""
    check_replaced(optimizer)
    for group in optimizer.param_groups:
        params = group["params"]
        if any(map(_is_meta, params)) and any(param.is_meta and isinstance(param, RaggedDTensor) for param in params):
            raise UsageError(
                "the optimizer steps on parameters that are still on the meta device",
                at=_names_of(optimizer, filter(_is_meta, params)),
                fix=META_FIX,
            )


def _own_state(optimizer: torch.optim.Optimizer) -> None:
    """Give annotated parameters tensors of their own where several have one object: each would count its steps there.

    A run of FSDP1 leaves one ``step`` for all parameters of a flat one, and files and loads keep it so.
    """
    seen: set[int] = set()
    for param, entry in getattr(optimizer, "state", {}).items():
        for key, value in entry.items() if is_managed(param) and isinstance(entry, dict) else ():
            if isinstance(value, torch.Tensor):
                entry[key] = value.detach().clone() if id(value) in seen else value
                seen.add(id(value))


def _before_first_step(optimizer: torch.optim.Optimizer) -> list[StepCount]:
    """Own the state, and warn of parameters beside annotated ones whose gradients differ between ranks.

    Returns the counts of the handles that the optimizer steps.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if unit := next(filter(None, map(unit_of, params)), None):
        _own_state(optimizer)
        with suppress(AttributeError):  # A wrapper without ``Optimizer.__init__``: the optimizer in it has the hooks.
            after_loads(optimizer, _own_state)
        forgotten = [param for param in params if param.grad is not None and is_forgotten(param)]
        if forgotten and unit[1].rank == 0 and not unit[1].is_alone:
            names = _names_of(optimizer, forgotten)
            warn_once(
                f"no annotation averages the gradients of {names}, which lie beside annotated ones: ranks drift apart"
                f"\n  at:  {place_of_rank()}, {type(optimizer).__name__}\n  fix: {FORGOTTEN_FIX}"
            )
    # Steps in backward are a part of it, also where a rank without inputs follows one.
    handles = dict.fromkeys(handle_of(one) for one in params if not (stepper_of(one) or has_torch_optimizer(one)))
    return [handle.stepped for handle in handles if handle is not None]


@unseen
def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    watch_ranks()
    if _COUNTS not in vars(optimizer):
        setattr(optimizer, _COUNTS, _before_first_step(optimizer))
    if CHECKS_ITSELF not in vars(optimizer):
        check_parameters(optimizer)
    if callable(kwargs.get("closure")) or (len(args) > 1 and callable(args[1])):
        return after_closure(args, kwargs, partial(_check_gradients, optimizer))
    _check_gradients(optimizer)
    return None


def after_closure(args: Any, kwargs: Any, call: Callable[[], object]) -> tuple[Any, Any]:
    """Return the arguments of a step, with ``call`` after its closure, if it has one: it makes other gradients."""

    def wrapped(closure: Any) -> Any:
        def evaluate() -> Any:
            loss = closure()
            call()
            return loss

        return evaluate if callable(closure) else closure

    named = {"closure": wrapped(kwargs["closure"])} if "closure" in kwargs else {}
    return (*args[:1], *map(wrapped, args[1:2]), *args[2:]), {**kwargs, **named}


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    check_gradients(f"{type(optimizer).__name__}.step", params)
    for count in () if in_backward() else getattr(optimizer, _COUNTS):
        count.steps += 1


def check_gradients(what: str, params: Sequence[torch.Tensor]) -> None:
    """Raise ``UsageError`` for the call ``what`` unless the gradients of ``params``, of any shapes, are complete."""
    check_finished(what, params)
    # Also a hook that runs before the average: those of sharded parameters run after it.
    for param in params if in_backward() else ():
        unit = unit_of(param) if type(param) is not RaggedDTensor and param.grad is not None else None
        if unit is not None and isinstance(unit[0], Reducer):
            unit[0].check_averaged(what)


def _names_of(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> str:
    """Describe some parameters, of any shapes: by name if the optimizer was given names, else by shape."""
    named: dict[int, str] = {}
    for group in optimizer.param_groups:
        named.update(zip(map(id, group["params"]), group.get("param_names", ())))
    return f"parameters {list_text([named.get(id(one), f'of shape {list(one.shape)}') for one in params])}"


@cache
def check_every_step() -> None:
    """Check parameters and gradients before each step of every optimizer of the process; a second call does nothing."""
    before_every_step(_check_optimizer)


# State that torch's optimizers keep once per parameter. By name: a scalar parameter's other state is a scalar too.
_PER_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})


def is_per_element(key: object, value: object, shape: torch.Size) -> bool:
    """Say whether ``value``, the state called ``key`` of a parameter of ``shape``, has a number for each element."""
    return isinstance(value, torch.Tensor) and value.shape == shape and (bool(shape) or key not in _PER_PARAMETER)


def cut_state(entry: dict[Any, Any], param: RaggedDTensor) -> None:
    """Make the state of ``param`` ragged, in place: whole tensors of its shape become this rank's pieces.

    No communication: every rank holds the whole tensors. Tensors of other shapes become replicated DTensors, numbers
    stay plain. Raises ``UsageError`` for a tensor that is cut in another way, such as by tensor parallelism.
    """
    layout = param._spec.layout
    for key, value in entry.items():
        if not isinstance(value, torch.Tensor):
            continue
        if type(value) is RaggedDTensor:
            if not value._spec.layout.matches(layout):
                raise _foreign(key, value, param)
            continue
        if isinstance(value, DTensor):
            if any(not placement.is_replicate() for placement in value.placements):
                raise _foreign(key, value, param)
            value = value._local_tensor
        if is_per_element(key, value, layout.shape):
            spec = param._spec.cast(value.dtype)
            entry[key] = RaggedDTensor.wrap(slice_full(value.detach(), layout).to(param.device, copy=True), spec)
        elif value.dim():
            replicas = [Replicate()] * layout.mesh.ndim
            entry[key] = DTensor.from_local(value.to(param.device), layout.mesh, replicas, run_check=False)
        else:
            entry[key] = value


def _whole_state(entry: dict[Any, Any]) -> None:
    """Make every tensor of a parameter's state whole and plain, in place.

    Collective: the ranks of each tensor's mesh, with values in the same order.
    """
    for key, value in entry.items():
        if isinstance(value, DTensor):
            entry[key] = value.full_tensor()


def _foreign(key: object, value: DTensor, param: DTensor) -> UsageError:
    return UsageError(
        f"optimizer state {key!r} is placed {value.placements}, its parameter {param.placements}",
        at=f"parameter of shape {list(param.shape)}",
        fix="load the state with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict",
    )


OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def rebind_optimizer(optimizer: OptimizerT, model: nn.Module) -> OptimizerT:
    """Give an optimizer that was built before ``model`` was annotated the parameters that the model has now.

    Param groups keep their order and options, and the state is kept, in its dtypes: training goes on as
    before. Whole state, of the parameters' full shapes, is cut to this rank's pieces, without
    communication; every rank must hold the same. For plain parameters, or another cut, state is gathered.

    Collective where state of sharded parameters is gathered: all ranks of their mesh.

    Args:
        optimizer: Any torch optimizer. Parameters of other models in it stay as they are.
        model: The model, outside forward and backward.

    Returns:
        ``optimizer``, the same object.

    Raises:
        ConfigError: An argument is of another kind; or the optimizer holds no parameter that ``model`` has or had,
            or one that nothing replaced; nothing was changed.
        UsageError: The optimizer keeps state that is not a parameter's own (LBFGS, once it has stepped), or state
            of a parameter that tensor parallelism has split.
    """
    check_optimizer("optimizer", optimizer)
    check_module("model", model)
    replaced = _find_replacements(optimizer, model)
    if not replaced:
        return optimizer
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        raise UsageError(
            "LBFGS keeps one state for all parameters together, which cannot be cut",
            fix="rebind it before its first step, or build a new one",
        )
    state: list[tuple[Any, Any]] = []
    for param, entry in optimizer.state.items():
        new = replaced.get(id(param))
        state.append((param, entry) if new is None else (new, _convert(entry, new)))
    for group in optimizer.param_groups:
        # In place: optimizers may hold the list itself.
        group["params"][:] = [replaced.get(id(param), param) for param in group["params"]]
    optimizer.state.clear()
    optimizer.state.update(state)
    vars(optimizer).pop(_COUNTS, None)
    return optimizer


def _find_replacements(optimizer: torch.optim.Optimizer, model: nn.Module) -> Mapping[int, nn.Parameter]:
    """Return the new parameter for each replaced one, by the id of the old one."""
    current = {id(param) for param in model.parameters()}
    found: dict[int, nn.Parameter] = {}
    lost: list[str] = []
    is_of_model = False
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        is_of_model = is_of_model or id(param) in current
        replacement = replacement_of(param)
        if replacement is None:
            continue
        new = replacement.find()
        if new is None or new.shape != param.shape:
            lost.append(f"{replacement.fqn!r} {list(param.shape)}")
        elif id(new) in current:
            found[id(param)] = new
    if lost:
        raise ConfigError(
            f"nothing took the place of {len(lost)} parameters of the optimizer: {', '.join(lost)}",
            fix="call it outside forward and backward, while the annotated model is alive, or build a new optimizer",
        )
    if not found and not is_of_model:
        raise ConfigError(
            "the optimizer holds no parameter that this model has or had",
            fix="pass the model that the optimizer was built for",
        )
    return found


def _convert(entry: Any, new: nn.Parameter) -> Any:
    """Return the state of a parameter in the form for ``new``: cut or whole."""
    if not isinstance(entry, dict):
        return entry
    entry = dict(entry)
    if isinstance(new, RaggedDTensor):
        layout = new._spec.layout
        ragged = [value for value in entry.values() if type(value) is RaggedDTensor]
        if any(not value._spec.layout.matches(layout) for value in ragged):
            _whole_state(entry)
        cut_state(entry, new)
    elif not isinstance(new, DTensor):
        _whole_state(entry)
    else:
        for key, value in entry.items():
            if isinstance(value, RaggedDTensor):
                raise _foreign(key, value, new)
    return entry
