"""Optimizers in names, and those that would step in vain: on parameters that were replaced, or that have no values.

A parameter goes by the first FQN that it has in the model, without the parts that torch's own
wrappers add, so a description means the same at every number of ranks and in plain torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.comm import watch_ranks
from composable.dtensor import RaggedDTensor, check_finished
from composable.engine import META_FIX
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.ground.names import count_text, dtype_text, list_text, plain_fqn
from composable.ground.ownership import claim_of
from composable.ground.torch_hooks import before_every_step
from composable.ground.torch_private import opaque
from composable.planning import first_replacement

__all__ = [
    "CHECKS_ITSELF",
    "GroupNames",
    "OptimizerNames",
    "check_every_step",
    "check_parameters",
    "check_replaced",
    "describe_optimizer",
    "group_differences",
    "names_by_alias",
    "names_of_params",
]

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


# -- names

# What torch's schedulers and averagers write into a group: there or not, it is the same optimizer.
_SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


@dataclass(frozen=True)
class GroupNames:
    """One param group: the FQNs of its parameters and the names of its settings, such as ``lr``."""

    params: tuple[str, ...]
    settings: tuple[str, ...]

    @staticmethod
    def of(group: Mapping[str, object], params: Sequence[str]) -> "GroupNames":
        """Describe a param group whose parameters have the names ``params``."""
        return GroupNames(tuple(params), tuple(sorted(group.keys() - _SCHEDULED - {"params"})))


@dataclass(frozen=True)
class OptimizerNames:
    """The name of an optimizer's class, and its groups in order."""

    kind: str
    groups: tuple[GroupNames, ...]


def names_of_params(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name that each parameter goes by."""
    return {param: plain_fqn(name) for name, param in model.named_parameters()}


def names_by_alias(model: nn.Module) -> dict[str, str]:
    """Return the name that a parameter goes by for each name that it has."""
    names = names_of_params(model)
    return {plain_fqn(name): names[param] for name, param in model.named_parameters(remove_duplicate=False)}


def describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> OptimizerNames:
    """Describe ``optimizer``.

    Args:
        optimizer: Of parameters of one model.
        names: What ``names_of_params`` gave for it.

    Raises:
        ConfigError: It holds a parameter that the model does not have.
    """
    kind = type(optimizer).__name__
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        strangers = sum(param not in names for param in group["params"])
        if strangers:
            raise ConfigError(
                f"{strangers} of {len(group['params'])} parameters in group {index} of {kind} are not the model's",
                fix="make the optimizer from model.parameters(), after the model was annotated",
            )
        groups.append(GroupNames.of(group, [names[param] for param in group["params"]]))
    return OptimizerNames(kind, tuple(groups))


def group_differences(saved: Sequence[GroupNames], current: Sequence[GroupNames], source: str) -> list[str]:
    """Return a line for each thing in which the groups differ; the order within a group is no difference.

    Args:
        saved: The groups in ``source``.
        current: The groups of the optimizer that is to be loaded.
        source: How messages name where ``saved`` is from.
    """
    lines = []
    if len(saved) != len(current):
        lines.append(
            f"{count_text(len(saved), 'param group')} in {source}, {count_text(len(current), 'param group')} here"
        )
    nothing = GroupNames((), ())
    for index in range(max(len(saved), len(current))):
        there = saved[index] if index < len(saved) else nothing
        here = current[index] if index < len(current) else nothing
        lines += _one_sided(f"group {index}", there.params, here.params, source)
        if there is not nothing and here is not nothing:
            lines += _one_sided(f"settings of group {index}", there.settings, here.settings, source)
    return lines


def _one_sided(subject: str, there: Sequence[str], here: Sequence[str], source: str) -> list[str]:
    only_there = [name for name in there if name not in set(here)]
    only_here = [name for name in here if name not in set(there)]
    lines = []
    if only_there:
        lines.append(f"{subject}: only in {source}: {', '.join(only_there)}")
    if only_here:
        lines.append(f"{subject}: only here: {', '.join(only_here)}")
    return lines
