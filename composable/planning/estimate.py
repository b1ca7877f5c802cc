"""What a training step sends, how long that takes on given links, and how much memory it needs.

A collective cuts each buffer of n bytes into as many slices as its group has ranks, p. Two ways to move them are
known. *Direct*: every rank sends each other one its slice, p - 1 slices one after the other; that is what
``point_to_point`` does. *Ring*: in p - 1 rounds, twice as many in an all-reduce, every rank sends a slice to the next
one, in the order of ranks, and a round ends when the slowest link is done. That is what gloo does in all-gathers and
all-reduces, and NCCL where it takes rings. A message of m bytes takes ``latency + m / bandwidth``. Nothing overlaps,
ranks do not wait for each other, and adding up takes no time.

What the modules compute, their activations, is not known here; neither is what optimizers make for a while.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005; messages, Hockney, Parallel Computing 20(3), 1994; that
nothing sends less than a ring, Patarasuk and Yuan, doi 10.1016/j.jpdc.2008.09.002.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from composable.errors import ConfigError
from composable.ground.names import (
    bytes_text,
    check_number,
    count_text,
    described,
    handle_name,
    seconds_text,
    sibling_lines,
)

__all__ = [
    "Group",
    "HandleBytes",
    "HandleCollectives",
    "Leg",
    "Link",
    "Links",
    "PlanEstimate",
    "PlannedExchange",
    "Reduced",
    "Traffic",
    "groups_of",
    "peak_of_step",
]

# Gradient buffers alive at once: one being reduced, one being filled.
_GRADIENT_BUFFERS = 2


@dataclass(frozen=True)
class Link:
    """What a message takes.

    Attributes:
        latency: Seconds from the call until the first byte arrives.
        bandwidth: Bytes a second that each rank of a host gets while all of them send. Eight ranks that share a
            network card of 400 Gbit/s have 400e9 / 8 / 8 each.

    Raises:
        ConfigError: One is no finite number, the latency negative, or the bandwidth not positive.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        fix = "pass seconds, of at least 0"
        latency = check_number("latency of the link", self.latency, least=0, fix=fix)
        fix = "pass bytes a second, more than 0"
        bandwidth = check_number("bandwidth of the link", self.bandwidth, above=0, fix=fix)
        if math.isinf(latency) or math.isinf(bandwidth):
            raise ConfigError("latency or bandwidth of the link is infinite", fix="pass finite numbers")
        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "bandwidth", bandwidth)

    def seconds(self, message_bytes: float) -> float:
        """Return what a message takes."""
        return self.latency + message_bytes / self.bandwidth


@dataclass(frozen=True)
class Links:
    """The classes of links.

    Attributes:
        inside: Between ranks on the same host.
        between: Between ranks on different ones; ``None``: there is one host.

    Raises:
        ConfigError: One is no ``Link``.
    """

    inside: Link
    between: Link | None = None

    def __post_init__(self) -> None:
        for name, link in (("inside", self.inside), ("between", self.between)):
            if not isinstance(link, Link) and (name == "inside" or link is not None):
                raise ConfigError(
                    f"{name} of the links is {described(link)}",
                    fix="pass composable.Link(latency=5e-6, bandwidth=100e9), in seconds and bytes a second",
                )


class Group(NamedTuple):
    """Where the ranks of one group are.

    Attributes:
        on_hosts: How many of them are on each host that has any.
        crossings: How many of them have the next one of the ring on another host.
    """

    on_hosts: tuple[int, ...]
    crossings: int


# Groups of one size, those that are alike once, with how many of them there are.
_Groups: TypeAlias = tuple[tuple[Group, int], ...]


def groups_of(hosts: Sequence[int], size: int) -> tuple[_Groups, _Groups]:
    """Return the groups of ``size`` neighbours, and those of the ranks that have the same place in each of them.

    Args:
        hosts: Of each rank, one copy of all shards after the other, the host that it is on.
        size: Ranks of the first ones, a divisor of all ranks.
    """

    def counted(groups: Iterable[Sequence[int]]) -> _Groups:
        found = (Group(tuple(Counter(on).values()), sum(a != b for a, b in pairwise([*on, *on[:1]]))) for on in groups)
        return tuple(Counter(found).items())

    rows = [hosts[start : start + size] for start in range(0, len(hosts), size)]
    return counted(rows), counted(zip(*rows, strict=True))


