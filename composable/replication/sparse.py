"""Sparse gradients, averaged after a backward."""

from collections.abc import Sequence

import torch
from torch import nn

from composable.comm import Transport
from composable.errors import ConfigError
from composable.replication.managed import ReducedParam


def check_steppable(params: Sequence[ReducedParam]) -> None:
    """Raise ``ConfigError`` if a gradient is sparse: no optimizer can step it inside backward, bucket by bucket."""
    for item in params:
        if item.is_sparse:
            what = "an optimizer cannot step inside backward beside sparse gradients"
            fix = "step after backward, or build embeddings with sparse=False"
            raise ConfigError(what, at=f"parameter {item.fqn!r}", fix=fix)


class SparseGradients:
    """Sparse gradients of tables, the same on all ranks, averaged over ranks that each have some of the rows."""

    def __init__(self, params: Sequence[nn.Parameter], transport: Transport) -> None:
        self._params = params
        self._transport = transport
        self._key = transport.allocate_key() if params else -1

    @torch.no_grad()
    def average(self, scale: float, *, is_stopped: bool = False) -> None:
        """Replace every gradient by its mean; a rank without a gradient adds zero, and gets the mean. Collective.

        A gradient that no rank has stays ``None``. If a gradient is dense on one rank, as when a layer shares the
        table, the mean is dense on all ranks. ``scale`` is the factor of sums over the ranks. ``is_stopped``: take part
        without gradients, and leave this rank's as they are.
        """
        if not self._params or self._transport.world_size == 1:
            return
        grads = [None if is_stopped else param.grad for param in self._params]
        tables = [None if grad is None else _as_table(grad) for grad in grads]
        # For each parameter: its number of rows, -1 for no gradient, and whether the gradient is dense.
        own = [
            (-1, 0) if grad is None or table is None else (table.indices().shape[1], grad.layout == torch.strided)
            for grad, table in zip(grads, tables, strict=True)
        ]
        told = self._gather(torch.tensor(own, dtype=torch.int64, device=self._params[0].device))
        # Where nobody knows values, other ranks are taken to be like this one.
        of_ranks = told.tolist() if self._transport.carries_values else [own] * self._transport.world_size
        for param, table, of_param in zip(self._params, tables, zip(*of_ranks, strict=True), strict=True):
            counts, are_dense = zip(*of_param, strict=True)
            if max(counts) >= 0:
                mean = self._mean(param, table, [max(count, 0) for count in counts], scale)
                if not is_stopped:
                    param.grad = mean.to_dense() if any(are_dense) else mean

    def _mean(
        self, param: nn.Parameter, table: torch.Tensor | None, counts: Sequence[int], scale: float
    ) -> torch.Tensor:
        """Return the mean of ``table`` [shape of the parameter] over the ranks; ``counts``: rows on each rank."""
        numbers = torch.zeros(max(counts), dtype=torch.int64, device=param.device)
        values = torch.zeros(max(counts), *param.shape[1:], dtype=param.dtype, device=param.device)
        if table is not None:
            own = table.indices().shape[1]
            numbers[:own], values[:own] = table.indices()[0], table.values()
        # Every rank adds the rows up in the same order, so that the ranks stay equal.
        numbers, values = (
            torch.cat([part[:count] for part, count in zip(self._gather(one), counts, strict=True)])
            for one in (numbers, values)
        )
        # `sparse_coo_tensor` has an argument for this too, but torch 2.11 warns of it.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return torch.sparse_coo_tensor(numbers[None], values * scale, param.shape).coalesce()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked along a new first dim."""
        whole = tensor.new_empty(self._transport.world_size, *tensor.shape)
        if tensor.numel():
            as_bytes = (whole.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
            self._transport.begin_all_gather(*as_bytes, self._key).finish()
        return whole


def _as_table(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient [rows, ...] as a sparse tensor of rows."""
    is_table = grad.layout == torch.sparse_coo and grad.sparse_dim() == 1
    return (grad if is_table else grad.to_dense().to_sparse(1)).detach().coalesce()
