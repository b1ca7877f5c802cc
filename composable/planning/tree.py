"""The modules of an annotation: which they are, left to right and depth first, and what they are called."""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from composable.contract import excludes, get_registry
from composable.wording import plain_fqn

__all__ = ["managed_modules", "name_modules"]


def name_modules(roots: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Return the FQN of every module at or below ``roots``; of several roots, by their position."""
    names: dict[nn.Module, str] = {}
    for position, root in enumerate(roots):
        prefix = str(position) if len(roots) > 1 else ""
        for fqn, module in root.named_modules(prefix=prefix):
            names.setdefault(module, plain_fqn(fqn))
    return names


def managed_modules(roots: Iterable[nn.Module], ignored: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of one annotation, in ``modules()`` order, without those that others annotate or it ignores."""
    starts = tuple(roots)
    seen: set[nn.Module] = set()
    stack = [*reversed(starts)]
    while stack:
        module = stack.pop()
        if module in seen or module in ignored:
            continue
        seen.add(module)
        if module not in starts and ("fully_shard" in get_registry(module) or excludes(module, "fully_shard")):
            continue
        yield module
        stack.extend(child for child in reversed(module._modules.values()) if child is not None)
