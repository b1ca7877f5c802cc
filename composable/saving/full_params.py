"""Full parameters one after the other, out of a sharded model and into it, in bounded memory.

Source of the need: export to inference engines parameter by parameter spends its time on many small
collectives; here small parameters share one exchange. Trainers that send weights to other processes pack
them into buckets, one message each; here they are gathered into the bucket's own buffer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import torch
from torch import nn

from composable.arguments import check_bool, check_device, described
from composable.collectives import ModelRanks
from composable.errors import ConfigError, place_of_rank
from composable.ragged import cast_dtype
from composable.saving.entries import Entries, batches, entries_of, ranks_of
from composable.saving.fit import Differences, find_differences
from composable.saving.full_state import IncompatibleKeys, check_float, gather_values, max_bytes_of, spread_values
from composable.saving.param_bucket import BucketLayout, ParamBucket, plan_buckets
from composable.saving.selection import Names

__all__ = ["iter_full_params", "load_full_params"]


@overload
def iter_full_params(
    model: nn.Module,
    *,
    max_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rank0_only: bool = False,
    names: Names | None = None,
    bucket_bytes: None = None,
) -> Iterator[tuple[str, torch.Tensor | None]]: ...
@overload
def iter_full_params(
    model: nn.Module,
    *,
    max_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rank0_only: bool = False,
    names: Names | None = None,
    bucket_bytes: int,
) -> Iterator[ParamBucket]: ...
def iter_full_params(
    model: nn.Module,
    *,
    max_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rank0_only: bool = False,
    names: Names | None = None,
    bucket_bytes: int | None = None,
) -> Iterator[Any]:
    """Yield every parameter by FQN, in full, in the order of the plain model's ``named_parameters()``.

    Collective: the call, and each step of the iteration, by all ranks that share the model. Ranks may stop
    early, all at the same parameter. A rank that stops alone leaves those that go on waiting for it, until
    it waits for them elsewhere and all raise ``DesyncError``, or for the process group's timeout. Between steps
    of the iteration the model may be used; values are those at the time when the batch they are in was gathered.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        max_bytes: How much may be allocated at once beside what the caller keeps, or one parameter where
            that is larger. Parameters share exchanges up to half of it. Default: twice the largest handle.
        dtype: Of floating-point values; default: each parameter's own.
        device: Of the values; default: each parameter's own, and of buckets the mesh's.
        rank0_only: Only the first rank gets values; the others get ``None`` with each FQN, or
            buckets whose buffer is ``None``.
        names: Which parameters: a function that says of each FQN, as in ``state_dict()``, whether it is wanted, or a
            list or set of them. Asked at the call, before anything is gathered; all ranks alike. Default: all.
        bucket_bytes: Yield buckets of at most this many bytes; a larger parameter, which is never split, gets a
            bucket of its own. Beside the bucket that is filled, and those that the caller keeps, at most half of
            ``max_bytes`` is allocated, by default the bytes of the largest handle. The variable of a ``for`` loop
            keeps a bucket until the next one is there, unless it is deleted.

    Yields:
        FQN, as in ``state_dict()``, and a fresh tensor that nobody else holds. A tied parameter comes once, under the
        first of its FQNs that ``names`` wants. With ``bucket_bytes`` a ``ParamBucket`` of them, the same order.

    Raises:
        UsageError: The model is not annotated, a forward or backward runs, or parameters are on the meta device.
        ConfigError: ``max_bytes`` or ``bucket_bytes`` is no positive number of bytes, or ``dtype`` no floating-point
            type; ``names`` is neither a function nor FQNs of the model, or wants none.
        DesyncError: The ranks made different calls, or ``names`` wants other parameters on other ranks.
    """
    model_ranks = ranks_of(model, names)
    ranks = model_ranks.everyone
    with ranks.agreed():
        check_float(dtype)
        _check_bytes("max_bytes", max_bytes)
        _check_bytes("bucket_bytes", bucket_bytes)
        check_bool("rank0_only", rank0_only)
        check_device("device", device, or_none=True)
    options = ("iter_full_params", max_bytes, dtype, rank0_only, bucket_bytes)
    entries = entries_of(model, ranks, options, names=names)
    limit = max_bytes_of(entries) if max_bytes is None else max(max_bytes // 2, 1)
    target = None if device is None else torch.device(device)
    dst = 0 if rank0_only else None
    params = _named_params(model, entries)
    if bucket_bytes is None:
        return _iterate(params, model_ranks, limit, dtype, target, dst)
    layouts = plan_buckets([(fqn, cast_dtype(param, dtype), param.shape) for fqn, param in params], bucket_bytes)
    return _fill_buckets(layouts, dict(params), model_ranks, limit, target or ranks.device, dst)


def _check_bytes(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        what = f"{name} is {described(value)}"
        raise ConfigError(what, at=place_of_rank(), fix="pass a positive number of bytes, or None")


def _named_params(model: nn.Module, entries: Entries) -> list[tuple[str, torch.Tensor]]:
    """Return each parameter once, by the first name that a state dict has for it: without the parts of wrappers."""
    names: dict[int, str] = {}
    for key, tensor in entries.settable().items():
        names.setdefault(id(tensor), key)
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
            # Popped: what the caller drops is free at once.
            yield fqn, None if fulls is None else fulls.pop(0)


def _fill_buckets(
    layouts: Sequence[BucketLayout],
    params: Mapping[str, torch.Tensor],
    ranks: ModelRanks,
    max_bytes: int,
    device: torch.device,
    dst: int | None,
) -> Iterator[ParamBucket]:
    for layout in layouts:
        # Popped: what the caller drops is free at once.
        buckets = [_fill_bucket(layout, params, ranks, max_bytes, device, dst)]
        yield buckets.pop()


@torch.no_grad()
def _fill_bucket(
    layout: BucketLayout,
    params: Mapping[str, torch.Tensor],
    ranks: ModelRanks,
    max_bytes: int,
    device: torch.device,
    dst: int | None,
) -> ParamBucket:
    buffer: torch.Tensor | None = None
    views: dict[str, torch.Tensor] = {}
    if dst in (None, ranks.rank):
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        # The same bytes on every rank, and nothing of what the memory held before.
        for slot, following in pairwise(layout.slots):
            if slot.stop < following.offset:
                buffer[slot.stop : following.offset].zero_()
        views = layout.views(buffer)
    for batch in batches([(slot.fqn, params[slot.fqn]) for slot in layout.slots], max_bytes):
        out = None if buffer is None else [views[fqn] for fqn, _ in batch]
        gather_values([param for _, param in batch], ranks, dst, dtype=None, device=None, out=out)
    return ParamBucket(layout, buffer)


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

    Collective: all ranks that share the model, between steps. ``src`` holds no more values at once than the
    largest handle has, or one; the other ranks never hold a full value of a sharded parameter.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        pairs: On ``src``: FQNs, any of those of a tied parameter, also of persistent buffers, and values. Values of
            other dtypes are cast. On other ranks it is not used; ``None`` will do.
        src: Which of the ranks has the pairs, as ``dst`` of ``full_state_dict``.
        strict: Every parameter has to come, and nothing that the model does not have.
        names: Load a part of the model, and let that stand for the model in ``strict``: a function that says of each
            FQN whether it is part of it, or a list or set of them. All ranks alike. Default: all.

    Returns:
        FQNs of parameters that did not come and FQNs that the model does not have, on every rank; empty if ``strict``.

    Raises:
        ConfigError: On every rank: a value has another shape than its parameter, an FQN comes twice; with
            ``strict`` also an unknown FQN, and at the end missing ones. Each pair is checked before it is
            written, but a stream cannot be checked ahead: what came in batches before is loaded. Also: ``names``
            makes no sense, or wants nothing.
        UsageError: The model is not annotated, a forward or backward runs, or parameters are on the meta device.
        DesyncError: The ranks made different calls, ``names`` wants other entries on other ranks, or the iteration
            failed on ``src``, which raises what happened.
    """
    model_ranks = ranks_of(model, names)
    ranks = model_ranks.everyone
    with ranks.agreed():
        ranks.check_member("src", src)
        check_bool("strict", strict)
    entries = entries_of(model, ranks, ("load_full_params", src, strict), names=names)
    settable = entries.settable()
    is_source = ranks.rank == src
    reader = _Reader(entries, pairs if is_source and pairs is not None else (), max_bytes_of(entries), strict=strict)
    arrived: set[int] = set()
    while True:
        batch: list[tuple[str, torch.Tensor]] = []
        with ranks.agreed():
            if is_source:
                batch = reader.read_batch()
        keys = ranks.object_of(src, [key for key, _ in batch])
        if not keys:
            break
        targets = [settable[key] for key in keys]
        spread_values(targets, [value for _, value in batch] if is_source else None, model_ranks, src)
        arrived |= {id(target) for target in targets}
    missing = [fqn for fqn, param in _named_params(model, entries) if id(param) not in arrived]
    error = Differences(missing=tuple(missing)).error(strict=strict, loaded="what came was loaded")
    if error is not None:
        raise error
    return IncompatibleKeys(missing, ranks.object_of(src, reader.unexpected))


