"""Full values, state dicts, and checkpoints."""

from typing import TYPE_CHECKING

from composable.saving.entries import Entries, Names, batches, check_float, entries_for, entries_now, ranks_of
from composable.saving.full_values import (
    IncompatibleKeys,
    full_state_dict,
    gather_values,
    iter_full_params,
    load_full_params,
    load_full_state_dict,
)
from composable.saving.loads import register_load_check, register_room
from composable.saving.run_folder import sync_folder, write_summed
from composable.saving.storage import Storage, StoredFolder, folder_at
from composable.saving.unsharding import unshard_params

if TYPE_CHECKING:
    from composable.saving.checkpoint import (
        SavedCheckpoint,
        SaveHandle,
        checked_run,
        find_checkpoint,
        load_checkpoint,
        save_checkpoint,
    )
else:
    _LATE = {"SaveHandle", "SavedCheckpoint", "checked_run", "find_checkpoint", "load_checkpoint", "save_checkpoint"}

    def __getattr__(name: str) -> object:
        """Return a name of the file that runs torch's checkpoints, which take as long to import as this package."""
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from composable.saving import checkpoint

        return getattr(checkpoint, name)
