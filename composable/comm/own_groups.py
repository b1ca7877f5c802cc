"""The choice of a transport and its group.

Two annotations that share a group would have to agree on the order of their buckets. Autograd decides it, and otherwise
on a rank whose loss leaves a part out, or whose second model goes backward first: buckets of equal size would be mixed
up in silence. So an ``OwnTransport`` has a group in which no other collective runs. A copied model may never train, so
the ranks make this group, all together, only when they need it.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from composable.comm.hosts import hosts_of
from composable.comm.ranks import Ranks, default_group, kept_with, make_group
from composable.comm.shared_memory import MET, SharedMemoryTransport, meet
from composable.comm.transport import Pending, ProcessGroupTransport, Transport, choose_transport, transport_class
from composable.comm.waits import Started
from composable.errors import ConfigError, warn_once
from composable.ground.torch_private import real_backend, replace_body, tensors_have_values

# So many groups of the same ranks are worth a warning: gloo takes three threads and five files for each.
_MANY = 16


def choose_transport_for(ranks: Ranks, name: str = "auto") -> str:
    """Return the name of the transport for these ranks if they all share a host; errors as ``choose_transport``."""
    return _choose(ranks, (0,) * ranks.size, name)


def settle_transport_for(ranks: Ranks, name: str = "auto") -> str:
    """Return the name of the transport for these ranks on their actual hosts. Collective if hosts make a difference.

    ``name`` is the user's choice, which has been checked. If some ranks cannot map the memory of others, all ranks log
    it, and take the next transport.

    Call it after the ranks have compared their calls. Before, the exchange of hosts may run against a collective of
    another size on another rank, which ends the process.
    """
    on_one_host = choose_transport_for(ranks, name)
    if name != "auto" or not transport_class(on_one_host).maps_memory:
        return on_one_host
    hosts = hosts_of(ranks)
    chosen = _choose(ranks, hosts, name)
    return _choose(ranks, hosts, name, may_map=_can_map(ranks)) if transport_class(chosen).maps_memory else chosen


def _choose(ranks: Ranks, hosts: Sequence[int], name: str, *, may_map: bool = True) -> str:
    group = ranks.process_group
    # Ranks of a simulation are threads.
    may_map = may_map and bool(real_backend(group))
    return choose_transport(ranks.device.type, dist.get_backend(group), hosts, name, may_map=may_map)


def _can_map(ranks: Ranks) -> bool:
    """Say whether these ranks, on one host, can map each other's memory. Collective at first use."""

    def ask() -> list[object] | None:
        try:
            return [meet(ranks)]
        except ConfigError as error:  # on every rank
            warn_once(f"{error.what}; they use another transport, which is slower")
            return None

    return kept_with(ranks.process_group, MET, ask) is not None


def transport_of(group: dist.ProcessGroup, name: str) -> Transport:
    """Return the transport ``name`` of ``group``, one for all callers if it is shared. Collective at first use."""
    transport = transport_class(name)
    if not transport.is_shared:
        return transport(group)
    # It lives as long as the group, like torch's own groups, and has further groups of its own.
    shared: dict[str, Transport] = kept_with(group, name, dict)
    if not shared or shared[name].closed_because:
        shared[name] = transport(group)
    return shared[name]


def host_transport_of(ranks: Ranks, name: str) -> Transport:
    """Return the transport for tensors in host memory between ``ranks``, shared if it can be. Collective at first use.

    ``name`` is that of their transport for parameters, which is used if these are in host memory.
    """
    group = ranks.process_group
    if ranks.device.type == "cpu":
        return transport_of(group, name)
    backend = "fake" if dist.get_backend(group) == "fake" else "gloo"
    numbers = sorted(ranks.numbers)
    return kept_with(group, "host", lambda: ProcessGroupTransport(make_group(numbers, group, backend=backend)))


