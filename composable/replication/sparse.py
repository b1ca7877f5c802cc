"""Averages sparse gradients, which lie in no bucket: rows are gathered, and added up on every rank."""

from collections.abc import Sequence

import torch
from torch import nn

from composable.collectives import Transport

__all__ = ["SparseGradients"]

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
