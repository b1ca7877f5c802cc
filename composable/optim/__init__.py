"""A torch optimizer's step on local tensors, and what it needs to know of parameters."""

from composable.optim.checks import (
    CHECKS_ITSELF,
    GroupNames,
    OptimizerNames,
    check_every_step,
    check_replaced,
    describe_optimizer,
    group_differences,
    names_by_alias,
    names_of_params,
)
from composable.optim.clip import clip_grad_norm_, get_total_norm, ranks_of_param
from composable.optim.flat_step import PartStep, accelerate_optimizer
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
