"""The plan, made from names and shapes before any change."""

from composable.planning.layout import (
    RaggedShard,
    ShardSplit,
    Span,
    boxes,
    choose_owners,
    in_memory_order,
    in_order_of_dims,
    local_shape,
    part_of_dim,
    strides_of,
)
from composable.planning.options import (
    NO_CASTS,
    NO_OFFLOAD,
    AlignLike,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamDtypes,
    ShardingStrategy,
    ShardOptions,
    ShardPlacementFn,
    as_mixed_precision,
    is_hybrid,
    skipped_modules,
)
from composable.planning.planner import make_plan, plan
from composable.planning.shard_plan import BufferPlan, HandlePlan, ShardPlan
from composable.planning.structure import (
    HandleMembers,
    first_replacement,
    make_useless,
    managed_modules,
    mark_replaced,
    name_modules,
    replacement_of,
)
from composable.planning.subclasses import Form, SplitNode
