"""The gradient buckets of ``replicate``, and their averaging."""

from composable.replication.managed import Ignored, find_ignored, unmanaged_params
from composable.replication.options import ReplicateArguments, choose_device
from composable.replication.outside_buckets import BufferSync, broadcast_params
from composable.replication.plan import ReplicaPlan, plan_replica
from composable.replication.precision import ModulePrecision, keep_grad_in
from composable.replication.reducer import Reducer
from composable.replication.rounds import BackwardTiming, Phase, moment, ms_apart
from composable.replication.sparse import check_steppable
