"""What the ranks tell each other at the end of a backward: one small message from each to all.

Autograd's order says when a handle may be reduced early; what it missed, and which parameters got no
gradient anywhere, only all ranks together know. See docs/notes/completion.md.

The message travels in host memory, also where parameters live on a device: nobody waits for kernels.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ReduceOp

from composable.collectives import Pending, Ranks, Transport
from composable.runtime.account import Account
from composable.storage import Handle

__all__ = ["Agreement", "find_stale"]


class Agreement:
    """The message of the handles that one group of ranks shares.

    Args:
        ranks: Who shares them.
        transport: Between these ranks, for tensors on the CPU; this takes a key of it.
        accounts: Of all flat buffers, in an order equal on all ranks.
    """

    def __init__(self, ranks: Ranks, transport: Transport, accounts: Sequence[Account]) -> None:
        self._ranks = ranks
        self._transport = transport
        self._key = transport.allocate_key()
        self._accounts = tuple(accounts)
        # One byte for a complaint, then the accounts.
        length = 1 + sum(account.numel_bytes for account in accounts)
        self._mine, self._every = bytearray(length), bytearray(length * ranks.size)
        # The same memory. What a first forward made in inference mode could never be written to outside of it.
        with torch.inference_mode(mode=False):
            self._sent = torch.frombuffer(self._mine, dtype=torch.uint8)
            self._received = torch.frombuffer(self._every, dtype=torch.uint8)
        self._pending: Pending | None = None

    def begin(self, *, has_failed: bool) -> None:
        """Tell the other ranks. Collective."""
        if self._ranks.is_alone:
            return
        self._mine[:] = bytes([has_failed]) + b"".join([account.told() for account in self._accounts])
        self._pending = self._transport.begin_all_gather(self._received, self._sent, self._key)

    def finish(self) -> bool:
        """Make the accounts those of all ranks; return whether any rank complains."""
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        pending.finish()
        length = len(self._mine)
        first = self._every[:length]
        if self._every == first * self._ranks.size:
            # Nobody knows more than this rank.
            return bool(first[0])
        told = [bytes(self._every[start : start + length]) for start in range(0, len(self._every), length)]
        start = 1
        for account in self._accounts:
            stop = start + account.numel_bytes
            account.hear([one[start:stop] for one in told])
            start = stop
        return any(one[0] for one in told)

    def abandon(self) -> None:
        """Wait for a message that was begun, and forget it."""
        self._transport.settle()
        self._pending = None

    def raise_together(self, failure: Exception | None) -> None:
        """Raise the failure of any rank on all of them. Collective, after ``finish`` has said that there is one."""
        self._ranks.raise_together(failure)


def find_stale(ranks_of: Mapping[Handle, Ranks], kept: Sequence[Handle]) -> list[Handle]:
    """Return those of ``kept``, unsharded, of which some rank has written its shard since they were gathered.

    Collective over the ranks of each handle: one small message.
    """
    groups: dict[Ranks, list[Handle]] = {}
    for handle in kept:
        groups.setdefault(ranks_of[handle], []).append(handle)
    stale: list[Handle] = []
    for ranks, handles in groups.items():
        with torch.inference_mode(mode=False):
            told = torch.tensor([not handle.is_fresh() for handle in handles], dtype=torch.int32)
        heard = ranks.reduce(told, ReduceOp.MAX).tolist()
        stale += [handle for handle, is_stale in zip(handles, heard, strict=True) if is_stale]
    return stale
