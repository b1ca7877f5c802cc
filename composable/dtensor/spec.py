"""The cut of one parameter over the ranks.

A cut is ragged: every rank owns one contiguous range of the flattened parameter, of any
length, also none. All ranks hold the same bounds, so each has the ranges of all others. No communication.

Where tensor parallelism has split the parameter over other dims of the mesh, the cut divides a *block*: the part
that the ranks along the cut dim hold together. Ranks along the other dims have other blocks, and other bounds.

Terms: a *local* tensor is this rank's piece, ``[rows, *rest]`` when every bound falls on a
row of the block and 1-D otherwise; a *full* tensor has the parameter's shape.
"""

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import add
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.distributed import ReduceOp
from torch.distributed.tensor import Replicate, Shard

from composable.comm import Ranks
from composable.dtensor.packed import PackedPiece, memory_of
from composable.errors import ConfigError, UsageError
from composable.ground.torch_private import DeviceMesh, DTensorSpec, Placement, TensorMeta, modes_off
from composable.planning import (
    RaggedShard,
    boxes,
    in_memory_order,
    in_order_of_dims,
    local_shape,
    part_of_dim,
    strides_of,
)

if TYPE_CHECKING:  # they take long to import, and are needed only to save and load
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Label(Protocol):
    """The identity of a parameter. ``str(label)`` is its name in messages.

    Attributes:
        module: Name, in messages, of the module that owns it.
        everyone: All ranks that hold pieces of it, or copies of pieces; ``None``: its handle is gone.
        has_parts: On some of these ranks, modules of the same tree are on a part of the ranks.
    """

    @property
    def module(self) -> str: ...

    @property
    def everyone(self) -> Ranks | None: ...

    @property
    def has_parts(self) -> bool: ...


class Split(NamedTuple):
    """One split of a parameter into blocks, by a ``Shard`` of tensor parallelism."""

    mesh_dim: int  # The dim of the mesh that the split goes over.
    dim: int  # The dim of the parameter that is split.
    rank: int  # This rank within ``mesh_dim``.


