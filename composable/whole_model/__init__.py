"""Features for whole models, with sharded and replicated modules alike."""

from composable.whole_model.backward_steps import (
    BackwardSteps,
    ReducingUnit,
    State,
    check_ranks_below,
    listeners_of,
    nothing_annotated,
    params_of,
    states_of,
    step_in_backward,
    units_of,
)
from composable.whole_model.kept import KeptGradients
