"""Tensors that travel in no bucket: sparse gradients, and parameters and buffers that are made equal."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from composable.comm import Transport
from composable.ground.torch_private import foreach_copy_

__all__ = ["BufferSync", "SparseGradients", "broadcast_tensors"]


# Instead of a number of rows: this rank has no gradient, or one that is not sparse.
_NONE = -1
_DENSE = -2


class SparseGradients:
    """Averages the gradients of parameters that are rows of tables, such as those of ``nn.Embedding(sparse=True)``.

    Args:
        params: Equal on all ranks.
        transport: Of the ranks.
    """

    __slots__ = ("_key", "_params", "_transport")

    def __init__(self, params: Sequence[nn.Parameter], transport: Transport) -> None:
        self._params = params
        self._transport = transport
        self._key = transport.allocate_key() if params else -1

    def average(self, scale: float, *, is_stopped: bool = False) -> None:
        """Replace every gradient by its mean; ranks without one count as zero, and get it. Collective.

        A gradient that no rank has stays ``None``. One that is dense on a rank, as where a layer shares a table,
        is dense on all of them then.

        Args:
            scale: What sums are multiplied with.
            is_stopped: Meet the other ranks, but take part without gradients, and leave them as they are.
        """
        if not self._params or self._transport.world_size == 1:
            return
        grads = [None if is_stopped or param.grad is None else param.grad.detach() for param in self._params]
        rows = [grad.coalesce() if grad is not None and _is_table(grad) else None for grad in grads]
        own = [
            _NONE if grad is None else _DENSE if row is None else row.indices().shape[1]
            for grad, row in zip(grads, rows, strict=True)
        ]
        counts = self._gather(torch.tensor(own, device=self._params[0].device)).tolist()
        for index, param in enumerate(self._params):
            of_ranks = [of_rank[index] for of_rank in counts]
            if _DENSE in of_ranks:
                averaged = self._average_dense(param, grads[index], scale)
            elif max(of_ranks) >= 0:
                averaged = self._average_rows(param, rows[index], of_ranks, scale)
            else:
                continue
            if not is_stopped:
                param.grad = averaged

    def _average_dense(self, param: nn.Parameter, grad: torch.Tensor | None, scale: float) -> torch.Tensor:
        if grad is None:
            whole = torch.zeros_like(param, memory_format=torch.contiguous_format).detach()
        else:
            whole = (grad.to_dense() if grad.layout != torch.strided else grad.clone()).contiguous()
        flat = torch.view_as_real(whole).view(-1) if whole.is_complex() else whole.view(-1)
        self._transport.begin_all_reduce(flat, self._key, scale=scale).finish()
        return whole

    def _average_rows(
        self, param: nn.Parameter, rows: torch.Tensor | None, counts: Sequence[int], scale: float
    ) -> torch.Tensor:
        """Return the mean of ``rows`` over the ranks, of which ``counts`` is how many each has."""
        most = max(counts)
        numbers = torch.zeros(most, dtype=torch.int64, device=param.device)
        values = torch.zeros(most, *param.shape[1:], dtype=param.dtype, device=param.device)
        if rows is not None:
            count = rows.indices().shape[1]
            numbers[:count] = rows.indices()[0]
            values[:count] = rows.values()
        every_number, every_value = self._gather(numbers), self._gather(values)
        # Every rank adds up in the same order, so that the ranks stay equal.
        filled = [max(count, 0) for count in counts]  # Nothing at all on a rank without a gradient.
        numbers = torch.cat([part[:count] for part, count in zip(every_number, filled, strict=True)])
        values = torch.cat([part[:count] for part, count in zip(every_value, filled, strict=True)])
        values *= scale
        return torch.sparse_coo_tensor(numbers[None], values, param.shape, check_invariants=False).coalesce()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, one after the other in a dim of their own."""
        whole = tensor.new_empty(self._transport.world_size, *tensor.shape)
        flat, part = whole.view(-1), tensor.reshape(-1)
        if part.numel():
            as_bytes = (flat.view(torch.uint8), part.view(torch.uint8))
            self._transport.begin_all_gather(*as_bytes, self._key).finish()
        return whole


def _is_table(grad: torch.Tensor) -> bool:
    return grad.layout == torch.sparse_coo and grad.sparse_dim() == 1


# Tensors below this size travel together.
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
            self._packed = _Packed(tensors, self._device)
        self._packed.broadcast(tensors, self._transport, self._key, source_rank)


class _Packed:
    """Memory for tensors of any dtypes, as bytes back to back."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        *starts, stop = accumulate((-(-tensor.nbytes // 16) * 16 for tensor in tensors), initial=0)
        self.flat = torch.zeros(stop, dtype=torch.uint8, device=device)
        self.views = [
            self.flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

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
    """Overwrite ``tensors``, of any shapes and dtypes, with those of one rank, a few bytes at a time. Collective."""
    if transport.world_size == 1:
        return
    key = transport.allocate_key()
    small: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.data
        if data.nbytes >= _PACKED_BYTES and data.is_contiguous() and data.device == device:
            transport.begin_broadcast(data.view(-1).view(torch.uint8), source_rank, key).finish()
            continue
        small.append(data)
        if sum(one.nbytes for one in small) >= _PACKED_BYTES:
            _Packed(small, device).broadcast(small, transport, key, source_rank)
            small = []
    if small:
        _Packed(small, device).broadcast(small, transport, key, source_rank)
