"""Norms of ragged tensors, without a gather.

Each rank reduces its piece; then the ranks exchange a tensor of the size of the result.
"""

import math
from collections.abc import Mapping, Sequence
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


class NormParts:
    """The rule that joins norms of pieces to the norm of the whole, on one rank and over ranks, in fp64.

    A *part* is the power of a piece's norm, and parts are added. For the infinite order, a part is the largest
    magnitude, and whether there is a NaN, which a maximum over ranks need not propagate. ``op`` combines the parts of
    ranks; ``order`` is 0 or above.
    """

    def __init__(self, order: float) -> None:
        self.order = order
        self.op: ReduceOp.RedOpType = ReduceOp.MAX if order == math.inf else ReduceOp.SUM

    def nothing(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the parts [1 or 2, *shape] of no piece at all, fp64."""
        return torch.zeros(2 if self.order == math.inf else 1, *shape, dtype=torch.float64, device=device)

    def of(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the parts [1 or 2, *shape] of pieces with norms [*shape], fp64."""
        norms = norms.double()
        if self.order == math.inf:
            return torch.stack([norms.nan_to_num(0.0, posinf=math.inf), norms.isnan().double()])
        return (norms if self.order in (0, 1) else norms.pow(self.order)).unsqueeze(0)

    def join(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the one part [1 or 2, 1] of pieces with parts [1 or 2, pieces]."""
        return parts.amax(1, keepdim=True) if self.order == math.inf else parts.sum(1, keepdim=True)

    def norms(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the norms [*shape] of whole tensors with parts [1 or 2, *shape]."""
        if self.order == math.inf:
            return parts[0].where(parts[1] == 0, math.nan)
        return parts[0] if self.order in (0, 1) else parts[0].pow(1.0 / self.order)


def summed_in(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to take a piece's norm in: half precision is summed in fp32, as torch does inside."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else None


def cut_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of a DTensor's mesh over which ranks hold different elements; none for a plain tensor.

    ``tensor`` has any shape and dtype.
    """
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))


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
    wide = widest(layouts) if layouts else None
    for members in groups.values():
        layout = layouts[members[0]]
        whole = _norms_of_group(layout, [tensors[index] for index in members], order, dtype)
        mesh = wide.mesh if wide is not None and shares_cut(wide.mesh, layout) else layout.mesh
        real = [dtype or _real_of(tensors[index]._spec.dtype) for index in members]
        kinds = {kind: whole.to(kind).unbind() for kind in set(real)}
        specs = {kind: replicated_spec(mesh, scalars[0]) for kind, scalars in kinds.items()}
        for position, (index, kind) in enumerate(zip(members, real)):
            found[index] = dtensor_new(DTensor, kinds[kind][position], specs[kind], requires_grad=False)
    return as_terms(found, tensors[0]) if tensors else found


def _norms_of_group(
    layout: RaggedLayout, tensors: Sequence[Any], order: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return the norms [len(tensors)] in fp64."""
    device = tensors[0]._local_tensor.device
    owned = [index for index, tensor in enumerate(tensors) if tensor._spec.layout.lo < tensor._spec.layout.hi]
    pieces = [values_of(tensors[index]._local_tensor) for index in owned]
    if dtype is None:
        dtype = next((kind for piece in pieces if (kind := summed_in(piece.dtype))), None)
    whole = NormParts(order)
    parts = whole.nothing((len(tensors),), device)
    if pieces:
        found = whole.of(torch.stack(foreach_norm(pieces, order, dtype=dtype)))
        if len(owned) == len(tensors):
            parts = found
        else:
            parts[:, torch.tensor(owned, device=device)] = found
    return whole.norms(layout.reduce(parts, whole.op))


def _norm_over_dims(this: Any, order: float, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None) -> DTensor:
    """Return the norm over some dims, replicated; Adafactor takes such norms of rows and columns.

    Collective: one all-reduce of the result's size, in fp64.
    """
    layout, local, whole = this._spec.layout, values_of(this._local_tensor), NormParts(order)
    parts = whole.nothing([1 if dim in dims else size for dim, size in enumerate(layout.shape)], local.device)
    if layout.lo < layout.hi:
        # Zeros fill the piece up to whole rows of the first dim.
        width = layout.block_shape.numel() // layout.block_shape[0]
        first, last = layout.lo // width, -(-layout.hi // width)
        rows = local.new_zeros((last - first) * width)
        rows[layout.lo - first * width : layout.hi - first * width] = local.reshape(-1)
        rows = rows.view(last - first, *layout.block_shape[1:])
        own = parts
        for dim, (offset, size) in enumerate(zip(layout.block_offsets, rows.shape)):
            own = own if dim in dims else own.narrow(dim + 1, offset + (0 if dim else first), size)
        kind = summed_in(local.dtype)
        own.copy_(whole.of(torch.linalg.vector_norm(rows, order, dim=list(dims), keepdim=True, dtype=kind)))
    norms = whole.norms(layout.reduce(parts, whole.op)).to(dtype or _real_of(local.dtype))
    return as_terms(replicate(norms if keepdim else norms.squeeze(tuple(dims)), layout), this)  # type: ignore[no-any-return]  # this tensor


def _real_of(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


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
    shared: list[tuple[DeviceMesh, int]] = []
    for grad in grads:
        shared += [at for dim in cut_dims(grad) if (at := (grad.device_mesh, dim)) not in shared]
    groups = [Ranks.of_mesh(mesh, dim) for mesh, dim in shared]
    for ranks in groups:
        if scale.device.type == "cpu" and ranks.device.type != "cpu":
            # The gradients rest on the host, and the scaler only queues the copy of its scale from the device.
            torch.get_device_module(ranks.device).current_stream(ranks.device).synchronize()
    if locals_:
        op(locals_, found, scale)
    for ranks in groups:
        found.copy_(ranks.reduce(found.clone(), ReduceOp.MAX))
