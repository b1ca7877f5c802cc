"""Full values and state dicts."""

from composable.saving.data import DISTRUST, as_data, read_data
from composable.saving.entries import (
    Entries,
    Names,
    NamesOnAll,
    OptimizerNames,
    batches,
    check_float,
    entries_for,
    entries_now,
    names_of_params,
    names_on_all,
    optimizer_differences,
    picked_of,
    ranks_of,
)
from composable.saving.full_values import (
    IncompatibleKeys,
    full_state_dict,
    gather_values,
    iter_full_params,
    load_as_torch,
    load_full_params,
    load_full_state_dict,
)
from composable.saving.loads import find_differences, register_load_check, register_room
from composable.saving.unsharding import unshard_params
