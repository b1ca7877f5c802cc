"""How often operations gathered a ragged tensor that nobody asked to gather, and a mode that forbids it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from composable.arguments import check_bool
from composable.errors import UsageError
from composable.ragged.spec import RaggedLayout

__all__ = ["count_fallback", "fallback_counts", "strict_mode"]


class _Fallbacks:
    """Counts operations that gathered a ragged tensor, or refuses them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.strict_depth = 0


_FALLBACKS = _Fallbacks()


def count_fallback(op: str, layout: RaggedLayout) -> None:
    """Note that ``op`` is about to gather a tensor of ``layout``.

    Raises:
        UsageError: ``strict_mode`` is on.
    """
    if _FALLBACKS.strict_depth:
        raise UsageError(
            f"{op} has no rule for ragged tensors and would gather all of {list(layout.shape)}",
            at=f"rank {layout.global_rank}",
            fix="call full_tensor() where a gather is meant, or leave strict_mode()",
        )
    _FALLBACKS.counts[op] += 1


def fallback_counts(*, reset: bool = False) -> dict[str, int]:
    """Return how often each operation gathered ragged tensors behind the user's back, since the last reset.

    ``full_tensor`` and ``redistribute`` are asked for, and not counted.
    """
    check_bool("reset", reset)
    counts = dict(_FALLBACKS.counts)
    if reset:
        _FALLBACKS.counts.clear()
    return counts


@contextmanager
def strict_mode() -> Iterator[None]:
    """Raise ``UsageError`` instead of gathering a ragged tensor that nobody asked to gather."""
    _FALLBACKS.strict_depth += 1
    try:
        yield
    finally:
        _FALLBACKS.strict_depth -= 1
