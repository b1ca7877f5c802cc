"""What ranks send each other in a step, to ranks on their host and to those on others: numbers in, numbers out.

A collective cuts each buffer into as many slices as its group has ranks. Two ways to move them are known. *Direct*:
every rank sends each other one its slice; that is what ``point_to_point`` does. *Ring*: every rank sends slices to the
next one, in the order of ranks, and the last one to the first. That is what gloo does in all-gathers and all-reduces,
and NCCL where it takes rings. No algorithm sends less in all, unless the network itself copies and adds up; gloo sends
more, as its reduce-scatter is an all-reduce.

Source: ring and pairwise exchange, Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005; that nothing sends less than a
ring, Patarasuk and Yuan, doi 10.1016/j.jpdc.2008.09.002.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from composable.wording import bytes_text, count_text, handle_name, sibling_lines

__all__ = ["Exchange", "Group", "Groups", "HandleTraffic", "Traffic", "groups_of"]


@dataclass(frozen=True)
class Group:
    """Where the ranks of one group are.

    Attributes:
        on_hosts: How many of them are on each host that has any.
        crossings: How many of them have the next one of the ring on another host.
    """

    on_hosts: tuple[int, ...]
    crossings: int

    @staticmethod
    def of(hosts: Sequence[int]) -> "Group":
        """Return the group whose ranks, in their order, are on these hosts."""
        ring = pairwise([*hosts, *hosts[:1]])
        return Group(tuple(Counter(hosts).values()), sum(host != following for host, following in ring))

    @property
    def size(self) -> int:
        """Ranks in it."""
        return sum(self.on_hosts)


# Groups of one size, those that are alike once, with how many of them there are.
Groups = tuple[tuple[Group, int], ...]


def groups_of(hosts: Sequence[int], world_size: int) -> tuple[Groups, Groups]:
    """Return the groups that share buffers, and those that hold copies of one shard.

    Args:
        hosts: Of each rank, one copy of all shards after the other, the host that it is on.
        world_size: Ranks that share each buffer.
    """
    rows = [hosts[start : start + world_size] for start in range(0, len(hosts), world_size)]
    return _counted(rows), _counted(zip(*rows, strict=True))


def _counted(found: Iterable[Sequence[int]]) -> Groups:
    return tuple(Counter(map(Group.of, found)).items())


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind that one handle has in a step.

    Attributes:
        calls: How many.
        whole_bytes: Of the whole buffers of all calls.
        groups: Who calls.
        passes: How often each slice goes to all ranks, or is gathered from all: twice in an all-reduce.
        is_direct: Slices go straight to where they are needed, otherwise around a ring.
    """

    calls: int
    whole_bytes: int
    groups: Groups
    passes: int = 1
    is_direct: bool = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends, to the nearest byte."""
        size = self.groups[0][0].size
        return _rounded(self.passes * self.whole_bytes * (size - 1), size)

    @property
    def between_bytes(self) -> int:
        """Those of them that go to other hosts; the mean over all ranks, to the nearest byte."""
        size, number = self.groups[0][0].size, sum(times for _, times in self.groups)
        slices = sum(times * self._slices_between(group) for group, times in self.groups)
        return _rounded(self.passes * self.whole_bytes * slices, size * size * number)

    def _slices_between(self, group: Group) -> int:
        """Return how many slices of a buffer all ranks of a group together send to other hosts, in one pass."""
        if self.is_direct:
            return sum(ranks * (group.size - ranks) for ranks in group.on_hosts)
        return group.crossings * (group.size - 1)


def _rounded(number: int, divisor: int) -> int:
    return (2 * number + divisor) // (2 * divisor)


@dataclass(frozen=True)
class HandleTraffic:
    """What one rank sends for one handle in a training step; the mean over all ranks.

    Attributes:
        module_fqns: The fully sharded module, or the positions of several.
        collectives: Calls, also of those that move nothing as there is one rank only.
        inside_bytes: To ranks on the same host.
        between_bytes: To ranks on other hosts.
    """

    module_fqns: tuple[str, ...]
    collectives: int
    inside_bytes: int
    between_bytes: int

    @staticmethod
    def of(module_fqns: tuple[str, ...], exchanges: Sequence[Exchange]) -> "HandleTraffic":
        """Return the sums over all collectives of a handle."""
        between = sum(one.between_bytes for one in exchanges)
        sent = sum(one.sent_bytes for one in exchanges)
        return HandleTraffic(module_fqns, sum(one.calls for one in exchanges), sent - between, between)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a training step; the mean over all ranks."""

    handles: tuple[HandleTraffic, ...]

    @property
    def collectives(self) -> int:
        """Calls of all handles."""
        return sum(handle.collectives for handle in self.handles)

    @property
    def inside_bytes(self) -> int:
        """Bytes to ranks on the same host."""
        return sum(handle.inside_bytes for handle in self.handles)

    @property
    def between_bytes(self) -> int:
        """Bytes to ranks on other hosts."""
        return sum(handle.between_bytes for handle in self.handles)

    def __str__(self) -> str:
        entries = (
            (
                "  " + handle_name(handle.module_fqns),
                "",
                f"{count_text(handle.collectives, 'collective')}, {bytes_text(handle.inside_bytes)} inside the host,"
                f" {bytes_text(handle.between_bytes)} to others",
            )
            for handle in self.handles
        )
        headline = (
            f"a rank sends in a step: {bytes_text(self.inside_bytes)} inside its host,"
            f" {bytes_text(self.between_bytes)} to others, in {count_text(self.collectives, 'collective')}"
        )
        return "\n".join([headline, *sibling_lines(entries)])
