"""What an annotation will do, decided before anything is changed: names and shapes in, numbers out."""

from composable.planning.cut import RaggedShard, boxes, in_memory_order, in_order_of_dims, local_shape, strides_of
from composable.planning.handle_plan import BufferPlan, HandlePlan
from composable.planning.layout import FlatLayout, ShardSplit, Span
from composable.planning.links import Link, Links, PlanEstimate
from composable.planning.offload import NO_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from composable.planning.options import (
    AlignLike,
    ShardingStrategy,
    ShardOptions,
    ShardPlacementFn,
    is_hybrid,
    is_spread,
)
from composable.planning.planner import HandleMembers, make_plan, plan
from composable.planning.precision import (
    NO_CASTS,
    MixedPrecisionPolicy,
    ParamDtypes,
    as_mixed_precision,
    skipped_modules,
)
from composable.planning.replaced import first_replacement, mark_replaced, marks_made, replacement_of
from composable.planning.shard_plan import ShardPlan
from composable.planning.subclasses import PROTOCOL, Form, SplitNode
from composable.planning.tree import managed_modules, name_modules

__all__ = [
    "NO_CASTS",
    "NO_OFFLOAD",
    "PROTOCOL",
    "AlignLike",
    "BufferPlan",
    "CPUOffloadPolicy",
    "FlatLayout",
    "Form",
    "HandleMembers",
    "HandlePlan",
    "Link",
    "Links",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParamDtypes",
    "PlanEstimate",
    "RaggedShard",
    "ShardOptions",
    "ShardPlacementFn",
    "ShardPlan",
    "ShardSplit",
    "ShardingStrategy",
    "Span",
    "SplitNode",
    "as_mixed_precision",
    "boxes",
    "first_replacement",
    "in_memory_order",
    "in_order_of_dims",
    "is_hybrid",
    "is_spread",
    "local_shape",
    "make_plan",
    "managed_modules",
    "mark_replaced",
    "marks_made",
    "name_modules",
    "plan",
    "replacement_of",
    "skipped_modules",
    "strides_of",
]
