"""Reductions under way: a few gradient buffers, filled and reduced in turn."""

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.distributed import ReduceOp

from composable.collectives import ModelRanks, Pending, Ranks, Transport
from composable.engine.buffer import FlatBuffer
from composable.engine.gradients import GradientBuffer, GradientPool
from composable.engine.handle import Handle, handle_of
from composable.engine.handle_step import Account, Turn
from composable.engine.reduce_paths import Reduction
from composable.engine.streams import Streams
from composable.engine.user_comms import CHOICES
from composable.errors import ComposableError, ConfigError, UsageError, located, place_of_rank
from composable.ragged import note_finished, note_unfinished
from composable.torch_private import autograd_profiler
from composable.tracing import in_region

__all__ = ["Agreement", "Choices", "Comparison", "HandOver", "Reductions", "find_stale"]


class Reductions:
    """Takes gradients from the leaves and gives them, reduced, to the sharded parameters.

    Args:
        streams: Of the device.

    Attributes:
        failure: What went wrong on this rank; it still took part in every collective.
    """

    def __init__(self, streams: Streams) -> None:
        self.failure: ComposableError | None = None
        self._streams = streams
        # With what the result and the source belong to.
        self._under_way: deque[tuple[Reduction, Account, GradientBuffer | None]] = deque()
        self._pool = GradientPool()

    def use_streams(self, streams: Streams) -> None:
        """Run on other streams from now on; nothing is under way."""
        self._streams = streams

    def take(self, account: Account, max_buffers: int) -> GradientBuffer | None:
        """Move the gradients of the leaves into a buffer; ``None`` where there are no elements to reduce.

        Args:
            account: Of the flat buffer.
            max_buffers: Gradient buffers that may be alive, this one included: waits until they are fewer.

        Raises:
            UsageError: They cannot be reduced, and no message would tell the other ranks.
        """
        flat = account.flat
        if flat.is_empty:
            account.had |= flat.gradients.bits()
            flat.gradients.drop()
            account.take(flat.shard.new_empty(0))
            return None
        while len(self._under_way) >= max_buffers:
            self._finish_first()
        gradient = self._pool.take(flat.gradients.pool_key, flat.gradients.make_buffer)
        try:
            account.had |= flat.gradients.take(gradient)
        except UsageError as error:
            if account.fills_with_zeros:
                # No message tells the other ranks, so zeros from here would go into their mean.
                raise
            # The other ranks are about to reduce: they get zeros, and hear of it at the end of backward.
            flat.gradients.drop()
            flat.gradients.take(gradient)
            self.failure = self.failure or error
        return gradient

    def begin(self, account: Account, gradient: GradientBuffer | None) -> None:
        """Start to reduce what ``take`` returned; ``None``: what waits for its all-reduce over copies. Collective.

        Raises:
            ConfigError: A hook of the user gave no such gradients, and no message would tell the other ranks.
        """
        flat = account.flat
        path, to_host = flat.routes.gradient_path, flat.home.is_elsewhere
        assert path is not None, "connected when the root was decided"
        if autograd_profiler._is_profiler_enabled:
            start = functools.partial(self._streams.begin_reduction, path, gradient, to_host=to_host)
            reduction = in_region("reduce", _name_of(flat), start)
        else:
            reduction = self._streams.begin_reduction(path, gradient, to_host=to_host)
        self._under_way.append((reduction, account, gradient))
        comms = flat.routes.comms
        if comms.hook is not None or comms.all_reduce_hook is not None:
            self._look_for_failure(account)

    def reduce(self, account: Account, max_buffers: int) -> None:
        """Reduce what the leaves hold, zeros where they hold nothing; arguments and errors as above. Collective."""
        gradient = self.take(account, max_buffers)
        if gradient is not None:
            self.begin(account, gradient)

    def _look_for_failure(self, account: Account) -> None:
        """Note what a hook did wrong: it has met the other ranks all the same, unless it raised."""
        try:
            handle = handle_of(account.flat.params[0].sharded)
            with located(f"{place_of_rank()}, {handle.described}" if handle is not None else place_of_rank()):
                account.flat.routes.check_hook()
        except ConfigError as error:
            if account.fills_with_zeros:
                raise
            self.failure = self.failure or error

    def finish(self) -> None:
        """Wait for all that was started."""
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        reduction, account, gradient = self._under_way.popleft()
        if autograd_profiler._is_profiler_enabled:
            shard = in_region("wait for reduce", _name_of(account.flat), reduction.finish)
        else:
            shard = reduction.finish()
        if gradient is not None:
            self._pool.give(account.flat.gradients.pool_key, gradient)
        if shard is not None:
            account.take(shard)

    def end(self) -> ComposableError | None:
        """Give the buffers back to the device; returns what went wrong."""
        self._pool.release()
        failure, self.failure = self.failure, None
        return failure

    def abandon(self) -> None:
        """Wait for all that was started, and forget it."""
        while self._under_way:
            self._under_way[0][0].finish()
            self._under_way.popleft()
        self.end()


