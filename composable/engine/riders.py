"""Numbers that travel with the message that ends a backward.

Both annotations have such a message: ``finish.py`` for ``fully_shard``, in host memory; and flags behind the last
bucket of ``replicate``, on its device and in its dtype. A *rider* puts some numbers of this rank on it, and hears those
of all ranks when it has come. So what ranks want to know of each other once a step costs no collective and no wait.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from composable.comm import Ranks
from composable.errors import ComposableError, UsageError
from composable.ground.torch_private import tensors_have_values

_NUMBER_BYTES = 8
# A number of such bytes is NaN.
_NOTHING = 255


class HostCopy:
    """A copy of ``tensor``, of any shape, in host memory, made on the current stream of its device without a wait."""

    def __init__(self, tensor: torch.Tensor) -> None:
        kind = tensor.device.type if tensors_have_values() else "cpu"  # In a rehearsal there is no device.
        tensor = tensor.detach()
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=kind == "cuda")
        self._copy.copy_(tensor, non_blocking=True)
        self._event = None if kind == "cpu" else torch.Event(kind)
        if self._event is not None:
            self._event.record()

    def read(self) -> torch.Tensor:
        """Return the copy, of the same shape; waits for what the device was given before, and no longer."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


class Rider(ABC):
    """Numbers of each rank, as many on all, that travel with each message that ends a backward.

    An annotation's state takes riders by ``carry``. From then on ``tell`` runs on each rank as a message starts, also
    where this rank has no gradients or the backward has failed; ``hear`` runs when the message has come. They must not
    raise, communicate, or let the host wait for its device: to read on the host what has come on a device, hold a
    ``HostCopy`` and read it in the next ``hear``. A message that an exception stops is not heard. In a rehearsal, where
    tensors have no values, the bytes travel, but nobody tells or hears.
    """

    name: str  # For errors; equal on all ranks.
    count: int  # How many numbers a rank tells; equal on all ranks.
    is_optional = False  # A graph that cannot tell its numbers leaves them out: they are not a number.
    adjusts = False  # Reduced gradients wait for ``hear``, and ``adjust`` gets them.

    @abstractmethod
    def tell(self, device: torch.device) -> torch.Tensor:
        """Return the numbers of this rank [count] in float64 on ``device``; they travel exactly."""

    @abstractmethod
    def hear(self, told: torch.Tensor, numbers: Sequence[int]) -> ComposableError | None:
        """Take the numbers of all ranks: ``told`` [ranks, count] float64, where ``tell`` had its own.

        ``numbers`` has the global rank of each row, those of other blocks of tensor parallelism too. Returns an error
        with which the backward ends; it has to follow from ``told`` alone, as all ranks must raise it.
        """

    def adjust(self, reduced: torch.Tensor, divisor: float) -> None:
        """Change ``reduced`` [any], a sum over ranks that was divided by ``divisor``, in place, after ``hear``."""


class Riders:
    """The riders of one message between the ranks ``numbers``. They travel as bytes, exact in low precision too."""

    def __init__(self, members: Sequence[Rider] = (), numbers: Sequence[int] = ()) -> None:
        self.members = members
        self._numbers = numbers
        self._counts = [one.count for one in members]
        self.adjusting = [one for one in members if one.adjusts]
        self.needed = [one.name for one in members if not one.is_optional]
        self.rank_bytes = _NUMBER_BYTES * sum(self._counts)  # How much each rank tells.

    def compare(self, ranks: Ranks, failure: UsageError | None = None) -> None:
        """Raise ``failure`` of any rank, or ``DesyncError`` unless all have the same riders. Collective."""
        text = "\n".join(f"{one.name}, {one.count} numbers" for one in self.members)
        what = "the ranks let different numbers travel with the end of a backward"
        ranks.compare(text, failure, shown=text, what=what, fix="make the same calls on every rank, in the same order")

    def tell(self, block: torch.Tensor) -> None:
        """Write what this rank tells to ``block`` [rank_bytes], of any dtype, a byte an element.

        Raises ``UsageError`` in a graph that is being captured: each replay would tell the same numbers.
        """
        if _is_captured():
            if self.needed:
                what = f"{' and '.join(self.needed)} ran inside of a CUDA graph"
                raise UsageError(what, fix="leave the backward out of the graph")
            block.fill_(_NOTHING)
            return
        block.copy_(torch.cat([one.tell(block.device) for one in self.members]).view(torch.uint8))

    def hear(self, block: torch.Tensor) -> ComposableError | None:
        """Let each rider hear all ranks by ``block`` [ranks, rank_bytes] or flat, of any dtype; returns its error."""
        if _is_captured():
            return None
        told = torch.empty(len(self._numbers), self.rank_bytes, dtype=torch.uint8, device=block.device)
        told.copy_(block.view(told.shape))
        parts = told.view(torch.float64).split(self._counts, dim=1)
        found = [one.hear(part, self._numbers) for one, part in zip(self.members, parts, strict=True)]
        return next(filter(None, found), None)


def _is_captured() -> bool:
    """Say whether a CUDA graph captures what runs; also what runs on the host, which the graph does not."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
