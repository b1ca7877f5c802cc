"""What training has changed in a model, for a process that has a copy of its weights, such as one that generates.

After a step most weights are in bfloat16 what they were, as a small update rounds to nothing. Each rank compares its
own shards with what it gave last, bit by bit, and only what differs travels: positions with values, or all elements of
a shard with the ranges that they fill, whichever takes fewer bytes.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from composable.comm import Ranks
from composable.dtensor import PieceExchange, RaggedDTensor, cast_dtype, values_of
from composable.errors import ConfigError, StateDictError
from composable.ground.names import check_module, described, list_text
from composable.planning import part_of_dim
from composable.saving import Names, check_float, entries_for

# Integers with the bits of an element, by its bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Sums of bits are made over so many elements at a time, as 64-bit integers.
_CHUNK_NUMEL = 2**22
_FACTORS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def changed_params(
    model: nn.Module, *, dst: int = 0, dtype: torch.dtype | None = None, names: Names | None = None
) -> "ChangedParams":
    """Return a function that gives on one rank what has changed in ``model`` since it was called last, or since now.

    Collective, as each call of what it returns: all ranks that share the model, between steps. Whoever has
    ``full_state_dict(model, dtype=dtype)`` from now, or from any later call, follows by ``apply_changes``.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        dst: The rank that gets the changes, by its number among all ranks that share the model.
        dtype: The dtype of floating-point values for whoever has the copy; default: each parameter's own.
        names: Which entries of the state dict, as for ``full_state_dict``.

    Returns:
        A ``ChangedParams``. Each rank keeps a copy of its own shards in ``dtype``: ``nbytes`` of it.

    Raises:
        ConfigError, UsageError, DesyncError: As for ``full_state_dict``.
    """
    check_module("model", model)
    return ChangedParams(model, dst, dtype, names)


class _Elements(NamedTuple):
    """Where elements of a rank lie: from ``lo`` on in a block of a whole, whose dims are flattened in ``order``."""

    values: torch.Tensor  # [numel]
    shape: Sequence[int]  # That of the whole.
    block: Sequence[int]
    offsets: Sequence[int]
    order: Sequence[int]
    lo: int
    is_stored: bool = True  # Another rank gives these elements, in pieces of other bounds, if it is false.

    def key(self) -> int:
        """Return a number that ranks with copies of these elements share; 0: they are not given."""
        return hash((*self.block, *self.offsets, self.lo, len(self.values))) * self.is_stored

    def positions(self, index: torch.Tensor) -> torch.Tensor:
        """Return where the own elements ``index`` [n] int64 are in the flattened whole: [n] int64."""
        rest, found = index + self.lo, torch.zeros_like(index)
        if list(self.block) == list(self.shape) and not self.order:
            return rest
        strides = [*itertools.accumulate(self.shape[:0:-1], int.__mul__, initial=1)][::-1]
        for dim in reversed(self.order or range(len(self.shape))):
            found += (rest % self.block[dim] + self.offsets[dim]) * strides[dim]
            rest = rest // self.block[dim]
        return found


class ChangedParams:
    """Gives what has changed in a model; ``changed_params`` makes it.

    Attributes:
        nbytes: The bytes of this rank's copy of its shards.
    """

    def __init__(self, model: nn.Module, dst: int, dtype: torch.dtype | None, names: Names | None) -> None:
        self._model, self._dst, self._dtype, self._names = model, dst, dtype, names
        self._given = {name: cut.values for name, cut in self._cuts()[1].items()}

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self._given.values())

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        """Return the changes on ``dst``, and an empty dict on the other ranks.

        Collective: all ranks that share the model, between steps. ``dst`` holds the changes of all ranks.

        Returns:
            By the first name of each parameter and persistent buffer a dict of plain values and tensors on the CPU,
            which ``torch.save`` and ``torch.load(weights_only=True)`` carry: all its ``names``, its ``shape``, the
            ``sum`` of the bits of the whole, ``values`` [n] at the ``positions`` [n] in the flattened whole, and
            ``range_values`` [m] of the ``ranges`` [k, 2], each a first position and a length.

        Raises:
            ConfigError, UsageError, DesyncError: As for ``full_state_dict``; nothing counts as given then.
        """
        ranks, cuts, names = self._cuts()
        parts = [_parts_of(cut, self._given.get(name)) for name, cut in cuts.items()]
        own = [(*map(len, each), _sum_of(cut), cut.key()) for each, cut in zip(parts, cuts.values(), strict=True)]
        every = ranks.objects(own)
        givers = _givers(every, self._dst)
        exchange = PieceExchange(ranks)
        got: list[list[list[torch.Tensor]]] = [[] for _ in parts]
        for rank, told in enumerate(every):
            if ranks.rank not in (rank, self._dst):
                continue
            given = [at for at, those in enumerate(givers) if rank in those]
            mine = {at: parts[at] if rank == ranks.rank else _room_for(parts[at], told[at]) for at in given}
            flat = [part.reshape(-1) for each in mine.values() for part in each]
            if ranks.rank != self._dst:
                exchange.send(flat, [self._dst])
            elif rank != self._dst:
                exchange.receive(flat, [part.dtype for part in flat], rank)
            for at, each in mine.items():
                got[at].append(each)
        exchange.run()
        self._given = {name: cut.values for name, cut in cuts.items()}
        if ranks.rank != self._dst:
            return {}
        found: dict[str, Any] = {}
        for at, (name, aliases) in enumerate(names.items()):
            joined = (torch.cat([part.cpu() for part in each]) for each in zip(*got[at], strict=True))
            total = _wrapped(sum(every[rank][at][4] for rank in givers[at]))
            about = {"names": aliases, "shape": [*cuts[name].shape], "sum": total}
            found[name] = about | dict(zip(_PARTS, joined, strict=True))
        return found

    def _cuts(self) -> tuple[Ranks, dict[str, _Elements], dict[str, list[str]]]:
        """Return the ranks, this rank's elements of each entry, as a copy, and all names of each. Collective."""
        with entries_for(self._model, self._names, "changed_params", self._dst, self._dtype) as (model_ranks, entries):
            model_ranks.everyone.check_member("dst", self._dst)
            check_float(self._dtype)
            first, cuts = entries.first_names(), {name: self._cut(one) for name, one in entries.unique().items()}
        names: dict[str, list[str]] = {name: [] for name in cuts}
        for name, one in entries.tensors().items():
            names[first[id(one)]].append(name)
        return model_ranks.everyone, cuts, names

    def _cut(self, tensor: torch.Tensor) -> _Elements:
        kind, local = cast_dtype(tensor, self._dtype), tensor.detach()
        if kind.itemsize not in _BITS:
            raise ConfigError(f"changes of elements of {kind}", fix="leave them out by names=")
        if isinstance(tensor, DTensor):
            local = values_of(tensor._local_tensor).detach()
        values = local.reshape(-1).to(kind, copy=True)
        if isinstance(tensor, RaggedDTensor):
            cut = tensor._spec.layout
            return _Elements(values, cut.shape, cut.block_shape, cut.block_offsets, cut.order, cut.lo, cut.is_stored)
        offsets, sizes = [0] * tensor.ndim, [*tensor.shape]
        if isinstance(tensor, DTensor):
            place = tensor.device_mesh.get_coordinate() or ()
            for size, at, one in zip(tensor.device_mesh.shape, place, tensor.placements):
                if isinstance(one, Shard):
                    start, stop = part_of_dim(sizes[one.dim], size, at)
                    offsets[one.dim] += start
                    sizes[one.dim] = stop - start
        return _Elements(values, tensor.shape, sizes, offsets, (), 0)


