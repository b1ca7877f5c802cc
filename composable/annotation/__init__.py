"""States, roots, hooks, copies and checks of sharded modules."""

from composable.annotation.checks import check_own_memory, mark_memory
from composable.annotation.copies import AnnotatedPart, copy_module
from composable.annotation.hooks import call_as_forward, register_fully_shard_hooks, sharded_face
from composable.annotation.root import (
    FullyShardState,
    Root,
    handle_of_module,
    has_parts,
    model_ranks_of,
    sharded_state_of,
)
