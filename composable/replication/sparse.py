"""Sparse gradients, averaged after a backward."""

from collections.abc import Sequence

import torch
from torch import nn

from composable.comm import Transport
from composable.errors import ConfigError, place_of_rank
from composable.replication.tensors import ReducedParam

__all__ = ["SparseGradients", "check_steppable"]


def check_steppable(params: Sequence[ReducedParam]) -> None:
    """Raise unless an optimizer can step these parameters inside backward, bucket by bucket.

    Raises:
        ConfigError: A gradient is sparse.
    """
    for item in params:
        if item.is_sparse:
            raise ConfigError(
                "an optimizer cannot step inside backward beside sparse gradients",
                at=f"{place_of_rank()}, parameter {item.fqn!r}",
                fix="step after backward, or build embeddings with sparse=False",
            )


class SparseGradients:
    """Averages the gradients of tables, of which each rank has some rows.

    Args:
        params: Equal on all ranks.
        transport: Of the ranks.
    """

    def __init__(self, params: Sequence[nn.Parameter], transport: Transport) -> None:
        self._params = params
        self._transport = transport
        self._key = transport.allocate_key() if params else -1

    @torch.no_grad()
    def average(self, scale: float, *, is_stopped: bool = False) -> None:
        """Replace every gradient by its mean; ranks without one count as zero, and get it. Collective.

        A gradient that no rank has stays ``None``. One that is dense on a rank, as where a layer shares the table,
        is dense on all of them then.

        Args:
            scale: What sums are multiplied with.
            is_stopped: Meet the other ranks, but take part without gradients, and leave them as they are.
        """
        if not self._params or self._transport.world_size == 1:
            return
        grads = [None if is_stopped else param.grad for param in self._params]
        tables = [None if grad is None else _as_table(grad) for grad in grads]
        # Of each parameter: how many rows there are, -1 for no gradient, and whether it is dense.
        own = [
            (-1, 0) if grad is None or table is None else (table.indices().shape[1], grad.layout == torch.strided)
            for grad, table in zip(grads, tables, strict=True)
        ]
        of_ranks = self._gather(torch.tensor(own, dtype=torch.int64, device=self._params[0].device)).unbind(1)
        for param, table, told in zip(self._params, tables, of_ranks, strict=True):
            counts, are_dense = told.t().tolist()
            if max(counts) >= 0:
                mean = self._mean(param, table, [max(count, 0) for count in counts], scale)
                if not is_stopped:
                    param.grad = mean.to_dense() if any(are_dense) else mean

    def _mean(
        self, param: nn.Parameter, table: torch.Tensor | None, counts: Sequence[int], scale: float
    ) -> torch.Tensor:
        """Return the mean of ``table`` [shape of the parameter] over the ranks; ``counts``: how many rows each has."""
        numbers = torch.zeros(max(counts), dtype=torch.int64, device=param.device)
        values = torch.zeros(max(counts), *param.shape[1:], dtype=param.dtype, device=param.device)
        if table is not None:
            own = table.indices().shape[1]
            numbers[:own], values[:own] = table.indices()[0], table.values()
        # Every rank adds up in the same order, so that the ranks stay equal.
        numbers, values = (
            torch.cat([part[:count] for part, count in zip(self._gather(one), counts, strict=True)])
            for one in (numbers, values)
        )
        # An argument of `sparse_coo_tensor` that says the same is one that torch 2.11 warns of.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return torch.sparse_coo_tensor(numbers[None], values * scale, param.shape).coalesce()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, one after the other in a dim of their own."""
        whole = tensor.new_empty(self._transport.world_size, *tensor.shape)
        if tensor.numel():
            as_bytes = (whole.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
            self._transport.begin_all_gather(*as_bytes, self._key).finish()
        return whole


def _as_table(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient [rows, ...] with rows that are sparse."""
    is_table = grad.layout == torch.sparse_coo and grad.sparse_dim() == 1
    return (grad if is_table else grad.to_dense().to_sparse(1)).detach().coalesce()
