"""Messages between ranks: flat pieces of tensors, several of them in one message where asked."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from composable.collectives import Ranks

__all__ = ["Exchange"]

# Pieces in one message start at multiples of this, so that they can be viewed in any dtype.
_PACKED_ALIGN = 16


class Exchange:
    """The messages of one call: what this rank sends, and where what it gets goes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._device_type = ranks.device.type
        self._sends: list[tuple[torch.Tensor, int]] = []
        self._receives: list[tuple[torch.Tensor, int]] = []
        self._arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def send(self, pieces: Sequence[torch.Tensor], peers: Iterable[int]) -> None:
        """Send flat tensors, in one message to each peer."""
        peers = list(peers)
        if not peers:
            return
        if len(pieces) == 1:
            message = pieces[0].to(self._device_type).contiguous().view(torch.uint8)
        else:
            spans, total = _spans(pieces, [piece.dtype for piece in pieces])
            message = torch.empty(total, dtype=torch.uint8, device=self._device_type)
            for piece, (start, stop) in zip(pieces, spans, strict=True):
                message[start:stop].view(piece.dtype).copy_(piece)
        self._sends += [(message, peer) for peer in peers]

    def receive(self, targets: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], peer: int) -> None:
        """Receive one message into flat tensors; ``dtypes`` are those it was sent in."""
        only = targets[0]
        if len(targets) == 1 and only.dtype == dtypes[0] and only.device.type == self._device_type:
            # As bytes: not every backend knows every dtype.
            message = only.view(torch.uint8)
        else:
            spans, total = _spans(targets, dtypes)
            message = torch.empty(total, dtype=torch.uint8, device=self._device_type)
            self._arrivals += [
                (target, message[start:stop].view(dtype))
                for target, dtype, (start, stop) in zip(targets, dtypes, spans, strict=True)
            ]
        self._receives.append((message, peer))

    def run(self) -> None:
        """Exchange the messages and put what arrived in its place."""
        self._ranks.exchange(self._sends, self._receives)
        for target, piece in self._arrivals:
            target.copy_(piece)


def _spans(pieces: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> tuple[list[tuple[int, int]], int]:
    """Return the bytes ``[start, stop)`` of each piece in a message, and the message's length."""
    sizes = [piece.numel() * dtype.itemsize for piece, dtype in zip(pieces, dtypes, strict=True)]
    if len(sizes) == 1:
        return [(0, sizes[0])], sizes[0]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _PACKED_ALIGN) * _PACKED_ALIGN)
    return [(start, start + size) for (start, _), size in zip(pairwise(starts), sizes)], starts[-1]
