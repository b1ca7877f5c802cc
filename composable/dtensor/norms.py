"""Norms of ragged tensors, without a gather.

Each rank reduces its piece; then the ranks exchange a tensor of the size of the result.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor, Replicate

from composable.comm import Ranks
from composable.dtensor.gather import as_terms, gather_and_run, replicate, shares_cut, widest
from composable.dtensor.packed import values_of
from composable.dtensor.spec import RaggedLayout, replicated_spec
from composable.ground.torch_private import DeviceMesh, OpOverload, dtensor_new, foreach_norm

aten = torch.ops.aten


def norms_over(groups: Iterable[Ranks], norms: torch.Tensor, order: float) -> torch.Tensor:
    """Return the norms [any], fp64, of tensors that are cut over each of ``groups``, given those of this rank's pieces.

    Collective: one all-reduce for each group, of powers of the norms. ``order`` is 0 or above.
    """
    norms = norms.double()
    if order == math.inf:
        # As bits, which have the order of the numbers: a maximum over ranks need not propagate NaN, which is above all.
        bits = norms.abs().view(torch.int64)
        for ranks in groups:
            bits = ranks.reduce(bits, ReduceOp.MAX)
        return bits.view(torch.float64)
    is_sum = order in (0, 1)
    powers = norms if is_sum else norms.pow(order)
    for ranks in groups:
        powers = ranks.reduce(powers, ReduceOp.SUM)
    return powers if is_sum else powers.pow(1.0 / order)


def summed_in(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to take a piece's norm in: half precision is summed in fp32, as torch does inside."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else None


def cut_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of a DTensor's mesh over which ranks hold different elements; none for a plain tensor.

    ``tensor`` has any shape and dtype.
    """
    placements = enumerate(tensor.placements if isinstance(tensor, DTensor) else ())
    return tuple(dim for dim, placement in placements if not isinstance(placement, Replicate))


