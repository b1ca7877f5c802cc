"""What users set on the root of a tree, and not on each handle."""

from dataclasses import dataclass
from typing import Any

from composable.runtime.streams import Streams

__all__ = ["RootSettings"]


@dataclass
class RootSettings:
    """Settings that hold for all handles of a root.

    Attributes:
        is_last_backward: The end of a backward waits for the reductions, and for the other ranks.
        finalizes_by_hand: It never does: ``finalize_backward`` does.
        post_optim_event: Of a device: the shards are written once it is reached; the next forward takes it.
        streams: Shared with other roots; ``None``: the root has its own.
    """

    is_last_backward: bool = True
    finalizes_by_hand: bool = False
    post_optim_event: Any = None
    streams: Streams | None = None

    @property
    def ends_backward(self) -> bool:
        """The end of a backward ends the step's reductions as well."""
        return self.is_last_backward and not self.finalizes_by_hand

    def copied(self) -> "RootSettings":
        """Return what a deep copy of the root has: events and streams are not copied."""
        return RootSettings(self.is_last_backward, self.finalizes_by_hand)