def _givers(every: Sequence[Sequence[Sequence[int]]], dst: int) -> list[set[int]]:
    """Return for each entry the ranks that give their elements; of copies that of ``dst``, or of the first rank."""
    order = sorted(range(len(every)), key=lambda rank: rank != dst)
    found = []
    for told in zip(*every, strict=True):
        first: dict[int, int] = {}
        for rank in order:
            if told[rank][-1]:
                first.setdefault(told[rank][-1], rank)
        found.append({*first.values()})
    return found


_PARTS = "positions", "values", "ranges", "range_values"


def _parts_of(cut: _Elements, given: torch.Tensor | None) -> list[torch.Tensor]:
    """Return what has changed since ``given`` [numel]: positions [n], values [n], ranges [k, 2], their values [m]."""
    values = cut.values
    kind = torch.int32 if math.prod(cut.shape) < 2**31 else torch.int64
    none = torch.empty(0, dtype=torch.int64, device=values.device)
    if given is None or len(given) != len(values):
        changed = torch.arange(len(values), device=values.device)
    else:
        changed = (_bits(values) != _bits(given)).nonzero().view(-1)
    if len(changed) * (kind.itemsize + values.itemsize) > values.nbytes:
        places = cut.positions(torch.arange(len(values), device=values.device))
        starts = (places.diff(prepend=places[:1] - 2) != 1).nonzero().view(-1)
        lengths = starts.diff(append=starts.new_tensor([len(values)]))
        if values.nbytes + 16 * len(starts) <= len(changed) * (kind.itemsize + values.itemsize):
            return [none.to(kind), values[:0], torch.stack([places[starts], lengths], 1), values]
    return [cut.positions(changed).to(kind), values[changed], none.view(0, 2), values[:0]]


