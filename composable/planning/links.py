"""How long ranks talk in a training step, from what links of two classes take for a message and for a byte.

A message of m bytes takes ``latency + m / bandwidth`` (Hockney, Parallel Computing 20(3), 1994), and a rank sends
one at a time. Of a buffer of n bytes in a group of p ranks a slice is n / p bytes, and

* direct, a rank sends p - 1 slices, one after the other, each over the link that leads to its peer;
* in a ring there are p - 1 rounds (twice as many in an all-reduce), in which every rank sends one slice at the same
  time, and which end when the slowest link is done.

Nothing overlaps with other collectives or with computation, ranks do not wait for each other, and adding up slices
takes no time. So this is what communication takes if nothing hides it, on an idle network.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, here with two classes of links.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from composable.arguments import check_number, described
from composable.errors import ConfigError
from composable.planning.traffic import Exchange, Group
from composable.wording import handle_name, seconds_text, sibling_lines

__all__ = ["HandleEstimate", "Link", "Links", "PlanEstimate"]


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
        bandwidth = check_number(
            "bandwidth of the link", self.bandwidth, above=0, fix="pass bytes a second, more than 0"
        )
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


@dataclass(frozen=True)
class HandleEstimate:
    """Seconds that one handle's collectives take in a training step.

    Attributes:
        module_fqns: The fully sharded module, or the positions of several.
        inside_s: On links inside a host.
        between_s: On links between hosts. A round of a ring is counted with the link that it waits for.
    """

    module_fqns: tuple[str, ...]
    inside_s: float
    between_s: float

    @property
    def seconds(self) -> float:
        """On all links."""
        return self.inside_s + self.between_s

    @staticmethod
    def of(module_fqns: tuple[str, ...], exchanges: Iterable[Exchange], links: Links) -> "HandleEstimate":
        """Return the sums over all collectives of a handle.

        Raises:
            ConfigError: Some go to other hosts, and there is no link between hosts.
        """
        inside_s = between_s = 0.0
        for one in exchanges:
            if one.calls:
                # All groups are at it at once, so the slowest counts.
                first, second = max((_seconds(one, group, links) for group, _ in one.groups), key=sum)
                inside_s, between_s = inside_s + one.calls * first, between_s + one.calls * second
        return HandleEstimate(module_fqns, inside_s, between_s)


def _seconds(one: Exchange, group: Group, links: Links) -> tuple[float, float]:
    """Return what one call takes inside hosts and between them; the buffers of all calls count as equally large."""
    size = group.size
    slice_bytes = one.whole_bytes / one.calls / size
    inside_s = links.inside.seconds(slice_bytes)
    if len(group.on_hosts) == 1:
        return one.passes * (size - 1) * inside_s, 0.0
    between = _between(links)
    if one.is_direct:
        # Of the rank for which it is most.
        between_s = between.seconds(slice_bytes)
        return max((((ranks - 1) * inside_s, (size - ranks) * between_s) for ranks in group.on_hosts), key=sum)
    rounds = one.passes * (size - 1)
    # The bandwidth of a host is that of all of its ranks; those whose next rank is on the host leave it to the others.
    between_s = between.seconds(slice_bytes * group.crossings / size)
    is_inside = group.crossings < size and inside_s > between_s
    return (rounds * inside_s, 0.0) if is_inside else (0.0, rounds * between_s)


def _between(links: Links) -> Link:
    if links.between is None:
        raise ConfigError(
            "there are several hosts, and no link between them", fix="pass Links(inside=Link(...), between=Link(...))"
        )
    return links.between


@dataclass(frozen=True)
class PlanEstimate:
    """Seconds that communication takes in a training step, if nothing hides it and the network is idle.

    What is assumed: ``docs/plan.md``. Left out: small messages, such as who has gradients; optimizers,
    clipping and checkpoints; communication hooks and collectives of the user's.
    """

    handles: tuple[HandleEstimate, ...]

    @property
    def inside_s(self) -> float:
        """On links inside a host."""
        return sum(handle.inside_s for handle in self.handles)

    @property
    def between_s(self) -> float:
        """On links between hosts."""
        return sum(handle.between_s for handle in self.handles)

    @property
    def seconds(self) -> float:
        """On all links."""
        return self.inside_s + self.between_s

    def __str__(self) -> str:
        headline = f"communication of a step: {_described(self)}; no overlap"
        entries = (("  " + handle_name(handle.module_fqns), "", _described(handle)) for handle in self.handles)
        return "\n".join([headline, *sibling_lines(entries)])


def _described(one: HandleEstimate | PlanEstimate) -> str:
    parts = [(one.inside_s, "inside hosts"), (one.between_s, "between hosts")]
    by_class = " and ".join(f"{seconds_text(seconds)} {where}" for seconds, where in parts if seconds)
    return f"{seconds_text(one.seconds)}, {by_class}" if one.inside_s and one.between_s else by_class or "none"
