"""The names of a module tree, and in what two of them differ; the name of one module for a message."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import NamedTuple

from torch import nn

from composable.errors import ConfigError
from composable.wording import class_name, join_fqn, list_text, module_text, plain_fqn

__all__ = ["SUCCESSOR", "NamedTree", "check_same_fqns", "describe_module", "fqn_in_model"]

_MAX_NAMES_SHOWN = 10
# On a meta buffer of which an annotation has taken other names: the tensor with memory that took its place there.
SUCCESSOR = "_composable_successor"


def describe_module(module: nn.Module) -> str:
    """Name ``module`` for an error: its FQN below the outermost module that is alive, and its class.

    A module does not know its parents, so this looks through the live objects: slow, for
    errors only.
    """
    return module_text(_find_fqn(module), class_name(module))


def fqn_in_model(module: nn.Module, name: str, fqn: str = "") -> str:
    """Name what ``module`` holds under ``name`` for an error, below the outermost module that is alive; slow.

    Args:
        module: Holds it.
        name: Of a parameter or buffer.
        fqn: A name of it from elsewhere, which counts where it says more.
    """
    found = join_fqn(_find_fqn(module), name)
    return fqn if fqn.endswith(f".{found}") else found


def _find_fqn(module: nn.Module) -> str:
    # By id: this must not fail on a module that cannot be hashed, and what is compared stays alive.
    parents: dict[int, tuple[nn.Module, str]] = {}
    for candidate in gc.get_objects():
        # Not isinstance: a proxy object answers it by running code of its own.
        if issubclass(type(candidate), nn.Module):
            for name, child in candidate.__dict__.get("_modules", {}).items():
                parents.setdefault(id(child), (candidate, name))
    names: list[str] = []
    seen = {id(module)}
    while id(module) in parents:
        module, name = parents[id(module)]
        if id(module) in seen:
            break
        seen.add(id(module))
        names.append(name)
    return plain_fqn(".".join(reversed(names)))


class _Visit(NamedTuple):
    """One place of a module tree: where it hangs and the names it holds."""

    parent: int
    name: str
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    is_alias: bool


@dataclass(frozen=True)
class NamedTree:
    """The names of a module tree, in ``named_modules()`` order.

    Names are kept per module and joined to FQNs only for an error: FQNs of a deep tree add
    up to quadratic length. A module met again is one more visit without content, so the
    names of an alias count too. ``ties`` are the tensors met again, with where they were first.
    """

    visits: list[_Visit]
    ties: list[tuple[int, str, int, str]]
    modules: list[nn.Module] = field(compare=False)

    @staticmethod
    def of(root: nn.Module) -> "NamedTree":
        visits: list[_Visit] = []
        ties: list[tuple[int, str, int, str]] = []
        modules: list[nn.Module] = []
        seen_modules: set[nn.Module] = set()
        first_slot: dict[int, tuple[int, str]] = {}
        stack = [(-1, "", root)]
        while stack:
            parent, name, module = stack.pop()
            index = len(visits)
            if module in seen_modules:
                visits.append(_Visit(parent, name, (), (), True))
                continue
            seen_modules.add(module)
            modules.append(module)
            params = tuple(key for key, param in module._parameters.items() if param is not None)
            buffers = tuple(key for key, buffer in module._buffers.items() if buffer is not None)
            visits.append(_Visit(parent, name, params, buffers, False))
            for key in params + buffers:
                tensor = module._parameters[key] if key in module._parameters else module._buffers[key]
                if tensor is not None and tensor.is_meta:
                    tensor = getattr(tensor, SUCCESSOR, tensor)
                first = first_slot.setdefault(id(tensor), (index, key))
                if first != (index, key):
                    ties.append((index, key, *first))
            stack.extend((index, key, child) for key, child in reversed(module._modules.items()) if child is not None)
        return NamedTree(visits, ties, modules)

    def fqn(self, index: int, leaf: str = "") -> str:
        names = [leaf] if leaf else []
        while index > 0:
            names.append(self.visits[index].name)
            index = self.visits[index].parent
        return ".".join(reversed(names))

    def fqns(self) -> dict[str, list[str]]:
        named: dict[str, list[str]] = {"parameters": [], "buffers": [], "modules": []}
        for index, visit in enumerate(self.visits):
            named["modules"].append(self.fqn(index))
            named["parameters"] += [self.fqn(index, key) for key in visit.params]
            named["buffers"] += [self.fqn(index, key) for key in visit.buffers]
        return named

    def shared_fqns(self) -> dict[str, list[str]]:
        ties = [f"{self.fqn(i, key)} = {self.fqn(j, first)}" for i, key, j, first in self.ties]
        aliases = [self.fqn(index) for index, visit in enumerate(self.visits) if visit.is_alias]
        return {"shared tensors": ties, "shared modules": aliases}


def check_same_fqns(name: str, module: nn.Module, old: NamedTree, new: NamedTree) -> None:
    """Raise ``ConfigError`` if ``name``, an annotation of ``module``, changed a name between the two."""
    if old == new:
        return
    was, now = old.fqns(), new.fqns()
    differences = [line for kind in was for line in _list_differences(kind, was[kind], now[kind])]
    if not differences:
        # The same names, but other slots share a tensor or a module than before.
        was, now = old.shared_fqns(), new.shared_fqns()
        differences = [line for kind in was for line in _list_differences(kind, was[kind], now[kind])]
    raise ConfigError(
        "\n    ".join([f"{name} changed the FQNs of the module it annotates", *differences]),
        at=describe_module(module),
        fix="an annotation keeps every parameter, buffer and module under its name and in its place",
    )


def _list_differences(kind: str, old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return lines that say which names are gone, are new, or are in another place, of few that explain the order."""
    olds, news = set(old), set(new)
    both, both_now = [fqn for fqn in old if fqn in news], [fqn for fqn in new if fqn in olds]
    runs = SequenceMatcher(None, both, both_now, autojunk=False).get_matching_blocks()
    in_order = {fqn for start, _, length in runs for fqn in both[start : start + length]}
    parts = {
        "missing": [fqn for fqn in old if fqn not in news],
        "new": [fqn for fqn in new if fqn not in olds],
        "moved": [fqn for fqn in both_now if fqn not in in_order],
    }
    return [f"{kind} {what}: {list_text(fqns, _MAX_NAMES_SHOWN)}" for what, fqns in parts.items() if fqns]
