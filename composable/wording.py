"""How names, lists, counts and sizes are written, in plans and in messages."""

from collections.abc import Callable, Collection, Sequence
from itertools import islice

import torch

__all__ = [
    "bytes_text",
    "class_name",
    "count_text",
    "dtype_text",
    "join_fqn",
    "list_text",
    "module_text",
    "plain_fqn",
    "ranks_text",
]

# What wrappers of torch, which are no annotations, add to the names of what is below them.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


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
