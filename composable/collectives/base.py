"""The calls every transport offers: what moves, not when.

A transport belongs to one shard group. ``begin_*`` starts a collective and returns a
``Pending``; ``finish`` makes its result readable by the current stream (CUDA) or by the
calling thread (CPU). All ranks of the group call ``begin_*`` in the same order with equal
shapes and the same ``key``. On CUDA, all-gathers and reduce-scatters run on the stream that
is current in ``begin_*``; the others run beside it.

Buffers are one-dimensional and contiguous. ``W`` is the group size, ``S`` the shard numel.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Order", "Pending", "Started", "Transport"]

# Of what was started last, how much is kept: a rank runs ahead by a few handles at most.
_RECENT = 64


class Order:
    """What this rank has started in one process group, where collectives have no tags and meet by their order.

    Attributes:
        count: How much.
        recent: Tags of the last ones.
    """

    __slots__ = ("count", "recent")

    def __init__(self) -> None:
        self.count = 0
        self.recent: deque[int] = deque(maxlen=_RECENT)


class Pending(Protocol):
    """A collective that was started."""

    def finish(self) -> None:
        """Wait until the result may be read and every buffer may be reused. Idempotent."""
        ...

    def is_over(self) -> bool:
        """Say whether ``finish`` would return without waiting for other ranks."""
        ...


class Started:
    """A collective that was started, as the watch of ranks that wait reads it; see ``watch.py``.

    Attributes:
        transport: That started it.
        tag: Twice the key of the buffer; one more for a reduce-scatter.
        number: Which of its kind it is on this rank, from 1 on: of its tag where messages have tags, else of the group.
        has_tag: Messages are matched by their tag, not by the order of all collectives of the group.
        nbytes: What travels, at most; infinite where nobody knows, or the host does not wait for it alone.
    """

    __slots__ = ("number", "tag", "transport")

    has_tag = False
    nbytes: float = math.inf
    transport: "Transport"
    tag: int
    number: int


class Transport(ABC):
    """Moves bytes between the ranks of one group.

    Attributes:
        name: The name the plan prints and ``transport=`` accepts.
        moves: What it can move, for messages.
        rank: This rank within the group.
        world_size: Ranks in the group.
        groups: The process groups it talks in; empty until it talks.
        begun: By tag, how many collectives whose messages have tags this rank has started.
        is_closed: The ranks have diverged, and every call raises.
        has_nccl: CUDA tensors travel by NCCL: to finish a collective lets a stream wait, and the thread goes on.
        in_flight: What was started and nobody has waited for.
        order: Of all others in the group; shared by all transports of the group.
    """

    name: str
    moves: str = "tensors of any device"
    rank: int
    world_size: int
    groups: "tuple[dist.ProcessGroup, ...]" = ()
    begun: Mapping[int, int] = MappingProxyType({})
    order: Order
    is_closed: bool = False
    has_nccl: bool = False
    in_flight: "dict[Started, None]"
    _keys_taken: int = 0

    @classmethod
    def serves(cls, device_type: str, backend: str) -> bool:
        """Say whether this transport can move tensors of ``device_type`` over a group of ``backend``."""
        return True

    @classmethod
    def fits(cls, device_type: str, backend: str, hosts: Sequence[int]) -> bool:
        """Say whether this transport is the one to take, if none before it in the list is.

        Args:
            device_type: Of what it would move.
            backend: Of the group.
            hosts: The number of the host of each rank.
        """
        return cls.serves(device_type, backend)

    def allocate_key(self) -> int:
        """Return a key that no other buffer of this transport has; all ranks in the same order."""
        key = self._keys_taken
        self._keys_taken = key + 1
        return key

    @abstractmethod
    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        """Fill ``buffer`` [W * S] with every rank's ``shard`` [S], in rank order.

        ``shard`` does not overlap ``buffer``, or is its slice of this rank; both stay untouched by the caller until
        ``finish``.
        """

    @abstractmethod
    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        """Write ``scale`` times the sum over ranks of slice ``rank`` of ``source`` [W * S] to ``shard`` [S].

        ``shard`` may be of another dtype than ``source``, which is then the one that travels; the sum runs in the
        wider of the two where that costs no further rounding. ``source`` may be overwritten. Both stay untouched by
        the caller until ``finish``.
        """

    @abstractmethod
    def begin_all_reduce(self, tensor: torch.Tensor, key: int, *, scale: float = 1.0) -> Pending:
        """Replace ``tensor`` by ``scale`` times its sum over ranks."""

    @abstractmethod
    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        """Replace ``tensor`` on every rank by that of ``source_rank`` (a rank within the group)."""

    def empty(self, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return [numel] of undefined content where this transport wants what it moves; else as ``like``.

        What ``begin_reduce_scatter`` reads and writes comes from here. On a device it is allocated on
        the current stream.
        """
        return like.new_empty(numel) if dtype is None else like.new_empty(numel, dtype=dtype)

    def has_started(self, started: Started) -> bool:
        """Say whether a collective is one of this transport's."""
        return started.transport is self

    def settle(self) -> None:
        """Wait for all that was started and not finished, also by a ``begin_*`` that an exception cut short."""

    def close(self) -> None:
        """Let go of what the transport holds; nothing is in flight. Every rank of the group, in the same order."""
