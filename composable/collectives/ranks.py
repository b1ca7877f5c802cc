"""Ranks that talk to each other, outside the hot path: agree on errors, compare, exchange.

A rank that raises alone leaves the others waiting in the next collective. Code that may fail on
some ranks only (reading a file, checking what rank 0 was given) runs in ``agreed``, and what
follows is reached by all ranks or by none.

Everything here is collective over the ranks, in the same order on all of them. Ranks in
messages are global ones: what the launcher, the logs and ``dist.get_rank()`` call them.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable.collectives.watch import explained
from composable.errors import ComposableError, ConfigError, DesyncError, place_of_rank
from composable.torch_private import is_tracing, traceable_collectives

__all__ = ["Ranks", "compare_in_each", "device_for", "device_of"]

_T = TypeVar("_T")
_P = ParamSpec("_P")
_NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
# Messages of `confirm` travel under a tag that nothing else here uses.
_CONFIRM_TAG = 0x5EED
# How many numbers each group has given out.
_NUMBERS_TAKEN: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()


def _watched(method: "Callable[Concatenate[Ranks, _P], _T]") -> "Callable[Concatenate[Ranks, _P], _T]":
    """Let a method say what the watch of ranks that wait has found, if its wait ends by an error."""

    @functools.wraps(method)
    def call(ranks: "Ranks", *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(ranks, *args, **kwargs)
        except ComposableError:
            raise
        except RuntimeError as error:
            raise explained(error, ranks.group) from error

    return cast("Callable[Concatenate[Ranks, _P], _T]", call)


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
        return Ranks.of(mesh.get_group(mesh_dim), device_of(mesh))

    @staticmethod
    def of_world() -> "Ranks":
        """Return all ranks, or this process alone where no process group is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, torch.device("cpu"), 0, 1, (0,))
        group = dist.group.WORLD
        assert group is not None, "a process group is initialised"
        has_nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
        return Ranks.of(group, device_for("cuda" if has_nccl else "cpu"))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of ranks that are known to have one: everything annotated has."""
        assert self.group is not None, "a process without a process group"
        return self.group

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
        if not self.is_alone:
            flag = torch.tensor([failure is not None], dtype=torch.uint8, device=self.device)
            if self.reduce(flag, dist.ReduceOp.MAX).item():
                failures = self.objects(_as_told(failure))
                if failure is None:
                    failure = next(told for told in failures if told is not None)
        if failure is not None:
            raise failure

    @_watched
    def compare(self, text: str, failure: Exception | None = None, *, shown: str, what: str, fix: str) -> None:
        """Raise on every rank unless all have equal texts and no failure.

        Ranks that meet here from different calls find different texts.

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
        if self.is_alone:
            if failure is not None:
                raise failure
            return
        digest = hashlib.sha256(text.encode()).digest()
        mine = torch.tensor([failure is not None, *digest], dtype=torch.uint8, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self.group)
        found = torch.stack(every).tolist()
        if any(one[0] for one in found):
            self.raise_together(failure)
        if any(one != found[0] for one in found):
            lines = _first_difference(self.objects(shown), self.numbers)
            raise DesyncError(f"{what}\n{lines}", at=place_of_rank(), fix=fix)

    def confirm(self, key: str, *, shown: Callable[[], str], what: str, fix: str) -> None:
        """Raise on every rank unless all are about to do the same thing: asked before tensors move that have to fit.

        As ``are_alike`` asks. Does nothing in a graph that is being compiled.

        Args:
            key: What has to be equal.
            shown: Says what this rank is about to do, for people.
            what: What is wrong if the keys differ.
            fix: What the user should do then.

        Raises:
            DesyncError: The keys differ.
        """
        if is_tracing() or self.are_alike(key):
            return
        texts = self.objects(shown())
        lines = [f"    rank {number}: {text}" for number, text in zip(self.numbers, texts, strict=True)]
        if len(set(texts)) == 1:
            lines.append("    (of another model or mesh, though in equal words)")
        raise DesyncError("\n".join([what, *lines]), at=place_of_rank(), fix=fix)

    def are_alike(self, key: str) -> bool:
        """Say whether all ranks have equal keys.

        Sixteen bytes to a peer and from one, in as many rounds as the number of ranks has binary digits. By messages,
        since a collective of other ranks, of another size, would end the process where it met this one.
        """
        if self.is_alone:
            return True
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
        # The largest number and, as its negative, the least: they agree if all are equal.
        extremes = torch.tensor([number, -number], device=self._confirm_device)
        step = 1
        while step < self.size:
            got = torch.empty_like(extremes)
            self._swap(extremes, (self.rank + step) % self.size, got, (self.rank - step) % self.size)
            extremes = torch.maximum(extremes, got)
            step *= 2
        largest, least = extremes.tolist()
        return bool(largest == -least)

    @functools.cached_property
    def _confirm_device(self) -> torch.device:
        # The host, where its group can talk there: reading a number from a device waits for all of its work.
        talks_on_host = self.device.type == "cpu" or "cpu:" in str(dist.get_backend_config(self.group))
        return torch.device("cpu") if talks_on_host else self.device

    @_watched
    def _swap(self, sent: torch.Tensor, to: int, got: torch.Tensor, source: int) -> None:
        if sent.device.type != "cpu":
            # Both at once: on a stream a receive would wait for ever for the send behind it.
            self.exchange([(sent, to)], [(got, source)])
            return
        group = self.process_group
        works = group.recv([got], source, _CONFIRM_TAG), group.send([sent], to, _CONFIRM_TAG)
        for work in works:
            work.wait()

    def take_number(self) -> int:
        """Return how often this was called for the group; all ranks in the same order. Not collective."""
        if self.group is None:
            return 0
        number = _NUMBERS_TAKEN.get(self.group, 0)
        _NUMBERS_TAKEN[self.group] = number + 1
        return number

    def check_member(self, name: str, rank: int) -> None:
        """Raise unless ``rank`` is a rank within the group. Not collective.

        Raises:
            ConfigError: It is not.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ConfigError(f"{name} is {rank!r}", fix=f"pass a rank of the model, 0 to {self.size - 1}")

    # Values

    @_watched
    def objects(self, value: _T) -> list[_T]:
        """Return every rank's ``value``, which can be pickled."""
        if self.is_alone:
            return [value] * self.size
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @_watched
    def object_of(self, source: int, value: _T | None) -> _T:
        """Return on every rank the object that ``source``, a rank within the group, has."""
        box = [value]
        if not self.is_alone:
            dist.broadcast_object_list(box, group=self.group, group_src=source, device=self.device)
        return box[0]  # type: ignore[return-value]  # the source gives one

    @_watched
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor``, contiguous and on ``device``, with that of ``source``, a rank within the group."""
        if tensor.numel() and not self.is_alone:
            # As bytes: not every backend knows every dtype.
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=source)

    def reduce(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> torch.Tensor:
        """Reduce a small tensor over the ranks; may change it in place, the result counts. Can be compiled."""
        if self.size == 1 or self.group is None or tensor.is_meta:
            return tensor
        # Offloaded tensors: the group talks in tensors of its own device only.
        moved = tensor.to(self.device)
        # Not `torch.compiler.is_compiling`: in torch 2.11 it says no while the graph behind the operations is made.
        if is_tracing():
            moved = traceable_collectives.all_reduce(moved, _NAMES[op], self.group)
        else:
            self._all_reduce(moved, op)
        return moved.to(tensor.device)

    @_watched
    def _all_reduce(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> None:
        dist.all_reduce(tensor, op=op, group=self.group)

    @_watched
    def gather_ragged(self, full: torch.Tensor, bounds: Sequence[int]) -> None:
        """Complete ``full`` [bytes], of which each rank has its own range ``[bounds[rank], bounds[rank + 1])``."""
        sizes = [stop - start for start, stop in pairwise(bounds)]
        own = slice(bounds[self.rank], bounds[self.rank + 1])
        if self.size == 1 or not full.numel():
            return
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
        works = [
            dist.broadcast(full[bounds[rank] : bounds[rank + 1]], group=self.group, group_src=rank, async_op=True)
            for rank, size in enumerate(sizes)
            if size
        ]
        for work in works:
            if work is not None:
                work.wait()

    @_watched
    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Send and receive tensors of bytes; of a pair of ranks, messages keep their order.

        Args:
            sends: Message and the rank within the group that gets it.
            receives: Where a message goes, and the rank within the group that sends it.
        """
        ops = [dist.P2POp(dist.isend, message, group=self.group, group_peer=peer) for message, peer in sends]
        ops += [dist.P2POp(dist.irecv, message, group=self.group, group_peer=peer) for message, peer in receives]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank in the mesh."""
    return device_for(mesh.device_type)


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
    return "    (the printed plans are equal; the options differ)"


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
