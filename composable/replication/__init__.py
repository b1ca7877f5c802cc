"""The gradient buckets of ``replicate``, and their averaging."""

from composable.replication.broadcasts import BufferSync, broadcast_tensors
from composable.replication.bucket import BucketOptions, ReducedParam
from composable.replication.bucket_memory import check_memory
from composable.replication.fusion import FORMS, join_all_reduces
from composable.replication.hooks import register_replicate_hooks
from composable.replication.precision import NO_PRECISION, Precision, PrecisionPlan, plan_precision
from composable.replication.reducer import Reducer
from composable.replication.state import ReplicateState
from composable.replication.tensors import ManagedTensors, find_tensors

__all__ = [
    "FORMS",
    "NO_PRECISION",
    "BucketOptions",
    "BufferSync",
    "ManagedTensors",
    "Precision",
    "PrecisionPlan",
    "ReducedParam",
    "Reducer",
    "ReplicateState",
    "broadcast_tensors",
    "check_memory",
    "find_tensors",
    "join_all_reduces",
    "plan_precision",
    "register_replicate_hooks",
]
