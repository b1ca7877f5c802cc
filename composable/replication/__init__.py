"""The gradient buckets of ``replicate``, and their averaging."""

from composable.replication.broadcasts import BufferSync, broadcast_tensors
from composable.replication.bucket import BucketOptions, Delay, ReducedParam, check_steppable
from composable.replication.bucket_memory import check_memory
from composable.replication.fusion import FORMS, join_all_reduces
from composable.replication.hooks import move_inputs, register_replicate_hooks
from composable.replication.ignored import find_ignored
from composable.replication.locals import local_of
from composable.replication.options import Choices, check_device_of, choose_delay, choose_device
from composable.replication.precision import NO_PRECISION, Precision, PrecisionPlan, plan_precision
from composable.replication.reducer import Reducer
from composable.replication.state import ReplicateState, check_replicated, replicate_state_of
from composable.replication.tensors import ManagedTensors, find_tensors
from composable.replication.timing import BackwardTiming

__all__ = [
    "FORMS",
    "NO_PRECISION",
    "BackwardTiming",
    "BucketOptions",
    "BufferSync",
    "Choices",
    "Delay",
    "ManagedTensors",
    "Precision",
    "PrecisionPlan",
    "ReducedParam",
    "Reducer",
    "ReplicateState",
    "broadcast_tensors",
    "check_device_of",
    "check_memory",
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
