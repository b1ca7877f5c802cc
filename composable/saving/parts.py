"""What of a model only some ranks have, such as experts: by name, in the checkpoint of all.

A name means one thing in a checkpoint, whichever rank wrote it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.collectives import Ranks
from composable.errors import ConfigError, place_of_rank
from composable.optim import GroupNames, OptimizerNames, names_of_params, ranks_of_param
from composable.ragged import RaggedDTensor
from composable.wording import list_text

__all__ = ["Parts", "find_parts"]


@dataclass(frozen=True)
class Parts:
    """The entries of a model's state dict, on all ranks.

    Attributes:
        shared: Names that every rank has; ``None``: all ranks have the same ones.
        elsewhere: Names that this rank lacks.
    """

    shared: frozenset[str] | None = None
    elsewhere: frozenset[str] = frozenset()

    def shared_of(self, optimizers: Iterable[OptimizerNames]) -> tuple[OptimizerNames, ...]:
        """Return what has to be equal on all ranks: optimizers, without what only some ranks have."""
        if self.shared is None:
            return tuple(optimizers)
        return tuple(
            replace(
                one, groups=tuple(GroupNames(self._only_shared(group.params), group.settings) for group in one.groups)
            )
            for one in optimizers
        )

    def _only_shared(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if self.shared is None or name in self.shared)

    def merged(self, optimizers: tuple[OptimizerNames, ...], ranks: Ranks) -> tuple[OptimizerNames, ...]:
        """Return optimizers with what any rank's have. Collective, once ``shared_of`` is known to be equal."""
        if self.shared is None:
            return optimizers
        told = ranks.objects(optimizers)
        return tuple(_joined(every) for every in zip(*told, strict=True))


def find_parts(model: nn.Module, ranks: Ranks) -> Parts:
    """Find out which ranks have which entries. Collective: all of ``ranks``.

    Raises:
        ConfigError: A parameter of one name is annotated in each of several groups of ranks, and others of the model
            on all of these: so it has several values.
    """
    with ranks.agreed():
        homes: dict[str, tuple[int, ...]] = dict.fromkeys(get_model_state_dict(model), ())
        named = {name: param for param, name in names_of_params(model).items() if name in homes}
        ragged = [param._spec.layout for param in named.values() if isinstance(param, RaggedDTensor)]
        # Beside what tensor parallelism has split, plain parameters are the same along its dims.
        joined = {layout.ranks.numbers: layout.mesh for layout in ragged if layout.mesh.ndim > 1}
        found = {name: _home_of(param, joined) for name, param in named.items()}
        whole = max(map(set, found.values()), key=len, default=set())
        # Alone, equal groups may be those that tensor parallelism leaves for data.
        homes |= {name: home for name, home in found.items() if set(home) < whole}
    if ranks.are_alike("\n".join(f"{name} {home}" for name, home in homes.items())):
        return Parts()
    every = ranks.objects(homes)
    _check_one_each(every)
    names = [frozenset(one) for one in every]
    return Parts(frozenset.intersection(*names), frozenset.union(*names) - homes.keys())


def _home_of(param: torch.Tensor, joined: Mapping[tuple[int, ...], DeviceMesh]) -> tuple[int, ...]:
    """Return the ranks that have pieces or copies of a parameter; none: no annotation is known.

    Args:
        param: Of the model.
        joined: The mesh of all dims, by the data ranks that share what is split over others.
    """
    if isinstance(param, RaggedDTensor) and (mesh := joined.get(param._spec.layout.ranks.numbers)) is not None:
        return tuple(sorted(mesh.mesh.flatten().tolist()))
    if isinstance(param, DTensor) and param.device_mesh.ndim > 1:
        return tuple(sorted(param.device_mesh.mesh.flatten().tolist()))
    found = ranks_of_param(param)
    return () if found is None else found.numbers


def _check_one_each(every: Sequence[dict[str, tuple[int, ...]]]) -> None:
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


def _joined(optimizers: Sequence[OptimizerNames]) -> OptimizerNames:
    groups = zip(*(one.groups for one in optimizers), strict=True)
    return replace(
        optimizers[0],
        groups=tuple(
            GroupNames(tuple(dict.fromkeys(name for one in every for name in one.params)), every[0].settings)
            for every in groups
        ),
    )
