"""Optimizers and norms of sharded parameters."""

from composable.optim.backward_steps import BackwardSteps, step_in_backward
from composable.optim.clip import clip_grad_norm_, get_total_norm, has_finite_gradients, ranks_of_param
from composable.optim.local_step import LentPieces, LocalStep, State, lend_grad, local_grad, state_like
from composable.optim.rebind import (
    CHECKS_ITSELF,
    check_every_step,
    check_parameters,
    check_replaced,
    cut_state,
    is_per_element,
    rebind_optimizer,
)
