"""Full values, out of a model and into it.

One rank, or all, get full values one handle at a time; one rank sends them, batch by batch, into the shards of all.
Small parameters share one exchange. Sharded state dicts are torch's own ``model.state_dict()``.
"""

import io
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, distribute_tensor

from composable.comm import ModelRanks, Ranks
from composable.dtensor import RaggedDTensor, cast_dtype, memory_of
from composable.errors import ConfigError, UsageError, warn_once
from composable.features import by_grid, collect_whole, spread_whole
from composable.ground.names import check_bool, check_device, described, list_text, plain_fqn
from composable.saving.data import as_data, read_data
from composable.saving.entries import Entries, Names, batches, check_float, entries_for, entries_now
from composable.saving.loads import Differences, find_differences, make_room


class IncompatibleKeys(NamedTuple):
    """Keys that did not match, as ``torch.nn.Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


# -- state dicts


class ValuesElsewhere(OrderedDict[str, Any]):
    """The empty state dict of a rank that gets no values. To write it would put ``{}`` over what another rank wrote."""

    def _refuse(self, *_: object) -> NoReturn:
        what = "this rank has no values to write, send or load: full_state_dict gave them to another rank"
        fix = "if state: torch.save(state, path); every rank loads with load_full_state_dict(model, state)"
        raise UsageError(what, fix=fix)

    __reduce_ex__ = _refuse
    _metadata = property(_refuse)  # What ``load_state_dict`` looks at.


@torch.no_grad()
def full_state_dict(
    model: nn.Module,
    *,
    dst: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    names: Names | None = None,
) -> dict[str, Any]:
    """Return on one rank the ``state_dict()`` of the plain model, with full plain tensors.

    Collective: all ranks that share the model, between steps; also before the first forward. Beside the result at most
    the bytes of the largest handle are allocated, on any rank.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        dst: The rank that gets the values, by its number among all ranks that share the model.
        dtype: The dtype of floating-point tensors in the result; default: their own.
        device: The device of the tensors in the result.
        names: Which entries: a list or set of FQNs, as in ``state_dict()``, or a function that says for each FQN
            whether it is wanted. Equal on all ranks. Default: all.

    Returns:
        On ``dst`` an ordered dict with the keys, order, module versions and shapes of the plain model. Tensors are
        new; names that share a tensor in the model share it here. Buffers, and parameters that are not sharded, have
        the values of ``dst``. On other ranks an empty dict, which cannot be pickled, as by ``torch.save``, nor given to
        ``load_state_dict``: both are a ``UsageError``.

    Raises:
        UsageError: The model is not annotated, a forward or backward runs, or parameters are on the meta device.
        ConfigError: ``dst`` is no rank of the group, ``dtype`` no floating-point type; ``names`` is neither a function
            nor FQNs of the model, or picks none.
        DesyncError: The ranks made different calls, or ``names`` picks other entries on other ranks.
    """
    with entries_for(model, names, "full_state_dict", dst, dtype) as (ranks, entries):
        check_device("device", device)
        ranks.everyone.check_member("dst", dst)
        check_float(dtype)
    unique = entries.unique()
    fulls = dict(_iterate(list(unique.items()), ranks, entries.batch_bytes(), dtype, torch.device(device), dst))
    if ranks.rank != dst:
        return ValuesElsewhere()
    whole = {id(tensor): fulls[key] for key, tensor in unique.items()}
    state = OrderedDict((key, whole.get(id(value), value)) for key, value in entries.values.items())
    if entries.metadata is not None:
        state._metadata = entries.metadata  # type: ignore[attr-defined]  # where torch keeps it
    return state


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

    Collective: all ranks that share the model, between steps; also before the first forward, and into a model
    on the meta device, whose shards and buffers get memory where there are values. Every key is
    checked before anything is changed. Values go in batches no larger than the largest handle; no other rank ever holds
    a full copy. Other dtypes are cast. Buffers and parameters that are not sharded are broadcast.

    Args:
        model: As for ``full_state_dict``.
        state_dict: On ``src``: tensors by key, of the plain model's shapes, on any device, also memory-mapped; a
            floating-point value may have any floating-point dtype. Or a mapping that reads values on demand: the call
            uses ``keys()``, ``[key]`` once for each key, and ``shape_of(key)``, which gives a shape without reading;
            without this method each value is read twice. On other ranks it is not used.
        src: The rank that has the state dict, by its number as ``dst`` of ``full_state_dict``.
        strict: Every key of the model must be there, and no other.
        names: Load a part of the model, such as adapters; ``strict`` then checks this part only. Otherwise as for
            ``full_state_dict``.

    Returns:
        The missing and unexpected keys, on every rank; empty if ``strict``.

    Raises:
        StateDictError: On every rank: keys are missing, unexpected or of another shape, all in one error; nothing was
            changed.
        DesyncError: Reading a value failed on ``src``, which raises the cause; batches before it are loaded.
        ConfigError, UsageError, DesyncError: As for ``full_state_dict``.
    """
    with entries_for(model, names, "load_full_state_dict", src, strict, permits_meta=True) as (ranks, entries):
        ranks.everyone.check_member("src", src)
        check_bool("strict", strict)
    if isinstance(state_dict, dict) and not hasattr(state_dict, "shape_of"):  # others read values on demand
        state_dict = {plain_fqn(key) if isinstance(key, str) else key: value for key, value in state_dict.items()}
    held = state_dict if ranks.rank == src else None
    differences = Differences()
    with ranks.everyone.agreed():
        if ranks.rank == src:
            differences = _differences_from(entries, held)
            differences.check(strict=strict)
    differences = Differences(*ranks.everyone.object_of(src, astuple(differences)))
    missing = set(differences.missing)
    given = [key for key in entries.values if key not in missing]
    limit = entries.batch_bytes()
    if entries.on_meta():
        for name, module in model.named_modules():
            make_room(module, dict.fromkeys(given), f"{name}." if name else "", {})
        # The modules hold other buffers now.
        entries = entries_now(model)
    # Of several names for one tensor the last counts, as in torch.
    targets = entries.targets()
    last = {id(targets[key]): key for key in given if key in targets}
    planned = batches([(key, targets[key]) for key in last.values()], limit) if held is not None else ()
    read = ([(key, _read(held or {}, key, tensor)) for key, tensor in batch] for batch in planned)
    _spread_batches(read, targets, ranks, src)
    _load_the_rest(model, entries, given, held, ranks.everyone, src)
    return IncompatibleKeys(list(differences.missing), list(differences.unexpected))


