"""Communication: the only folder that calls ``torch.distributed``."""

from composable.comm.hang_watchdog import (
    annotating,
    calling,
    explain_waits,
    set_divergence_timeout,
    two_threads,
    watch_ranks,
)
from composable.comm.mesh import (
    DataParallelMeshDims,
    Grid,
    GroupOrPair,
    check_inside,
    joined_mesh,
    other_grid,
    resolve_grid,
    resolve_ranks,
)
from composable.comm.model_ranks import ModelRanks
from composable.comm.own_groups import (
    OwnTransport,
    call_before_destroy,
    choose_transport_for,
    host_transport_of,
    make_host_ranks,
    part_of,
    settle_transport_for,
    transport_of,
)
from composable.comm.ranks import (
    COMPARISON,
    LOADED,
    Ranks,
    all_reduce_in,
    answer_for_absent_ranks,
    compare_in_each,
    reduce_scatter_in,
    wait_for_hook,
    wait_for_work,
)
from composable.comm.transport import DONE, Pending, Transport, register_transport, transport_class, transport_names
from composable.comm.waits import (
    AnnotationStatus,
    Started,
    Tree,
    described,
    history_here,
    notice_history,
    notice_tree,
)
