"""A torch optimizer's step on local tensors, and what it needs to know of parameters."""

from composable.optim.annotated import ranks_of_param
from composable.optim.checks import CHECKS_ITSELF, check_every_step, check_replaced
from composable.optim.clip import clip_grad_norm_, get_total_norm
from composable.optim.local_step import accelerate_optimizer
from composable.optim.names import (
    GroupNames,
    OptimizerNames,
    describe_optimizer,
    group_differences,
    names_by_alias,
    names_of_params,
)
from composable.optim.part_step import PartStep
from composable.optim.rebind import rebind_optimizer

__all__ = [
    "CHECKS_ITSELF",
    "GroupNames",
    "OptimizerNames",
    "PartStep",
    "accelerate_optimizer",
    "check_every_step",
    "check_replaced",
    "clip_grad_norm_",
    "describe_optimizer",
    "get_total_norm",
    "group_differences",
    "names_by_alias",
    "names_of_params",
    "ranks_of_param",
    "rebind_optimizer",
]