def _name_of(flat: FlatBuffer) -> str:
    """Return the name of the module whose parameters lie in ``flat``."""
    handle = handle_of(flat.params[0].sharded)
    return "" if handle is None else handle.fqn


_DIGEST_BYTES = 8
# What the first byte says.
_HAS_FAILED = 1
_GOES_ON = 2
_WHAT = "the ranks reduce gradients in different ways, so those of the last backward are wrong"
_FIX = "call the methods that set something with the same values on every rank, drop the gradients, run backward again"


class Choices:
    """What users chose for some handles, of what has to be equal on all ranks.

    Args:
        handles: In an order equal on all ranks.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = tuple(handles)
        self._known, self._digest = -1, b""

    def digest(self) -> bytes:
        """Return a few bytes that differ where the choices do."""
        if self._known != CHOICES.made:
            self._known = CHOICES.made
            self._digest = hashlib.blake2b(self.text().encode(), digest_size=_DIGEST_BYTES).digest()
        return self._digest

    def text(self) -> str:
        """Return the choices, a line for each handle; classes of modules are each rank's own business."""
        return "\n".join(f"{handle.fqn}: {handle.chosen_text()}" for handle in self._handles)

    def shown(self) -> str:
        """Return the same for people."""
        return "\n".join(f"{handle.described}: {handle.chosen_text() or 'as annotated'}" for handle in self._handles)


class Comparison:
    """What takes the place of an ``Agreement`` for ranks that send none: compares choices after a change of them.

    By messages that only who changed something sends: a rank that did so alone waits, and the watch over ranks that
    wait tells all of them what differs.

    Args:
        ranks: Who shares the handles, with those that have other blocks.
        handles: All of them end a missing gradient with zeros.

    Attributes:
        goes_on: Never: they reduce nothing after the end of a backward.
        transport: None.
    """

    goes_on = False
    transport: Transport | None = None

    def __init__(self, ranks: Ranks, handles: Sequence[Handle]) -> None:
        self._ranks = ranks
        self._choices = Choices(handles)
        # Before the first forward the plans were compared, and the choices with them.
        self._agreed: bytes | None = self._choices.digest()

    def begin(self, *, has_failed: bool, goes_on: bool = False) -> None:
        """Do nothing."""

    def finish(self) -> bool:
        """Say whether the ranks have to compare."""
        return self._choices.digest() != self._agreed

    def abandon(self) -> None:
        """Do nothing."""

    def raise_together(self, failure: Exception | None) -> None:
        """Compare, then raise ``failure`` if there is one. Collective.

        Raises:
            DesyncError: The ranks chose to reduce gradients in different ways.
        """
        # Until they agree all ranks ask again, also one that goes back to what it had.
        self._agreed = None
        text = self._choices.text()
        if not self._ranks.are_alike(text):
            self._ranks.compare(text, shown=self._choices.shown(), what=_WHAT, fix=_FIX)
        self._agreed = self._choices.digest()
        if failure is not None:
            raise failure


