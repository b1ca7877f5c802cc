"""Steps that would be in vain: on parameters that were replaced, that have no values, or whose gradients do not fit."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from composable.comm import watch_ranks
from composable.dtensor import RaggedDTensor, check_finished
from composable.engine import META_FIX
from composable.errors import UsageError, place_of_rank
from composable.ground.names import dtype_text, list_text
from composable.ground.ownership import claim_of
from composable.ground.torch_hooks import before_every_step
from composable.ground.torch_private import opaque
from composable.planning import first_replacement

__all__ = ["CHECKS_ITSELF", "check_every_step", "check_parameters", "check_replaced"]

_is_meta = attrgetter("is_meta")

# They mix gradients into averages by an operation that takes one dtype.
_LERPING = {torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam}
# An optimizer with an attribute of this name finds out itself when its parameters need the check.
CHECKS_ITSELF = "_composable_local_step"


def check_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters that an annotation has replaced.

    Raises:
        UsageError: The optimizer was built before the annotation, or inside forward or backward.
    """
    for group in optimizer.param_groups:
        replacement = first_replacement(group["params"])
        if replacement is not None:
            raise UsageError(
                "the optimizer holds a parameter that no module has any more, so its step would be lost",
                at=f"{place_of_rank()}, parameter {replacement.fqn_in_model()!r}",
                fix="rebind_optimizer(optimizer, model) after annotating the model, or build the optimizer then",
            )


def check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to update parameters that an annotation has replaced, or that have no values.

    Raises:
        UsageError: As ``check_replaced``, or a sharded parameter is still on the meta device.
    """
    check_replaced(optimizer)
    for group in optimizer.param_groups:
        params = group["params"]
        if any(map(_is_meta, params)) and any(param.is_meta and isinstance(param, RaggedDTensor) for param in params):
            raise UsageError(
                "the optimizer steps on parameters that are still on the meta device",
                at=f"{place_of_rank()}, {_describe_params(optimizer)}",
                fix=META_FIX,
            )


@opaque
def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    watch_ranks()
    if CHECKS_ITSELF not in vars(optimizer):
        check_parameters(optimizer)
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _then_checked(kwargs["closure"], optimizer)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _then_checked(args[1], optimizer), *args[2:]), kwargs
    _check_gradients(optimizer)
    return None


def _then_checked(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Let what makes the gradients end with a check of them."""

    def evaluate() -> Any:
        loss = closure()
        _check_gradients(optimizer)
        return loss

    return evaluate


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    check_finished(f"{type(optimizer).__name__}.step", params)
    # What fails does so at the first step, where there is no state yet; Adagrad has some from the start.
    if not optimizer.state or type(optimizer) is torch.optim.Adagrad:
        for group in optimizer.param_groups:
            _check_dtypes(type(optimizer), group)


def _check_dtypes(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
    """Refuse gradients of another dtype than their annotated parameters, where torch's kernels would."""
    decays = group.get("weight_decay") and not group.get("decoupled_weight_decay")
    # A decay that is added to gradients gives them the dtype of the parameters.
    if not (group.get("fused") or (kind in _LERPING and (kind is torch.optim.AdamW or not decays))):
        return
    for param in group["params"]:
        grad = param.grad
        if grad is None or grad.dtype == param.dtype:
            continue
        claim = claim_of(param)
        if type(param) is RaggedDTensor or claim is not None:
            fqn = param._spec.layout.label if claim is None else claim.fqn
            raise UsageError(
                f"{'fused ' if group.get('fused') else ''}{kind.__name__} takes no gradients of "
                f"{dtype_text(grad.dtype)} for parameters of {dtype_text(param.dtype)}",
                at=f"{place_of_rank()}, parameter {str(fqn)!r}",
                fix="annotate without keep_low_precision_grads, or take an optimizer that does, such as SGD",
            )


def _describe_params(optimizer: torch.optim.Optimizer) -> str:
    """Name the parameters on the meta device, of which the optimizer knows no names unless it was given some."""
    found: list[str] = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"of shape {list(param.shape)}" for param in group["params"]]
        found += [name for name, param in zip(names, group["params"], strict=True) if param.is_meta]
    return f"parameters {list_text(found)}"


def check_every_step() -> None:
    """Refuse such steps of every optimizer of the process, and those with gradients that are under way; once."""
    if not _REGISTERED:
        _REGISTERED.append(before_every_step(_check_optimizer))


_REGISTERED: list[RemovableHandle] = []
