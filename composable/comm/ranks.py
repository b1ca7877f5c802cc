"""Groups of ranks that compare values and share errors.

A rank that raises alone leaves the others waiting in the next collective. Code that may fail on
some ranks only (reading a file, checking what rank 0 was given) runs in ``agreed``, and what
follows is reached by all ranks or by none.

Methods of ``Ranks`` are collective over them, in the same order on all of them, unless they say otherwise. Ranks in
messages are global ones: what the launcher, the logs and ``dist.get_rank()`` call them.
"""

import functools
import hashlib
import itertools
import os
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ReduceScatterOptions
from torch.distributed.device_mesh import DeviceMesh

from composable.comm.hang_watchdog import meeting
from composable.errors import ComposableError, ConfigError, DesyncError, UsageError, place_of_rank
from composable.ground.names import count_text
from composable.ground.torch_private import (
    default_timeout_of,
    is_tracing,
    new_named_group,
    real_backend,
    reduce_scatter_into,
    set_timeout,
    timeout_of,
    traceable_collectives,
)

__all__ = [
    "Ranks",
    "all_reduce_in",
    "compare_in_each",
    "default_group",
    "device_for",
    "hosts_of",
    "kept_with",
    "known_hosts",
    "make_group",
    "number_hosts",
    "reduce_scatter_in",
    "rows_of_hosts",
    "told_timeout",
    "wait_for_work",
    "wait_like_the_world",
]


_T = TypeVar("_T")
_NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
# Messages of `are_alike` travel under a tag that nothing else here uses.
_CONFIRM_TAG = 0x5EED
_HOOK = "a communication hook"
# Says which host a process is on, in place of what the system says.
HOST_VARIABLE = "COMPOSABLE_HOST"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")

_KEPT: "WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]]" = WeakKeyDictionary()


def kept_with(group: dist.ProcessGroup, key: Hashable, make: Callable[[], _T]) -> _T:
    """Return what ``make`` has made at first, kept as long as ``group`` lives, which it must not hold."""
    kept = _KEPT.setdefault(group, {})
    if key not in kept:
        kept[key] = make()
    found: _T = kept[key]
    return found