class Agreement:
    """The message of the handles that one group of ranks shares. Making one is collective where there are others.

    Args:
        ranks: Who shares them, and who has other blocks.
        transport: Between all of these, for tensors on the CPU; this takes a key of it.
        accounts: Of all flat buffers, in an order equal on all ranks.
        handles: That the ranks share.

    Attributes:
        goes_on: Some rank had more to reduce when it told what it had.
        transport: As given.
    """

    def __init__(
        self, ranks: ModelRanks, transport: Transport, accounts: Sequence[Account], handles: Sequence[Handle]
    ) -> None:
        self._ranks = ranks.everyone
        self._column = ranks.column
        self._choices = Choices(handles)
        self._differs = self.goes_on = False
        self.transport = transport
        self._key = transport.allocate_key()
        self._accounts = tuple(accounts)
        # One byte for a complaint, then the choices and the accounts.
        length = 1 + _DIGEST_BYTES + sum(account.numel_bytes for account in accounts)
        if ranks.others:
            # Of other blocks there may be another number of buffers.
            length = max(self._ranks.objects(length))
        self._mine, self._every = bytearray(length), bytearray(length * self._ranks.size)
        # The same memory. What a first forward made in inference mode could never be written to outside of it.
        with torch.inference_mode(mode=False):
            self._sent = torch.frombuffer(self._mine, dtype=torch.uint8)
            self._received = torch.frombuffer(self._every, dtype=torch.uint8)
        self._pending: Pending | None = None

    def begin(self, *, has_failed: bool, goes_on: bool = False) -> None:
        """Tell the other ranks. Collective.

        Args:
            has_failed: Something went wrong on this rank.
            goes_on: It has more to reduce, which may fail as well.
        """
        if self._ranks.is_alone:
            return
        first = bytes([_HAS_FAILED * has_failed | _GOES_ON * goes_on])
        told = first + self._choices.digest() + b"".join([account.told() for account in self._accounts])
        self._mine[: len(told)] = told
        self._pending = self.transport.begin_all_gather(self._received, self._sent, self._key)

    def finish(self) -> bool:
        """Make the accounts those of all ranks; return whether any rank complains."""
        pending, self._pending = self._pending, None
        if pending is None:
            self.goes_on = False
            return False
        pending.finish()
        length = len(self._mine)
        first = self._every[:length]
        if self._every == first * self._ranks.size:
            # Nobody knows more than this rank.
            self.goes_on = bool(first[0] & _GOES_ON)
            return bool(first[0] & _HAS_FAILED)
        told = [bytes(self._every[start : start + length]) for start in range(0, len(self._every), length)]
        start = 1 + _DIGEST_BYTES
        self._differs = any(one[1:start] != told[0][1:start] for one in told)
        self.goes_on = any(one[0] & _GOES_ON for one in told)
        column = [told[index] for index in self._column]
        for account in self._accounts:
            stop = start + account.numel_bytes
            account.hear([one[start:stop] for one in column])
            start = stop
        return self._differs or any(one[0] & _HAS_FAILED for one in told)

    def abandon(self) -> None:
        """Wait for a message that was begun, and forget it."""
        self.transport.settle()
        self._pending = None
        self.goes_on = False

    def raise_together(self, failure: Exception | None) -> None:
        """Raise the failure of any rank on all of them. Collective, after ``finish`` has said that there is one.

        Raises:
            DesyncError: The ranks chose to reduce gradients in different ways.
        """
        if not self._differs:
            self._ranks.raise_together(failure)
            return
        self._differs = False
        self._ranks.compare(self._choices.text(), failure, shown=self._choices.shown(), what=_WHAT, fix=_FIX)


