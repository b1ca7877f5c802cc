"""Process groups that an annotation makes for itself, where no other collective can come between.

Two annotations that share a group would have to agree on whose buckets come first. A copied model
may never train, so the group, which all ranks make together, waits until it is needed.
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable.collectives.base import Pending, Transport
from composable.collectives.process_group import ProcessGroupTransport
from composable.collectives.ranks import Ranks
from composable.torch_private import timeout_of

__all__ = ["OwnTransport", "make_host_ranks"]

# Groups that were made and are no longer needed, by the group they were made for. torch derives the
# names of groups from how many there are: to destroy one makes the next name collide.
_IDLE: "WeakKeyDictionary[dist.ProcessGroup, list[tuple[str, dist.ProcessGroup]]]" = WeakKeyDictionary()


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
        self._group: dist.ProcessGroup | None = None
        self._made: Transport | None = None

    def connect(self) -> Transport:
        """Make the group, if that is still to do. Collective."""
        if self._made is None:
            self._group = _take(self.ranks)
            self._made = ProcessGroupTransport(self._group)
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

    def close(self) -> None:
        """Leave the group to who needs one next. Collective: it is made if it was not."""
        self.connect().close()
        assert self._group is not None, "connected above"
        _IDLE.setdefault(self.ranks.process_group, []).append((self.ranks.device.type, self._group))
        self._group = self._made = None


def _take(ranks: Ranks) -> dist.ProcessGroup:
    """Return a group of the same ranks that nothing else uses. Collective over them."""
    group = ranks.process_group
    idle = _IDLE.get(group, [])
    for position, (served, own) in enumerate(idle):
        if served == ranks.device.type:
            del idle[position]
            return own
    backend = dist.get_backend(group)
    made = dist.new_group(
        list(ranks.numbers),
        timeout=timeout_of(group) if ranks.device.type == "cpu" and backend != "fake" else None,
        # A group that was made without naming a backend has one for each device type, as the default one has.
        backend=None if backend == "undefined" else backend,
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup), "every rank that calls this is in the group"
    return made


def make_host_ranks() -> Ranks:
    """Return all ranks in a group of their own that talks in host memory, for threads beside the main one.

    Collective: all ranks.
    """
    made = dist.new_group(backend="gloo")
    assert isinstance(made, dist.ProcessGroup), "every rank is in it"
    return Ranks.of(made, torch.device("cpu"))