def _differences_from(entries: Entries, state_dict: Mapping[str, Any] | None) -> Differences:
    if not isinstance(state_dict, Mapping):
        raise ConfigError(
            f"state_dict is a {type(state_dict).__name__}, not a mapping, on the rank that should have it",
            fix="pass the full state dict on rank src",
        )
    shape_of = getattr(state_dict, "shape_of", None)
    expected = dict.fromkeys(entries.values) | entries.targets()
    return find_differences(expected, list(state_dict.keys()), shape_of or state_dict.__getitem__)


def _read(state_dict: Mapping[str, Any], key: str, target: torch.Tensor) -> torch.Tensor:
    value = state_dict[key]
    # Checked again, also for a mapping with ``shape_of``: a wrong shape must not reach the exchange.
    if not isinstance(value, torch.Tensor) or value.numel() != target.numel():
        raise UsageError(f"the value of {key!r} changed after it was checked")
    if isinstance(value, DTensor):
        raise ConfigError(f"the value of {key!r} is a DTensor", fix="pass full plain tensors")
    return value


def _load_the_rest(
    model: nn.Module, entries: Entries, given: list[str], held: Mapping[str, Any] | None, ranks: Ranks, src: int
) -> None:
    """Load extra state through torch, which also lets modules read in their own way what is no parameter of theirs."""
    targets = entries.targets()
    others = [key for key in given if key not in targets]
    with ranks.agreed():
        packed = None if held is None else as_data({key: held[key] for key in others}, "extra state")
    extras = read_data(io.BytesIO(ranks.object_of(src, packed)), "extra state") if others else {}
    load_as_torch(model, {key: extras[key] if key in extras else targets[key] for key in given})