def find_stale(everyone: Ranks, ranks_of: Mapping[Handle, Ranks], kept: Sequence[Handle]) -> list[Handle]:
    """Return those of ``kept``, unsharded, of which some rank has written its shard since they were gathered.

    Collective over the ranks of each handle: one small message. Beside handles of all ranks those of a part of them,
    such as experts, cost none: where one of these was written, on any rank, all of them count as written.

    Args:
        everyone: All ranks of the root.
        ranks_of: Of each handle.
        kept: Handles; of those on ``everyone`` the same on all ranks.
    """
    groups: dict[Ranks, list[Handle]] = {}
    for handle in kept:
        groups.setdefault(ranks_of[handle], []).append(handle)
    stale: list[Handle] = []
    outer = groups.pop(everyone, [])
    if outer:
        parts = [handle for handles in groups.values() for handle in handles]
        *heard, is_part_stale = _heard(everyone, [*map(_is_stale, outer), any(map(_is_stale, parts))])
        stale = [handle for handle, is_stale in zip(outer, heard, strict=True) if is_stale]
        return stale + (parts if is_part_stale else [])
    for ranks, handles in sorted(groups.items(), key=lambda item: item[0].order):
        heard = _heard(ranks, map(_is_stale, handles))
        stale += [handle for handle, is_stale in zip(handles, heard, strict=True) if is_stale]
    return stale


def _is_stale(handle: Handle) -> bool:
    return not handle.is_fresh()


def _heard(ranks: Ranks, flags: Iterable[bool]) -> list[int]:
    """Return of each flag whether it is set on any rank. Collective."""
    with torch.inference_mode(mode=False):
        told = torch.tensor(list(flags), dtype=torch.int32)
    heard: list[int] = ranks.reduce(told, ReduceOp.MAX).tolist()
    return heard


