"""Ragged tensors in torch.distributed.checkpoint, which knows tensors as axis-aligned boxes.

A flat range of an n-dimensional tensor is a few boxes. Each is saved, and read back at any
world size, straight from and into the local piece: no tensor is communicated.

Loading *full* state dicts (``set_model_state_dict`` and its kin) goes through functions of torch
that refuse placements they do not know; ``support_full_state_dicts`` teaches them ours, and makes
those that load optimizers compare the groups first: torch loads what differs in part, or wrongly.
"""

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Replicate

from composable.collectives.mesh import device_of
from composable.collectives.ranks import agreed, raise_together
from composable.errors import ConfigError, UsageError
from composable.optim.names import (
    GroupNames,
    describe_optimizer,
    group_differences,
    names_by_alias,
    names_of_params,
)
from composable.planning.layout import boxes
from composable.ragged.spec import RaggedLayout, RaggedShard, ragged_spec, slice_full
from composable.saving.fit import entries_to_load, find_differences
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
            return _alone(flat[start:stop]).view(chunk.sizes)
        start = stop
    raise ConfigError(f"no piece of {index.fqn!r} starts at {index.offset} on rank {layout.rank}")


def _alone(piece: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a storage of its own, where it is the host's.

    torch copies every tensor that is part of a larger storage before it writes it.
    """
    if piece.device.type != "cpu" or not piece.numel():
        return piece
    start = piece.storage_offset() * piece.itemsize
    storage = piece.untyped_storage()[start : start + piece.nbytes]
    return torch.empty(0, dtype=piece.dtype).set_(storage, 0, piece.shape, piece.stride())


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
    """Make ``distribute_tensor``, ``redistribute`` and the loading of full state dicts accept ``RaggedShard``, once.

    Calls without a ``RaggedShard`` go to torch unchanged.
    """
    if not hasattr(dtensor.distribute_tensor, "knows_ragged"):
        distribute_tensor = _with_ragged_distribute(cls, dtensor.distribute_tensor)
        dtensor.distribute_tensor = distribute_tensor
        dtensor.DTensor.redistribute = _with_ragged_target(  # type: ignore[method-assign]  # meant
            cls, dtensor.DTensor.redistribute
        )
        vars(state_dict_utils)["distribute_tensor"] = distribute_tensor
        state_dict_utils._distribute_tensors = _with_ragged_values(cls, state_dict_utils._distribute_tensors)
        for name in ("_distribute_state_dict", "_broadcast_state_dict"):
            setattr(dcp_state_dict, name, _with_ragged_scalars(cls, getattr(dcp_state_dict, name)))
        load_optimizers = _with_compared_groups(cls, dcp_state_dict._load_optim_state_dict)
        dcp_state_dict._load_optim_state_dict = load_optimizers
        dcp_state_dict._load_model_state_dict = _with_check(cls, dcp_state_dict._load_model_state_dict)


def _with_check(cls: Any, original: Any) -> Any:
    """Wrap what would take a full state dict with missing keys, or find other keys after writing some."""

    @wraps(original)
    def load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
        is_given = bool(state_dict) or info.broadcast_from_rank0
        if info.handle_model and is_given and (info.full_state_dict or info.broadcast_from_rank0):
            named, opaque = entries_to_load(model)
            # As torch names what torch.compile wraps.
            expected = {key.replace("_orig_mod.", ""): value for key, value in named.items()}
            ragged = next((value for value in expected.values() if isinstance(value, cls)), None)
            if ragged is not None:
                error = None
                if not info.broadcast_from_rank0 or dist.get_rank() == 0:
                    differences = find_differences(expected, list(state_dict), state_dict.__getitem__, opaque=opaque)
                    error = differences.error(strict=info.strict)
                assert dist.group.WORLD is not None, "ragged tensors need ranks"
                raise_together(error, dist.group.WORLD, torch.device(ragged.device_mesh.device_type))
        return original(model, state_dict, info)

    return load_model_state_dict


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


def _with_ragged_target(cls: Any, original: Any) -> Any:
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
        return distribute(cls, tensor.full_tensor(), tensor.device_mesh, placements or (), src_data_rank=None)

    return redistribute


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
    if full.shape != target.shape:
        raise ConfigError(f"a full tensor of shape {list(full.shape)} for one of shape {list(target.shape)}")
    piece = slice_full(full, target._spec.layout)
    if target.is_meta:
        return dtensor_new(cls, piece.detach().clone(), target._spec.cast(piece.dtype), requires_grad=False)
    target._local_tensor.detach().copy_(piece)
    return target


def _with_compared_groups(cls: Any, original: Any) -> Any:
    """Wrap what loads optimizer state by FQN. Without ``strict`` and without ragged parameters it is torch's own."""

    @wraps(original)
    def load_optim_state_dict(
        model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state_dict: dict[str, Any], info: Any
    ) -> None:
        ragged = next((param for param in model.parameters() if isinstance(param, cls)), None)
        if info.handle_optim and info.strict and ragged is not None:
            layout: RaggedLayout = ragged._spec.layout
            # With `broadcast_from_rank0` torch talks to all ranks, and the dict is on the first.
            group = dist.group.WORLD if info.broadcast_from_rank0 else layout.group
            assert group is not None, "there are ragged parameters, so there is a group"
            with agreed(group, device_of(layout.mesh)):
                lines = optimizer_state_differences(model, optimizers, state_dict) if state_dict else []
                if lines:
                    raise ConfigError(
                        "\n  - ".join(["the optimizer state dict does not fit:", *lines]),
                        fix="make the optimizer as it was, or pass StateDictOptions(strict=False)",
                    )
        original(model, optimizers, state_dict, info)

    return load_optim_state_dict


def optimizer_state_differences(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state_dict: Mapping[str, Any]
) -> list[str]:
    """Return a line for each thing in which ``optimizers`` differ from a state dict of torch, keyed by FQN.

    Args:
        model: Has the parameters.
        optimizers: Of which ``state_dict`` may hold more: groups of other parameters of the model are left alone.
        state_dict: Nested or flattened.
    """
    names, aliases = names_of_params(model), names_by_alias(model)
    lines = []
    for optimizer in optimizers:
        current = describe_optimizer(optimizer, names).groups
        own = {name for group in current for name in group.params}
        if "state" not in state_dict:
            saved, with_state = _flattened_groups(state_dict, current), {key.rpartition(".")[0] for key in state_dict}
            with_state = {name for name in own if f"state.{name}" in with_state}
        elif all(isinstance(key, int) for key in state_dict["state"]) and state_dict["state"]:
            continue  # by position, not by FQN
        else:
            saved = _nested_groups(state_dict["param_groups"], aliases, own)
            with_state = {aliases.get(name, name) for name in state_dict["state"]}
        lines += group_differences(saved, current, "the state dict")
        trained = [name for param, name in names.items() if name in own and param.requires_grad]
        without = [name for name in trained if name not in with_state] if with_state else []
        if without:
            lines.append(f"no state for: {', '.join(without)}")
        strangers = sorted(with_state - set(names.values()))
        if strangers:
            lines.append(f"state for what is not in the model: {', '.join(strangers)}")
    return lines


def _nested_groups(groups: Sequence[Mapping[str, Any]], aliases: Mapping[str, str], own: set[str]) -> list[GroupNames]:
    found = []
    for group in groups:
        params = [aliases.get(name, name) for name in group["params"]]
        is_of_another = params and all(name in aliases and name not in own for name in params)
        if not is_of_another:
            found.append(GroupNames.of(group, params))
    return found


def _flattened_groups(flat: Mapping[str, Any], current: Sequence[GroupNames]) -> list[GroupNames]:
    """Return what ``flat`` has of the groups in ``current``; it does not say how its own were cut."""
    found = []
    for group in current:
        has = {name: [key for key in group.settings if f"param_groups.{name}.{key}" in flat] for name in group.params}
        params = [name for name in group.params if has[name] or not group.settings]
        settings = [key for key in group.settings if all(key in has[name] for name in params)]
        found.append(GroupNames(tuple(params), tuple(settings)))
    return found
