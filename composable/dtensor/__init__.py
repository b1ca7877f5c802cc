"""The sharded parameter: a DTensor that is cut at any element."""

from composable.dtensor.gather import fallback_counts, note_written, strict_mode
from composable.dtensor.norms import cut_dims, norms_over, summed_in
from composable.dtensor.packed import memory_of, values_of, write_values
from composable.dtensor.spec import RaggedLayout, RaggedSpec, ragged_spec, slice_block, slice_full, splits_of
from composable.dtensor.tensor import (
    RaggedDTensor,
    assign_grad,
    check_finished,
    note_finished,
    note_unfinished,
    register_ragged,
    was_zeroed,
    watch_zeroing,
    wrap_ragged,
)
from composable.dtensor.transfer import PieceExchange, cast_dtype, collect_blocks, spread_blocks, teach_torch
