"""Which transport serves a group.

``choose_transport`` is a pure function of what all ranks know, so all ranks choose alike: device, backend, and which
of them share a host.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable.collectives.base import Transport
from composable.collectives.hosts import hosts_of
from composable.collectives.own_groups import make_host_transport
from composable.collectives.point_to_point import PointToPointTransport
from composable.collectives.process_group import ProcessGroupTransport
from composable.collectives.ranks import Ranks
from composable.errors import ConfigError

__all__ = [
    "TRANSPORTS",
    "choose_transport",
    "choose_transport_for",
    "host_transport_of",
    "make_transport",
    "settle_transport_for",
    "transport_of",
]

# The first that fits is taken.
TRANSPORTS: tuple[type[ProcessGroupTransport], ...] = (PointToPointTransport, ProcessGroupTransport)

# A process group's transport lives as long as the group, like the groups of torch.distributed
# itself. The values must not keep their keys alive, so only transports that have a group of
# their own are kept here.
_SHARED: "WeakKeyDictionary[dist.ProcessGroup, PointToPointTransport]" = WeakKeyDictionary()
_ON_HOST: "WeakKeyDictionary[dist.ProcessGroup, Transport]" = WeakKeyDictionary()


def choose_transport(device_type: str, backend: str, hosts: Sequence[int], name: str = "auto") -> str:
    """Return the name of the transport for a shard group.

    Args:
        device_type: Where the parameters live.
        backend: Backend of the shard group, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
        hosts: The number of the host of each of its ranks, as ``hosts_of`` gives them.
        name: The user's choice; ``auto``: the fastest that fits.

    Raises:
        ConfigError: ``name`` is unknown, or does not fit device and backend.
    """
    own_backend = _backend_for(device_type, backend)
    if name == "auto":
        return next(one.name for one in TRANSPORTS if one.fits(device_type, own_backend, hosts))
    chosen = _named(name, ["auto"])
    if not chosen.serves(device_type, own_backend):
        raise ConfigError(
            f"transport {name!r} moves {chosen.moves}; the group is {backend} on {device_type}",
            fix="pass transport='auto'",
        )
    return name


def choose_transport_for(ranks: Ranks, name: str = "auto") -> str:
    """Return the name of the transport for these ranks, as it is if they all share a host. Not collective.

    Raises:
        ConfigError: As ``choose_transport``.
    """
    return choose_transport(ranks.device.type, dist.get_backend(ranks.process_group), (0,) * ranks.size, name)


def settle_transport_for(ranks: Ranks, name: str) -> str:
    """Return the name of the transport for these ranks, wherever they are. Collective if that makes a difference.

    Where ranks have not yet compared what they do, one that waits here for another's host may meet a collective of
    another size, which ends the process.

    Args:
        ranks: Who talks.
        name: The user's choice, which has been checked.
    """
    on_one_host = choose_transport_for(ranks, name)
    if name != "auto" or on_one_host == ProcessGroupTransport.name:
        return on_one_host
    return choose_transport(ranks.device.type, dist.get_backend(ranks.process_group), hosts_of(ranks), name)


def make_transport(name: str, group: dist.ProcessGroup) -> Transport:
    """Make a transport. Collective over ``group``.

    Raises:
        ConfigError: ``name`` is unknown.
    """
    return _named(name)(group)


def transport_of(group: dist.ProcessGroup, name: str) -> Transport:
    """Return the transport of ``group`` for whoever may share one. Collective over ``group`` on the first call.

    Raises:
        ConfigError: ``name`` is unknown.
    """
    if name != PointToPointTransport.name:
        return make_transport(name, group)
    shared = _SHARED.get(group)
    if shared is None or shared.is_closed:
        shared = _SHARED[group] = PointToPointTransport(group)
    return shared


def host_transport_of(ranks: Ranks, name: str) -> Transport:
    """Return what moves tensors in host memory between ``ranks``, for whoever may share it. Collective at first use.

    Args:
        ranks: Who talks.
        name: Of the transport that they have for parameters, which serves where those are in host memory.
    """
    if ranks.device.type == "cpu":
        return transport_of(ranks.process_group, name)
    shared = _ON_HOST.get(ranks.process_group)
    if shared is None:
        shared = _ON_HOST[ranks.process_group] = make_host_transport(ranks)
    return shared


def _backend_for(device_type: str, backend: str) -> str:
    by_device = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return by_device.get(device_type, "") if by_device else backend


def _named(name: str, others: Sequence[str] = ()) -> type[ProcessGroupTransport]:
    found = {one.name: one for one in reversed(TRANSPORTS)}
    if not isinstance(name, str) or name not in found:
        known = ", ".join(map(repr, [*others, *found]))
        raise ConfigError(f"transport is {name!r}", fix=f"pass one of {known}")
    return found[name]
