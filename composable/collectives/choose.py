"""How bytes move between the ranks of a group: one interface, several transports.

``choose_transport`` is a pure function of what all ranks know, so all ranks choose alike.
"""

from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable.collectives.base import Pending, Transport
from composable.collectives.point_to_point import PointToPointTransport
from composable.collectives.process_group import ProcessGroupTransport
from composable.errors import ConfigError

__all__ = ["Pending", "Transport", "choose_transport", "make_transport", "transport_of"]

# Each peer costs the host one send and one receive, 10 us together; gloo's own all-gather
# costs it 12 us whatever the number of peers.
MAX_POINT_TO_POINT_RANKS = 8

_TRANSPORTS: dict[str, type[ProcessGroupTransport]] = {
    ProcessGroupTransport.name: ProcessGroupTransport,
    PointToPointTransport.name: PointToPointTransport,
}

# A process group's transport lives as long as the group, like the groups of torch.distributed
# itself. The values must not keep their keys alive, so only a transport that has a group of
# its own is kept here.
_SHARED: "WeakKeyDictionary[dist.ProcessGroup, PointToPointTransport]" = WeakKeyDictionary()


def choose_transport(device_type: str, backend: str, world_size: int, name: str = "auto") -> str:
    """Return the name of the transport for a shard group.

    Args:
        device_type: Where the parameters live.
        backend: Backend of the shard group, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
        world_size: Ranks in it.
        name: The user's choice; ``auto``: the fastest that fits.

    Raises:
        ConfigError: ``name`` is unknown, or does not fit device and backend.
    """
    fits = device_type == "cpu" and _backend_for("cpu", backend) == "gloo"
    if name == "auto":
        return "point_to_point" if fits and 2 <= world_size <= MAX_POINT_TO_POINT_RANKS else "process_group"
    _check_name(name, ["auto", *_TRANSPORTS])
    if name == "point_to_point" and not fits:
        raise ConfigError(
            f"transport 'point_to_point' moves CPU tensors over gloo; the group is {backend} on {device_type}",
            fix="pass transport='auto'",
        )
    return name


def make_transport(name: str, group: dist.ProcessGroup) -> Transport:
    """Make a transport. Collective over ``group``.

    Raises:
        ConfigError: ``name`` is unknown.
    """
    _check_name(name, list(_TRANSPORTS))
    return _TRANSPORTS[name](group)


def transport_of(group: dist.ProcessGroup, name: str) -> Transport:
    """Return the transport of ``group`` for whoever may share one. Collective over ``group`` on the first call.

    Raises:
        ConfigError: ``name`` is unknown.
    """
    if name != PointToPointTransport.name:
        return make_transport(name, group)
    shared = _SHARED.get(group)
    if shared is None:
        shared = _SHARED[group] = PointToPointTransport(group)
    return shared


def _backend_for(device_type: str, backend: str) -> str:
    by_device = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return by_device.get(device_type, "") if by_device else backend


def _check_name(name: str, known: list[str]) -> None:
    if name not in known:
        raise ConfigError(f"transport is {name!r}", fix=f"pass one of {', '.join(map(repr, known))}")