def load_as_torch(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Load some of the entries of the model's own state dict, by the names that ``entries_now`` has."""
    state = model.state_dict(keep_vars=True)  # The keys as torch has them, with those of torch.compile.
    for key, name in [(key, plain_fqn(key)) for key in state]:
        if name in values:
            state[key] = values[name]  # Parameters and buffers are copied onto themselves, which moves nothing.
        else:
            del state[key]
    result: Any = model.load_state_dict(state, strict=False)
    if result and result.unexpected_keys:
        what = f"hooks have added {list_text(result.unexpected_keys)} to the state dict, and no module reads this"
        warn_once(f"{what}: take it in a hook of register_load_state_dict_pre_hook")


# -- values, gathered and spread


def gather_values(
    tensors: Sequence[torch.Tensor],
    ranks: ModelRanks,
    dst: int | None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[torch.Tensor] | None:
    """Return full values on rank ``dst``, or on every rank if it is ``None``, in new tensors. Collective.

    Tensors may be sharded in any way; of a plain tensor each rank takes its own values. ``dtype`` is for floats.
    """
    whole: dict[int, torch.Tensor] = {}
    for _, alike in by_grid(tensor for tensor in tensors if isinstance(tensor, RaggedDTensor)):
        fulls = collect_whole(alike, ranks, dst, dtype=dtype, device=device)
        whole.update(zip(map(id, alike), fulls or ()))
    has_values = dst in (None, ranks.rank)
    for tensor in tensors:
        if isinstance(tensor, RaggedDTensor):
            continue
        value = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        if has_values:
            # Strides are not preserved: a copy of a view would keep gaps of the view's memory alive.
            whole[id(tensor)] = value.to(
                device or value.device, cast_dtype(value, dtype), copy=True, memory_format=torch.contiguous_format
            )
    return [whole.pop(id(tensor)) for tensor in tensors] if has_values else None


def _spread_batches(
    read: Iterator[list[tuple[str, torch.Tensor]]], targets: Mapping[str, torch.Tensor], ranks: ModelRanks, src: int
) -> set[int]:
    """Load the pairs that ``src`` reads, batch by batch; return the ids of the targets that had values. Collective."""
    arrived: set[int] = set()
    while True:
        with ranks.everyone.agreed():
            batch = next(read, [])
        keys = ranks.everyone.object_of(src, [key for key, _ in batch])
        if not keys:
            return arrived
        tensors = [targets[key] for key in keys]
        _spread_values(tensors, [value for _, value in batch] if ranks.rank == src else None, ranks, src)
        arrived |= set(map(id, tensors))


def _spread_values(tensors: list[torch.Tensor], values: list[torch.Tensor] | None, ranks: ModelRanks, src: int) -> None:
    """Overwrite ``tensors``, ragged or not, with full values that only ``src`` has. Collective."""
    value_of = {} if values is None else dict(zip(map(id, tensors), values, strict=True))
    for grid, alike in by_grid(tensor for tensor in tensors if isinstance(tensor, RaggedDTensor)):
        own = None if values is None else [value_of[id(tensor)] for tensor in alike]
        spread_whole(alike, grid, ranks, src, None if own is None else own.__getitem__)
        increment_version([memory_of(tensor._local_tensor) for tensor in alike])
    for tensor in tensors:
        if not isinstance(tensor, RaggedDTensor):
            _broadcast_into(tensor, value_of.get(id(tensor)), ranks.everyone, src)


def _broadcast_into(target: torch.Tensor, value: torch.Tensor | None, ranks: Ranks, src: int) -> None:
    """Overwrite a tensor that every rank has whole, or a DTensor of torch's own, with the value of ``src``."""
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


# -- parameter by parameter


def iter_full_params(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rank0_only: bool = False,
    names: Names | None = None,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every parameter of the state dict by FQN, in full, in the order of the plain ``named_parameters()``.

    Collective: the call, and each step of the iteration, by all ranks that share the model. Ranks may stop early, all
    at the same parameter; if one stops alone, the others get an error when it waits for them elsewhere. Between steps
    of the iteration the model may be used; a value is from the time when its batch was gathered. Besides values that
    the caller keeps, at most twice the bytes of the largest handle are allocated.

    Args:
        model: As for ``full_state_dict``.
        dtype: The dtype of floating-point values; default: each parameter's own.
        device: The device of values; default: each parameter's own.
        rank0_only: Only the first rank gets values; the others get ``None`` with each FQN.
        names: Which parameters, as for ``full_state_dict``. A function runs at the call, before anything is gathered.

    Yields:
        FQN, as in ``state_dict()``, and a new tensor of the parameter's shape that only the caller holds. A tied
        parameter comes once, under the first of its FQNs that ``names`` picks.

    Raises:
        ConfigError, UsageError, DesyncError: As for ``full_state_dict``, all of them at the call.
    """
    with entries_for(model, names, "iter_full_params", dtype, rank0_only) as (ranks, entries):
        check_float(dtype)
        check_bool("rank0_only", rank0_only)
        check_device("device", device, or_none=True)
    target = None if device is None else torch.device(device)
    dst = 0 if rank0_only else None
    return _iterate(_named_params(model, entries), ranks, entries.batch_bytes(), dtype, target, dst)


def _named_params(model: nn.Module, entries: Entries) -> list[tuple[str, torch.Tensor]]:
    """Return each parameter once, by the first name that a state dict has for it: without the parts of wrappers."""
    names = entries.first_names()
    return [(names[id(param)], param) for param in model.parameters() if id(param) in names]


def _iterate(
    named: Sequence[tuple[str, torch.Tensor]],
    ranks: ModelRanks,
    max_bytes: int,
    dtype: torch.dtype | None,
    device: torch.device | None,
    dst: int | None,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    for batch in batches(named, max_bytes):
        with torch.no_grad():
            fulls = gather_values([param for _, param in batch], ranks, dst, dtype=dtype, device=device)
        for fqn, _ in batch:
            # Popped, so that a tensor is freed as soon as the caller drops it.
            yield fqn, None if fulls is None else fulls.pop(0)


@torch.no_grad()
def load_full_params(
    model: nn.Module,
    pairs: Iterable[tuple[str, torch.Tensor]] | None,
    *,
    src: int = 0,
    strict: bool = True,
    names: Names | None = None,
) -> IncompatibleKeys:
    """Load pairs of FQN and full tensor that one rank produces, in any order: the inverse of ``iter_full_params``.

    Collective: all ranks that share the model, between steps. ``src`` holds at most as many values at once as the
    largest handle has, and one more; the other ranks never hold a full value of a sharded parameter.

    Args:
        model: As for ``full_state_dict``.
        pairs: On ``src``: FQNs of parameters and persistent buffers, any FQN of a tied parameter, and values of their
            shapes. Values of other dtypes are cast. On other ranks it is not used and may be ``None``.
        src: The rank that has the pairs, by its number as ``dst`` of ``full_state_dict``.
        strict: Every parameter must come, and no FQN that the model does not have.
        names: Load a part of the model, as for ``load_full_state_dict``.

    Returns:
        FQNs of parameters that did not come and FQNs that the model does not have, on every rank; empty if ``strict``.

    Raises:
        ConfigError: On every rank: a value has another shape than its parameter, an FQN comes twice; with
            ``strict`` also an unknown FQN, and at the end missing ones. Each pair is checked before it is
            written, but a stream cannot be checked ahead: batches before it are loaded.
        DesyncError: The iteration failed on ``src``, which raises the cause.
        ConfigError, UsageError, DesyncError: As for ``full_state_dict``.
    """
    with entries_for(model, names, "load_full_params", src, strict) as (ranks, entries):
        ranks.everyone.check_member("src", src)
        check_bool("strict", strict)
    unexpected: list[str] = []
    given = pairs if ranks.rank == src and pairs is not None else ()
    checked = _checked_pairs(given, entries, unexpected, strict=strict)
    targets = entries.targets()
    arrived = _spread_batches(batches(checked, entries.batch_bytes()), targets, ranks, src)
    if not arrived.issubset(map(id, (*model.parameters(), *model.buffers()))):
        load_as_torch(model, targets)  # A module reads what came, beside what it has.
    missing = [fqn for fqn, param in _named_params(model, entries) if id(param) not in arrived]
    Differences(missing=tuple(missing)).check(strict=strict, loaded="what came was loaded")
    return IncompatibleKeys(missing, ranks.everyone.object_of(src, unexpected))


def _checked_pairs(
    pairs: Iterable[tuple[str, torch.Tensor]], entries: Entries, unexpected: list[str], *, strict: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield pairs that fit; ``unexpected`` gets FQNs that the model does not have, an error with ``strict``."""
    targets = entries.targets()
    seen: set[str] = set()
    for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
        match pair:
            case (str(key), torch.Tensor() as value) if key not in seen:
                seen.add(key)
            case _:
                fix = "pass (FQN, tensor) pairs, each FQN once"
                raise ConfigError(f"pairs is or holds {described(pair)}", fix=fix)
        expected = {key: targets[key]} if key in targets else {}
        differences = find_differences(expected, [key], {key: value}.__getitem__)
        differences.check(strict=strict, loaded="only what came before was loaded")
        if key in targets:
            yield key, value
        else:
            unexpected.append(key)
