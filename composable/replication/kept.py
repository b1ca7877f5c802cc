"""Averages the gradients that backwards without synchronisation have left, without another backward."""

from collections.abc import Sequence

import torch

from composable.collectives import Transport
from composable.replication.bucket import ReducedParam, grad_dtype_of
from composable.replication.locals import local_gradient, local_of, wrapped_like
from composable.replication.sparse import SparseGradients

__all__ = ["average_kept"]


def average_kept(
    params: Sequence[ReducedParam],
    transport: Transport,
    key: int,
    scale: float,
    sparse: SparseGradients,
    *,
    is_any: bool,
) -> bool:
    """Replace gradients by their means, one at a time, if any rank has kept some, and say whether. Collective.

    Args:
        params: Equal on all ranks; at least one.
        transport: Of the ranks.
        key: Of the collectives.
        scale: What sums are multiplied with.
        sparse: Averages those that are sparse.
        is_any: This rank has kept some.
    """
    flags = torch.tensor([is_any, *(item.param.grad is not None for item in params)])
    flags = flags.to(params[0].param.device, torch.float32)
    # The gradients of every parameter go the same way on all ranks, whoever has one.
    transport.begin_all_reduce(flags, key).finish()
    is_anywhere, *has_grad = flags.tolist()
    if not is_anywhere:
        return False
    for item, is_there in zip(params, has_grad, strict=True):
        if is_there and not item.is_sparse:
            if item.param.grad is None:
                item.param.grad = torch.zeros_like(item.param, dtype=grad_dtype_of(item.param))
            grad = local_gradient(item.param.grad.detach(), item.param)
            if grad is not local_of(item.param.grad):
                item.param.grad = wrapped_like(grad, item.param)
            whole = grad.contiguous()
            transport.begin_all_reduce(whole.view(-1), key, scale=scale).finish()
            if whole is not grad:
                grad.copy_(whole)
    sparse.average(scale)
    return True
