"""Where the gradients of a flat buffer lie while they are collected and reduced.

They live for one backward: handles of equal layout share them, one after the other.
"""

from collections.abc import Callable

import torch

from composable.planning import FlatLayout

__all__ = ["GRADIENT_BUFFERS", "GradientBuffer", "GradientPool"]

# Alive at once, unless the user says otherwise: one being reduced, one being filled.
GRADIENT_BUFFERS = 2


class GradientBuffer:
    """The gradients of one flat buffer, back to back.

    Args:
        layout: Of the flat buffer.
        source: [W * S], of undefined content.

    Attributes:
        source: The same, padding zero.
        views: One per parameter, in its full shape.
    """

    __slots__ = ("source", "views")

    def __init__(self, layout: FlatLayout, source: torch.Tensor) -> None:
        self.source = source
        self.views = [span.view_in(source) for span in layout.spans]
        filled = 0
        for span in layout.spans:
            if span.start > filled:
                source[filled : span.start].zero_()
            filled = span.stop
        if filled < layout.numel:
            source[filled:].zero_()


class GradientPool:
    """Gradient buffers of one backward, reused between handles of equal layout."""

    def __init__(self) -> None:
        self._free: dict[object, list[GradientBuffer]] = {}

    def take(self, key: object, make: Callable[[], GradientBuffer]) -> GradientBuffer:
        """Return a buffer that was given back under an equal ``key``, or a new one; its contents are undefined."""
        free = self._free.get(key)
        if free:
            return free.pop()
        # What nobody can use now goes, so that modules that all differ take no more memory than equal ones.
        self._free.clear()
        return make()

    def give(self, key: object, gradient: GradientBuffer) -> None:
        """Take back a buffer whose reduction has finished."""
        self._free.setdefault(key, []).append(gradient)

    def release(self) -> None:
        """Drop every buffer: between backwards a gradient pool is dead weight."""
        self._free.clear()
