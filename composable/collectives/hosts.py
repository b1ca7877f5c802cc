"""Which ranks share a host: asked once of each group, after which all its ranks know the same.

Two processes share a host if they agree in three things, which no launcher has to tell: the name of the host, the boot
of its kernel, and the network namespace. Containers on one machine that have networks of their own are hosts of their
own: what travels between them takes the network (docs/notes/transport.md).
"""

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable.collectives.ranks import Ranks
from composable.errors import ConfigError, place_of_rank
from composable.wording import count_text

__all__ = ["hosts_of", "known_hosts", "number_hosts", "rows_of_hosts"]

# Says which host a process is on, in place of what the system says.
VARIABLE = "COMPOSABLE_HOST"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")

_KNOWN: "WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]]" = WeakKeyDictionary()


def hosts_of(ranks: Ranks) -> tuple[int, ...]:
    """Return the number of each rank's host, in the order of the group: 0 is the host of the first rank.

    Collective over ``ranks`` on the first call for their group. The environment variable ``COMPOSABLE_HOST`` names the
    host of a rank where the system's view is not the one that counts: one name for all hosts that share fast links.
    """
    group = ranks.group
    if group is None or ranks.size == 1:
        return (0,) * ranks.size
    known = _KNOWN.get(group)
    if known is None:
        known = _KNOWN[group] = number_hosts(_names(ranks, group))
    return known


def known_hosts(ranks: Ranks) -> tuple[int, ...]:
    """Return what ``hosts_of`` has found before for the group of ``ranks``; empty: nobody has asked. Not collective."""
    return () if ranks.group is None else _KNOWN.get(ranks.group, ())


def number_hosts(names: Sequence[str]) -> tuple[int, ...]:
    """Return a number for each name: equal for equal ones, from 0 on in the order in which they first appear."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def rows_of_hosts(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in ascending order.

    Args:
        hosts: The number of the host of each rank, as ``hosts_of`` gives them.

    Raises:
        ConfigError: Hosts have different numbers of ranks.
    """
    rows = tuple(tuple(rank for rank, own in enumerate(hosts) if own == host) for host in sorted(set(hosts)))
    if len({len(row) for row in rows}) > 1:
        found = Counter(len(row) for row in rows)
        counts = ", ".join(f"{size} on {count_text(found[size], 'host')}" for size in sorted(found, reverse=True))
        raise ConfigError(
            f"a hybrid strategy without a mesh, and hosts have different numbers of ranks: {counts}",
            at=place_of_rank(),
            fix="start as many ranks on every host; or pass a mesh of two dims",
        )
    return rows


def _names(ranks: Ranks, group: dist.ProcessGroup) -> Sequence[str]:
    """Return the name of each rank's host."""
    simulated = getattr(group, "hosts", None)
    if simulated is not None:
        return tuple(simulated)
    if ranks.is_alone:
        # A group that only pretends: nobody can be asked, so this is all that is known.
        count = os.environ.get("LOCAL_WORLD_SIZE", "")
        on_each = int(count) if count.isdigit() and int(count) else dist.get_world_size()
        return [str(number // on_each) for number in ranks.numbers]
    return ranks.objects(_own_name())


def _own_name() -> str:
    given = os.environ.get(VARIABLE, "")
    if given:
        return given
    parts = [socket.gethostname()]
    with suppress(OSError):
        # Machines made from one image may have one name.
        parts.append(_BOOT.read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(_NETWORK))
    # As short however long the name, since each rank gets all.
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
