"""The annotations of modules: states, roots, hooks, copies and checks."""

from composable.annotation.checks import check_own_memory, mark_memory
from composable.annotation.copies import copy_module, handles_within
from composable.annotation.hooks import call_as_forward, register_fully_shard_hooks, sharded_face
from composable.annotation.kept import KeptGradients
from composable.annotation.replicated import ReplicateState, check_replicated, replicate_state_of
from composable.annotation.root import FullyShardState, Root, handle_of_module, model_ranks_of, sharded_state_of
from composable.annotation.states import (
    AnnotationState,
    ReducingUnit,
    check_not_joined,
    check_ranks_below,
    has_parts,
    nothing_annotated,
    params_of,
    states_below,
    states_of,
    take_over_optimizers,
    unit_of,
    units_of,
)
