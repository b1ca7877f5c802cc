"""How bytes move between ranks, and how ranks agree: the only folder that calls ``torch.distributed``."""

from composable.collectives.base import Pending, Started, Transport
from composable.collectives.choose import (
    choose_transport_for,
    host_transport_of,
    settle_transport_for,
    transport_of,
)
from composable.collectives.group_calls import all_reduce_in, reduce_scatter_in, wait_for_work
from composable.collectives.mesh import (
    DataParallelMeshDims,
    Grid,
    GroupOrPair,
    check_inside,
    joined_mesh,
    resolve_grid,
    resolve_ranks,
)
from composable.collectives.model_ranks import ModelRanks
from composable.collectives.own_groups import OwnTransport, call_before_destroy, make_host_ranks, part_of
from composable.collectives.places import Told, described, notice_tree
from composable.collectives.process_group import DONE
from composable.collectives.ranks import Ranks, compare_in_each
from composable.collectives.verdict import Tree
from composable.collectives.watch import annotating, explain_waits, set_divergence_timeout, watch_ranks

__all__ = [
    "DONE",
    "DataParallelMeshDims",
    "Grid",
    "GroupOrPair",
    "ModelRanks",
    "OwnTransport",
    "Pending",
    "Ranks",
    "Started",
    "Told",
    "Transport",
    "Tree",
    "all_reduce_in",
    "annotating",
    "call_before_destroy",
    "check_inside",
    "choose_transport_for",
    "compare_in_each",
    "described",
    "explain_waits",
    "host_transport_of",
    "joined_mesh",
    "make_host_ranks",
    "notice_tree",
    "part_of",
    "reduce_scatter_in",
    "resolve_grid",
    "resolve_ranks",
    "set_divergence_timeout",
    "settle_transport_for",
    "transport_of",
    "wait_for_work",
    "watch_ranks",
]