class _Reader:
    """Takes pairs from an iterable, checked, a batch at a time."""

    def __init__(
        self, entries: Entries, pairs: Iterable[tuple[str, torch.Tensor]], max_bytes: int, *, strict: bool
    ) -> None:
        self.unexpected: list[str] = []
        self._targets = entries.settable()
        self._pairs = iter(pairs if isinstance(pairs, Iterable) else [pairs])
        self._max_bytes = max_bytes
        self._strict = strict
        self._seen: set[str] = set()

    def read_batch(self) -> list[tuple[str, torch.Tensor]]:
        """Return the next pairs; none at the end. Of two names of one tensor the later pair counts."""
        batch: dict[int, tuple[str, torch.Tensor]] = {}
        total = 0
        for pair in self._pairs:
            key, value = _checked(pair)
            if not self._accept(key, value):
                continue
            batch[id(self._targets[key])] = (key, value)
            total += value.nbytes
            if total >= self._max_bytes:
                break
        return list(batch.values())

    def _accept(self, key: str, value: torch.Tensor) -> bool:
        if key in self._seen:
            raise ConfigError(f"{key!r} comes twice", at=place_of_rank(), fix="give each FQN once")
        self._seen.add(key)
        expected = {key: self._targets[key]} if key in self._targets else {}
        differences = find_differences(expected, [key], lambda _: value)
        error = differences.error(strict=self._strict, loaded="only what came before was loaded")
        if error is not None:
            raise error
        self.unexpected += differences.unexpected
        return not differences.unexpected


def _checked(pair: object) -> tuple[str, torch.Tensor]:
    if isinstance(pair, tuple | list) and len(pair) == 2:
        key, value = pair
        if isinstance(key, str) and isinstance(value, torch.Tensor):
            return key, value
    raise ConfigError(
        f"pairs is or holds {described(pair)}", at=place_of_rank(), fix="pass (FQN, tensor) pairs, as dict.items() has"
    )
