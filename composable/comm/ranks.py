"""Groups of ranks that compare values and share errors.

A rank that raises alone leaves the others waiting in the next collective. Code that may fail on
some ranks only (reading a file, checking an argument of rank 0) runs in ``agreed``: then all
ranks continue after it, or none does.

Methods of ``Ranks`` are collective over these ranks, in the same order on all of them, unless they say otherwise.
Errors name global ranks: the numbers of the launcher, the logs and ``dist.get_rank()``.
"""

import functools
import hashlib
import itertools
import os
import sys
import threading
import time
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import string_at
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ReduceScatterOptions
from torch.distributed.device_mesh import DeviceMesh

from composable.comm.hang_watchdog import check_store, meeting
from composable.comm.users_frames import call_around
from composable.comm.waits import described
from composable.errors import ComposableError, ConfigError, DesyncError, UsageError, error_of, place_of_rank
from composable.ground.modes import outside_modes
from composable.ground.names import check_int
from composable.ground.torch_private import (
    PrefixStore,
    Store,
    default_timeout_of,
    is_tracing,
    new_named_group,
    real_backend,
    reduce_scatter_into,
    set_timeout,
    store_of_default_group,
    timeout_of,
    traceable_collectives,
)

_T = TypeVar("_T")
# A tensor on the device of the ranks, of any dtype, and the rank within the group at its other end.
Message: TypeAlias = tuple[torch.Tensor, int]
_NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
# Messages of `are_alike` travel under a tag that nothing else here uses.
_CONFIRM_TAG = 0x5EED
_HOOK = "a communication hook"
# Lines with these words count loads.
LOADED = "loads by load_state_dict"
_MIXED = "some ranks have loaded a state dict, and others have not: sharded parameters have pieces of both models"
_LOAD_ON_ALL = (
    "call load_state_dict on every rank: take it out of `if rank == 0:`; or load_full_state_dict(model, state_dict) on "
    "every rank, which takes the values of the first one"
)
_ONE_CALL = "make the same calls in the same order on every rank: take them out of `if rank == 0:`"
# How long a rank may take to tell that it could not make a group.
_TELLING_S = 2.0
# How long a rank waits for others that were there a moment ago, beside a quarter of a second for each.
_MET_S = 30.0
# How many files gloo opens for a group beside one for each rank, and some to spare.
_FILES = 12
_BEGUN = "has begun to make it, and has told no more: it has ended, or is slow"

# Kinds of messages: of a digest, and of as many bytes on every rank.
COMPARISON, FLAGS = "comparison", "flags"
_DIGEST_BYTES = 8
_LENGTH_BYTES = 8
# Answers a message of the ranks, by its kind, bytes and source: those of ``Ranks.exchange``.
Answer: TypeAlias = "Callable[[Ranks, str, bytes, int | None], list[bytes]]"
_ANSWERS: list[Answer] = []

_KEPT: "WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]]" = WeakKeyDictionary()


def kept_with(group: dist.ProcessGroup, key: Hashable, make: Callable[[], _T]) -> _T:
    """Return the object that ``make`` made in the first call; kept as long as ``group``, which it must not hold."""
    kept = _KEPT.setdefault(group, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]  # type: ignore[no-any-return]  # what ``make`` made


def answer_for_absent_ranks(answer: Answer) -> None:
    """Let ``answer`` say what all ranks of a group of torch's fake backend give in a message; else all say the same."""
    _ANSWERS.append(answer)


