"""Replicated modules on a part of a root's ranks: they take part in every step of the root, called or not.

Which of them a rank calls depends on its tokens, as with sharded ones that follow. So they begin with the root: what
ranks do together before a forward, and the averaging of a backward.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from composable.collectives import Grid
from composable.contract import annotated_below

__all__ = ["Companion", "find_companions"]


@runtime_checkable
class Companion(Protocol):
    """The state of an annotation that averages by itself."""

    grid: Grid

    def begin_to_follow(self) -> None:
        """Leave it to the root, from now on, when ranks meet. Collective over the annotation's ranks."""
        ...

    def end_to_follow(self) -> None:
        """The root is undone."""
        ...

    def follow_forward(self) -> None:
        """A forward of the root begins. Collective over the annotation's ranks."""
        ...

    def follow_backward(self) -> None:
        """A backward of the root begins; collectives that this starts run at its end."""
        ...


def find_companions(modules: Sequence[nn.Module], grid: Grid) -> list[Companion]:
    """Return those below a root's modules, in an order equal on all ranks that share them."""
    states = dict.fromkeys(state for _, state in annotated_below(modules) if isinstance(state, Companion))
    found = [state for state in states if state.grid.everyone.size < grid.everyone.size]
    return sorted(found, key=lambda state: state.grid.everyone.order)