class HandOver:
    """Ends the reductions of one root, of one backward or of several.

    Args:
        turns: Of all handles of the root.
        reductions: What is under way.

    Attributes:
        agreements: How the ranks of each group compare what they have.
    """

    __slots__ = ("_is_deferred", "_is_settled", "_reductions", "_turns", "agreements")

    def __init__(self, turns: Mapping[Handle, Turn], reductions: Reductions) -> None:
        self._is_deferred = False
        self._is_settled = True
        self._turns = turns
        self._reductions = reductions
        self.agreements: Sequence[Agreement | Comparison] = ()

    @property
    def is_deferred(self) -> bool:
        """Backwards have ended whose reductions did not; a later backward or the user ends them."""
        return self._is_deferred

    @is_deferred.setter
    def is_deferred(self, is_deferred: bool) -> None:
        if is_deferred is not self._is_deferred:
            (note_unfinished if is_deferred else note_finished)(self._turns)
            self._is_deferred = is_deferred

    def agree_by(self, make: Callable[[Sequence[Account]], Sequence[Agreement | Comparison]]) -> None:
        """Let the ranks compare at each end; ``make`` gets the accounts of all handles."""
        self.agreements = make([account for turn in self._turns.values() for account in turn.accounts])

    def open(self) -> None:
        """A backward begins: what one left that a hook of the user, or Ctrl-C, cut short in its end is forgotten."""
        if not self._is_settled:
            for turn in self._turns.values():
                for account in turn.accounts:
                    account.clear()
        self._is_settled = False

    def postpone(self) -> None:
        """Leave the end to a later backward, or to the user: accounts go on where they are."""
        self._is_settled = True

    def tell(self, *, ends: bool) -> None:
        """Note what the leaves still hold; if this ends the reductions, also those of before, tell the other ranks."""
        is_synced, goes_on = self.is_deferred, False
        for turn in self._turns.values():
            if not turn.handle.requires_gradient_sync:
                turn.handle.keep_gradients()
            elif ends:
                is_synced = True
                for account in turn.accounts:
                    account.look()
                    goes_on |= account.has_more or self._is_kept(turn.handle, account)
            else:
                self.is_deferred = True
        if ends and is_synced:
            for agreement in self.agreements:
                agreement.begin(has_failed=self._reductions.failure is not None, goes_on=goes_on)

    def end(self, tidy: Callable[[], None]) -> None:
        """Reduce what is left on any rank, and hand over every gradient.

        Args:
            tidy: Called when nothing is under way any more, before parameters get their gradients.

        Raises:
            UsageError: On this rank, or on one that tells of it in its message, a gradient could not be reduced.
                Or one came too late for a module whose ranks send no message.
        """
        self._is_settled = False
        with torch.no_grad():
            self._reductions.finish()
            complaining = {agreement: None for agreement in self.agreements if agreement.finish()}
            stray = self._reduce_the_rest()
            failure: Exception | None = self._reductions.end() or (_stray(stray) if stray else None)
            complaining |= self._tell_again(has_failed=failure is not None)
            tidy()
            was_deferred, self.is_deferred = self.is_deferred, False
            self._settle()
            if was_deferred:
                for turn in self._turns.values():
                    if turn.handle.keeps_gradients:
                        # Once more: what they wait beside may be another gradient now.
                        turn.handle.keep_gradients()
        # In each group: ranks that share another one with this rank wait there to hear of it.
        for agreement in complaining:
            try:
                agreement.raise_together(failure)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _tell_again(self, *, has_failed: bool) -> dict[Agreement | Comparison, None]:
        """Tell where some rank had more to reduce how that went; returns where some rank complains now."""
        again = [agreement for agreement in self.agreements if agreement.goes_on]
        for agreement in again:
            agreement.begin(has_failed=has_failed)
        return {agreement: None for agreement in again if agreement.finish()}

    def transports(self) -> set[Transport]:
        """Return all that ranks tell each other by."""
        return {agreement.transport for agreement in self.agreements if agreement.transport is not None}

    def abandon(self) -> None:
        """Forget what was told and not heard."""
        for agreement in self.agreements:
            agreement.abandon()

    def forget_kept(self) -> None:
        """Forget shards that wait for an all-reduce over copies: some may hold part of a backward only."""
        for turn in self._turns.values():
            turn.handle.forget_kept_shards()
            self._note_waiting(turn)

    def close(self) -> None:
        """Forget the agreements, and with them the shards."""
        self.agreements = ()

    def _settle(self) -> None:
        """Give parameters what waited for the other ranks; hooks of users run."""
        for turn in self._turns.values():
            for account in turn.accounts:
                account.settle(fills_unused=turn.handle.fills_unused)
            if turn.handle.waits_for_copies:
                turn.handle.keep_gradients()
            self._note_waiting(turn)
        self._is_settled = True

    def _note_waiting(self, turn: Turn) -> None:
        """Let users know whether gradients wait for a later backward, or for an all-reduce over copies."""
        if turn.handle.is_waiting:
            note_unfinished([turn.handle], is_droppable=True)
            turn.is_waiting = True
        elif turn.is_waiting:
            note_finished([turn.handle])
            turn.is_waiting = False

    def _is_kept(self, handle: Handle, account: Account) -> bool:
        """Say whether earlier backwards left shards that are to be summed up over copies now."""
        kept = account.flat.routes.kept
        return kept.total is not None and not kept.defers and handle.requires_gradient_sync

    def _reduce_the_rest(self) -> list[Handle]:
        """Reduce what some rank still holds; returns handles of whose gradients the ranks do not tell each other."""
        stray: list[Handle] = []
        for handle, turn in self._turns.items():
            for account in turn.accounts:
                if not account.has_more:
                    if self._is_kept(handle, account):
                        self._reductions.begin(account, None)
                    continue
                account.has_more = False
                # What has been stepped cannot take another part of its gradient.
                if account.fills_with_zeros or account.flat.gradients.steppers:
                    stray.append(handle)
                    handle.drop_gradients()
                else:
                    self._reductions.reduce(account, handle.gradient_buffers)
        self._reductions.finish()
        return stray


def _stray(handles: Sequence[Handle]) -> UsageError:
    return UsageError(
        "a gradient arrived after its module was reduced: a parameter was used outside its forward",
        at=f"{place_of_rank()}, {', '.join(handle.described for handle in handles)}",
        fix="use them in the forward of their own module, let the module above own them, "
        + (
            "or step after backward"
            if any(handle.steppers for handle in handles)
            else "or annotate with unused_gradients='none'"
        ),
    )
