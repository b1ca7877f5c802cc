"""When handles unshard, reshard and reduce, and on which stream."""

from composable.runtime.copies import copy_module
from composable.runtime.following import Follower
from composable.runtime.graph_inputs import follow_inputs
from composable.runtime.hooks import call_as_forward, register_fully_shard_hooks
from composable.runtime.notices import notice_hook_states
from composable.runtime.part import AnnotatedPart
from composable.runtime.scheduler import Scheduler
from composable.runtime.state import FullyShardState, Root, handle_of_module, model_ranks_of, sharded_state_of
from composable.runtime.streams import streams_for

__all__ = [
    "AnnotatedPart",
    "Follower",
    "FullyShardState",
    "Root",
    "Scheduler",
    "call_as_forward",
    "copy_module",
    "follow_inputs",
    "handle_of_module",
    "model_ranks_of",
    "notice_hook_states",
    "register_fully_shard_hooks",
    "sharded_state_of",
    "streams_for",
]
