"""What parameters and optimizers are called in checkpoints, the same on every rank, and how two of them differ.

A parameter goes by the first FQN that it has in the model, without the parts that torch's own
wrappers add, so a name means the same at every number of ranks and in plain torch. Ranks may have different parts of a
model, such as experts: a name means one thing, whichever rank wrote it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from composable.comm import Ranks
from composable.dtensor import RaggedDTensor
from composable.errors import ConfigError, place_of_rank
from composable.ground.names import count_text, list_text, plain_fqn
from composable.optim import ranks_of_param

__all__ = [
    "GroupNames",
    "OptimizerNames",
    "describe_optimizer",
    "group_differences",
    "names_by_alias",
    "names_of_params",
    "names_on_all",
    "optimizer_differences",
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
    both = {*there} & {*here}
    sides = {f"in {source}": [name for name in there if name not in both]}
    sides["here"] = [name for name in here if name not in both]
    return [f"{subject}: only {side}: {', '.join(names)}" for side, names in sides.items() if names]


def optimizer_differences(saved: Sequence[OptimizerNames], current: Sequence[OptimizerNames]) -> list[str]:
    """Return a line for each thing in which optimizers differ from those in a checkpoint."""
    if len(saved) != len(current):
        kinds = [", ".join(one.kind for one in each) or "no optimizer" for each in (saved, current)]
        return [f"the checkpoint holds {kinds[0]}; here: {kinds[1]}"]
    lines = []
    for index, (there, here) in enumerate(zip(saved, current)):
        name = "optimizer" if len(current) == 1 else f"optimizer {index}"
        if there.kind != here.kind:
            lines.append(f"{name} is {there.kind} in the checkpoint, {here.kind} here")
        lines += [f"{name}, {line}" for line in group_differences(there.groups, here.groups, "the checkpoint")]
    return lines


# -- on all ranks


def names_on_all(
    ranks: Ranks, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], arguments: Sequence[str] = ()
) -> tuple[tuple[OptimizerNames, ...], frozenset[str]]:
    """Describe the optimizers with the parameters that any rank has; also return the names that only other ranks have.

    Collective. Raises where ranks have other optimizers or ``arguments``, or a name has several values.
    """
    with ranks.agreed():
        mine = _describe_optimizers(model, optimizers)
        homes = _homes(model)
    is_alike = ranks.are_alike("\n".join(f"{name} {home}" for name, home in homes.items()))
    every = [homes] if is_alike else ranks.objects(homes)
    _check_one_each(every)
    shared = frozenset.intersection(*map(frozenset, every))
    elsewhere = frozenset().union(*every) - homes.keys()
    lines = [*arguments]
    for index, one in enumerate(mine):
        lines.append(f"optimizer {index} is {one.kind}, of {len(one.groups)} groups")
        for group in one.groups:
            params = tuple(name for name in group.params if is_alike or name in shared)
            lines.append(f"a group of optimizer {index}: {GroupNames(params, group.settings)}")
    text = "\n".join(lines)
    ranks.compare(
        text,
        shown=text,
        what="the ranks call save_checkpoint or load_checkpoint with different arguments",
        fix="make the call with equal arguments on all ranks",
    )
    if is_alike:
        return mine, elsewhere
    merged = []
    for told in zip(*ranks.objects(mine), strict=True):
        of_groups = zip(*(one.groups for one in told), strict=True)
        groups = [
            replace(of_ranks[0], params=tuple(dict.fromkeys(name for one in of_ranks for name in one.params)))
            for of_ranks in of_groups
        ]
        merged.append(OptimizerNames(told[0].kind, tuple(groups)))
    return tuple(merged), elsewhere


def _describe_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[OptimizerNames, ...]:
    # Modules that were unsharded by hand show their sharded parameters again, which the optimizers hold.
    model.state_dict(keep_vars=True)
    names = names_of_params(model)
    described = tuple(describe_optimizer(optimizer, names) for optimizer in optimizers)
    params = [name for optimizer in described for group in optimizer.groups for name in group.params]
    twice = sorted({name for name in params if params.count(name) > 1}) if len(params) > len(set(params)) else []
    if twice:
        raise ConfigError(f"in two param groups or optimizers: {', '.join(twice)}", fix="give each parameter one place")
    return described


def _homes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return for each name in the model the ranks that have pieces or copies of what it names, where those are few."""
    homes: dict[str, tuple[int, ...]] = dict.fromkeys(get_model_state_dict(model), ())
    named = {name: param for param, name in names_of_params(model).items() if name in homes}
    layouts = [param._spec.layout for param in named.values() if isinstance(param, RaggedDTensor)]
    # Beside what tensor parallelism has split, plain parameters are the same along its dims.
    joined = {layout.ranks.numbers: layout.mesh for layout in layouts if layout.mesh.ndim > 1}
    found: dict[str, tuple[int, ...]] = {}
    for name, param in named.items():
        ranks = ranks_of_param(param)
        mesh = param.device_mesh if isinstance(param, DTensor) and param.device_mesh.ndim > 1 else None
        if isinstance(param, RaggedDTensor):
            mesh = joined.get(param._spec.layout.ranks.numbers, mesh)
        whole_mesh = () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
        found[name] = whole_mesh or (() if ranks is None else ranks.numbers)
    whole = max(map(set, found.values()), key=len, default=set())
    # Alone, equal groups may be those that tensor parallelism leaves for data.
    return homes | {name: home for name, home in found.items() if set(home) < whole}


def _check_one_each(every: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    places: dict[str, dict[tuple[int, ...], None]] = {}
    for homes in every:
        for name, home in homes.items():
            if home:
                places.setdefault(name, {})[home] = None
    twice = [name for name, homes in places.items() if len(homes) > 1]
    if twice:
        groups = " and ".join(str(list(home)) for home in places[twice[0]])
        raise ConfigError(
            f"a checkpoint has one value for each name, and ranks {groups} have parameters of their own "
            f"of the names {list_text(twice)}",
            at=place_of_rank(),
            fix="name experts by their number in the whole model, such as nn.ModuleDict({'6': ..., '7': ...})",
        )
