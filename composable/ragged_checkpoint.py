"""Ragged tensors in torch.distributed.checkpoint, which knows tensors as axis-aligned boxes.

A flat range of an n-dimensional tensor is a few boxes. Each is saved, and read back at any
world size, straight from and into the local piece: no tensor is communicated.

Loading *full* state dicts (``set_model_state_dict`` and its kin) goes through functions of torch
that refuse placements they do not know; ``support_full_state_dicts`` teaches them ours.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as dtensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Replicate

from composable.errors import ConfigError, UsageError
from composable.layout import boxes
from composable.ragged_spec import RaggedLayout, RaggedShard, ragged_spec, slice_full
from composable.torch_private import DeviceMesh, Placement, dcp_state_dict, dtensor_new, state_dict_utils

__all__ = ["chunks_of", "distribute", "piece_at", "support_full_state_dicts", "write_items_of"]


def chunks_of(layout: RaggedLayout) -> list[ChunkStorageMetadata]:
    """Return the boxes that this rank's piece consists of; none where it owns nothing."""
    if not layout.shape.numel():
        # Without a chunk a tensor without elements would be missing from the checkpoint.
        return [ChunkStorageMetadata(torch.Size([0] * len(layout.shape)), layout.shape)] if layout.rank == 0 else []
    return [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in boxes(layout.shape, layout.lo, layout.hi)
    ]


def write_items_of(fqn: str, local: torch.Tensor, layout: RaggedLayout) -> list[WriteItem]:
    """Return one item a box. Replicas all offer theirs; the planner drops doubles."""
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=layout.shape),
        )
        for chunk in chunks_of(layout)
    ]


def piece_at(index: MetadataIndex, local: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Return the box that starts at ``index.offset`` as a view of the local tensor.

    Raises:
        ConfigError: This rank owns no such box.
    """
    flat = local.detach().view(-1)
    start = 0
    for chunk in chunks_of(layout):
        stop = start + chunk.sizes.numel()
        if index.offset is None or chunk.offsets == index.offset:
            return flat[start:stop].view(chunk.sizes)
        start = stop
    raise ConfigError(f"no piece of {index.fqn!r} starts at {index.offset} on rank {layout.rank}")


def distribute(
    cls: Any,
    full: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Cut a full tensor as ``placements`` say: torch's ``distribute_tensor`` for one ``RaggedShard``.

    Collective: the values of ``src_data_rank`` (a rank within each mesh dim) count. ``None``: every rank's own.

    Raises:
        ConfigError: Other placements than one ``RaggedShard`` and ``Replicate``.
    """
    dims = [dim for dim, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    others = [p for p in placements if not isinstance(p, (RaggedShard, Replicate))]
    if len(dims) != 1 or others or len(placements) != mesh.ndim:
        raise ConfigError(
            f"placements are {tuple(placements)} on a mesh of {mesh.ndim} dims",
            fix="give one RaggedShard, and Replicate on the other mesh dims",
        )
    ragged = placements[dims[0]]
    assert isinstance(ragged, RaggedShard), "chosen above"
    spec = ragged_spec(mesh, full.shape, full.dtype, ragged.bounds, mesh_dim=dims[0])
    full = full.detach()
    if full.device.type != mesh.device_type and not full.is_meta:
        full = full.to(mesh.device_type)
    if src_data_rank is not None and not full.is_meta:
        full = full.clone(memory_format=torch.contiguous_format)
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                dist.broadcast(full, group=mesh.get_group(dim), group_src=src_data_rank)
    local = slice_full(full, spec.layout).clone()
    return dtensor_new(cls, local, spec, requires_grad=False)


def support_full_state_dicts(cls: Any) -> None:
    """Make ``distribute_tensor`` and the loading of full state dicts accept ``RaggedShard``; once a process.

    Calls without a ``RaggedShard`` go to torch unchanged.
    """
    if not hasattr(dtensor.distribute_tensor, "knows_ragged"):
        distribute_tensor = _with_ragged_distribute(cls, dtensor.distribute_tensor)
        dtensor.distribute_tensor = distribute_tensor
        vars(state_dict_utils)["distribute_tensor"] = distribute_tensor
        state_dict_utils._distribute_tensors = _with_ragged_values(cls, state_dict_utils._distribute_tensors)
        for name in ("_distribute_state_dict", "_broadcast_state_dict"):
            setattr(dcp_state_dict, name, _with_ragged_scalars(cls, getattr(dcp_state_dict, name)))


def _with_ragged_distribute(cls: Any, original: Any) -> Any:
    @wraps(original)
    def distribute_tensor(
        tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        src_data_rank: int | None = 0,
    ) -> Any:
        if device_mesh is None or not any(isinstance(placement, RaggedShard) for placement in placements or ()):
            return original(tensor, device_mesh, placements, src_data_rank=src_data_rank)
        if isinstance(tensor, dtensor.DTensor):
            if tensor.device_mesh == device_mesh and tensor.placements == tuple(placements or ()):
                return tensor
            raise UsageError(f"tensor is already distributed as {tensor.placements}", fix="pass full_tensor()")
        return distribute(cls, tensor, device_mesh, placements or (), src_data_rank=src_data_rank)

    distribute_tensor.knows_ragged = True  # type: ignore[attr-defined]  # marks the wrapper
    return distribute_tensor


def _with_ragged_values(cls: Any, original: Any) -> Any:
    @wraps(original)
    def distribute_tensors(
        local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None
    ) -> None:
        others = []
        for key in keys:
            pair = local_state_dict.get(key)
            # torch marks what is still to be cut as (local DTensor, full tensor).
            if isinstance(pair, tuple) and type(pair[0]) is cls:
                local_state_dict[key] = _cut_into(cls, *pair)
            else:
                others.append(key)
        original(local_state_dict, others, device, pg)

    return distribute_tensors


def _with_ragged_scalars(cls: Any, original: Any) -> Any:
    """Wrap what leaves every scalar a plain one: right for step counters, not for a scalar parameter's state."""

    @wraps(original)
    def distribute_state_dict(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        scalars = {key: value for key, value in local.items() if type(value) is cls and value.dim() == 0}
        original(full, local, *args, **kwargs)
        for key, target in scalars.items():
            value = local.get(key)
            if type(value) is torch.Tensor:
                local[key] = _cut_into(cls, target, value)

    return distribute_state_dict


def _cut_into(cls: Any, target: Any, full: torch.Tensor) -> Any:
    piece = slice_full(full, target._spec.layout)
    if target.is_meta:
        return dtensor_new(cls, piece.detach().clone(), target._spec.cast(piece.dtype), requires_grad=False)
    target._local_tensor.detach().copy_(piece)
    return target