def norm_of_list(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run ``_foreach_norm``: ragged tensors in one go, other tensors one by one. Any float shapes -> a list of []."""
    tensors = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    if order < 0:
        return gather_and_run(cls, op, args, kwargs)  # type: ignore[no-any-return]  # a list
    norms = iter(_norms([tensor for tensor in tensors if type(tensor) is cls], order, dtype))
    return [next(norms) if type(tensor) is cls else op([tensor], order, dtype=dtype)[0] for tensor in tensors]


def vector_norm(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``linalg_vector_norm``: over all dims, the result is []; over some dims, it has the shape of the rest."""
    this, order, dims, keepdim = (*args, *(2, None, False)[len(args) - 1 :])[:4]
    dtype = kwargs.get("dtype")
    if type(this) is cls and dims and this.dim() > 1 and 0 < order < math.inf and not this._spec.layout.order:
        return _norm_over_dims(this, order, [dim % this.dim() for dim in dims], keepdim, dtype)
    if type(this) is not cls or dims is not None or keepdim or order < 0:
        return gather_and_run(cls, op, args, kwargs)
    return _norms([this], order, dtype)[0]


def _norms(tensors: Sequence[Any], order: float, dtype: torch.dtype | None) -> list[DTensor]:
    """Return the norm of each tensor, replicated. Collective: one all-reduce for all tensors of one group.

    Within a piece low precision is accumulated in fp32; over pieces everything is in fp64.
    """
    layouts: list[RaggedLayout] = [tensor._spec.layout for tensor in tensors]
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for index, layout in enumerate(layouts):
        groups.setdefault((layout.mesh, layout.cut_dims), []).append(index)
    found: list[Any] = [None] * len(tensors)
    # On one mesh where possible: the caller can add up norms only if these are DTensors of one mesh.
    wide = widest(layouts)
    for members in groups.values():
        layout = layouts[members[0]]
        pieces = {at: values_of(tensors[at]._local_tensor) for at in members}
        owned = {at: piece for at, piece in pieces.items() if layouts[at].lo < layouts[at].hi}
        low = next(filter(None, (summed_in(piece.dtype) for piece in owned.values())), None)
        own = dict(zip(owned, foreach_norm([*owned.values()], order, dtype=dtype or low) if owned else ()))
        zero = pieces[members[0]].new_zeros((), dtype=torch.float64)
        whole = norms_over(layout.reduction_groups, torch.stack([own.get(at, zero) for at in members]), order)
        mesh = wide.mesh if shares_cut(wide.mesh, layout) else layout.mesh
        real = [dtype or tensors[at]._spec.dtype.to_real() for at in members]
        kinds = {kind: whole.to(kind).unbind() for kind in set(real)}
        specs = {kind: replicated_spec(mesh, scalars[0]) for kind, scalars in kinds.items()}
        for position, (at, kind) in enumerate(zip(members, real)):
            found[at] = dtensor_new(DTensor, kinds[kind][position], specs[kind], requires_grad=False)
    return as_terms(found, tensors[0])  # type: ignore[no-any-return]  # this list


def _norm_over_dims(this: Any, order: float, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None) -> DTensor:
    """Return the norm over some dims, replicated; Adafactor takes such norms of rows and columns.

    Collective: one all-reduce of the result's size, in fp64.
    """
    layout, local = this._spec.layout, values_of(this._local_tensor)
    shape = [1 if dim in dims else size for dim, size in enumerate(layout.shape)]
    own = norms = local.new_zeros(shape, dtype=torch.float64)
    if layout.lo < layout.hi:
        # Zeros fill the piece up to whole rows of the first dim.
        width = layout.block_shape.numel() // layout.block_shape[0]
        first, last = layout.lo // width, -(-layout.hi // width)
        rows = local.new_zeros((last - first) * width)
        rows[layout.lo - first * width : layout.hi - first * width] = local.reshape(-1)
        rows = rows.view(last - first, *layout.block_shape[1:])
        for dim, (offset, size) in enumerate(zip(layout.block_offsets, rows.shape)):
            own = own if dim in dims else own.narrow(dim, offset + (0 if dim else first), size)
        own.copy_(torch.linalg.vector_norm(rows, order, dim=list(dims), keepdim=True, dtype=summed_in(local.dtype)))
    norms = norms_over(layout.reduction_groups, norms, order).to(dtype or local.dtype.to_real())
    return as_terms(replicate(norms if keepdim else norms.squeeze(tuple(dims)), layout), this)  # type: ignore[no-any-return]  # this tensor


# -- truth values, and the gradient scaler


def any_or_all(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``any`` or ``all``: truth values of any shape -> []; in-place initialisers need it between draws."""
    this = args[0]
    layout: RaggedLayout = this._spec.layout
    local = op(this._local_tensor)
    reduce_op = ReduceOp.MAX if op is aten.any.default else ReduceOp.MIN
    return replicate(layout.reduce(local.to(torch.uint8), reduce_op).to(local.dtype), layout)


def unscale(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Unscale gradients [any] in place; ``found_inf`` [1] tells every rank whether any rank found an inf or NaN.

    Collective: one all-reduce for each mesh dim that some gradient is cut over.
    """
    grads, found_inf, inv_scale = args
    found, scale, *pieces = (t._local_tensor if isinstance(t, DTensor) else t for t in (found_inf, inv_scale, *grads))
    locals_ = [piece for piece in pieces if piece.numel()]
    shared = dict.fromkeys((grad.device_mesh, dim) for grad in grads for dim in cut_dims(grad))
    groups = [Ranks.of_mesh(mesh, dim) for mesh, dim in shared]
    for ranks in groups:
        if scale.device.type == "cpu" and ranks.device.type != "cpu":
            # The gradients rest on the host, and the scaler only queues the copy of its scale from the device.
            torch.get_device_module(ranks.device).current_stream(ranks.device).synchronize()
    if locals_:
        op(locals_, found, scale)
    for ranks in groups:
        found.copy_(ranks.reduce(found.clone(), ReduceOp.MAX))
