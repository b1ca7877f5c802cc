"""Makes tensors equal on every rank: parameters and buffers at annotation, buffers before a forward."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composable.collectives import Transport
from composable.torch_private import foreach_copy_

__all__ = ["BufferSync", "broadcast_tensors"]

# Broadcasts in flight at annotation, and what is packed into one of them, in bytes.
_BROADCAST_BYTES = 32 * 2**20
_PACKED_BYTES = 2**20


class BufferSync:
    """Gives every rank the buffers of the first one.

    Args:
        slots: Where each buffer hangs: the module's buffers and the name in them. A module may
            put another tensor there between two forwards.
        transport: Of the ranks.
        device: Of the transport's tensors.
    """

    def __init__(
        self, slots: Sequence[tuple[dict[str, torch.Tensor | None], str]], transport: Transport, device: torch.device
    ) -> None:
        self.slots = slots
        self._transport = transport
        self._device = device
        self._key = transport.allocate_key()
        self._packed: _Packed | None = None

    def broadcast(self, source_rank: int = 0) -> None:
        """Overwrite the buffers with those of one rank, all in one broadcast. Collective."""
        if self._transport.world_size == 1:
            return
        # Through `data`, since a backward may still need what a buffer was saved for.
        tensors = [buffers.data for owner, name in self.slots if (buffers := owner[name]) is not None]
        if self._packed is None or not self._packed.fits(tensors):
            self._packed = _Packed.like(tensors, self._device)
        self._packed.broadcast(tensors, self._transport, self._key, source_rank)


@dataclass
class _Packed:
    """Tensors of any dtypes, as bytes back to back."""

    flat: torch.Tensor
    views: list[torch.Tensor]

    @staticmethod
    def like(tensors: Sequence[torch.Tensor], device: torch.device) -> "_Packed":
        starts = []
        stop = 0
        for tensor in tensors:
            starts.append(stop)
            stop += -(-tensor.nbytes // 16) * 16
        flat = torch.zeros(stop, dtype=torch.uint8, device=device)
        views = [
            flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
        return _Packed(flat, views)

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        return len(tensors) == len(self.views) and all(
            tensor.shape == view.shape and tensor.dtype == view.dtype
            for tensor, view in zip(tensors, self.views, strict=True)
        )

    def broadcast(self, tensors: list[torch.Tensor], transport: Transport, key: int, source_rank: int = 0) -> None:
        if not self.flat.numel():
            return
        if transport.rank == source_rank:
            foreach_copy_(self.views, tensors)
        transport.begin_broadcast(self.flat, source_rank, key).finish()
        if transport.rank != source_rank:
            foreach_copy_(tensors, self.views)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], transport: Transport, device: torch.device, source_rank: int = 0
) -> None:
    """Overwrite ``tensors`` with those of one rank, holding few bytes at a time. Collective."""
    if transport.world_size == 1:
        return
    key = transport.allocate_key()
    small: list[torch.Tensor] = []
    small_bytes = 0
    in_flight = []
    in_flight_bytes = 0
    for tensor in tensors:
        data = tensor.data
        if data.nbytes < _PACKED_BYTES or not data.is_contiguous() or data.device != device:
            small.append(data)
            small_bytes += data.nbytes
            if small_bytes >= _PACKED_BYTES:
                _Packed.like(small, device).broadcast(small, transport, key, source_rank)
                small, small_bytes = [], 0
            continue
        in_flight.append(transport.begin_broadcast(data.view(-1).view(torch.uint8), source_rank, key))
        in_flight_bytes += data.nbytes
        if in_flight_bytes >= _BROADCAST_BYTES:
            for pending in in_flight:
                pending.finish()
            in_flight, in_flight_bytes = [], 0
    for pending in in_flight:
        pending.finish()
    if small:
        _Packed.like(small, device).broadcast(small, transport, key, source_rank)
