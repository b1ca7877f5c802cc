"""What modules, parameters and values are called, in plans, state dicts and messages."""

import gc
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn

from composable.errors import ConfigError

__all__ = [
    "SUCCESSOR",
    "NamedTree",
    "bytes_text",
    "check_same_fqns",
    "class_name",
    "count_text",
    "describe_module",
    "dtype_text",
    "fqn_in_model",
    "handle_name",
    "join_fqn",
    "list_text",
    "module_text",
    "plain_fqn",
    "ranks_text",
    "seconds_text",
    "sibling_lines",
]


# What wrappers of torch, which are no annotations, add to the names of what is below them.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_LAST_NUMBER = re.compile(r"(.*?)(\d+)(\D*)")


def join_fqn(fqn: str, name: str) -> str:
    """Return the FQN of what the module at ``fqn`` holds under ``name``: a wrapper of torch adds nothing to it."""
    if name in _WRAPPERS:
        return fqn
    return f"{fqn}.{name}" if fqn else name


def plain_fqn(fqn: str) -> str:
    """Return ``fqn`` as a state dict has it: without the parts that wrappers of torch add."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def class_name(value: object) -> str:
    """Return the name of the class that users gave an object: a fully sharded module has another one."""
    kind = type(value)
    name: str = vars(kind).get("_composable_class_name", kind.__name__)
    return name


def module_text(fqn: str, kind: str) -> str:
    """Return what messages call a module: by its FQN and its class; one that has no FQN is the root of its tree."""
    return f"module {fqn!r} ({kind})" if fqn else f"module {kind}"


def handle_name(module_fqns: Sequence[str]) -> str:
    """Return what plans call a handle: the FQN of its module, or the positions of several."""
    return ", ".join(fqn or "(root)" for fqn in module_fqns)


def list_text(names: Collection[str], most: int = 5, *, write: Callable[[str], str] = repr) -> str:
    """Return names for a message: the first ``most``, and how many more there are."""
    shown = ", ".join(map(write, islice(names, most)))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_text(number: int) -> str:
    if number < 1024:
        return f"{number} B"
    value, unit = number / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    value, unit = seconds * 1e6, "us"
    for larger in ("ms", "s"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}"


def sibling_lines(entries: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each entry, or for a run of them that differ only in the number in their name, which rises.

    Args:
        entries: A name with its indent, what follows it, and what is said of it.
    """
    runs: list[tuple[tuple[str, str, str], int, int]] = []  # what is equal in a run, first and last number
    for name, after, text in entries:
        # A name of several modules is none of siblings.
        numbered = None if ", " in name else _LAST_NUMBER.fullmatch(name)
        before, number, rest = (numbered[1], int(numbered[2]), numbered[3]) if numbered else (name, -1, "")
        key = (before, rest + after, text)
        if runs and number > 0 and runs[-1][0] == key and runs[-1][2] + 1 == number:
            runs[-1] = (key, runs[-1][1], number)
        else:
            runs.append((key, number, number))
    lines = []
    for (before, after, text), first, last in runs:
        number_text = "" if first < 0 else str(first) if first == last else f"[{first}-{last}]"
        times = f" x {last - first + 1}, each" if last > first else ""
        lines.append(f"{before}{number_text}{after}{times}: {text}")
    return lines


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
