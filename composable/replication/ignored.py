"""Which modules, parameters and buffers a ``replicate`` is to leave alone."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composable.arguments import described
from composable.claims import names_left_alone
from composable.errors import ConfigError, place_of_rank
from composable.fqns import describe_module

__all__ = ["Ignored", "find_ignored"]


@dataclass(frozen=True)
class Ignored:
    """What one annotation leaves alone.

    Attributes:
        modules: With all below them.
        tensors: Parameters and buffers of other modules.
    """

    modules: frozenset[nn.Module] = frozenset()
    tensors: tuple[torch.Tensor, ...] = ()

    def ids(self, roots: Sequence[nn.Module]) -> set[int]:
        """Return the ids of all parameters and buffers that are left alone, by the mark of torch on a root too."""
        below = (tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers()))
        return {id(tensor) for tensor in (*below, *self.tensors)} | _marked_tensors(roots)

    def copied(self, modules: Collection[nn.Module], memo: dict[int, Any]) -> "Ignored":
        """Return the same of a deep copy of ``modules``."""
        return Ignored(
            frozenset(copy.deepcopy(module, memo) for module in self.modules if module in modules),
            tuple(copy.deepcopy(tensor, memo) for tensor in self.tensors),
        )


def find_ignored(roots: Sequence[nn.Module], ignored_modules: object, ignored_params: object) -> Ignored:
    """Return what the two arguments name.

    Args:
        roots: The annotated modules.
        ignored_modules: A list or set of modules below them.
        ignored_params: Parameters, or names of parameters and buffers: below the root, or behind the number
            of the root where there are several, as in messages. A tied one is left alone under all its names.

    Raises:
        ConfigError: One is of another kind, or not below ``roots``.
    """
    return Ignored(_check_modules(roots, ignored_modules), tuple(_tensors(roots, ignored_params)))


def _check_modules(roots: Sequence[nn.Module], ignored_modules: object) -> frozenset[nn.Module]:
    if ignored_modules is None:
        return frozenset()
    if isinstance(ignored_modules, nn.Module) or not isinstance(ignored_modules, Collection):
        raise ConfigError(
            f"ignored_modules is a {type(ignored_modules).__name__}",
            fix="pass a list or set of modules",
        )
    inside = {visited for module in roots for visited in module.modules()}
    for ignored in ignored_modules:
        if not isinstance(ignored, nn.Module):
            raise ConfigError(f"ignored_modules holds a {type(ignored).__name__}", fix="pass modules only")
        if ignored not in inside:
            raise ConfigError(
                "an ignored module is not in the module that ignores it",
                at=f"{place_of_rank()}, {describe_module(ignored)}",
                fix="take it out of ignored_modules",
            )
    return frozenset(ignored_modules)


def _tensors(roots: Sequence[nn.Module], ignored_params: object) -> Iterator[torch.Tensor]:
    if ignored_params is None:
        return
    fix = "pass a list or set of parameters of the module, or of names of its parameters and buffers"
    if isinstance(ignored_params, str | torch.Tensor | Mapping) or not isinstance(ignored_params, Iterable):
        raise ConfigError(f"ignored_params is {described(ignored_params)}", at=place_of_rank(), fix=fix)
    by_name = dict(_named_tensors(roots))
    known = {id(tensor) for tensor in by_name.values()}
    for one in ignored_params:
        if isinstance(one, str) and one in by_name:
            yield by_name[one]
        elif isinstance(one, nn.Parameter) and id(one) in known:
            yield one
        elif isinstance(one, str | nn.Parameter):
            what = f"{one!r}" if isinstance(one, str) else f"a parameter {list(one.shape)}"
            raise ConfigError(
                f"ignored_params holds {what}, which is not in the module",
                at=f"{place_of_rank()}, {describe_module(roots[0])}",
                fix="take it out, or correct its name",
            )
        else:
            raise ConfigError(f"ignored_params holds {described(one)}", at=place_of_rank(), fix=fix)


def _named_tensors(roots: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, root in enumerate(roots):
        prefix = str(index) if len(roots) > 1 else ""
        yield from root.named_parameters(prefix, remove_duplicate=False)
        yield from root.named_buffers(prefix, remove_duplicate=False)


def _marked_tensors(modules: Collection[nn.Module]) -> set[int]:
    """Return the ids of parameters and buffers that torch's mark on one of ``modules`` has all names of."""
    marked: set[int] = set()
    for module in modules:
        names = frozenset(names_left_alone(module))
        if names:
            named = [
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ]
            marked |= {id(tensor) for fqn, tensor in named if fqn in names}
            marked -= {id(tensor) for fqn, tensor in named if fqn not in names}
    return marked
