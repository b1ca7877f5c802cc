"""The parts of a model that a full state dict is made of, and which ranks share them.

A model's *entries* are what ``state_dict()`` lists: key and tensor, ties and shared buffers under every
name. Ragged tensors among them are gathered or filled in *batches* of bounded size.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.annotation import FullyShardState, handle_of_module, sharded_state_of
from composable.arguments import check_module
from composable.collectives import ModelRanks, Ranks
from composable.contract import get_registry, managing_state
from composable.engine import META_FIX, handle_of
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.fqns import describe_module
from composable.optim import ranks_of_param
from composable.replication import ReplicateState
from composable.saving.selection import Names, pick
from composable.wording import list_text

__all__ = ["Entries", "batches", "entries_now", "entries_of", "has_meta", "largest_handle_bytes", "ranks_of"]


@dataclass(frozen=True)
class Entries:
    """What a model's state dict lists.

    Attributes:
        values: Every entry by key, in the plain model's order: parameters and buffers themselves, ties as one object.
        metadata: Module versions, which torch keeps beside the entries.
        unlisted: Parameters that no entry has, since a module's own hook took them out or renamed them, by FQN.
    """

    values: dict[str, Any]
    metadata: Any
    unlisted: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the entries that are tensors."""
        return {key: value for key, value in self.values.items() if isinstance(value, torch.Tensor)}

    def settable(self) -> dict[str, torch.Tensor]:
        """Return what values may be loaded into: the tensors, and parameters that no entry has."""
        return {**self.tensors(), **self.unlisted}

    def picked(self, names: Names | None) -> "Entries":
        """Return those that ``names`` wants.

        Raises:
            ConfigError: ``names`` makes no sense, or wants none.
        """
        wanted = pick(names, {**self.values, **self.unlisted})
        values, unlisted = (
            {key: value for key, value in one.items() if key in wanted} for one in (self.values, self.unlisted)
        )
        return Entries(values, self.metadata, unlisted)


def ranks_of(model: nn.Module, names: Names | None = None) -> ModelRanks:
    """Return the ranks that share ``model``: those of the annotations on it and below it, and of its DTensors.

    Collective over them where there are DTensors of tensor parallelism.

    Args:
        model: Annotated.
        names: Of a model that is annotated on different ranks: what the question is about.

    Raises:
        UsageError: There is no annotation.
        ConfigError: ``model`` is no module, annotations are on different ranks and what is asked for is too,
            ``names`` makes no sense, or the ranks of annotations and DTensors are no grid.
    """
    check_module("model", model)
    found: dict[tuple[int, ...], Ranks] = {}
    for module in model.modules():
        states = [managing_state(module, "fully_shard"), *(one.state for one in get_registry(module).values())]
        for state in states:
            if isinstance(state, (FullyShardState, ReplicateState)):
                found.setdefault(state.grid.everyone.numbers, state.grid.everyone)
    if not found:
        raise UsageError(
            "the model is not annotated",
            at=f"{place_of_rank()}, {describe_module(model)}",
            fix="use state_dict() and load_state_dict() of the plain model, or annotate it first",
        )
    tensors: Iterable[torch.Tensor] = [*model.parameters(), *model.buffers()]
    if len(found) > 1 and names is not None:
        tensors = entries_now(model).picked(names).settable().values()
        homes = map(ranks_of_param, tensors)
        found = {home.numbers: home for home in homes if home is not None}
    if len(found) != 1:
        raise ConfigError(
            f"modules are annotated on different ranks: {', '.join(str(list(ranks)) for ranks in found)}"
            if found
            else "modules are annotated on different ranks, and names picks no parameter of any",
            at=f"{place_of_rank()}, {describe_module(model)}",
            fix="call this on each part of the model that is on one set of ranks, or pick it by names=",
        )
    return ModelRanks.of(next(iter(found.values())), list(_mesh_dims(tensors)))


def _mesh_dims(tensors: Iterable[torch.Tensor]) -> Iterable[Ranks]:
    """Return the ranks along each mesh dim that something of ``tensors`` is split or replicated over."""
    found: dict[tuple[int, int], Ranks] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            for dim in range(mesh.ndim):
                if (id(mesh), dim) not in found:
                    found[id(mesh), dim] = Ranks.of_mesh(mesh, dim)
    return {ranks.numbers: ranks for ranks in found.values()}.values()


