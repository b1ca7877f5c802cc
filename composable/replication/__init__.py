"""The gradient buckets of ``replicate``, and their averaging."""

from composable.replication.forwards import (
    NO_PRECISION,
    Precision,
    PrecisionPlan,
    move_inputs,
    plan_precision,
    register_replicate_hooks,
)
from composable.replication.options import (
    BucketOptions,
    DelayedAllReduce,
    ReplicateOptions,
    check_device_of,
    choose_delay,
    choose_device,
)
from composable.replication.outside_buckets import FORMS, BufferSync, broadcast_tensors, join_all_reduces
from composable.replication.reducer import Reducer
from composable.replication.reports import BackwardTiming
from composable.replication.state import ReplicateState, check_replicated, replicate_state_of
from composable.replication.tensors import (
    ManagedTensors,
    ReducedParam,
    check_steppable,
    find_ignored,
    find_tensors,
    local_of,
)

__all__ = [
    "FORMS",
    "NO_PRECISION",
    "BackwardTiming",
    "BucketOptions",
    "BufferSync",
    "DelayedAllReduce",
    "ManagedTensors",
    "Precision",
    "PrecisionPlan",
    "ReducedParam",
    "Reducer",
    "ReplicateOptions",
    "ReplicateState",
    "broadcast_tensors",
    "check_device_of",
    "check_replicated",
    "check_steppable",
    "choose_delay",
    "choose_device",
    "find_ignored",
    "find_tensors",
    "join_all_reduces",
    "local_of",
    "move_inputs",
    "plan_precision",
    "register_replicate_hooks",
    "replicate_state_of",
]
