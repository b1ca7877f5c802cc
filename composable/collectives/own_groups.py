"""Process groups that an annotation makes for itself, where no other collective can come between.

Two annotations that share a group would have to agree on whose buckets come first. A copied model
may never train, so the group, which all ranks make together, waits until it is needed.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable.collectives.base import Pending, Started, Transport
from composable.collectives.new_groups import make_group
from composable.collectives.process_group import ProcessGroupTransport
from composable.collectives.ranks import Ranks
from composable.torch_private import replace_body

__all__ = ["OwnTransport", "call_before_destroy", "make_host_ranks", "make_host_transport", "part_of"]

# Groups that were made and are no longer needed, by number, under the group they were made for.
_IDLE: "WeakKeyDictionary[dist.ProcessGroup, dict[int, _OwnGroup]]" = WeakKeyDictionary()
_MADE: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()

# Groups of a few of the ranks of another one, under the default group: by their ranks, backend and device type.
_PARTS: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], dist.ProcessGroup]]" = WeakKeyDictionary()


class _OwnGroup:
    """A group that was made for others.

    Attributes:
        made: The group.
        number: How many were made before it for the same ranks: equal on all of them.
        device_type: Of the tensors it talks in.
    """

    __slots__ = ("device_type", "made", "number")

    def __init__(self, made: dist.ProcessGroup, number: int, device_type: str) -> None:
        self.made = made
        self.number = number
        self.device_type = device_type


class OwnTransport(Transport):
    """A transport in a group of its own, which is made when the first collective needs it.

    Args:
        ranks: Who talks. In the new group they are in the order of their global ranks.
    """

    name = ProcessGroupTransport.name

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.rank = sorted(ranks.numbers).index(ranks.numbers[ranks.rank])
        self.world_size = ranks.size
        self._group: _OwnGroup | None = None
        self._made: Transport | None = None
        self._finalizer: weakref.finalize[..., OwnTransport] | None = None

    def connect(self) -> Transport:
        """Make the group, if that is still to do. Collective."""
        if self._made is None:
            self._group = _take(self.ranks)
            self._made = ProcessGroupTransport(self._group.made)
            self.groups = self._made.groups
            # A replicated model that is dropped leaves its group to the next one.
            ranks = weakref.ref(self.ranks.process_group)
            self._finalizer = weakref.finalize(self, _leave, ranks, self._group, self._made)
            self._finalizer.atexit = False
        return self._made

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        return self.connect().begin_all_gather(buffer, shard, key)

    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        return self.connect().begin_reduce_scatter(source, shard, key, scale=scale)

    def begin_all_reduce(self, tensor: torch.Tensor, key: int, *, scale: float = 1.0) -> Pending:
        return self.connect().begin_all_reduce(tensor, key, scale=scale)

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        return self.connect().begin_broadcast(tensor, source_rank, key)

    def has_started(self, started: Started) -> bool:
        return self._made is not None and self._made.has_started(started)

    def settle(self) -> None:
        if self._made is not None:
            self._made.settle()

    def close(self) -> None:
        """Leave the group to who needs one next. Collective: it is made if it was not."""
        self.connect().close()
        assert self._finalizer is not None, "connected above"
        self._finalizer()
        self._group = self._made = self._finalizer = None
        self.groups = ()


def _leave(ranks: "weakref.ref[dist.ProcessGroup]", own: _OwnGroup, transport: Transport) -> None:
    """Offer a group to who needs one next, unless a peer may still take part in something that never ended here."""
    group = ranks()
    if group is not None and not transport.in_flight:
        _IDLE.setdefault(group, {})[own.number] = own


def _take(ranks: Ranks) -> _OwnGroup:
    """Return a group of the same ranks that nothing else uses. Collective over them."""
    group = ranks.process_group
    idle = _IDLE.setdefault(group, {})
    # Each rank collects its garbage when it likes: a group is free once all of them say so.
    offered = {own.number for own in list(idle.values()) if own.device_type == ranks.device.type}
    free = set.intersection(*ranks.objects(offered))
    if free:
        return idle.pop(min(free))
    made = _make(ranks.numbers, ranks)
    number = _MADE[group] = _MADE.get(group, 0) + 1
    return _OwnGroup(made, number, ranks.device.type)


def _make(numbers: Sequence[int], ranks: Ranks) -> dist.ProcessGroup:
    """Return a new group of the ranks with these global numbers, like that of ``ranks``. Collective over them."""
    group = ranks.process_group
    backend = dist.get_backend(group)
    # A group that was made without naming a backend has one for each device type, as the default one has.
    return make_group(sorted(numbers), group, backend=None if backend == "undefined" else backend)


def part_of(ranks: Ranks, size: int) -> Ranks:
    """Return the part of ``ranks``, ``size`` consecutive ones, that this rank is in; one group for all that ask.

    Collective over the part at first: all ranks, in the same order.

    Args:
        ranks: Who share something.
        size: A divisor of how many they are.
    """
    start = ranks.rank - ranks.rank % size
    numbers = ranks.numbers[start : start + size]
    world = dist.group.WORLD
    assert world is not None, "there are ranks to take a part of"
    made = _PARTS.setdefault(world, {})
    key = (numbers, dist.get_backend(ranks.process_group), ranks.device.type)
    if key not in made:
        made[key] = _make(numbers, ranks)
    return Ranks.of(made[key], ranks.device)


def make_host_transport(ranks: Ranks) -> Transport:
    """Return a transport of the same ranks, in a group of its own that talks in host memory. Collective over them."""
    group = ranks.process_group
    backend = "fake" if dist.get_backend(group) == "fake" else "gloo"
    return ProcessGroupTransport(make_group(sorted(ranks.numbers), group, backend=backend))


def make_host_ranks() -> Ranks:
    """Return all ranks in a group of their own that talks in host memory, for threads beside the main one.

    Collective: all ranks.
    """
    made = make_group(range(dist.get_world_size()), dist.group.WORLD, backend="gloo")
    return Ranks.of(made, torch.device("cpu"))


def call_before_destroy(call: Callable[[], None]) -> None:
    """Have ``call`` called before torch destroys all process groups; once for the process."""

    def destroy_process_group(original: Callable[[Any], None], group: Any = None) -> None:
        if group is None or group == dist.group.WORLD:
            call()
        original(group)

    replace_body(dist.destroy_process_group, destroy_process_group)
