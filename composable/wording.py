"""How names, lists, counts, sizes and times are written, in plans and in messages."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

import torch

__all__ = [
    "bytes_text",
    "class_name",
    "count_text",
    "dtype_text",
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
