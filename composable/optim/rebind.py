"""Let an optimizer follow its model through an annotation, or out of one."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.arguments import check_module, check_optimizer
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.optim.entries import cut_state, split_state, whole_state
from composable.planning import replacement_of
from composable.ragged import RaggedDTensor

__all__ = ["rebind_optimizer"]

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def rebind_optimizer(optimizer: OptimizerT, model: nn.Module) -> OptimizerT:
    """Make an optimizer that was built before ``model`` was annotated hold the parameters it has now.

    Param groups keep their order and options, and the state comes along: training goes on as if
    nothing had happened. Whole state is cut to this rank's pieces, without communication; every
    rank must hold the same. The other way round, and from one cut to another, state is gathered.

    Collective where state of sharded parameters is gathered: all ranks of their mesh.

    Args:
        optimizer: Any torch optimizer. Parameters of other models in it stay as they are.
        model: The model, outside forward and backward.

    Returns:
        ``optimizer``, the same object.

    Raises:
        ConfigError: An argument is of another kind; or the optimizer holds no parameter that ``model`` has or had,
            or one that nothing replaced; nothing was changed.
        UsageError: The optimizer keeps state that is not a parameter's own (LBFGS, once it has stepped).
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
    return optimizer


def _find_replacements(optimizer: torch.optim.Optimizer, model: nn.Module) -> Mapping[int, nn.Parameter]:
    """Return what takes the place of each replaced parameter, by the id of the old one."""
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
            at=place_of_rank(),
            fix="call it outside forward and backward, while the annotated model is alive, or build a new optimizer",
        )
    if not found and not is_of_model:
        raise ConfigError(
            "the optimizer holds no parameter that this model has or had",
            at=place_of_rank(),
            fix="pass the model that the optimizer was built for",
        )
    return found


def _convert(entry: Any, new: nn.Parameter) -> Any:
    """Return the state of a parameter as ``new`` needs it."""
    if not isinstance(entry, dict):
        return entry
    entry = dict(entry)
    if isinstance(new, RaggedDTensor):
        layout = new._spec.layout
        ragged = [value for value in entry.values() if type(value) is RaggedDTensor]
        if any(not value._spec.layout.matches(layout) for value in ragged):
            whole_state(entry)
        cut_state(entry, new)
    elif any(isinstance(value, RaggedDTensor) for value in entry.values()) or not isinstance(new, DTensor):
        whole_state(entry)
        if isinstance(new, DTensor):
            split_state(entry, new)
    return entry
