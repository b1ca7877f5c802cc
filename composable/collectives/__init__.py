"""How bytes move between ranks, and how ranks agree: the only folder that calls ``torch.distributed``."""

from composable.collectives.base import Pending, Transport
from composable.collectives.choose import choose_transport_for, transport_of
from composable.collectives.mesh import Grid, resolve_mesh, resolve_ranks
from composable.collectives.own_groups import OwnTransport, make_host_ranks
from composable.collectives.ranks import Ranks

__all__ = [
    "Grid",
    "OwnTransport",
    "Pending",
    "Ranks",
    "Transport",
    "choose_transport_for",
    "make_host_ranks",
    "resolve_mesh",
    "resolve_ranks",
    "transport_of",
]
