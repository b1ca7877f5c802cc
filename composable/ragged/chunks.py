"""Ragged tensors in torch.distributed.checkpoint, which knows tensors as axis-aligned boxes.

A flat range of an n-dimensional tensor is a few boxes. Each is saved, and read back at any
world size, straight from and into the local piece: no tensor is communicated.
"""

from operator import add

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from composable.errors import ConfigError, UsageError
from composable.planning import boxes, in_order_of_dims
from composable.ragged.spec import RaggedLayout

__all__ = ["chunks_of", "piece_at", "write_items_of"]


def chunks_of(layout: RaggedLayout) -> list[ChunkStorageMetadata]:
    """Return the boxes that this rank's piece consists of; none where it owns nothing."""
    if not layout.shape.numel():
        # Without a chunk a tensor without elements would be missing from the checkpoint.
        return [ChunkStorageMetadata(torch.Size([0] * len(layout.shape)), layout.shape)] if layout.rank == 0 else []
    return [
        ChunkStorageMetadata(torch.Size(map(add, layout.block_offsets, offsets)), torch.Size(sizes))
        for offsets, sizes in boxes(layout.block_shape, layout.lo, layout.hi, layout.order)
    ]


def write_items_of(fqn: str, local: torch.Tensor, layout: RaggedLayout) -> list[WriteItem]:
    """Return one item a box. Replicas all offer theirs, where they are cut alike; the planner drops doubles.

    Raises:
        UsageError: There are no values to write.
    """
    if local.is_meta:
        raise UsageError(f"{fqn!r} is on the meta device: there is nothing to save", fix="materialize the model first")
    if not layout.is_stored:
        return []
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
            piece = _alone(flat[start:stop])
            if not layout.order:
                return piece.view(chunk.sizes)
            return in_order_of_dims(piece.view([chunk.sizes[dim] for dim in layout.order]), layout.order)
        start = stop
    raise ConfigError(f"no piece of {index.fqn!r} starts at {index.offset} on rank {layout.global_rank}")


def _alone(piece: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a storage of its own, where it is the host's.

    torch copies every tensor that is part of a larger storage before it writes it.
    """
    if piece.device.type != "cpu" or not piece.numel():
        return piece
    start = piece.storage_offset() * piece.itemsize
    storage = piece.untyped_storage()[start : start + piece.nbytes]
    return torch.empty(0, dtype=piece.dtype).set_(storage, 0, piece.shape, piece.stride())