@dataclass(frozen=True)
class Ranks:
    """Ranks that communicate with each other."""

    group: dist.ProcessGroup | None  # Their process group; ``None`` for a single process without one.
    device: torch.device  # The device of the tensors that the group sends.
    rank: int  # This rank within the group.
    size: int  # The number of ranks.
    numbers: tuple[int, ...]  # Their global ranks, in the order of the group.
    # The process that has made this object, whose connections a fork of it must not use.
    process: int = field(default_factory=os.getpid, compare=False)

    def __hash__(self) -> int:
        # A hash of all fields would cost a microsecond, and clipping takes one for each parameter.
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
        """The process group, for ranks that surely have one, as the ranks of every annotation do."""
        return default_group() if self.group is None else self.group

    @property
    def order(self) -> tuple[int, tuple[int, ...]]:
        """A sort key of groups, equal on all ranks, small groups first: a rank in several uses them in this order."""
        return self.size, self.numbers

    @functools.cached_property
    def is_alone(self) -> bool:
        """There are no other ranks to send to: the group has one rank, or the fake backend."""
        return self.size == 1 or self.group is None or dist.get_backend(self.group) == "fake"

    # Errors

    def check_process(self) -> None:
        """Raise ``UsageError`` in a forked process: its messages would end the next step of its parent in an abort."""
        if os.getpid() != self.process and not self.is_alone:
            what = f"a fork of process {self.process} would send messages on the connections of its parent"
            fix = 'run the model in the parent only, or start processes by multiprocessing.get_context("spawn")'
            raise UsageError(what, fix=fix)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run a block that may raise on some ranks, and raise on every rank if it raised on any.

        The block itself must not communicate among these ranks. Its error is raised on this rank, and on others an
        error of the same type where it is one of this library.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.raise_together(failure)

    def raise_together(self, failure: Exception | None) -> None:
        """Raise ``failure`` on the rank that has one, and an error with its text on the others; else do nothing."""
        self.compare("", failure)

    def compare(
        self,
        text: str,
        failure: Exception | None = None,
        *,
        shown: str | Callable[[], str] = "",
        what: str = "",
        fix: str = "",
        call: str = "",
    ) -> None:
        """Raise on every rank unless all have equal texts and no failure.

        Ranks that come here from different calls get an error that names the call of each. A graph that is being
        compiled compares nothing.

        Args:
            text: The text that has to be equal on all ranks.
            failure: An error that this rank alone has found.
            shown: The text for users; the error shows its first lines that differ.
            what: The message of the error if the texts differ.
            fix: The fix in that error.
            call: Name of the call; empty: the call of this package that the user made.

        Raises:
            Exception: ``failure``, or the failure of another rank.
            DesyncError: The texts differ, or the calls.
        """
        if not is_tracing():
            call = call or call_around(sys._getframe(1))
            if not self.are_alike(f"{call}\n{'a failure' if failure is not None else f'text {text}'}"):
                told = self.objects((call, as_told(failure), shown if isinstance(shown, str) else shown()))
                calls, failures, texts = (list(column) for column in zip(*told, strict=True))
                if len(set(calls)) > 1:
                    what, fix, failure = "the ranks are in different calls", _ONE_CALL, None
                    texts = [
                        one + (f", which raised {error[0]}: {error[1]}" if error else "") for one, error, _ in told
                    ]
                else:
                    failure = failure or next((error_of(*one) for one in failures if one is not None), None)
                if failure is None:
                    lines = _first_difference(texts, self.numbers)
                    what, fix = (_MIXED, _LOAD_ON_ALL) if LOADED in lines else (what, fix)
                    what = what or f"the ranks are at different places in {call}"
                    failure = DesyncError(f"{what}\n{lines}", fix=fix or _ONE_CALL)
        if failure is not None:
            raise failure

    def are_alike(self, key: str) -> bool:
        """Say whether all ranks have equal keys."""
        digest = hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES).digest()
        return len({*self.exchange(digest, COMPARISON)}) == 1

    def check_member(self, name: str, rank: int) -> None:
        """Raise ``ConfigError`` unless ``rank`` is a number from 0 to ``size - 1``. Not collective."""
        check_int(name, rank, 0, self.size - 1, fix=f"pass a rank of the model, 0 to {self.size - 1}")

    def count(self, text: str) -> int:
        """Return the number of times, this one too, that this rank has counted ``text`` here. Not collective."""
        counts = kept_with(self.process_group, "counts", Counter[str])
        counts[text] += 1
        return counts[text]

    # Values

    def exchange(self, content: bytes, kind: str, *, source: int | None = None, to: int | None = None) -> list[bytes]:
        """Return the bytes of all ranks, in rank order: the one way in which ranks tell each other what is no tensor.

        Ranks of a group of torch's fake backend are not there: ``answer_for_absent_ranks`` says who answers for them.

        Args:
            content: The bytes of this rank; empty: it has nothing to say.
            kind: The name of the message, equal on all ranks, for diagnoses and rehearsals. A ``COMPARISON`` has a
                digest from every rank.
            source: The one rank within the group that is heard, in place of all; ``None``: all are.
            to: The one rank within the group that hears the others, which hear nobody; ``None``: all do.
        """
        if self.size == 1 or self.group is None:
            return [content]
        if self.is_alone:
            return _ANSWERS[-1](self, kind, content, source) if _ANSWERS else [content] * self.size
        self.check_process()
        # What is sent has nothing to do with the modes of the caller.
        with torch.inference_mode(mode=False), outside_modes():
            return self._passed_on(content) if kind == COMPARISON else self._collected(content, kind, source, to)

    def _passed_on(self, digest: bytes) -> list[bytes]:
        """Exchange digests: in each of about log2(ranks) rounds, a rank sends all that it has to one peer (Bruck).

        Messages, since a collective here would end the process if other ranks were in a collective of another size.
        """
        # On the host, if the group can send host tensors: reading a number from a device waits for all of its work.
        is_on_host = self.device.type == "cpu" or "cpu:" in str(dist.get_backend_config(self.group))
        rows = torch.empty(self.size, _DIGEST_BYTES, dtype=torch.uint8, device="cpu" if is_on_host else self.device)
        rows[0].copy_(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        have = 1
        while have < self.size:
            count = min(have, self.size - have)
            sends = [(rows[:count], (self.rank - have) % self.size)]
            receives = [(rows[have : have + count], (self.rank + have) % self.size)]
            # The group counts the first of the two messages as its next collective.
            with meeting(self.group, "swap"):
                for work in self._begin(sends, receives, _CONFIRM_TAG):
                    work.wait()
            have += count
        found = [bytes(row) for row in rows.tolist()]
        # The first one is this rank's, then come those of the next ranks.
        return [found[(rank - self.rank) % self.size] for rank in range(self.size)]

    def _collected(self, content: bytes, kind: str, source: int | None, to: int | None) -> list[bytes]:
        """Exchange bytes of any lengths by collectives, each rank's filled up to the longest."""
        told = len(content).to_bytes(_LENGTH_BYTES, "big") + content if source in {None, self.rank} else b""
        # Flags have as many bytes on every rank.
        longest = len(told) if kind == FLAGS else int(self.reduce(torch.tensor(len(told)), dist.ReduceOp.MAX))
        sent = torch.frombuffer(bytearray(told.ljust(longest)), dtype=torch.uint8).to(self.device)
        with meeting(self.group, kind):
            if source is not None:
                dist.broadcast(sent, group=self.group, group_src=source)
                return [_content_in(sent)] * self.size
            got = list(sent.new_empty(self.size, sent.numel()).unbind()) if to in {None, self.rank} else None
            if to is not None:
                dist.gather(sent, got, group=self.group, group_dst=to)
            elif got is not None:
                dist.all_gather(got, sent, group=self.group)
        return [b""] * self.size if got is None else [_content_in(one) for one in got]

    def objects(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in rank order: numbers, texts, bytes, and tuples, lists, sets, dicts of them.

        They travel as Python writes them: a pickle would let whoever reaches a port of the group run code here.
        """
        return [literal_eval(one.decode()) for one in self.exchange(repr(value).encode(), "objects")]

    def object_of(self, source: int, value: _T | None, kind: str = "object_of") -> _T:
        """Return on every rank the value, as for ``objects``, that ``source``, a rank within the group, has."""
        return literal_eval(self.exchange(repr(value).encode(), kind, source=source)[source].decode())  # type: ignore[no-any-return]  # what the source gave

    def texts_on_first(self, text: str) -> list[str]:
        """Return on the first rank the texts of all ranks, in rank order; else no text."""
        if self.is_alone:
            return [text]
        told = self.exchange(text.encode(), "texts", to=0)
        return [one.decode() for one in told] if self.rank == 0 else []

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on some rank. Collective: as many flags on every rank."""
        return [any(column) for column in zip(*self.exchange(bytes(flags), FLAGS), strict=True)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` (any shape and dtype, contiguous, on ``device``) with the tensor of rank ``source``."""
        if tensor.numel() and not self.is_alone:
            with meeting(self.group, "broadcast"):
                # As bytes: not every backend knows every dtype.
                dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=source)

    def reduce(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> torch.Tensor:
        """Reduce a small tensor over the ranks, and return the result; ``tensor`` may change too. Can be compiled.

        Shapes: any, of any dtype that the backend reduces; the result has the same shape, dtype and device.
        """
        if self.size == 1 or self.group is None or tensor.is_meta:
            return tensor
        # Offloaded tensors: the group sends tensors of its own device only.
        moved = tensor.to(self.device)
        # Not `torch.compiler.is_compiling`: in torch 2.11 it says no while the graph behind the operations is made.
        if is_tracing():
            moved = traceable_collectives.all_reduce(moved, _NAMES[op], self.group)
        else:
            with meeting(self.group, "reduce"):
                dist.all_reduce(moved, op=op, group=self.group)
        return moved.to(tensor.device)

    def gather_ragged(self, full: torch.Tensor, bounds: Sequence[int]) -> None:
        """Complete ``full`` [numel] uint8, in which each rank has its range ``[bounds[rank], bounds[rank + 1])``."""
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
            for work in filter(None, works):
                work.wait()

    def begin_exchange(self, sends: Iterable[Message], receives: Iterable[Message]) -> Callable[[], None]:
        """Begin to send and receive tensors [n], in order between two ranks; what is returned waits for the end."""
        # Ranks may have different numbers of messages.
        with meeting(self.group, "exchange", ahead=None):
            works = self._begin(sends, receives)

        def finish() -> None:
            with meeting(self.group, "exchange", ahead=None):
                for work in works:
                    work.wait()

        return finish

    def _begin(self, sends: Iterable[Message], receives: Iterable[Message], tag: int = 0) -> list[dist.Work]:
        ways = ((dist.isend, sends), (dist.irecv, receives))
        ops = [dist.P2POp(way, one, None, self.group, tag, peer) for way, found in ways for one, peer in found]
        # In one call: on a stream, a receive would wait for ever for the send behind it.
        return dist.batch_isend_irecv(ops) if ops else []


def device_for(device_type: str) -> torch.device:
    """Return this process's device of the type ``device_type``."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _first_difference(texts: Sequence[str], numbers: Sequence[int]) -> str:
    lines = [text.splitlines() for text in texts]
    for index in range(max(len(own) for own in lines)):
        at_index = [own[index] if index < len(own) else "(nothing more)" for own in lines]
        if len(set(at_index)) > 1:
            return "\n".join(f"    rank {rank}: {line.strip()}" for rank, line in zip(numbers, at_index, strict=True))
    return "    (the texts are equal, but the model, mesh or options differ)"


def _content_in(filled: torch.Tensor) -> bytes:
    held = filled.cpu()
    told = string_at(held.data_ptr(), held.nbytes)
    return told[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(told[:_LENGTH_BYTES], "big")]


def as_told(failure: BaseException | None) -> tuple[str, str, str, str | None] | None:
    """Return the class, text, place and fix of the error that the other ranks raise: the same failure."""
    if failure is None:
        return None
    if not isinstance(failure, ComposableError):
        failure = DesyncError(f"another rank raised {type(failure).__name__}: {failure}")
    # An error that is older than the process group has no rank.
    at = failure.at or ""
    at = at if at.startswith("rank ") else ", ".join(filter(None, [place_of_rank(), at]))
    return type(failure).__name__, failure.what, at, failure.fix


def compare_in_each(
    lines: Mapping[Ranks, list[str] | tuple[str, ...]],  # no ``Sequence``, which a text is, too
    failure: ComposableError | None = None,
    *,
    what: str,
    fix: str,
) -> None:
    """Compare the lines of each group, small groups first; a failure in one is passed on to the next. Collective.

    Raises ``failure``, or the failure of another rank; or ``DesyncError`` if the lines of a group differ.
    """
    for ranks in sorted(lines, key=lambda ranks: ranks.order):
        text = "\n".join(lines[ranks])
        try:
            ranks.compare(text, failure, shown=text, what=what, fix=fix)
        except ComposableError as error:
            failure = error
    if failure is not None:
        raise failure


# Collectives in a group of the user's choice


def all_reduce_in(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace ``tensor``, of any shape and floating-point or complex, by its sum over the ranks. Collective.

    Streams: on a device, runs on the current stream; on the CPU, the thread waits. ``reduce_scatter_in`` is alike.
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
    """Wait for the work that a collective of another module or the user returned; ``None``: the collective is over.

    ``what`` names the call that started it; empty: a communication hook of the user.
    """
    if work is not None:
        # The collective is the last one that the group has started.
        with meeting(group, "work", what or _HOOK, ahead=0):
            work.wait()  # type: ignore[attr-defined]  # a work


def wait_for_hook(future: Any, what: str, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of the future of a communication hook, ``what`` in messages, once it is there.

    Raises ``ConfigError`` if nobody sets it in the time in which a collective of ``group`` ends or fails.
    """
    group = group or default_group()
    if isinstance(future, torch.futures.Future) and not future.done() and real_backend(group):
        is_set = threading.Event()
        future.add_done_callback(lambda _: is_set.set())
        # Less than the other ranks' timeout: they may wait for this rank's flags meanwhile.
        limit_s = 0.8 * timeout_of(group).total_seconds()
        with meeting(group, "future", what, ahead=None):
            if not is_set.wait(limit_s):
                raise ConfigError(
                    f"the future of {what} was not set within {limit_s:.0f} s",
                    fix="return a future that is set: that of a collective (work.get_future()), or call set_result",
                )
    return future.wait()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


# The groups of ranks


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks; raises ``UsageError`` if there is no process group."""
    world = dist.group.WORLD
    if world is None:
        fix = "call init_process_group, in a script that torchrun starts"
        raise UsageError("there is no process group", at="this process", fix=fix)
    return world


def make_group(
    numbers: Sequence[int], like: dist.ProcessGroup | None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return a new group of the ranks with these global numbers, in this order. Collective over them.

    torch names a new group by the number of groups that this process is in. So ranks in different numbers of groups,
    as after a mesh of one rank, would wait for each other under different names; and after a group was destroyed, a
    name comes twice. Here a name counts the groups of exactly these ranks, which make all of them together.

    Args:
        numbers: The global ranks, this rank among them.
        like: The group whose timeout the new group gets.
        backend: As ``new_group`` takes it; ``None``: the backend of the default group.

    Raises:
        DesyncError: The group was not made, as a rank has ended or failed; names these ranks.
    """
    world = default_group()
    check_store()
    # Counted before the attempt, so that the ranks' counts stay equal if one rank fails.
    number = next(kept_with(world, ("made", *numbers), lambda: itertools.count(1)))
    name = f"composable:{number}:{'-'.join(map(str, numbers))}"
    timeout, rank = told_timeout(like), str(world.rank())
    if len(numbers) == 1 or not real_backend(world):
        return new_named_group(name, tuple(numbers), backend, timeout)
    bound = timeout or default_timeout_of(world)
    if like is not None and real_backend(like) == "gloo" and sorted(dist.get_process_group_ranks(like)) == [*numbers]:
        # A rank that has ended or is elsewhere is found here, as in any other wait: then making a group is quick.
        Ranks.of(like, torch.device("cpu")).are_alike(name)
        bound = min(bound, timedelta(seconds=_MET_S + len(numbers) / 4))
    told = PrefixStore(f"composable groups/{name}", store_of_default_group())
    lacks = _lacks_files(len(numbers)) if "gloo" in (backend or real_backend(world)) else ""
    told.set(rank, lacks or _BEGUN)
    told.add("lacking", bool(lacks))
    if told.add("come", 1) == len(numbers):
        told.set("all", "")
    try:
        told.wait(["all"], bound)
        are_ready = not told.add("lacking", 0)
        # The timeout is that of each later wait, too: nothing may shorten it.
        made = new_named_group(name, tuple(numbers), backend, timeout) if are_ready else None
    except Exception as error:
        was_waiting = "imeout" in str(error) or "imed out" in str(error)  # For a rank that could not make it.
        told.set(rank, "" if was_waiting else f"raised {described(error)}")
        raise _not_made(numbers, told, described(error)) from error
    if made is None:
        raise _not_made([one for one in numbers if told.get(str(one)).decode() != _BEGUN], told, "too few files")
    return made


def _lacks_files(size: int) -> str:
    """Return the error of this process if it may not open as many files as gloo does for a group; "": it may."""
    opened: list[int] = []
    try:
        opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(_FILES + size))
    except OSError as error:
        return f"raised {described(error)}"
    finally:
        for one in opened:
            os.close(one)
    return ""


def _not_made(numbers: Sequence[int], told: Store, why: str) -> DesyncError:
    """Return the error of a group that was not made, with what these ranks have told; who waited tells nothing."""
    lines: list[str] = []
    deadline = time.monotonic() + _TELLING_S
    with suppress(RuntimeError):  # The store has ended too.
        for rank in map(str, numbers):
            text = "had not come"
            while told.check([rank]) and (text := told.get(rank).decode()) == _BEGUN and time.monotonic() < deadline:
                time.sleep(0.05)
            lines += [f"    rank {rank}: {text}"] if text else []
    return DesyncError(
        "\n".join([f"a process group was not made: {why}", *lines]),
        fix="read the errors of the ranks above, and start again from a checkpoint; too many open files: raise the "
        "limit (ulimit -n), and annotate parts by one call with their list, which makes one group",
    )


def told_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the timeout that ``group`` was given; ``None``: it has torch's default, or the fake backend."""
    if group is None or not real_backend(group):
        return None
    timeout = timeout_of(group)
    return None if timeout == default_timeout_of(group) else timeout


def wait_like_the_world(every: Iterable[Ranks]) -> None:
    """Give groups without a timeout of their own the timeout of the default process group. Not collective.

    torch gives such groups, for example the groups of a mesh, its default of 10 or 30 minutes, whatever timeout the
    default group has. A rank that waits there for a lost host would wait long after all others have given up.
    """
    timeout = told_timeout(dist.group.WORLD)
    if timeout is None:
        return
    for ranks in every:
        if ranks.group is not None and real_backend(ranks.group) and told_timeout(ranks.group) is None:
            set_timeout(ranks.group, timeout)
