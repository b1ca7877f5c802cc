"""Full state dicts: gathered to one rank, or loaded from one rank, a handle at a time.

Sharded state dicts are torch's own ``model.state_dict()``, which needs nothing of this file.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, distribute_tensor

from composable.arguments import check_bool, check_device
from composable.collectives import ModelRanks, Ranks
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.features import by_grid, collect_whole, spread_whole
from composable.ragged import RaggedDTensor, cast_dtype
from composable.saving.entries import (
    Entries,
    batches,
    entries_now,
    entries_of,
    has_meta,
    largest_handle_bytes,
    ranks_of,
)
from composable.saving.fit import Differences, find_differences
from composable.saving.room import make_room
from composable.saving.selection import Names

__all__ = [
    "IncompatibleKeys",
    "check_float",
    "full_state_dict",
    "gather_values",
    "load_full_state_dict",
    "max_bytes_of",
    "spread_values",
]

# Small tensors travel together up to this many bytes, also where every handle is smaller.
_LEAST_BATCH_BYTES = 2**20


class IncompatibleKeys(NamedTuple):
    """Keys that did not match, as ``torch.nn.Module.load_state_dict`` returns them.

    Attributes:
        missing_keys: The model has them, the state dict did not.
        unexpected_keys: The state dict had them, the model does not.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.no_grad()
def full_state_dict(
    model: nn.Module,
    *,
    dst: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    names: Names | None = None,
) -> dict[str, Any]:
    """Return on one rank what ``state_dict()`` of the plain model would be, with full plain tensors.

    Collective: all ranks that share the model, between steps; also before the first forward. Values go
    from each owner straight into the result. Beside the result at most the bytes of the largest handle
    are allocated, on any rank.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        dst: Which of the ranks gets the values: of the shard group, or of all mesh dims under tensor parallelism.
        dtype: Of floating-point tensors in the result; default: their own.
        device: Of the tensors in the result.
        names: Which entries: a function that says of each FQN, as in ``state_dict()``, whether it is wanted, or a
            list or set of them. All ranks alike. Default: all.

    Returns:
        On ``dst`` an ordered dict with the keys, order and module versions of the plain model: parameters,
        persistent buffers, extra state, as far as ``names`` wants them. Tensors are fresh; names that share one in
        the model share it here.
        Buffers, and parameters that are not sharded, are those of ``dst``. On other ranks an empty dict.

    Raises:
        UsageError: The model is not annotated, a forward or backward runs, or parameters are on the meta device.
        ConfigError: ``dst`` is no rank of the group, ``dtype`` no floating-point type; ``names`` is neither a function
            nor FQNs of the model, or wants none.
        DesyncError: The ranks made different calls, or ``names`` wants other entries on other ranks.
    """
    model_ranks = ranks_of(model, names)
    ranks = model_ranks.everyone
    with ranks.agreed():
        check_device("device", device)
        device = torch.device(device)
        ranks.check_member("dst", dst)
        check_float(dtype)
    entries = entries_of(model, ranks, ("full_state_dict", dst, dtype), names=names)
    fulls: dict[int, torch.Tensor] = {}
    unique = {id(tensor): tensor for tensor in entries.tensors().values()}
    for batch in batches((("", tensor) for tensor in unique.values()), max_bytes_of(entries)):
        tensors = [tensor for _, tensor in batch]
        values = gather_values(tensors, model_ranks, dst, dtype=dtype, device=device)
        fulls |= {id(tensor): value for tensor, value in zip(tensors, values or ())}
    result: OrderedDict[str, Any] = OrderedDict()
    if ranks.rank == dst:
        for key, value in entries.values.items():
            result[key] = fulls[id(value)] if isinstance(value, torch.Tensor) else value
        if entries.metadata is not None:
            result._metadata = entries.metadata  # type: ignore[attr-defined]  # where torch keeps it
    return result


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    src: int = 0,
    strict: bool = True,
    names: Names | None = None,
) -> IncompatibleKeys:
    """Load a full state dict that only one rank has, into the shards of every rank.

    Collective: all ranks that share the model, between steps; also before the first forward, and onto a model
    on the meta device, of which shards and buffers get memory as far as there are values. Every key is
    checked on every rank before anything is changed. Values go batch by batch, a batch no larger than the largest
    handle, from ``src`` straight into the shards: no other rank ever holds a full copy. Other
    dtypes are cast. Buffers and parameters that are not sharded are broadcast.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        state_dict: On ``src``: full tensors by key, on any device, also memory-mapped, or a mapping that reads
            values on demand. Of such a mapping ``keys()`` is used, ``[key]`` once for each key, and ``shape_of(key)``,
            which gives a shape without reading; one without that method is asked for each value twice.
            On other ranks it is not used; ``None`` will do.
        src: Which of the ranks has the state dict, as ``dst`` of ``full_state_dict``.
        strict: Every key of the model has to be there, and no other.
        names: Load a part of the model, and let that stand for the model in ``strict``: a function that says of each
            FQN whether it is part of it, or a list or set of them. All ranks alike. Default: all.

    Returns:
        The missing and unexpected keys, on every rank; empty if ``strict``.

    Raises:
        StateDictError: On every rank: keys are missing, unexpected or of another shape, all in one error; nothing was
            changed.
        ConfigError: An argument is wrong.
        UsageError: The model is not annotated, or a forward or backward runs.
        DesyncError: The ranks made different calls, ``names`` wants other entries on other ranks, or reading a value
            failed on ``src``, which raises what happened; batches before it are loaded.
    """
    model_ranks = ranks_of(model, names)
    ranks = model_ranks.everyone
    with ranks.agreed():
        ranks.check_member("src", src)
        check_bool("strict", strict)
    options = ("load_full_state_dict", src, strict)
    entries = entries_of(model, ranks, options, names=names, permits_meta=True)
    is_source = ranks.rank == src
    differences = Differences()
    with ranks.agreed():
        if is_source:
            differences = _compare(entries, state_dict)
            error = differences.error(strict=strict)
            if error is not None:
                raise error
    differences = ranks.object_of(src, differences)
    missing = set(differences.missing)
    given = [key for key in entries.values if key not in missing]
    limit = max_bytes_of(entries)
    if has_meta(entries.values.values()):
        for name, module in model.named_modules():
            make_room(module, dict.fromkeys(given), f"{name}." if name else "", {})
        # The modules hold other buffers now.
        entries = entries_now(model)
    _spread(entries, given, state_dict if is_source else None, model_ranks, src, limit)
    _finish(model, entries, given, state_dict if is_source else None, ranks, src)
    return IncompatibleKeys(list(differences.missing), list(differences.unexpected))


