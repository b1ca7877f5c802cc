"""Optimizers and norms of sharded parameters."""

from composable.optim.clip import clip_grad_norm_, get_total_norm, has_finite_gradients, ranks_of_param
from composable.optim.flat_step import LocalStep, accelerate_optimizer
from composable.optim.rebind import CHECKS_ITSELF, check_every_step, check_replaced, rebind_optimizer
