"""What the ranks tell each other at the end of a backward: one small message from each to all.

Autograd's order says when a handle may be reduced early; what it missed, and which parameters got no
gradient anywhere, only all ranks together know. See docs/notes/completion.md.

What users chose of how gradients are reduced changes any time, and has to be equal on all ranks. So a digest of it goes
along, and where digests differ the ranks tell each other all of it.

Ranks with other blocks, of tensor parallelism, get the message too: they have other gradients, and hear of errors.

The message travels in host memory, also where parameters live on a device: nobody waits for kernels.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed import ReduceOp

from composable.collectives import ModelRanks, Pending, Ranks, Transport
from composable.runtime.account import Account
from composable.storage import CHOICES, Handle

__all__ = ["Agreement", "Choices", "Comparison", "find_stale"]


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