class PlannedExchange(NamedTuple):
    """Collectives of one kind that one handle has in a step.

    Attributes:
        calls: How many.
        whole_bytes: Of the whole buffers of all calls, which count as equally large.
        groups: Who calls.
        passes: How often each slice goes to all ranks, or is gathered from all: twice in an all-reduce.
        is_direct: Slices go straight to where they are needed, otherwise around a ring.
    """

    calls: int
    whole_bytes: int
    groups: _Groups
    passes: int = 1
    is_direct: bool = False

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that one rank sends, and those that go to other hosts; means over ranks, rounded."""
        size, number = sum(self.groups[0][0].on_hosts), sum(times for _, times in self.groups)
        between = sum(times * self._slices_between(group) for group, times in self.groups)
        of_all = self.passes * self.whole_bytes
        return _rounded(of_all * (size - 1), size), _rounded(of_all * between, size * size * number)

    def _slices_between(self, group: Group) -> int:
        """Return how many slices of a buffer all ranks of a group together send to other hosts, in one pass."""
        size = sum(group.on_hosts)
        return sum(n * (size - n) for n in group.on_hosts) if self.is_direct else group.crossings * (size - 1)

    def seconds(self, links: Links) -> tuple[float, float]:
        """Return what all calls take inside hosts and between them; of groups, all at it at once, the slowest counts.

        Raises:
            ConfigError: Some go to other hosts, and there is no link between hosts.
        """
        if not self.calls:
            return 0.0, 0.0
        inside_s, between_s = max((self._seconds_in(group, links) for group, _ in self.groups), key=sum)
        return self.calls * inside_s, self.calls * between_s

    def _seconds_in(self, group: Group, links: Links) -> tuple[float, float]:
        size = sum(group.on_hosts)
        rounds, slice_bytes = self.passes * (size - 1), self.whole_bytes / self.calls / size
        inside_s = links.inside.seconds(slice_bytes)
        if len(group.on_hosts) == 1:
            return rounds * inside_s, 0.0
        if links.between is None:
            fix = "pass Links(inside=Link(...), between=Link(...))"
            raise ConfigError("there are several hosts, and no link between them", fix=fix)
        if self.is_direct:
            # Of the rank for which it is most.
            between_s = links.between.seconds(slice_bytes)
            return max((((n - 1) * inside_s, (size - n) * between_s) for n in group.on_hosts), key=sum)
        # The bandwidth of a host is that of all its ranks; those whose next rank is on the host leave it to the others.
        between_s = links.between.seconds(slice_bytes * group.crossings / size)
        is_inside = group.crossings < size and inside_s > between_s
        return (rounds * inside_s, 0.0) if is_inside else (0.0, rounds * between_s)


def _rounded(number: int, divisor: int) -> int:
    return (2 * number + divisor) // (2 * divisor)


class HandleCollectives(NamedTuple):
    """What one handle's collectives amount to in one training step: calls, and bytes.

    Bytes are of whole buffers; of all-reduces, which are between the ranks that hold copies, of shards. Gathers from
    secondary shards, which are between a part of the ranks, are counted apart.
    """

    module_fqns: tuple[str, ...]
    all_gathers: int
    all_gather_bytes: int
    reduce_scatters: int
    reduce_scatter_bytes: int
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    secondary_all_gathers: int = 0
    secondary_all_gather_bytes: int = 0


class Traffic(NamedTuple):
    """What one rank sends in a training step, for one handle or for all; the mean over all ranks.

    Attributes:
        module_fqns: The fully sharded module, or the positions of several; of all handles none.
        collectives: Calls, also of those that move nothing as there is one rank only.
        inside_bytes: To ranks on the same host.
        between_bytes: To ranks on other hosts.
        handles: What adds up to it, of all handles.
    """

    module_fqns: tuple[str, ...]
    collectives: int
    inside_bytes: int
    between_bytes: int
    handles: tuple["Traffic", ...] = ()

    @staticmethod
    def of(exchanges: Iterable[tuple[tuple[str, ...], Sequence[PlannedExchange]]]) -> "Traffic":
        """Return the sums over the collectives of handles."""
        handles = []
        for module_fqns, found in exchanges:
            sent = [one.sent_bytes() for one in found]
            between = sum(elsewhere for _, elsewhere in sent)
            inside = sum(everywhere for everywhere, _ in sent) - between
            handles.append(Traffic(module_fqns, sum(one.calls for one in found), inside, between))
        collectives, inside = sum(one.collectives for one in handles), sum(one.inside_bytes for one in handles)
        return Traffic((), collectives, inside, sum(one.between_bytes for one in handles), tuple(handles))

    def __str__(self) -> str:
        inside, between = bytes_text(self.inside_bytes), bytes_text(self.between_bytes)
        calls = count_text(self.collectives, "collective")
        if self.module_fqns:
            return f"{calls}, {inside} inside the host, {between} to others"
        return _printed(
            f"a rank sends in a step: {inside} inside its host, {between} to others, in {calls}", self.handles
        )


class PlanEstimate(NamedTuple):
    """Seconds that communication takes in a training step, if nothing hides it and the network is idle.

    What is assumed: ``docs/plan.md``. Left out: small messages, such as who has gradients; optimizers,
    clipping and checkpoints; communication hooks and collectives of the user's.

    Attributes:
        module_fqns: The fully sharded module, or the positions of several; of all handles none.
        inside_s: On links inside a host.
        between_s: On links between hosts. A round of a ring is counted with the link that it waits for.
        handles: What adds up to it, of all handles.
    """

    module_fqns: tuple[str, ...]
    inside_s: float
    between_s: float
    handles: tuple["PlanEstimate", ...] = ()

    @staticmethod
    def of(exchanges: Iterable[tuple[tuple[str, ...], Sequence[PlannedExchange]]], links: Links) -> "PlanEstimate":
        """Return the sums over the collectives of handles."""
        handles = []
        for module_fqns, found in exchanges:
            times = [one.seconds(links) for one in found]
            handles.append(PlanEstimate(module_fqns, sum(one for one, _ in times), sum(other for _, other in times)))
        inside_s, between_s = sum(one.inside_s for one in handles), sum(one.between_s for one in handles)
        return PlanEstimate((), inside_s, between_s, tuple(handles))

    @property
    def seconds(self) -> float:
        """On all links."""
        return self.inside_s + self.between_s

    def __str__(self) -> str:
        parts = [(self.inside_s, "inside hosts"), (self.between_s, "between hosts")]
        text = " and ".join(f"{seconds_text(seconds)} {where}" for seconds, where in parts if seconds) or "none"
        if self.inside_s and self.between_s:
            text = f"{seconds_text(self.seconds)}, {text}"
        return text if self.module_fqns else _printed(f"communication of a step: {text}; no overlap", self.handles)


def _printed(headline: str, handles: Iterable[Traffic | PlanEstimate]) -> str:
    entries = (("  " + handle_name(one.module_fqns), "", str(one)) for one in handles)
    return "\n".join([headline, *sibling_lines(entries)])


class Leg(NamedTuple):
    """Bytes of one collective of a reduction: of what arrives beside its result, meanwhile, and of that, the output."""

    landing: int
    scratch: int
    output: int


class Reduced(NamedTuple):
    """Bytes of one flat buffer's gradients.

    Attributes:
        whole: Of the buffer that is reduced.
        legs: One, or two, of which the second makes the shard; that starts when the next first one does, or at the end.
            An output is there from the beginning of its leg on.
        is_late: The shard is made when all has arrived, beside what landed.
    """

    whole: int
    legs: tuple[Leg, ...]
    is_late: bool = False


class HandleBytes(NamedTuple):
    """Bytes of one handle.

    Attributes:
        depth: Handles around it.
        unsharded: Of the parameters.
        gradients: Of what autograd accumulates.
        reduced: Of its trainable buffers.
        is_freed: The parameters are freed between forward and backward.
        secondary: Of the secondary shards that stay then.
    """

    depth: int
    unsharded: int
    gradients: int
    reduced: tuple[Reduced, ...]
    is_freed: bool
    secondary: int = 0


def peak_of_step(handles: Sequence[HandleBytes]) -> int:
    """Return the most bytes at a time, in forward and backward, beside what rests between steps.

    Args:
        handles: Left to right, depth first, as they run.
    """
    return max(_forward(handles), max(_backward(handles), default=0))


def _forward(handles: Sequence[HandleBytes]) -> int:
    kept = peak = following = 0
    running: list[HandleBytes] = []  # the current one and those around it

    def live() -> int:
        return kept + sum(one.unsharded for one in running if one.is_freed) + following

    for index in range(len(handles) + 1):
        depth = handles[index].depth if index < len(handles) else 0
        while len(running) > depth:
            kept += running[-1].secondary
            peak = max(peak, live())  # Before it is freed.
            running.pop()
        if index < len(handles):
            running.append(handles[index])
            kept += 0 if handles[index].is_freed else handles[index].unsharded
            following = handles[index + 1].unsharded if index + 1 < len(handles) else 0
            peak = max(peak, live())
    return peak


def _backward(handles: Sequence[HandleBytes]) -> Iterator[int]:
    """Yield the bytes at every moment that may be the peak."""
    order, ends = _order(handles)
    unsharded = {index for index, handle in enumerate(handles) if not handle.is_freed}
    kept = sum(handle.secondary for handle in handles)
    met: list[int] = []
    under_way: list[tuple[Reduced, int]] = []  # with the number of the leg
    shards = 0

    def live() -> int:
        parameters = sum(handles[index].unsharded for index in unsharded)
        gradients = sum(handles[index].gradients for index in met)
        reduced = sum(one.whole + one.legs[leg].landing for one, leg in under_way)
        between = sum(one.legs[0].output for one, _ in under_way if len(one.legs) > 1)
        return kept + parameters + gradients + shards + reduced + between

    def begin(one: Reduced, leg: int) -> tuple[Reduced, int]:
        nonlocal shards
        shards += 0 if one.is_late or leg + 1 < len(one.legs) else one.legs[leg].output
        return one, leg

    def begin_second() -> int:
        """End the first legs under way; returns the bytes while that runs."""
        peak = live()
        for index, (one, leg) in enumerate(under_way):
            if leg + 1 < len(one.legs):
                peak = max(peak, live() + one.legs[leg].scratch)
                under_way[index] = begin(one, leg + 1)
        return peak

    def finish_first() -> int:
        """End the first reduction under way; returns the bytes while that runs."""
        nonlocal shards
        first, leg = under_way[0]
        peak = begin_second() if leg + 1 < len(first.legs) else live()
        late = first.legs[-1].output if first.is_late else 0
        peak = max(peak, live() + max(first.legs[-1].scratch, late))
        shards += late
        del under_way[0]
        return peak

    for position, index in enumerate([*order, None]):
        # What ran after this one in forward is complete when its backward begins.
        end = -1 if index is None else ends[index]
        for done in sorted((one for one in met if one > end), reverse=True):
            for left, one in zip(reversed(range(len(handles[done].reduced))), handles[done].reduced, strict=True):
                while len(under_way) >= _GRADIENT_BUFFERS:
                    yield finish_first()
                yield live() + one.whole
                if not left:
                    # Before the last reduction begins the parameters are freed, and gradients are in its buffer.
                    met.remove(done)
                    unsharded.discard(done)
                yield begin_second() + one.whole
                under_way.append(begin(one, 0))
            if done in met:
                met.remove(done)
                unsharded.discard(done)
            yield live()
        if index is not None:
            unsharded.add(index)
            yield live()  # While it is gathered.
            kept -= handles[index].secondary
            met.append(index)
            unsharded |= {index, *order[position + 1 : position + 2]}
            yield live()
    pooled = 0  # Buffers of gradients go when backward is over.
    while under_way:
        whole = under_way[0][0].whole
        yield pooled + finish_first()
        pooled += whole


def _order(handles: Sequence[HandleBytes]) -> tuple[list[int], dict[int, int]]:
    """Return the handles as backward meets them, the reverse of how forward leaves them, and the last one in each."""
    left: list[int] = []
    ends: dict[int, int] = {}
    running: list[int] = []
    for index in range(len(handles) + 1):
        depth = handles[index].depth if index < len(handles) else 0
        while running and handles[running[-1]].depth >= depth:
            ends[running[-1]] = index - 1
            left.append(running.pop())
        running.append(index)
    return left[::-1], ends
