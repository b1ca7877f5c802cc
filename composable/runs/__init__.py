"""Checkpoint runs, on disks and in storages; safetensors; saves on a signal.

Only the package itself gives their names, at the first use.
"""

from composable.runs.checkpoint import SavedCheckpoint, SaveHandle, find_checkpoint, load_checkpoint, save_checkpoint
from composable.runs.safetensors import load_safetensors, save_safetensors
from composable.runs.signals import SaveNotice, save_on_signal
from composable.runs.storage import Storage
