"""How one parameter is cut over the ranks of a mesh dim, and what moves between cut and whole.

A cut is ragged: every rank owns one contiguous range of the flattened parameter, of any
length, also none. All ranks hold the same bounds, so each knows what the others own.
Nothing here is a tensor subclass: local tensors in, local or full tensors out.

Terms: a *local* tensor is this rank's piece, ``[rows, *rest]`` when every bound falls on a
row and 1-D otherwise; a *full* tensor has the parameter's shape.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch.distributed.tensor import Replicate

from composable.collectives import Ranks
from composable.errors import ConfigError
from composable.planning import RaggedShard, in_memory_order, in_order_of_dims, local_shape
from composable.torch_private import (
    DeviceMesh,
    DTensorSpec,
    Placement,
    TensorMeta,
    is_tracing,
    traceable_collectives,
    without_modes,
)

__all__ = [
    "Label",
    "RaggedLayout",
    "RaggedSpec",
    "gather_full",
    "ragged_spec",
    "rebuild_spec",
    "replicated_spec",
    "slice_full",
]


class Label(Protocol):
    """Who a parameter is. As text, what messages call it.

    Attributes:
        key: Equal on all ranks, and another one for each parameter that they share.
        module: What messages call the module that owns it.
        everyone: All ranks that hold pieces of it, or copies of pieces; ``None``: it is gone.
    """

    @property
    def key(self) -> str: ...

    @property
    def module(self) -> str: ...

    @property
    def everyone(self) -> Ranks | None: ...


class RaggedLayout:
    """Which elements of a parameter each rank owns; what casts of a parameter and its gradient share.

    Attributes:
        mesh: The ranks.
        mesh_dim: The dim of it that the parameter is cut over; replicated over the others.
        shape: Shape of the whole.
        bounds: See ``RaggedShard``.
        order: In which the dims are flattened, and lie in a full tensor's memory; empty: as they are numbered.
        rank: This rank within ``mesh_dim``.
        lo: First element that this rank owns.
        hi: Past the last one.
        local_shape: Shape of this rank's piece.
    """

    __slots__ = (
        "_key",
        "_label",
        "_placements",
        "_ranks",
        "bounds",
        "hi",
        "lo",
        "local_shape",
        "mesh",
        "mesh_dim",
        "order",
        "rank",
        "shape",
    )

    def __init__(
        self,
        mesh: DeviceMesh,
        mesh_dim: int,
        shape: torch.Size,
        bounds: tuple[int, ...],
        rank: int,
        order: tuple[int, ...] = (),
    ) -> None:
        self.mesh = mesh
        self.order = order
        self.mesh_dim = mesh_dim
        self.shape = shape
        self.bounds = bounds
        self.rank = rank
        self.lo = bounds[rank]
        self.hi = bounds[rank + 1]
        self.local_shape = local_shape(shape, bounds, rank, order)
        self._ranks: Ranks | None = None
        self._key: str | None = None
        self._label: Label | None = None
        ragged = RaggedShard(bounds, order)
        self._placements: tuple[Placement, ...] = tuple(
            ragged if dim == mesh_dim else Replicate() for dim in range(mesh.ndim)
        )

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._placements

    @property
    def global_rank(self) -> int:
        """What messages call the rank that owns this piece; needs no process group."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return self.rank
        place = [*coordinate]
        place[self.mesh_dim] = self.rank
        with without_modes():  # Shown maybe while a graph is made: torch 2.11 would make fake tensors of the numbers.
            return int(self.mesh.mesh[tuple(place)])

    @property
    def ranks(self) -> Ranks:
        """Those that share the parameter."""
        if self._ranks is None:
            self._ranks = Ranks.of_mesh(self.mesh, self.mesh_dim)
        return self._ranks

    @property
    def label(self) -> Label | None:
        """The parameter that was cut first; its gradient and the optimizer's state have its layout."""
        return self._label

    @label.setter
    def label(self, label: Label) -> None:
        self._label, self._key = label, None

    @property
    def key(self) -> str:
        """What ranks compare before they exchange pieces."""
        if self._key is None:
            mesh, who = self.mesh, "" if self._label is None else self._label.key
            dims = f"{mesh.device_type} {mesh.mesh_dim_names} {tuple(mesh.shape)} {self.mesh_dim}"
            self._key = f"{who} {tuple(self.shape)} {self.bounds} {self.order} {dims}"
        return self._key

    def shares_ranks(self, other: "RaggedLayout") -> bool:
        """Say whether two tensors are cut over the same dim of the same mesh."""
        return self.mesh_dim == other.mesh_dim and (self.mesh is other.mesh or self.mesh == other.mesh)

    def matches(self, other: "RaggedLayout") -> bool:
        """Say whether the pieces of two tensors cover the same elements on every rank."""
        return self is other or (
            self.bounds == other.bounds
            and self.shape == other.shape
            and self.order == other.order
            and self.shares_ranks(other)
        )

    def empty_full(self, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Return a full tensor of undefined content, whose memory is in the layout's order."""
        if not self.order:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return in_order_of_dims(
            torch.empty([self.shape[dim] for dim in self.order], dtype=dtype, device=device), self.order
        )

    def flat(self, full: torch.Tensor) -> torch.Tensor:
        """Return a full tensor [numel] in the order in which it is cut; a view where that is its memory's."""
        return in_memory_order(full.reshape(self.shape) if self.order else full, self.order).reshape(-1)


class RaggedSpec(DTensorSpec):
    """A ``DTensorSpec`` with one ``RaggedShard`` placement, and what the hot path wants precomputed.

    A parameter, its gradient and its optimizer state share one object: equal layouts are
    then recognised by identity.

    Attributes:
        layout: The cut, shared by every dtype.
        dtype: Element type.
        is_idle: This rank owns no element, and in-place arithmetic may skip it. Not for integers:
            an operation that refuses them must do so on every rank.
    """

    def __init__(self, layout: RaggedLayout, dtype: torch.dtype) -> None:
        strides = _strides(layout.shape, layout.order)
        super().__init__(layout.mesh, layout.placements, tensor_meta=TensorMeta(layout.shape, strides, dtype))
        self.layout = layout
        self.dtype = dtype
        self.is_idle = layout.lo == layout.hi and dtype.is_floating_point
        self._casts: dict[torch.dtype, RaggedSpec] = {dtype: self}
        self._key: tuple[str, str] | None = None

    @property
    def key(self) -> str:
        """What ranks compare before they exchange pieces of a tensor."""
        of_layout, known = self.layout.key, self._key
        if known is None or known[0] is not of_layout:
            known = self._key = of_layout, f"{of_layout} {self.dtype}"
        return known[1]

    # A dataclass with its own __eq__ in the base; without this line the subclass would not be hashable.
    __hash__ = DTensorSpec.__hash__

    def cast(self, dtype: torch.dtype) -> "RaggedSpec":
        """Return the spec of the same cut in another dtype; the same object for the same dtype."""
        spec = self._casts.get(dtype)
        if spec is None:
            spec = RaggedSpec(self.layout, dtype)
            spec._casts = self._casts
            self._casts[dtype] = spec
        return spec

    def __copy__(self) -> "RaggedSpec":
        return RaggedSpec(self.layout, self.dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> "RaggedSpec":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        layout = self.layout
        return (
            rebuild_spec,
            (layout.mesh, layout.mesh_dim, tuple(layout.shape), self.dtype, layout.bounds, layout.rank, layout.order),
        )


def ragged_spec(
    mesh: DeviceMesh,
    shape: Sequence[int],
    dtype: torch.dtype,
    bounds: Sequence[int],
    *,
    mesh_dim: int = -1,
    order: Sequence[int] = (),
) -> RaggedSpec:
    """Describe a tensor that is cut at ``bounds`` over one dim of ``mesh`` and replicated over the others.

    Every rank makes the same call; no communication.

    Args:
        mesh: The ranks.
        shape: Shape of the whole tensor.
        dtype: Element type.
        bounds: One more than ``mesh_dim`` has ranks: rank ``r`` owns flat ``[bounds[r], bounds[r + 1])``.
        mesh_dim: The dim of the mesh; the last one by default.
        order: In which the dims are flattened, the outermost first; empty: as they are numbered.

    Raises:
        ConfigError: Bounds or order do not fit the mesh or the shape, or this rank is not in the mesh.
    """
    mesh_dim = mesh_dim % mesh.ndim
    size = torch.Size(shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError("this rank is not in the mesh", fix="make ragged tensors on the ranks of their mesh only")
    bounds = tuple(bounds)
    if len(bounds) != mesh.size(mesh_dim) + 1:
        raise ConfigError(f"{len(bounds)} bounds for a mesh dim of {mesh.size(mesh_dim)} ranks", fix="give one more")
    if bounds[-1] != size.numel():
        raise ConfigError(f"bounds {bounds} end before or after the {size.numel()} elements of {list(size)}")
    if order and len(order) != len(size):
        raise ConfigError(f"order {tuple(order)} for {len(size)} dims", fix="give every dim once, or none")
    return RaggedSpec(RaggedLayout(mesh, mesh_dim, size, bounds, coordinate[mesh_dim], tuple(order)), dtype)


def rebuild_spec(
    mesh: DeviceMesh,
    mesh_dim: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bounds: tuple[int, ...],
    rank: int,
    order: tuple[int, ...] = (),
) -> RaggedSpec:
    """Restore a pickled spec; keeps the rank that wrote it, whose piece it describes."""
    return RaggedSpec(RaggedLayout(mesh, mesh_dim, torch.Size(shape), bounds, rank, order), dtype)


def replicated_spec(mesh: DeviceMesh, full: torch.Tensor) -> DTensorSpec:
    """Describe ``full`` as held whole by every rank of ``mesh``."""
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensorSpec(mesh, tuple(Replicate() for _ in range(mesh.ndim)), tensor_meta=meta)


def slice_full(full: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Return this rank's piece of a full tensor, in the local shape; a view where its memory is in the cut's order."""
    return layout.flat(full)[layout.lo : layout.hi].view(layout.local_shape)


def gather_full(local: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Return the full tensor on every rank, fresh and dense, its memory in the layout's order.

    Collective: all ranks of the layout's group, same order.
    """
    bounds, world_size = layout.bounds, len(layout.bounds) - 1
    device, home = torch.device(layout.mesh.device_type), local.device
    if local.is_meta:
        return layout.empty_full(local.dtype, home)
    # Offloaded to the host: the group talks in device tensors only.
    source = local.detach().reshape(-1)
    source = source if home.type == device.type else source.to(device)
    full = layout.empty_full(local.dtype, source.device)
    if is_tracing() and world_size > 1 and full.numel():
        return _traceable_gather(source, layout).to(home)
    # Bytes, because not every backend knows every dtype.
    full_bytes, item = layout.flat(full).view(torch.uint8), local.element_size()
    full_bytes[layout.lo * item : layout.hi * item].copy_(source.contiguous().view(torch.uint8))
    layout.ranks.gather_ragged(full_bytes, [bound * item for bound in bounds])
    return full if home.type == device.type else full.to(home)


def _traceable_gather(source: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Gather as a graph can hold it: torch.compile does not see what other collectives write into lists."""
    sizes = [hi - lo for lo, hi in pairwise(layout.bounds)]
    piece = max(sizes)
    padded = torch.cat([source, source.new_zeros(piece - source.numel())])
    gathered = traceable_collectives.all_gather_tensor(padded, 0, layout.ranks.process_group)
    pieces = [gathered[rank * piece : rank * piece + size] for rank, size in enumerate(sizes)]
    whole = torch.cat(pieces)
    if not layout.order:
        return whole.view(layout.shape)
    return in_order_of_dims(whole.view([layout.shape[dim] for dim in layout.order]), layout.order)


def _strides(shape: torch.Size, order: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
