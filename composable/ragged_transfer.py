"""Moves ragged tensors to and from the one rank that holds them whole, piece by piece.

Every piece goes straight from where it is owned to where it is wanted: beside the whole tensors
nothing is allocated, except where dtype or device change, and then no more than one list's pieces.

An *owner* is a rank in the tensors' shard group; pieces without elements are not sent.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from composable.ragged import RaggedDTensor
from composable.ragged_spec import RaggedLayout

__all__ = ["collect_full", "spread_full"]


def collect_full(
    tensors: Sequence[RaggedDTensor], *, dst: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> list[torch.Tensor] | None:
    """Return the full values of ``tensors`` on rank ``dst``, fresh, contiguous and independent of each other.

    Collective: all ranks of the shard group, with the same tensors in the same order.

    Args:
        tensors: Of one shard group; none on the meta device.
        dst: Rank in the shard group that gets the values; the others get ``None``.
        dtype: Of the values; default: the tensors' own.
        device: Of the values; default: the tensors' own.
    """
    fulls: list[torch.Tensor] | None = None
    if _is_here(tensors, dst):
        fulls = [
            torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor._local_tensor.device)
            for tensor in tensors
        ]
    arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
    ops: list[dist.P2POp] = []
    for index, owner, lo, hi in _pieces(tensors):
        layout, local = tensors[index]._spec.layout, tensors[index]._local_tensor.detach().reshape(-1)
        if fulls is None:
            if layout.rank == owner:
                ops.append(_op(dist.isend, _on_mesh(local, layout), dst, layout))
            continue
        target = fulls[index].view(-1)[lo:hi]
        if owner == dst:
            target.copy_(local)
            continue
        into = target if _can_travel(target, local.dtype, layout) else _room(target, local.dtype, layout)
        ops.append(_op(dist.irecv, into, owner, layout))
        if into is not target:
            arrived.append((target, into))
    _run(ops)
    for target, into in arrived:
        target.copy_(into)
    return fulls


def spread_full(tensors: Sequence[RaggedDTensor], values: Callable[[int], torch.Tensor] | None, *, src: int) -> None:
    """Overwrite every rank's pieces with full values that only rank ``src`` has.

    Collective: all ranks of the shard group, with the same tensors in the same order.

    Args:
        tensors: Of one shard group; none on the meta device.
        values: On rank ``src``: gives the full value of ``tensors[index]``, of its shape, in any dtype and on any
            device; asked once for each. On other ranks not used.
        src: Rank in the shard group that has the values.
    """
    is_source = _is_here(tensors, src)
    arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
    ops: list[dist.P2POp] = []
    full: tuple[int, torch.Tensor] | None = None
    for index, owner, lo, hi in _pieces(tensors):
        # `.data` leaves the version counter alone: nothing that autograd saved is changed.
        layout, local = tensors[index]._spec.layout, tensors[index]._local_tensor.data.view(-1)
        if is_source:
            assert values is not None, "the source has the values"
            if full is None or full[0] != index:
                full = (index, values(index).detach().reshape(-1))
            piece = full[1][lo:hi]
            if owner == src:
                local.copy_(piece)
            else:
                ops.append(_op(dist.isend, _on_mesh(piece.to(local.dtype), layout), owner, layout))
        elif layout.rank == owner:
            into = local if _can_travel(local, local.dtype, layout) else _room(local, local.dtype, layout)
            ops.append(_op(dist.irecv, into, src, layout))
            if into is not local:
                arrived.append((local, into))
    _run(ops)
    for target, into in arrived:
        target.copy_(into)


def _is_here(tensors: Sequence[RaggedDTensor], rank: int) -> bool:
    return bool(tensors) and tensors[0]._spec.layout.rank == rank


def _pieces(tensors: Sequence[RaggedDTensor]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (index of the tensor, owner, first element, past the last) of every piece that has elements."""
    for index, tensor in enumerate(tensors):
        for owner, (lo, hi) in enumerate(pairwise(tensor._spec.layout.bounds)):
            if lo < hi:
                yield index, owner, lo, hi


def _can_travel(tensor: torch.Tensor, dtype: torch.dtype, layout: RaggedLayout) -> bool:
    return tensor.dtype == dtype and tensor.device.type == layout.mesh.device_type


def _room(like: torch.Tensor, dtype: torch.dtype, layout: RaggedLayout) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype, device=layout.mesh.device_type)


def _on_mesh(tensor: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    return tensor.to(layout.mesh.device_type).contiguous()


def _op(
    send_or_receive: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int, layout: RaggedLayout
) -> dist.P2POp:
    # As bytes: not every backend knows every dtype.
    return dist.P2POp(send_or_receive, tensor.view(torch.uint8), group=layout.group, group_peer=peer)


def _run(ops: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