def check_float(dtype: torch.dtype | None) -> None:
    """Raise unless ``dtype`` is one that weights are cast to.

    Raises:
        ConfigError: It is not.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"dtype is {dtype!r}", fix="pass a floating-point torch.dtype, or None to keep each tensor's own"
        )


def max_bytes_of(entries: Entries) -> int:
    """Return how many bytes of full values may be under way at once; the same on all ranks with these entries."""
    return max(largest_handle_bytes(entries.settable().values()), _LEAST_BATCH_BYTES)


def gather_values(
    tensors: Sequence[torch.Tensor],
    ranks: ModelRanks,
    dst: int | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device | None,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor] | None:
    """Return full values on rank ``dst``, or on every rank where that is ``None``: fresh, or in ``out``. Collective."""
    ragged = [tensor for tensor in tensors if isinstance(tensor, RaggedDTensor)]
    into: dict[int, torch.Tensor] = {}
    if out is not None:
        into = {id(tensor): target for tensor, target in zip(tensors, out, strict=True)}
    whole: dict[int, torch.Tensor] = {}
    for grid, alike in by_grid(ragged):
        targets = [into[id(tensor)] for tensor in alike] if out is not None else None
        fulls_of_grid = collect_whole(alike, grid, ranks, dst, dtype=dtype, device=device, out=targets)
        whole.update(zip(map(id, alike), fulls_of_grid or ()))
    fulls: list[torch.Tensor] = []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, RaggedDTensor):
            fulls += [whole[id(tensor)]] if id(tensor) in whole else []
            continue
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if out is not None:
            fulls.append(out[index].copy_(value.detach()))
        elif dst in (None, ranks.rank):
            # Not preserving strides: what a view leaves out would be kept alive.
            fulls.append(
                value.detach().to(
                    device or value.device,
                    cast_dtype(value, dtype),
                    copy=True,
                    memory_format=torch.contiguous_format,
                )
            )
    return fulls if dst in (None, ranks.rank) else None


def _compare(entries: Entries, state_dict: Mapping[str, Any] | None) -> Differences:
    if not isinstance(state_dict, Mapping):
        raise ConfigError(
            f"state_dict is a {type(state_dict).__name__}, not a mapping, on the rank that should have it",
            at=place_of_rank(),
            fix="pass the full state dict on rank src",
        )
    shape_of = getattr(state_dict, "shape_of", None)
    expected = {key: value if isinstance(value, torch.Tensor) else None for key, value in entries.values.items()}
    return find_differences(expected, list(state_dict.keys()), shape_of or state_dict.__getitem__)


def _spread(
    entries: Entries,
    given: list[str],
    state_dict: Mapping[str, Any] | None,
    ranks: ModelRanks,
    src: int,
    max_bytes: int,
) -> None:
    """Stream the tensors; of several names for one the last counts, as in torch."""
    last = {id(value): key for key in given if isinstance(value := entries.values[key], torch.Tensor)}
    for batch in batches([(key, entries.values[key]) for key in last.values()], max_bytes):
        values: list[torch.Tensor] = []
        with ranks.everyone.agreed():
            if state_dict is not None:
                values = [_read(state_dict, key, tensor) for key, tensor in batch]
        spread_values([tensor for _, tensor in batch], values if state_dict is not None else None, ranks, src)


def spread_values(tensors: list[torch.Tensor], values: list[torch.Tensor] | None, ranks: ModelRanks, src: int) -> None:
    """Overwrite ``tensors``, ragged or not, with full values that only ``src`` has. Collective."""
    value_of = {id(tensor): number for number, tensor in enumerate(tensors)}
    for grid, alike in by_grid(tensor for tensor in tensors if isinstance(tensor, RaggedDTensor)):
        own = None if values is None else [values[value_of[id(tensor)]] for tensor in alike]
        spread_whole(alike, grid, ranks, src, None if own is None else own.__getitem__)
        increment_version([tensor._local_tensor for tensor in alike])
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, RaggedDTensor):
            _broadcast_into(tensor, None if values is None else values[index], ranks.everyone, src)


def _read(state_dict: Mapping[str, Any], key: str, target: torch.Tensor) -> torch.Tensor:
    value = state_dict[key]
    # Also of a mapping that had promised it: a wrong shape must not reach the exchange.
    if not isinstance(value, torch.Tensor) or value.numel() != target.numel():
        raise UsageError(f"the value of {key!r} changed after it was checked", at=place_of_rank())
    if isinstance(value, DTensor):
        raise ConfigError(f"the value of {key!r} is a DTensor", at=place_of_rank(), fix="pass full plain tensors")
    return value


def _broadcast_into(target: torch.Tensor, value: torch.Tensor | None, ranks: Ranks, src: int) -> None:
    """Overwrite a tensor that every rank has whole, or a DTensor of torch's own."""
    is_direct = not isinstance(target, DTensor) and target.is_contiguous() and target.device.type == ranks.device.type
    # `.data` leaves the version counter alone: nothing that autograd saved is changed.
    full = target.data if is_direct else torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
    if value is not None:
        full.copy_(value.reshape(target.shape))
    ranks.broadcast(full, src)
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None))
    elif not is_direct:
        target.data.copy_(full)


def _finish(
    model: nn.Module,
    entries: Entries,
    given: list[str],
    state_dict: Mapping[str, Any] | None,
    ranks: Ranks,
    src: int,
) -> None:
    """Load what is no tensor, such as extra state, through torch, which also runs the modules' own hooks."""
    extras: dict[str, Any] = {}
    others = [key for key in given if not isinstance(entries.values[key], torch.Tensor)]
    with ranks.agreed():
        if state_dict is not None:
            extras = {key: state_dict[key] for key in others}
    if others:
        extras = ranks.object_of(src, extras)
    # Tensors are copied onto themselves, which moves nothing.
    state = OrderedDict((key, extras.get(key, entries.values[key])) for key in given)
    if entries.metadata is not None:
        state._metadata = entries.metadata  # type: ignore[attr-defined]  # where torch keeps it
    model.load_state_dict(state, strict=False)
