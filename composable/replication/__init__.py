"""The gradient buckets of ``replicate``, and their averaging."""

from composable.replication.managed import (
    Ignored,
    ManagedTensors,
    ReducedParam,
    find_ignored,
    find_tensors,
    unmanaged_params,
)
from composable.replication.options import ReplicateArguments, choose_delay, choose_device
from composable.replication.outside_buckets import BufferSync, broadcast_params
from composable.replication.precision import Precision, PrecisionPlan, plan_precision
from composable.replication.reducer import Reducer
from composable.replication.rounds import BackwardTiming, Phase, moment, ms_apart
from composable.replication.sparse import check_steppable
