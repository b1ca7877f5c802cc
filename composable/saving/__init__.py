"""Full values, state dicts, and checkpoints."""

from composable.saving.checkpoint import SavedCheckpoint, SaveHandle, find_checkpoint, load_checkpoint, save_checkpoint
from composable.saving.full_values import (
    full_state_dict,
    iter_full_params,
    load_full_params,
    load_full_state_dict,
)
from composable.saving.loads import register_load_check, register_room, teach_torch_to_load
from composable.saving.safetensors import load_safetensors, save_safetensors
from composable.saving.unsharding import unshard_params