def entries_of(
    model: nn.Module, ranks: Ranks, options: object, *, names: Names | None = None, permits_meta: bool = False
) -> Entries:
    """Return the entries of ``model``, sharded, once all ranks are known to have the same ones and to pick alike.

    Collective: all ranks of ``ranks``.

    Args:
        model: Annotated; between steps. What an earlier forward left unsharded is resharded.
        ranks: Who shares it.
        options: What else has to be the same on all ranks; compared by its ``repr``.
        names: Which of them; default: all.
        permits_meta: Entries on the meta device will do.

    Raises:
        UsageError: In a forward or backward, inside ``unshard_params``, or parameters are on the meta device.
        ConfigError: ``names`` makes no sense, or picks none.
        DesyncError: Another rank has other entries or options, or picks others; what ``names`` raised on another rank.
    """
    with ranks.agreed():
        _check_moment(model)
        everything = entries_now(model)
        entries = everything.picked(names)
        on_meta = [key for key, value in entries.values.items() if _is_meta(value)]
        if on_meta and not permits_meta:
            raise UsageError(
                "full values are asked for, and there are none on the meta device",
                at=f"{place_of_rank()}, {list_text(on_meta)}",
                fix=META_FIX,
            )
    homes = map(ranks_of_param, everything.settable().values())
    has_others = any(home is not None and home.numbers != ranks.numbers for home in homes)
    # What is on other ranks, such as experts, may have other names on each of these.
    _compare(entries if has_others else everything, entries, ranks, options)
    return entries


def entries_now(model: nn.Module) -> Entries:
    """Return the entries of ``model`` as they are; compares nothing."""
    values = model.state_dict(keep_vars=True)
    listed = {id(value) for value in values.values()}
    unlisted: dict[str, torch.Tensor] = {
        fqn: param for fqn, param in model.named_parameters() if id(param) not in listed
    }
    return Entries(dict(values), getattr(values, "_metadata", None), unlisted)


def has_meta(values: Iterable[Any]) -> bool:
    """Say whether some tensor is on the meta device."""
    return any(map(_is_meta, values))


def largest_handle_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all whole parameters of the largest handle that has some of ``tensors``; 0 without handles.

    The same on all ranks, also where blocks of tensor parallelism differ, or other handles.
    """
    handles = {handle: None for tensor in tensors if (handle := handle_of(tensor)) is not None}
    sizes = [
        sum(param.spec.shape.numel() * flat.compute_dtype.itemsize for flat in handle.buffers for param in flat.params)
        for handle in handles
    ]
    return max(sizes, default=0)


def batches(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Split named tensors, in order, into lists of at most ``max_bytes`` of full values, or of one tensor."""
    batch: list[tuple[str, torch.Tensor]] = []
    total = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.dtype.itemsize
        if batch and total + size > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append((name, tensor))
        total += size
    if batch:
        yield batch


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _check_moment(model: nn.Module) -> None:
    for module in model.modules():
        state = sharded_state_of(module)
        if state is None:
            continue
        handle = handle_of_module(module)
        if state.root is not None and not state.root.scheduler.is_idle:
            raise UsageError(
                "full values are asked for in the middle of a forward or backward",
                at=f"{place_of_rank()}, {describe_module(model)}",
                fix="ask for them between steps",
            )
        if handle is not None and handle.held_with is not None:
            raise UsageError(
                "full values are asked for while unshard_params shows the parameters",
                at=f"{place_of_rank()}, {handle.described}",
                fix="leave unshard_params first; inside it, state_dict() and load_state_dict() are the plain model's",
            )


def _compare(everything: Entries, picked: Entries, ranks: Ranks, options: object) -> None:
    """Raise on every rank unless all have the same entries and options, and picked the same."""
    wanted = {*picked.values, *picked.unlisted}
    text = "\n".join([f"options {options!r}", *_describe({**everything.values, **everything.unlisted}, wanted)])
    ranks.compare(
        text,
        shown=text,
        what="the ranks ask for full values of different models or with different arguments",
        fix="make the same call on the same model on every rank",
    )


def _describe(values: Mapping[str, Any], wanted: Collection[str]) -> Iterator[str]:
    for key, value in values.items():
        kind = "no tensor"
        if isinstance(value, torch.Tensor):
            name = type(value).__name__ if isinstance(value, DTensor) else "tensor"
            kind = f"{name} {list(value.shape)} {value.dtype}"
        yield f"{key}: {kind}{'' if key in wanted else ', not picked'}"
