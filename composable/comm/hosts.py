"""The hosts of ranks: which ranks share a machine."""

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from composable.comm.ranks import Ranks, kept_with
from composable.errors import ConfigError
from composable.ground.names import count_text

# Names the host of a process, in place of the names that the system gives.
HOST_VARIABLE = "COMPOSABLE_HOST"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def hosts_of(ranks: Ranks) -> tuple[int, ...]:
    """Return the number of each rank's host, in the order of the group: 0 is the host of the first rank.

    Collective over ``ranks`` on the first call for their group. Two processes share a host if three things are equal,
    which need no launcher: the name of the host, the boot of its kernel, and the network namespace. Containers on one
    machine with networks of their own count as hosts of their own: messages between them take the network
    (docs/inside/notes.md). The environment variable ``COMPOSABLE_HOST`` replaces these three by a name, for example one
    name for all hosts that share fast links.
    """
    group = ranks.group
    if group is None or ranks.size == 1:
        return (0,) * ranks.size
    known: list[int] = kept_with(group, "hosts", list)
    if not known:
        names = _names_of_hosts(ranks, group)
        # From 0 on, in the order in which hosts first appear.
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        known += [numbers[name] for name in names]
    return tuple(known)


def expected_hosts(ranks: Ranks) -> tuple[int, ...]:
    """Return what ``hosts_of`` has found, or torchrun's count of ranks says; empty: neither. Not collective."""
    known = () if ranks.group is None else tuple(kept_with(ranks.group, "hosts", list[int]))
    return known or _launched(ranks)


def _launched(ranks: Ranks) -> tuple[int, ...]:
    """Return the hosts on which torchrun has started ``ranks``; empty: it did not start them, or hosts differ."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    on_each = int(count) if count.isdecimal() else 0
    is_known = on_each > 0 and dist.get_world_size() % on_each == 0
    return tuple(number // on_each for number in ranks.numbers) if is_known else ()


def rows_of_hosts(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in ascending order, from ``hosts_of``; ``ConfigError``: their numbers differ."""
    rows = tuple(tuple(rank for rank, own in enumerate(hosts) if own == host) for host in sorted(set(hosts)))
    found = Counter(len(row) for row in rows)
    if len(found) > 1:
        counts = ", ".join(f"{size} on {count_text(found[size], 'host')}" for size in sorted(found, reverse=True))
        raise ConfigError(
            f"a hybrid strategy without a mesh, and hosts have different numbers of ranks: {counts}",
            fix="start as many ranks on every host; or pass a mesh of two dims",
        )
    return rows


def _names_of_hosts(ranks: Ranks, group: dist.ProcessGroup) -> Sequence[str]:
    simulated = getattr(group, "hosts", None)
    if simulated is not None:
        return tuple(simulated)
    if ranks.is_alone:
        # The fake backend: there are no other ranks to ask.
        return list(map(str, _launched(ranks) or (0,) * ranks.size))
    return ranks.objects(_own_host())


def _own_host() -> str:
    given = os.environ.get(HOST_VARIABLE, "")
    if given:
        return given
    parts = [socket.gethostname()]
    with suppress(OSError):
        # Machines made from one image may have one name.
        parts.append(_BOOT.read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(_NETWORK))
    # A digest is short, however long the name: each rank gets the digests of all ranks.
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