class RaggedLayout:
    """The elements of a parameter that each rank owns; casts of a parameter and its gradient share the layout."""

    def __init__(
        self,
        mesh: DeviceMesh,
        mesh_dim: int,
        shape: torch.Size,
        bounds: tuple[int, ...],
        rank: int,
        order: tuple[int, ...] = (),
        splits: tuple[Split, ...] = (),
    ) -> None:
        self.mesh = mesh  # The mesh of the ranks.
        self.splits = splits  # The splits of the whole into blocks, the outermost split first; mostly empty.
        # The mesh dims over which ranks hold different elements: ``mesh_dim``, and the dims of the splits.
        self.cut_dims = (mesh_dim, *(split.mesh_dim for split in splits))
        # Order in which the dims are flattened, and lie in a full tensor's memory; empty: their own order.
        self.order = order
        # The mesh dim that the parameter is cut over; it is replicated over other dims without a split.
        self.mesh_dim = mesh_dim
        self.shape = shape  # Shape of the whole.
        self.bounds = bounds  # Bounds of the ranks in the block, see ``RaggedShard``.
        self.rank = rank  # This rank within ``mesh_dim``.
        self.lo = bounds[rank]  # First element that this rank owns.
        self.hi = bounds[rank + 1]  # The element after the last one that this rank owns.
        # block_shape: Shape of the block that is cut; without splits, the shape of the whole.
        # block_offsets: Where in the whole the block begins, for each dim.
        self.block_offsets, self.block_shape = self.block_at([split.rank for split in splits])
        self.local_shape = local_shape(self.block_shape, bounds, rank, order)  # Shape of this rank's piece.
        # Checkpoints take this rank's piece. False where another rank stores a copy of the block: it may be cut at
        # other bounds, and the pieces of both would overlap.
        self.is_stored = True
        self.stored_among: tuple[tuple[int, ...], ...] = ()  # The ranks along each dim of which one stores its copy.
        # Label of the parameter that was cut first; its gradient and the optimizer's state have its layout.
        self.label: Label | None = None
        others = {split.mesh_dim: Shard(split.dim) for split in splits}
        cut = RaggedShard(bounds, order)
        cut.layout = weakref.ref(self)
        # The placements that describe this layout to torch.
        self.placements: tuple[Placement, ...] = tuple(
            cut if dim == mesh_dim else others.get(dim, Replicate()) for dim in range(mesh.ndim)
        )
        self.specs: dict[torch.dtype, RaggedSpec] = {}  # The specs with this layout, by dtype.

    def __reduce__(self) -> tuple[object, ...]:
        # A pickle keeps the rank that wrote it, since it describes the piece of that rank.
        cut = self.bounds, self.rank, self.order, self.splits
        return RaggedLayout, (self.mesh, self.mesh_dim, self.shape, *cut), {"is_stored": self.is_stored}

    def block_at(self, places: Sequence[int]) -> tuple[tuple[int, ...], torch.Size]:
        """Return offset in the whole and shape of the block of the rank at ``places`` in the mesh dims of splits."""
        offsets, sizes = [0] * len(self.shape), [*self.shape]
        for split, place in zip(self.splits, places, strict=True):
            start, stop = part_of_dim(sizes[split.dim], self.mesh.size(split.mesh_dim), place)
            offsets[split.dim] += start
            sizes[split.dim] = stop - start
        return tuple(offsets), torch.Size(sizes)

    def move_to(self, mesh: DeviceMesh) -> None:
        """Lie on the ranks of another 1-D mesh of this size, in which this rank has the same place.

        All tensors with this layout move: a parameter, its gradient, its optimizer state and copies of them.
        """
        self.mesh = mesh
        for name in ("ranks", "split_ranks"):
            vars(self).pop(name, None)
        for spec in self.specs.values():
            spec.mesh = mesh

    @property
    def is_even(self) -> bool:
        """Every block has the same shape."""
        counts = [1] * len(self.shape)
        for split in self.splits:
            counts[split.dim] *= self.mesh.size(split.mesh_dim)
        return all(size % count == 0 for size, count in zip(self.shape, counts))

    @property
    def global_rank(self) -> int:
        """The global rank that owns this piece, for messages; needs no process group."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return self.rank
        place = [*coordinate]
        place[self.mesh_dim] = self.rank
        with modes_off():  # In case a graph is being made: torch 2.11 would make fake tensors of the numbers.
            return int(self.mesh.mesh[tuple(place)])

    @cached_property
    def ranks(self) -> Ranks:
        """The ranks that share the block."""
        return Ranks.of_mesh(self.mesh, self.mesh_dim)

    @cached_property
    def split_ranks(self) -> tuple[Ranks, ...]:
        """For each split, the ranks that hold its parts."""
        return tuple(Ranks.of_mesh(self.mesh, split.mesh_dim) for split in self.splits)

    @property
    def reduction_groups(self) -> tuple[Ranks, ...]:
        """The groups over which pieces have to be added up, one after the other, for a sum over the whole."""
        return (self.ranks, *self.split_ranks)

    def reduce(self, tensor: torch.Tensor, op: "ReduceOp.RedOpType") -> torch.Tensor:
        """Reduce a small tensor [any] over all ranks that hold different elements; as ``Ranks.reduce``."""
        for ranks in self.reduction_groups:
            tensor = ranks.reduce(tensor, op)
        return tensor

    def average(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the mean of ``grad`` [any] over all ranks whose gradients are averaged. Collective."""
        ranks = (self.label and self.label.everyone) or self.ranks
        # A new tensor: the incoming gradient may have other readers.
        return ranks.reduce(grad.contiguous() / ranks.size, ReduceOp.SUM)

    def matches(self, other: "RaggedLayout") -> bool:
        """Say whether the pieces of two tensors cover the same elements on every rank."""
        return self is other or (
            self.bounds == other.bounds
            and self.shape == other.shape
            and self.order == other.order
            and self.splits == other.splits
            and self.cut_dims == other.cut_dims
            and (self.mesh is other.mesh or self.mesh == other.mesh)
        )

    def empty_full(self, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Return a full tensor [shape] of undefined content, whose memory is in the layout's order."""
        return torch.empty_strided(self.shape, strides_of(self.shape, self.order), dtype=dtype, device=device)

    def empty_block(self, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Return a block [block_shape] of undefined content, whose memory is in the layout's order."""
        strides = strides_of(self.block_shape, self.order)
        return torch.empty_strided(self.block_shape, strides, dtype=dtype, device=device)

    def block_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the block [block_shape] of a full tensor [shape] that this rank shares; a view."""
        for dim in {split.dim for split in self.splits}:
            full = full.narrow(dim, self.block_offsets[dim], self.block_shape[dim])
        return full

    def flat(self, block: torch.Tensor) -> torch.Tensor:
        """Return a block [block_shape] as [numel], in the order of the cut; a view if its memory has that order."""
        return in_memory_order(block.reshape(self.block_shape) if self.order else block, self.order).reshape(-1)

    def unflat(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the block [block_shape] with the elements ``flat`` [numel], in the order of the cut; a view."""
        order = self.order or range(len(self.block_shape))
        return in_order_of_dims(flat.view([self.block_shape[dim] for dim in order]), self.order)


class RaggedSpec(DTensorSpec):
    """A ``DTensorSpec`` with one ``RaggedShard`` placement, and values precomputed for the hot path.

    A parameter, its gradient and its optimizer state share one object: equal layouts are then recognised by identity.
    """

    def __init__(self, layout: RaggedLayout, dtype: torch.dtype) -> None:
        strides = strides_of(layout.shape, layout.order)
        super().__init__(layout.mesh, layout.placements, tensor_meta=TensorMeta(layout.shape, strides, dtype))
        self.layout = layout  # The cut, shared by every dtype.
        self.dtype = dtype  # Element type.
        # This rank owns no element, and list operations leave the tensor out. False for integers: an operation that
        # refuses integers must do so on every rank.
        self.is_idle = layout.lo == layout.hi and dtype.is_floating_point
        self._casts = layout.specs
        self._casts[dtype] = self

    # The base is a dataclass with its own __eq__; without this line the subclass would not be hashable.
    __hash__ = DTensorSpec.__hash__

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        # `dataclasses.replace` names the fields: return torch's own spec, of which a ragged DTensor is made again.
        return DTensorSpec(**fields) if fields else super().__new__(cls)

    def cast(self, dtype: torch.dtype) -> "RaggedSpec":
        """Return the spec of the same cut in another dtype; the same object for the same dtype."""
        spec = self._casts.get(dtype)
        return RaggedSpec(self.layout, dtype) if spec is None else spec

    def __copy__(self) -> "RaggedSpec":
        return RaggedSpec(self.layout, self.dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> "RaggedSpec":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return RaggedSpec, (self.layout, self.dtype)


def ragged_spec(
    mesh: DeviceMesh,
    shape: Sequence[int],
    dtype: torch.dtype,
    bounds: Sequence[int],
    *,
    mesh_dim: int = -1,
    order: Sequence[int] = (),
    splits: Mapping[int, int] = MappingProxyType({}),
) -> RaggedSpec:
    """Describe a tensor that is cut at ``bounds`` over one dim of ``mesh`` and split or replicated over the others.

    Every rank makes the same call; no communication.

    Args:
        mesh: The ranks.
        shape: Shape of the whole tensor.
        dtype: Element type.
        bounds: One more than ``mesh_dim`` has ranks: rank ``r`` owns flat ``[bounds[r], bounds[r + 1])`` of the block.
        mesh_dim: The dim of the mesh; the last one by default.
        order: Order in which the dims are flattened, the outermost first; empty: their own order.
        splits: For other dims of the mesh, the dim of the tensor that each splits, as ``Shard`` does.

    Raises:
        ConfigError: Bounds, order or splits do not fit the mesh or the shape, or this rank is not in the mesh.
    """
    mesh_dim = mesh_dim % mesh.ndim
    size = torch.Size(shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError("this rank is not in the mesh", fix="make ragged tensors on the ranks of their mesh only")
    bounds = tuple(bounds)
    if len(bounds) != mesh.size(mesh_dim) + 1:
        raise ConfigError(f"{len(bounds)} bounds for a mesh dim of {mesh.size(mesh_dim)} ranks", fix="give ranks + 1")
    if order and len(order) != len(size):
        raise ConfigError(f"order {tuple(order)} for {len(size)} dims", fix="give every dim once, or none")
    found = []
    for other, dim in sorted(splits.items()):
        if not (0 <= other < mesh.ndim and other != mesh_dim and -len(size) <= dim < len(size)):
            what = f"dim {dim} of {list(size)} cannot be split over mesh dim {other} of {mesh.ndim}"
            raise ConfigError(what, fix="give dims of the tensor, and mesh dims other than that of the cut")
        found.append(Split(other, dim % len(size), coordinate[other]))
    layout = RaggedLayout(mesh, mesh_dim, size, bounds, coordinate[mesh_dim], tuple(order), tuple(found))
    block = layout.block_shape
    if bounds[-1] != block.numel():
        what = f"bounds {bounds} end before or after the {block.numel()} elements of {list(block)}"
        raise ConfigError(what, fix="end them at the number of elements of this rank's block")
    return RaggedSpec(layout, dtype)


def spec_of_placements(
    mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Placement]
) -> RaggedSpec:
    """Return the spec of a tensor with these placements: one ``RaggedShard``, ``Replicate`` and ``Shard``.

    Raises ``ConfigError`` if there are others, or they do not fit.
    """
    cuts = [(dim, placement) for dim, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    known = layout_of(mesh, placements)
    if known is not None and known.shape == torch.Size(shape):
        return known.specs.get(dtype) or RaggedSpec(known, dtype)
    others = [p for p in placements if type(p) not in (RaggedShard, Replicate, Shard)]
    if len(cuts) != 1 or others or len(placements) != mesh.ndim:
        raise ConfigError(
            f"placements are {tuple(placements)} on a mesh of {mesh.ndim} dims",
            fix="give one RaggedShard, and Replicate or Shard on the other mesh dims",
        )
    dim, cut = cuts[0]
    return ragged_spec(mesh, shape, dtype, cut.bounds, mesh_dim=dim, order=cut.order, splits=splits_of(placements))


def layout_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> RaggedLayout | None:
    """Return the layout, on this rank, of the parameter that has these placements; ``None``: not known."""
    for placement in placements:
        reference = placement.layout if isinstance(placement, RaggedShard) else None
        layout: RaggedLayout | None = None if reference is None else reference()
        if layout is not None and layout.placements == tuple(placements) and layout.mesh == mesh:
            return layout if mesh.get_local_rank(layout.mesh_dim) == layout.rank else None
    return None


def splits_of(placements: Sequence[Placement]) -> dict[int, int]:
    """Return the mesh dims that split a tensor, each with the tensor dim that it splits."""
    return {dim: placement.dim for dim, placement in enumerate(placements) if isinstance(placement, Shard)}


def replicated_spec(mesh: DeviceMesh, full: torch.Tensor) -> DTensorSpec:
    """Describe ``full``, of any shape and dtype, as held whole by every rank of ``mesh``."""
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensorSpec(mesh, tuple(Replicate() for _ in range(mesh.ndim)), tensor_meta=meta)


def slice_full(full: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Return this rank's piece [local_shape] of a full tensor [shape]; a view if its memory has the layout's order."""
    return slice_block(layout.block_of(full), layout)


def slice_block(block: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Return this rank's piece [local_shape] of a block [block_shape], as ``slice_full`` does."""
    return layout.flat(block)[layout.lo : layout.hi].view(layout.local_shape)


# -- in torch.distributed.checkpoint, which stores tensors as axis-aligned boxes: a flat range is a few boxes. Each box
# is saved from the local piece, and read into it at any world size: no tensor is communicated.


def chunks_of(layout: RaggedLayout) -> "list[ChunkStorageMetadata]":
    """Return the boxes of this rank's piece; an empty list if the rank owns nothing."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if not layout.shape.numel():
        # Without a chunk a tensor without elements would be missing from the checkpoint.
        return [ChunkStorageMetadata(torch.Size([0] * len(layout.shape)), layout.shape)] if layout.rank == 0 else []
    return [
        ChunkStorageMetadata(torch.Size(map(add, layout.block_offsets, offsets)), torch.Size(sizes))
        for offsets, sizes in boxes(layout.block_shape, layout.lo, layout.hi, layout.order)
    ]


def write_items_of(fqn: str, local: torch.Tensor, layout: RaggedLayout) -> "list[WriteItem]":
    """Return one write item for each box of ``local`` [local_shape]; ``UsageError`` on the meta device.

    All replicas with the same cut offer their items; whoever saves shares them out.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

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


def piece_at(index: "MetadataIndex", local: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Return the box that starts at ``index.offset`` as a view of the local tensor [local_shape].

    Raises ``ConfigError`` if this rank owns no such box.
    """
    values = PackedPiece.values_of(local)
    flat = values.detach().view(-1)
    start = 0
    for chunk in chunks_of(layout):
        stop = start + chunk.sizes.numel()
        if index.offset is None or chunk.offsets == index.offset:
            piece = _alone(flat[start:stop])
            if layout.order:
                piece = in_order_of_dims(piece.view([chunk.sizes[dim] for dim in layout.order]), layout.order)
            else:
                piece = piece.view(chunk.sizes)
            return piece if values is memory_of(local) else PackedPiece.around(piece, local, values)
        start = stop
    what = f"no piece of {index.fqn!r} starts at {index.offset} on rank {layout.global_rank}"
    raise ConfigError(what, fix="leave the offsets as the plan of torch.distributed.checkpoint has them")


def _alone(piece: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory with a storage of its own, if it is host memory.

    torch copies every tensor that is part of a larger storage before it writes it.
    """
    if piece.device.type != "cpu" or not piece.numel():
        return piece
    start = piece.storage_offset() * piece.itemsize
    storage = piece.untyped_storage()[start : start + piece.nbytes]
    return torch.empty(0, dtype=piece.dtype).set_(storage, 0, piece.shape, piece.stride())
