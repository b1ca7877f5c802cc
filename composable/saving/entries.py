"""The parts of a model that a full state dict is made of, and which ranks share them.

A model's *entries* are what ``state_dict()`` lists: key and tensor, ties and shared buffers under every
name. Ragged tensors among them are gathered or filled in *batches* of bounded size.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable.collectives.mesh import device_of
from composable.collectives.ranks import agreed
from composable.contract import describe_module, get_registry, managing_state
from composable.errors import ConfigError, DesyncError, UsageError, place_of_rank
from composable.replicate import ReplicateState
from composable.runtime.state import FullyShardState
from composable.saving.fit import entries_to_load

__all__ = ["Entries", "Ranks", "batches", "entries_of", "has_meta", "largest_handle_bytes", "ranks_of"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """Who shares a model.

    Attributes:
        group: The ranks.
        device: Of the tensors that the group talks in.
        rank: This rank in the group.
    """

    group: dist.ProcessGroup
    device: torch.device
    rank: int

    def broadcast(self, value: _T | None, src: int) -> _T:
        """Return on every rank the object that ``src`` has. Collective."""
        box = [value]
        if dist.get_world_size(self.group) > 1:
            dist.broadcast_object_list(box, group=self.group, group_src=src, device=self.device)
        return box[0]  # type: ignore[return-value]  # the source gives one

    def check_member(self, name: str, rank: int) -> None:
        """Raise unless ``rank`` is one of the group.

        Raises:
            ConfigError: It is not.
        """
        world_size = dist.get_world_size(self.group)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ConfigError(f"{name} is {rank!r}", fix=f"pass a rank of the shard group, 0 to {world_size - 1}")


@dataclass(frozen=True)
class Entries:
    """What a model's state dict lists.

    Attributes:
        values: Every entry by key, in the plain model's order: parameters and buffers themselves, ties as one object.
        metadata: Module versions, which torch keeps beside the entries.
    """

    values: dict[str, Any]
    metadata: Any

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the entries that are tensors."""
        return {key: value for key, value in self.values.items() if isinstance(value, torch.Tensor)}


def ranks_of(model: nn.Module) -> Ranks:
    """Return the ranks that share ``model``: those of the annotations on it and below it.

    Raises:
        UsageError: There is no annotation.
        ConfigError: Annotations are on different ranks.
    """
    found: dict[tuple[int, ...], Ranks] = {}
    for module in model.modules():
        states = [managing_state(module, "fully_shard"), *(one.state for one in get_registry(module).values())]
        for state in states:
            if isinstance(state, FullyShardState):
                group, device = state.mesh.get_group(), device_of(state.mesh)
            elif isinstance(state, ReplicateState):
                group, device = state.group, state.device
            else:
                continue
            found.setdefault(tuple(dist.get_process_group_ranks(group)), Ranks(group, device, dist.get_rank(group)))
    if not found:
        raise UsageError(
            "the model is not annotated",
            at=f"{place_of_rank()}, {describe_module(model)}",
            fix="use state_dict() and load_state_dict() of the plain model, or annotate it first",
        )
    if len(found) > 1:
        raise ConfigError(
            f"modules are annotated on different ranks: {', '.join(str(list(ranks)) for ranks in found)}",
            at=f"{place_of_rank()}, {describe_module(model)}",
            fix="call this on each part of the model that is on one set of ranks",
        )
    return next(iter(found.values()))


def entries_of(model: nn.Module, ranks: Ranks, options: object, *, permits_meta: bool = False) -> Entries:
    """Return the entries of ``model``, sharded, once all ranks are known to have the same ones.

    Collective: all ranks of ``ranks``.

    Args:
        model: Annotated; between steps. What an earlier forward left unsharded is resharded.
        ranks: Who shares it.
        options: What else has to be the same on all ranks; compared by its ``repr``.
        permits_meta: Entries on the meta device will do; then those of the modules are returned as they are.

    Raises:
        UsageError: In a forward or backward, inside ``unshard_params``, or parameters are on the meta device.
        DesyncError: Another rank has other entries or options.
    """
    with agreed(ranks.group, ranks.device):
        _check_moment(model)
        if permits_meta and has_meta(entries_to_load(model)[0].values()):
            entries = Entries(dict(entries_to_load(model)[0]), None)
        else:
            values = model.state_dict(keep_vars=True)
            entries = Entries(dict(values), getattr(values, "_metadata", None))
    _compare(entries, ranks, options)
    return entries


def has_meta(values: Iterable[Any]) -> bool:
    """Say whether some tensor is on the meta device."""
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in values)


def largest_handle_bytes(model: nn.Module) -> int:
    """Return the bytes of the largest handle's parameters, unsharded; 0 without handles."""
    states = {id(state): state for module in model.modules() if (state := _sharded_state(module)) is not None}
    sizes = [
        sum(flat.buffer_bytes for flat in handle.buffers) for one in states.values() for handle in one.plan.handles
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


def _sharded_state(module: nn.Module) -> FullyShardState | None:
    state = managing_state(module, "fully_shard")
    return state if isinstance(state, FullyShardState) else None


def _check_moment(model: nn.Module) -> None:
    for module in model.modules():
        state = _sharded_state(module)
        if state is None:
            continue
        handle = state._module_to_handle.get(module)
        if state.root is not None and not state.root.scheduler.is_idle:
            raise UsageError(
                "full values are asked for in the middle of a forward or backward",
                at=f"{place_of_rank()}, {describe_module(model)}",
                fix="ask for them between steps",
            )
        if handle is not None and handle.held_with is not None:
            raise UsageError(
                "full values are asked for while unshard_params shows the parameters",
                at=f"{place_of_rank()}, module {handle.fqn!r}",
                fix="leave unshard_params first; inside it, state_dict() and load_state_dict() are the plain model's",
            )


def _compare(entries: Entries, ranks: Ranks, options: object) -> None:
    """Raise on every rank unless all have the same entries and options."""
    world_size = dist.get_world_size(ranks.group)
    if world_size == 1 or dist.get_backend(ranks.group) == "fake":
        return
    lines = [f"options {options!r}", *_describe(entries.values)]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=ranks.device)
    every = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(every, mine, group=ranks.group)
    if all(torch.equal(every[0], other) for other in every[1:]):
        return
    texts: list[list[str]] = [[]] * world_size
    dist.all_gather_object(texts, lines, group=ranks.group)
    common = set(texts[0]).intersection(*texts[1:])
    firsts = [next((line for line in text if line not in common), "(nothing else)") for text in texts]
    raise DesyncError(
        "the ranks ask for full values of different models or with different arguments"
        + "".join(f"\n    rank {rank}: {first}" for rank, first in enumerate(firsts)),
        at=place_of_rank(),
        fix="make the same call on the same model on every rank",
    )


def _describe(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            kind = type(value).__name__ if isinstance(value, DTensor) else "tensor"
            yield f"{key}: {kind} {list(value.shape)} {value.dtype}"
        else:
            yield f"{key}: no tensor"
