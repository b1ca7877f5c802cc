"""torch's own functions that take placements, taught ours: ``distribute_tensor`` and ``redistribute``.

Calls without a ``RaggedShard`` go to torch unchanged.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import Replicate, Shard

from composable.collectives import Ranks
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.planning import RaggedShard
from composable.ragged.lockstep import confirm_layout, is_parameter
from composable.ragged.spec import ragged_spec, slice_full, splits_of
from composable.ragged.tensor import RaggedDTensor
from composable.torch_private import DeviceMesh, Placement, replace_body

__all__ = ["distribute", "teach_torch"]


def distribute(
    full: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> RaggedDTensor:
    """Cut a full tensor as ``placements`` say: torch's ``distribute_tensor`` for one ``RaggedShard``.

    Collective: the values of ``src_data_rank`` (a rank within each mesh dim) count. ``None``: every rank's own.

    Raises:
        ConfigError: Other placements than one ``RaggedShard``, ``Replicate`` and ``Shard``.
        DesyncError: On every rank, where they run different operations on ragged tensors.
    """
    dims = [dim for dim, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    others = [p for p in placements if type(p) not in (RaggedShard, Replicate, Shard)]
    if len(dims) != 1 or others or len(placements) != mesh.ndim:
        raise ConfigError(
            f"placements are {tuple(placements)} on a mesh of {mesh.ndim} dims",
            fix="give one RaggedShard, and Replicate or Shard on the other mesh dims",
        )
    ragged = placements[dims[0]]
    assert isinstance(ragged, RaggedShard), "chosen above"
    splits = splits_of(placements)
    spec = ragged_spec(mesh, full.shape, full.dtype, ragged.bounds, mesh_dim=dims[0], order=ragged.order, splits=splits)
    full = full.detach()
    if full.device.type != mesh.device_type and not full.is_meta:
        full = full.to(mesh.device_type)
    if src_data_rank is not None and not full.is_meta:
        full = full.clone(memory_format=torch.contiguous_format)
        for dim in range(mesh.ndim):
            ranks = Ranks.of_mesh(mesh, dim)
            confirm_layout("distribute_tensor", ranks, spec.layout, full.dtype)
            ranks.broadcast(full, src_data_rank)
    local = slice_full(full, spec.layout).clone()
    return RaggedDTensor.wrap(local, spec)


def teach_torch() -> None:
    """Make ``distribute_tensor`` and ``redistribute`` accept ``RaggedShard``; once.

    Who imported ``distribute_tensor`` before holds torch's function itself, so it is that function
    whose body changes, not a name in a module.
    """
    if not hasattr(dtensor.distribute_tensor, "__wrapped__"):
        replace_body(dtensor.distribute_tensor, _distribute_tensor)
        dtensor.DTensor.redistribute = _with_ragged_target(  # type: ignore[method-assign]  # meant
            dtensor.DTensor.redistribute
        )


def _distribute_tensor(
    original: Any,
    tensor: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    if device_mesh is None or not any(isinstance(placement, RaggedShard) for placement in placements or ()):
        if is_parameter(tensor):
            raise UsageError(
                f"distribute_tensor of a parameter {list(tensor.shape)} that fully_shard has sharded",
                at=f"{place_of_rank()}, parameter {str(tensor._spec.layout.label)!r}",
                fix="call parallelize_module before fully_shard",
            )
        return original(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    if isinstance(tensor, dtensor.DTensor):
        if tensor.device_mesh == device_mesh and tensor.placements == tuple(placements or ()):
            return tensor
        raise UsageError(f"tensor is already distributed as {tensor.placements}", fix="pass full_tensor()")
    return distribute(tensor, device_mesh, placements or (), src_data_rank=src_data_rank)


def _with_ragged_target(original: Any) -> Any:
    @wraps(original)
    def redistribute(
        tensor: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> Any:
        # torch leaves the pieces as they are and calls them ragged.
        if not any(isinstance(placement, RaggedShard) for placement in placements or ()):
            return original(tensor, device_mesh, placements, **options)
        if device_mesh is not None and device_mesh != tensor.device_mesh:
            raise ConfigError("redistribute changes placements, not the mesh", fix="pass placements only")
        if options.get("forward_dtype") or options.get("backward_dtype"):
            raise ConfigError("redistribute to ragged bounds does not cast", fix="cast with .to() first")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise UsageError("a cut at ragged bounds has no gradient", fix="call detach() first, or use no_grad()")
        return distribute(tensor.full_tensor(), tensor.device_mesh, placements or (), src_data_rank=None)

    return redistribute