def _room_for(parts: Sequence[torch.Tensor], told: Sequence[int]) -> list[torch.Tensor]:
    """Return tensors on the CPU for the parts of another rank, which are as long as it has told."""
    return [torch.empty(count, *part.shape[1:], dtype=part.dtype) for count, part in zip(told, parts)]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_BITS[values.itemsize])


def _sum_of(cut: _Elements) -> int:
    """Return a sum of the bits of elements, each mixed with its position: it tells which elements are where."""
    total = 0
    for start in range(0, len(cut.values), _CHUNK_NUMEL):
        bits = _bits(cut.values[start : start + _CHUNK_NUMEL]).long()
        places = cut.positions(torch.arange(start, start + len(bits), device=bits.device))
        mixed = (bits + places * _FACTORS[0]) * _FACTORS[1]
        total += int(((mixed ^ (mixed >> 31)) * _FACTORS[0]).sum())
    return _wrapped(total)


def _wrapped(number: int) -> int:
    """Return a sum as 64 bits have it."""
    return (number + 2**63) % 2**64 - 2**63


@torch.no_grad()
def apply_changes(state_dict: Mapping[str, torch.Tensor], changes: Mapping[str, Any]) -> None:
    """Write what ``changed_params`` has given into full tensors. No communication.

    Args:
        state_dict: Full plain tensors of the dtype that ``changed_params`` was asked for, on any device, by every name:
            what ``full_state_dict`` gave, or the ``state_dict()`` of a plain model. They are changed in place.
        changes: All that one call has given, as it was or after ``torch.load(weights_only=True)``.

    Raises:
        ConfigError: ``changes`` is no dict that ``changed_params`` has given, or ``state_dict`` no dict.
        StateDictError: A name is missing, or a tensor has another dtype or shape: nothing was written. Or the
            tensors named have other bits than those of the model, after all was written: a change was left out.
    """
    if not isinstance(state_dict, Mapping):
        raise ConfigError(f"state_dict is {described(state_dict)}", fix="pass a dict of full plain tensors by name")
    targets: dict[str, list[torch.Tensor]] = {}
    for name, one in changes.items() if isinstance(changes, Mapping) else [("", changes)]:
        if not (isinstance(one, Mapping) and {"names", "shape", "sum", *_PARTS} <= one.keys()):
            raise ConfigError(f"changes is or holds {described(one)}", fix="pass what changed_params(model)() returned")
        tensors = [state_dict[key] for key in one["names"] if key in state_dict]
        is_fit = all(tensor.dtype == one["values"].dtype and list(tensor.shape) == one["shape"] for tensor in tensors)
        targets[name] = [*{id(tensor): tensor for tensor in tensors}.values()] if is_fit else []
    unfit = [name for name, found in targets.items() if not found]
    if unfit:
        fix = "pass the state dict of the plain model, in the dtype that changed_params was given"
        raise StateDictError(f"no tensors of the names, shapes and dtypes of the changes: {list_text(unfit)}", fix=fix)
    for name, found in targets.items():
        for one in found:
            flat = one.detach() if one.is_contiguous() else one.detach().contiguous()
            _write(flat.view(-1), changes[name])
            if flat.data_ptr() != one.data_ptr():
                one.copy_(flat)
            whole = _Elements(flat.view(-1), one.shape, one.shape, [0] * one.ndim, (), 0)
            if _sum_of(whole) != changes[name]["sum"]:
                unfit.append(name)
    if unfit:
        fix = "apply the changes of each call in order, or load full_state_dict(model) anew"
        raise StateDictError(f"other values than the model's, after the changes: {list_text(unfit)}", fix=fix)


def _write(flat: torch.Tensor, change: Mapping[str, Any]) -> None:
    flat[change["positions"].to(flat.device, torch.int64)] = change["values"].to(flat.device)
    done = 0
    for start, length in change["ranges"].tolist():
        flat[start : start + length] = change["range_values"][done : done + length].to(flat.device)
        done += length
