"""The parameter that users see: a DTensor cut anywhere."""

from composable.ragged.exchange import Exchange
from composable.ragged.fallback import LIVE_SOURCES, mark_stale
from composable.ragged.fallback_log import fallback_counts, strict_mode
from composable.ragged.lockstep import confirm_alike, refuse_in_each
from composable.ragged.norms import NormParts, cut_dims, summed_in
from composable.ragged.registration import register_ragged
from composable.ragged.spec import RaggedLayout, RaggedSpec, ragged_spec, slice_block, slice_full, splits_of
from composable.ragged.tensor import HOOKS, RaggedDTensor, hand_over_grad, was_zeroed, watch_zeroing
from composable.ragged.torch_calls import teach_torch
from composable.ragged.transfer import cast_dtype, collect_blocks, spread_blocks
from composable.ragged.unfinished import check_finished, note_finished, note_unfinished

__all__ = [
    "HOOKS",
    "LIVE_SOURCES",
    "Exchange",
    "NormParts",
    "RaggedDTensor",
    "RaggedLayout",
    "RaggedSpec",
    "cast_dtype",
    "check_finished",
    "collect_blocks",
    "confirm_alike",
    "cut_dims",
    "fallback_counts",
    "hand_over_grad",
    "mark_stale",
    "note_finished",
    "note_unfinished",
    "ragged_spec",
    "refuse_in_each",
    "register_ragged",
    "slice_block",
    "slice_full",
    "splits_of",
    "spread_blocks",
    "strict_mode",
    "summed_in",
    "teach_torch",
    "was_zeroed",
    "watch_zeroing",
]
