"""What ranks with inputs tell those that have none left: each collective of a root, before it starts.

Who runs no module cannot know which handle is gathered next, so who runs modules says it. What ranks do when they
hear of it is in ``following.py``; how they hear, and how long a step lasts, is the business of who makes a ``Teller``.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from composable.storage import Handle

__all__ = ["Teller"]


class Teller(Protocol):
    """Tells of one root. Each call may raise ``DesyncError``: ranks with inputs tell different things."""

    @property
    def has_listeners(self) -> bool:
        """Some rank runs no modules in this step: it cannot be asked for what only who ran them knows."""
        ...

    def begin_forward(self, module: nn.Module) -> None:
        """The outermost module that runs starts its forward.

        Raises:
            RuntimeError: All ranks are to stop where one has no inputs.
        """
        ...

    def end_forward(self, module: nn.Module, *, is_awaited: bool) -> None:
        """It ends; ``is_awaited``: a backward may follow."""
        ...

    def begin_backward(self) -> None:
        """A backward begins."""
        ...

    def drop(self, handle: Handle, bits: Sequence[int]) -> None:
        """Users have dropped kept gradients of the handle, those of ``bits`` of each buffer."""
        ...

    def gather(self, handle: Handle, *, takes_secondary: bool) -> None:
        """The handle's parameters are about to be gathered, from secondary shards or not."""
        ...

    def reduce(self, handle: Handle, position: int) -> None:
        """The gradients of the handle's buffer at ``position`` are about to be reduced."""
        ...

    def end_reductions(self, *, ends: bool) -> None:
        """The ranks are about to tell each other what is left; not if ``ends`` is false, but later."""
        ...

    def hand_over(self) -> None:
        """Parameters are about to get their gradients."""
        ...

    def end_by_hand(self) -> None:
        """They got them, outside of a backward."""
        ...

    def abandon(self, *, is_needed: bool) -> None:
        """A step is about to be forgotten; ``is_needed``: it left more than what this step has told of."""
        ...
