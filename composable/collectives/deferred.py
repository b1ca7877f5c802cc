"""A transport that is made when it is first needed, for what may never communicate.

A copied model may never train. Its process group, which all ranks make together, waits until it does.
"""

from collections.abc import Callable

import torch

from composable.collectives.base import Pending, Transport

__all__ = ["DeferredTransport"]


class DeferredTransport(Transport):
    """Stands in for the transport that ``make`` will return.

    Args:
        rank: This rank within the group.
        world_size: Ranks in the group.
        make: Returns the transport. Collective over the group.
    """

    def __init__(self, rank: int, world_size: int, make: Callable[[], Transport]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._make = make
        self._made: Transport | None = None

    def connect(self) -> Transport:
        """Make the transport, if that is still to do. Collective over the group."""
        if self._made is None:
            self._made = self._make()
            self.name = self._made.name
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