@dataclass(frozen=True)
class Ranks:
    """Ranks that talk to each other.

    Attributes:
        group: Their process group; ``None`` for a single process that has none.
        device: Of the tensors that the group talks in.
        rank: This rank within the group.
        size: How many there are.
        numbers: Their global ranks, in the order of the group.
    """

    group: dist.ProcessGroup | None
    device: torch.device
    rank: int
    size: int
    numbers: tuple[int, ...]

    def __hash__(self) -> int:
        # Of all fields it would cost a microsecond, and clipping asks once for each parameter.
        return hash((self.rank, self.numbers))

    @staticmethod
    def of(group: dist.ProcessGroup, device: torch.device) -> "Ranks":
        """Return the ranks of a group that this rank is in."""
        return Ranks(group, device, group.rank(), group.size(), tuple(dist.get_process_group_ranks(group)))

    @staticmethod
    def of_mesh(mesh: DeviceMesh, mesh_dim: int = 0) -> "Ranks":
        """Return the ranks along one dim of a mesh that this rank is in."""
        return Ranks.of(mesh.get_group(mesh_dim), device_for(mesh.device_type))

    @staticmethod
    def of_world() -> "Ranks":
        """Return all ranks, or this process alone where no process group is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, torch.device("cpu"), 0, 1, (0,))
        group = default_group()
        has_nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
        return Ranks.of(group, device_for("cuda" if has_nccl else "cpu"))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of ranks that are known to have one: everything annotated has."""
        return default_group() if self.group is None else self.group

    @property
    def order(self) -> tuple[int, tuple[int, ...]]:
        """Sorts groups alike on all ranks, parts before the whole: who is in several talks to one after the other."""
        return self.size, self.numbers

    @functools.cached_property
    def is_alone(self) -> bool:
        """There is nobody to talk to: one rank, or a group that only pretends."""
        return self.size == 1 or self.group is None or dist.get_backend(self.group) == "fake"

    # Errors

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run a block that may raise on some ranks, and raise on every rank if it did on any.

        The block itself must not communicate among these ranks.

        Raises:
            Exception: What the block raised here.
            ComposableError: What it raised on another rank, of the same type where it is an error of this library.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.raise_together(failure)

    def raise_together(self, failure: Exception | None) -> None:
        """Raise ``failure`` on the rank that has one and what it says on the others; nothing if there is none."""
        self.compare("", failure)

    def compare(
        self,
        text: str,
        failure: Exception | None = None,
        *,
        shown: str | Callable[[], str] = "",
        what: str = "",
        fix: str = "",
    ) -> None:
        """Raise on every rank unless all have equal texts and no failure.

        Ranks that meet here from different calls find different texts. Does nothing in a graph that is being compiled.

        Args:
            text: What has to be equal.
            failure: What this rank alone knows to be wrong.
            shown: The same for people, who get the first lines that differ.
            what: What is wrong if the texts differ.
            fix: What the user should do then.

        Raises:
            Exception: ``failure``, or what another rank told of its own.
            DesyncError: The texts differ.
        """
        key = "a failure" if failure is not None else f"text {text}"
        if not is_tracing() and not self.are_alike(key):
            told = self.objects((_as_told(failure), shown if isinstance(shown, str) else shown()))
            failure = failure or next((other for other, _ in told if other is not None), None)
            if failure is None:
                lines = _first_difference([text for _, text in told], self.numbers)
                failure = DesyncError(f"{what}\n{lines}", at=place_of_rank(), fix=fix)
        if failure is not None:
            raise failure

    def are_alike(self, key: str) -> bool:
        """Say whether all ranks have equal keys.

        Sixteen bytes to a peer and from one, in as many rounds as the number of ranks has binary digits. By messages,
        since a collective of other ranks, of another size, would end the process where it met this one.
        """
        if self.is_alone:
            return True
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
        # On the host, where the group can talk there: reading a number from a device waits for all of its work.
        is_on_host = self.device.type == "cpu" or "cpu:" in str(dist.get_backend_config(self.group))
        # The largest number and, as its negative, the least: they agree if all are equal.
        extremes = torch.tensor([number, -number], device="cpu" if is_on_host else self.device)
        step = 1
        while step < self.size:
            got = torch.empty_like(extremes)
            self._swap(extremes, (self.rank + step) % self.size, got, (self.rank - step) % self.size)
            extremes = torch.maximum(extremes, got)
            step *= 2
        largest, least = extremes.tolist()
        return bool(largest == -least)

    def _swap(self, sent: torch.Tensor, to: int, got: torch.Tensor, source: int) -> None:
        if sent.device.type != "cpu":
            # Both at once: on a stream a receive would wait for ever for the send behind it.
            self.exchange([(sent, to)], [(got, source)])
            return
        group = self.process_group
        # The first of the two messages is in the place of a collective.
        with meeting(group, "swap"):
            for work in (group.recv([got], source, _CONFIRM_TAG), group.send([sent], to, _CONFIRM_TAG)):
                work.wait()

    def check_member(self, name: str, rank: int) -> None:
        """Raise unless ``rank`` is a rank within the group. Not collective.

        Raises:
            ConfigError: It is not.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ConfigError(f"{name} is {rank!r}", fix=f"pass a rank of the model, 0 to {self.size - 1}")

    # Values

    def objects(self, value: _T) -> list[_T]:
        """Return every rank's ``value``, which can be pickled."""
        if self.is_alone:
            return [value] * self.size
        values: list[Any] = [None] * self.size
        with meeting(self.group, "objects"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def object_of(self, source: int, value: _T | None) -> _T:
        """Return on every rank the object that ``source``, a rank within the group, has."""
        box = [value]
        if not self.is_alone:
            with meeting(self.group, "object_of"):
                dist.broadcast_object_list(box, group=self.group, group_src=source, device=self.device)
        return box[0]  # type: ignore[return-value]  # the source gives one

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor``, of any shape and dtype, contiguous and on ``device``, with that of rank ``source``."""
        if tensor.numel() and not self.is_alone:
            with meeting(self.group, "broadcast"):
                # As bytes: not every backend knows every dtype.
                dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=source)

    def reduce(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> torch.Tensor:
        """Reduce a small tensor over the ranks; may change it in place, the result counts. Can be compiled.

        Shapes: any, of any dtype that the backend adds up or compares; the result has both, on the tensor's device.
        """
        if self.size == 1 or self.group is None or tensor.is_meta:
            return tensor
        # Offloaded tensors: the group talks in tensors of its own device only.
        moved = tensor.to(self.device)
        # Not `torch.compiler.is_compiling`: in torch 2.11 it says no while the graph behind the operations is made.
        if is_tracing():
            moved = traceable_collectives.all_reduce(moved, _NAMES[op], self.group)
        else:
            with meeting(self.group, "reduce"):
                dist.all_reduce(moved, op=op, group=self.group)
        return moved.to(tensor.device)

    def gather_ragged(self, full: torch.Tensor, bounds: Sequence[int]) -> None:
        """Complete ``full`` [numel] uint8, of which each rank has its range ``[bounds[rank], bounds[rank + 1])``."""
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        own = slice(bounds[self.rank], bounds[self.rank + 1])
        if self.size == 1 or not full.numel():
            return
        with meeting(self.group, "gather"):
            if max(sizes) * self.size <= 2 * sum(sizes):
                # Near equal pieces: one call, at the price of padding.
                padded = full.new_zeros(max(sizes))
                padded[: sizes[self.rank]].copy_(full[own])
                gathered = full.new_empty(self.size, max(sizes)).unbind()
                dist.all_gather(list(gathered), padded, group=self.group)
                for start, size, got in zip(bounds, sizes, gathered):
                    full[start : start + size].copy_(got[:size])
                return
            # Few owners, the common case: every byte is sent once and lands in place.
            pieces = [
                (rank, full[start : start + size]) for rank, (start, size) in enumerate(zip(bounds, sizes)) if size
            ]
            works = [dist.broadcast(piece, group=self.group, group_src=rank, async_op=True) for rank, piece in pieces]
            for work in works:
                if work is not None:
                    work.wait()

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Send and receive tensors [n] of any dtype, on ``device``; of a pair of ranks, messages keep their order.

        Args:
            sends: Message and the rank within the group that gets it.
            receives: Where a message goes, and the rank within the group that sends it.
        """
        ops = [dist.P2POp(dist.isend, message, group=self.group, group_peer=peer) for message, peer in sends]
        ops += [dist.P2POp(dist.irecv, message, group=self.group, group_peer=peer) for message, peer in receives]
        # How many messages each rank has is its own affair.
        with meeting(self.group, "exchange", ahead=None):
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()


def device_for(device_type: str) -> torch.device:
    """Return the device of this process of a type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _first_difference(texts: Sequence[str], numbers: Sequence[int]) -> str:
    lines = [text.splitlines() for text in texts]
    for index in range(max(len(own) for own in lines)):
        at_index = [own[index] if index < len(own) else "(nothing more)" for own in lines]
        if len(set(at_index)) > 1:
            return "\n".join(
                f"    rank {number}: {line.strip()}" for number, line in zip(numbers, at_index, strict=True)
            )
    return "    (the texts are equal, but the model, mesh or options differ)"


def _as_told(failure: Exception | None) -> ComposableError | None:
    """Return what the other ranks raise: the same, with the place where it happened."""
    if failure is None:
        return None
    place = place_of_rank()
    if not isinstance(failure, ComposableError):
        return DesyncError(f"another rank raised {type(failure).__name__}: {failure}", at=place)
    at = failure.at or ""
    return type(failure)(
        failure.what, at=at if at.startswith("rank ") else ", ".join(filter(None, [place, at])), fix=failure.fix
    )


def compare_in_each(texts: Mapping[Ranks, str], failure: ComposableError | None = None, *, what: str, fix: str) -> None:
    """Do what ``Ranks.compare`` does, in each group: a failure in one is told to those that follow. Collective.

    Raises:
        ComposableError: ``failure``, or that of another rank.
        DesyncError: The texts differ.
    """
    for ranks, text in texts.items():
        try:
            ranks.compare(text, failure, shown=text, what=what, fix=fix)
        except ComposableError as error:
            failure = error
    if failure is not None:
        raise failure


# In a group of the user's choice


def all_reduce_in(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace ``tensor``, of any shape and floating-point or complex, by its sum over the ranks. Collective.

    Streams: on a device it runs on the current one; on the CPU the thread waits. So does ``reduce_scatter_in``.
    """
    with meeting(group, "all_reduce", _HOOK):
        dist.all_reduce(_real(tensor), group=group)


def reduce_scatter_in(group: dist.ProcessGroup, source: torch.Tensor, shard: torch.Tensor) -> None:
    """Write the sum over ranks of slice ``rank`` of ``source`` [W * S] to ``shard`` [S], of one dtype. Collective."""
    options = ReduceScatterOptions()
    options.asyncOp = False
    with meeting(group, "reduce_scatter", _HOOK):
        # torch's own function has one name in some versions, another in others.
        work = reduce_scatter_into(group)(_real(shard), _real(source), options)
        if work is not None:
            work.wait()


def wait_for_work(work: object, group: dist.ProcessGroup, what: str = "") -> None:
    """Wait for what a collective of others has returned; ``None``: it is over.

    Args:
        work: What it has returned.
        group: Its ranks.
        what: The call that has started it; empty: a hook of the user's.
    """
    if work is not None:
        # It is the last that was started.
        with meeting(group, "work", what or _HOOK, ahead=0):
            work.wait()  # type: ignore[attr-defined]  # a work


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


# Their hosts


def hosts_of(ranks: Ranks) -> tuple[int, ...]:
    """Return the number of each rank's host, in the order of the group: 0 is the host of the first rank.

    Collective over ``ranks`` on the first call for their group. Two processes share a host if they agree in three
    things, which no launcher has to tell: the name of the host, the boot of its kernel, and the network namespace.
    Containers on one machine with networks of their own are hosts of their own: what travels between them takes the
    network (docs/notes.md). The environment variable ``COMPOSABLE_HOST`` names the host of a rank where the
    system's view is not the one that counts: one name for all hosts that share fast links.
    """
    group = ranks.group
    if group is None or ranks.size == 1:
        return (0,) * ranks.size
    return kept_with(group, "hosts", lambda: number_hosts(_names_of_hosts(ranks, group)))


def known_hosts(ranks: Ranks) -> tuple[int, ...]:
    """Return what ``hosts_of`` has found before for the group of ``ranks``; empty: nobody has asked. Not collective."""
    found: tuple[int, ...] = () if ranks.group is None else _KEPT.get(ranks.group, {}).get("hosts", ())
    return found


def number_hosts(names: Sequence[str]) -> tuple[int, ...]:
    """Return a number for each name: equal for equal ones, from 0 on in the order in which they first appear."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def rows_of_hosts(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in ascending order.

    Args:
        hosts: The number of the host of each rank, as ``hosts_of`` gives them.

    Raises:
        ConfigError: Hosts have different numbers of ranks.
    """
    rows = tuple(tuple(rank for rank, own in enumerate(hosts) if own == host) for host in sorted(set(hosts)))
    found = Counter(len(row) for row in rows)
    if len(found) > 1:
        counts = ", ".join(f"{size} on {count_text(found[size], 'host')}" for size in sorted(found, reverse=True))
        raise ConfigError(
            f"a hybrid strategy without a mesh, and hosts have different numbers of ranks: {counts}",
            at=place_of_rank(),
            fix="start as many ranks on every host; or pass a mesh of two dims",
        )
    return rows


def _names_of_hosts(ranks: Ranks, group: dist.ProcessGroup) -> Sequence[str]:
    simulated = getattr(group, "hosts", None)
    if simulated is not None:
        return tuple(simulated)
    if ranks.is_alone:
        # A group that only pretends: nobody can be asked, so this is all that is known.
        count = os.environ.get("LOCAL_WORLD_SIZE", "")
        on_each = int(count) if count.isdigit() and int(count) else dist.get_world_size()
        return [str(number // on_each) for number in ranks.numbers]
    return ranks.objects(_own_host())


def _own_host() -> str:
    given = os.environ.get(HOST_VARIABLE, "")
    if given:
        return given
    parts = [socket.gethostname()]
    with suppress(OSError):
        # Machines made from one image may have one name.
        parts.append(_BOOT.read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(_NETWORK))
    # As short however long the name, since each rank gets all.
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


# Their groups


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks.

    Raises:
        UsageError: There is none.
    """
    world = dist.group.WORLD
    if world is None:
        raise UsageError(
            "there is no process group",
            at="this process",
            fix="call init_process_group, in a script that torchrun starts",
        )
    return world


def make_group(
    numbers: Sequence[int], like: dist.ProcessGroup | None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return a new group of the ranks with these global numbers, in this order. Collective over them.

    torch names a new group after how many this process is in: ranks that are in different numbers of groups, as after
    a mesh of one rank, would wait for each other under different names, and after a group was destroyed a name comes
    twice. Here ranks count the groups that were made of just them, which they make together in any case.

    Args:
        numbers: This rank's among them.
        like: The group whose timeout it gets.
        backend: As ``new_group`` takes it; ``None``: that of the default group.
    """
    world = default_group()
    # Counted before the attempt: ranks of which one fails still count alike.
    number = next(kept_with(world, ("made", *numbers), lambda: itertools.count(1)))
    # Without spaces: diagnoses of the watch list names between them.
    name = f"composable:{number}:{'-'.join(map(str, numbers))}"
    return new_named_group(name, tuple(numbers), backend, told_timeout(like))


def told_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the timeout that ``group`` was told; ``None``: it has torch's default, or it only pretends."""
    if group is None or not real_backend(group):
        return None
    timeout = timeout_of(group)
    return None if timeout == default_timeout_of(group) else timeout


def wait_like_the_world(every: Iterable[Ranks]) -> None:
    """Give groups without a timeout of their own that of the default process group. Each rank for itself.

    torch gives such groups, as those of a mesh, its default of 10 or 30 minutes, whatever the default group was told:
    a rank that waits there for a host that is gone would be there long after all others have given up.
    """
    timeout = told_timeout(dist.group.WORLD)
    if timeout is None:
        return
    for ranks in every:
        if ranks.group is not None and real_backend(ranks.group) and told_timeout(ranks.group) is None:
            set_timeout(ranks.group, timeout)
