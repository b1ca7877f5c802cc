"""The share of a checkpoint that each rank writes.

No rank plans for others. Copies of a value are dealt out among the ranks that have it, which each of them knows from
the value's mesh and from the names that ``entries.py`` has compared. One sum over the ranks tells whether each value is
written once. If not, because an optimizer has state on some ranks only, or torch knows no mesh of all copies, the ranks
tell each other what they have.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from composable.comm import Ranks
from composable.dtensor import RaggedDTensor
from composable.ground.torch_private import plan_for_rank, root_mesh
from composable.runs.pieces import Report
from composable.saving import NamesOnAll

# The ranks that may write a value: all of them, or their numbers in order.
Holders = Sequence[int]
# The sum over 16 million ranks of numbers below this one fits into 64 bits.
_MODULUS = 2**40
_SMALL_NUMEL = 256


class SharePlanner(DefaultSavePlanner):
    """A planner of what one rank writes of the tree ``state``."""

    def __init__(self, state: dict[str, Any], every: NamesOnAll, ranks: Ranks) -> None:
        super().__init__()
        self.set_up_planner(state)
        self._ranks = ranks
        self._homes = every.homes
        self._everyone = range(ranks.size)
        self._copies: dict[Hashable, Holders] = {}
        # Beyond the last row of a tensor are pieces without elements, which nobody reads.
        self._items = [one for one in self.create_local_plan().items if _numel(one) or not _numel(one, whole=True)]
        self._mine = _deal(self._items, lambda item: self._holders(item.index.fqn), ranks.rank)
        # The sum over all ranks is 0 if all that should have a value do, and as many elements are written as it has.
        self._excess = sum(_number(item.index.fqn) * (_numel(item) or 1) for item in self._mine)
        for fqn, value in self.state_dict.items():
            home, is_first = self._home(fqn), self._home(fqn)[0] == ranks.rank
            self._excess += _number(f"has {fqn}") * (1 - len(home) * is_first)
            if is_first:
                self._excess -= _number(fqn) * ((isinstance(value, torch.Tensor) and value.numel()) or 1)

    def share(self) -> SavePlan:
        """Return the plan of what this rank writes. Collective."""
        excess = torch.tensor(self._excess % _MODULUS)
        if not self._ranks.is_alone and int(self._ranks.reduce(excess, dist.ReduceOp.SUM)) % _MODULUS:
            held: dict[tuple[str, Any], list[int]] = {}
            for rank, keys in enumerate(self._ranks.objects([_key(item) for item in self._items])):
                for key in keys:
                    held.setdefault(key, []).append(rank)
            self._mine = _deal(self._items, lambda item: tuple(held[_key(item)]), self._ranks.rank)
        plan: SavePlan = plan_for_rank(SavePlan(self._mine), self._ranks.rank)
        return plan

    def report(self, results: Iterable[WriteResult]) -> Report:
        """Return what ``merge`` needs of the values that were written."""
        data_of, values = {item.index: item.tensor_data for item in self._mine}, dict[str, Any]()
        for result in results:
            fqn, data, place = result.index.fqn, data_of[result.index], result.storage_data
            value = [str(data.properties.dtype)[6:], data.size] if data else [None, ()]
            box = [*data.chunk.offsets, *data.chunk.sizes] if data else []
            values.setdefault(fqn, [self.mappings[fqn], *value, []])[-1].append([place.offset, place.length, *box])
        return values

    def _home(self, fqn: str) -> Holders:
        """Return the ranks that have a value, or pieces of it."""
        path = self.mappings[fqn]
        name = path[1] if path[0] == "model" else path[2] if path[1] == "state" else None
        return self._homes.get(name, self._everyone)  # type: ignore[arg-type]  # texts

    def _holders(self, fqn: str) -> Holders:
        """Return the ranks that have the same elements of a value as this rank."""
        value, home = self.state_dict[fqn], self._home(fqn)
        if self._ranks.is_alone:
            return (self._ranks.rank,)
        if not isinstance(value, DTensor):
            return home
        mesh = value.device_mesh
        cut = tuple(dim for dim, placement in enumerate(value.placements) if not isinstance(placement, Replicate))
        chosen = value._spec.layout.stored_among if isinstance(value, RaggedDTensor) else ()
        key = id(mesh), cut, chosen, id(home)
        if key not in self._copies:
            self._copies[key] = tuple(sorted(_copies(mesh, cut, chosen).intersection(home)))
        return self._copies[key]


def _deal(items: Iterable[WriteItem], holders: Callable[[WriteItem], Holders], rank: int) -> list[WriteItem]:
    """Return the items that ``rank`` writes: those that the same ranks have are dealt out in turn, the largest first.

    Small ones, such as counters of steps, stay together: every rank of a load reads them all.
    """
    groups: dict[Holders, list[WriteItem]] = {}
    mine = []
    for item in items:
        group = holders(item)
        if _numel(item) > _SMALL_NUMEL:
            groups.setdefault(group, []).append(item)
        elif rank == group[1 % len(group)]:
            mine.append(item)
    for group, shared in groups.items():
        shared.sort(key=lambda item: (-_numel(item), item.index.fqn, item.index.offset or ()))
        # The first rank, which has more to do, comes last.
        mine += shared[(group.index(rank) - 1) % len(group) :: len(group)]
    return mine


def _copies(mesh: DeviceMesh, cut: Sequence[int], chosen: Iterable[Sequence[int]]) -> set[int]:
    """Return the ranks that have the same piece as this rank of a tensor that is cut over these dims of ``mesh``.

    Along dims of the whole mesh that ``mesh`` is a part of, as those of data parallelism, are copies too, except along
    ranks of which one is ``chosen``.
    """
    cut_ranks = [*(_line(mesh, dim) for dim in cut), *map(set, chosen)]
    root = root_mesh(mesh)
    place: list[Any] = [*(root.get_coordinate() or ())]
    for dim in range(root.ndim):
        if not any(_line(root, dim) <= ranks for ranks in cut_ranks):
            place[dim] = slice(None)
    return {*root.mesh[tuple(place)].flatten().tolist()}


def _line(mesh: DeviceMesh, dim: int) -> set[int]:
    """Return this rank and its neighbours along a dim of ``mesh``."""
    place: list[Any] = [*(mesh.get_coordinate() or ())]
    place[dim] = slice(None)
    return {*mesh.mesh[tuple(place)].tolist()}


def _number(fqn: str) -> int:
    return int.from_bytes(blake2b(fqn.encode(), digest_size=5).digest(), "big")


def _key(item: WriteItem) -> tuple[str, tuple[int, ...] | None]:
    return item.index.fqn, None if item.index.offset is None else tuple(item.index.offset)


def _numel(item: WriteItem, *, whole: bool = False) -> int:
    data = item.tensor_data
    return 0 if data is None else (data.size if whole else data.chunk.sizes).numel()
