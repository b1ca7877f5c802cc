"""Describes optimizers in names, and says in which names two of them differ.

A parameter goes by the first FQN that it has in the model, without the parts that torch's own
wrappers add, so a description means the same at every number of ranks and in plain torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from composable.errors import ConfigError
from composable.wording import count_text, plain_fqn

__all__ = [
    "GroupNames",
    "OptimizerNames",
    "describe_optimizer",
    "group_differences",
    "names_by_alias",
    "names_of_params",
]

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