class OwnTransport(Transport):
    """A transport in a group of its own, made when the first collective needs it, in the order of global ranks."""

    name = "own"

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.rank = sorted(ranks.numbers).index(ranks.numbers[ranks.rank])
        self.world_size = ranks.size
        self.carries_values = tensors_have_values()
        self._inner: ProcessGroupTransport | None = None
        self._finalize: Callable[[], object] | None = None

    def connect(self) -> ProcessGroupTransport:
        """Return the transport that does the work, which is made with its group unless it exists. Collective."""
        self.ranks.check_process()
        if self._inner is None:
            number, group = _take(self.ranks)
            # torch's debug level DETAIL wraps a new group: it is none of a real backend then.
            maps_memory = bool(real_backend(group)) and transport_class(settle_transport_for(self.ranks)).maps_memory
            inner = (
                SharedMemoryTransport(group, is_own=True, asked=self.ranks.process_group)
                if maps_memory
                else ProcessGroupTransport(group)
            )
            self.groups = inner.groups
            # A replicated model that is dropped leaves its group to the next one.
            finalizer = weakref.finalize(self, _leave, _idle_of(self.ranks), number, group, inner.in_flight)
            finalizer.atexit = False
            self._finalize = finalizer
            self._inner = inner  # Last: a call that was cut short is done again.
        return self._inner

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

    def settle(self) -> None:
        if self._inner is not None:
            self._inner.settle()

    def close(self) -> None:
        """Offer the group for reuse, unless a collective is in flight. Collective: makes the group if there is none."""
        self.connect()
        if self._finalize is not None:
            self._finalize()
        self._finalize = self._inner = None
        self.groups = ()


def _take(ranks: Ranks) -> tuple[int, dist.ProcessGroup]:
    """Return the number of a group of these ranks that nothing else uses, and the group. Collective over them."""
    # Ranks collect garbage at different times: a group is free once it is idle on all of them.
    idle = _idle_of(ranks)
    free = set.intersection(*ranks.objects(set(idle)))
    if free:
        return min(free), idle.pop(min(free))
    number = next(kept_with(ranks.process_group, ("own", ranks.device.type), itertools.count))
    if number + 1 == _MANY and ranks.rank == 0:
        warn_once(
            f"{_MANY} calls of replicate have a process group each, with threads, files and on NCCL a communicator: "
            "one call with the list of the modules, replicate([...]), has one group for all"
        )
    return number, _make_like(ranks.numbers, ranks)


def _idle_of(ranks: Ranks) -> dict[int, dist.ProcessGroup]:
    """Return the groups of these ranks that were made and are no longer needed, by number."""
    return kept_with(ranks.process_group, ("idle", ranks.device.type), dict)


def _leave(
    idle: dict[int, dist.ProcessGroup], number: int, group: dist.ProcessGroup, in_flight: dict[Started, None]
) -> None:
    """Offer a group for reuse, unless a collective never ended here: peers may still take part in it."""
    if not in_flight:
        idle[number] = group


def _make_like(numbers: Sequence[int], ranks: Ranks) -> dist.ProcessGroup:
    """Return a new group of the global ranks ``numbers``, like the group of ``ranks``. Collective over them."""
    backend = dist.get_backend(ranks.process_group)
    # A group that was made without naming a backend has one for each device type, as the default one has.
    return make_group(sorted(numbers), ranks.process_group, backend=None if backend == "undefined" else backend)


def part_of(ranks: Ranks, size: int) -> Ranks:
    """Return this rank's part of ``ranks``, ``size`` consecutive ranks; each caller gets the same group.

    The first call is collective over the part: all its ranks, in the same order. ``size`` divides ``ranks.size``.
    """
    start = ranks.rank - ranks.rank % size
    numbers = ranks.numbers[start : start + size]
    key = (numbers, dist.get_backend(ranks.process_group), ranks.device.type)
    return Ranks.of(kept_with(default_group(), key, lambda: _make_like(numbers, ranks)), ranks.device)


def make_host_ranks() -> Ranks:
    """Return all ranks in a new group for tensors on the host, for threads beside the main one. Collective."""
    return Ranks.of(make_group(range(dist.get_world_size()), dist.group.WORLD, backend="gloo"), torch.device("cpu"))


def call_before_destroy(call: Callable[[], None]) -> None:
    """Run ``call`` before torch destroys all process groups; only the first registration in a process counts."""

    def destroy_process_group(original: Callable[[Any], None], group: Any = None) -> None:
        if group is None or group == dist.group.WORLD:
            call()
        original(group)

    replace_body(dist.destroy_process_group, destroy_process_group)
