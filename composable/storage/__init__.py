"""What owns the memory: shards, unsharded buffers, gradients, and the two faces of a parameter."""

from composable.storage.class_gathers import ClassGatheredBuffer
from composable.storage.comms import CHOICES, HookFunction, Registration, copied_registrations, nearest
from composable.storage.copy_reach import modules_of_copy, reaches_out
from composable.storage.first_values import FirstValues, ParamInitFn
from composable.storage.flat_buffer import FlatBuffer
from composable.storage.gradient_buffer import GradientBuffer, GradientPool
from composable.storage.gradient_path import GradientPath, Reduction
from composable.storage.handle import FIX_COPY, Handle, handle_of, waits_for_copies
from composable.storage.hook_paths import reduced_otherwise
from composable.storage.module_buffers import describe_buffers, move_buffers
from composable.storage.replicas import by_grid, collect_at, spread_from
from composable.storage.resting_place import RestingPlace
from composable.storage.second_leg import Replicas
from composable.storage.sharded_param import ShardedParam
from composable.storage.stepping import (
    ELEMENT_WISE,
    Stepper,
    check_backward,
    forget_torch_hooks,
    give_torch_optimizers,
    has_stepped,
    has_torch_optimizer,
    mark_stepped,
    refuse_graph_of_backward,
    refuse_steppers,
    step_torch_optimizers,
    stepper_of,
    unmark_stepped,
)
from composable.storage.unfilled import META_FIX, MarkedMemory, is_unfilled, mark_unfilled
from composable.storage.whole_values import collect_whole, spread_whole

__all__ = [
    "CHOICES",
    "ELEMENT_WISE",
    "FIX_COPY",
    "META_FIX",
    "ClassGatheredBuffer",
    "FirstValues",
    "FlatBuffer",
    "GradientBuffer",
    "GradientPath",
    "GradientPool",
    "Handle",
    "HookFunction",
    "MarkedMemory",
    "ParamInitFn",
    "Reduction",
    "Registration",
    "Replicas",
    "RestingPlace",
    "ShardedParam",
    "Stepper",
    "by_grid",
    "check_backward",
    "collect_at",
    "collect_whole",
    "copied_registrations",
    "describe_buffers",
    "forget_torch_hooks",
    "give_torch_optimizers",
    "handle_of",
    "has_stepped",
    "has_torch_optimizer",
    "is_unfilled",
    "mark_stepped",
    "mark_unfilled",
    "modules_of_copy",
    "move_buffers",
    "nearest",
    "reaches_out",
    "reduced_otherwise",
    "refuse_graph_of_backward",
    "refuse_steppers",
    "spread_from",
    "spread_whole",
    "step_torch_optimizers",
    "stepper_of",
    "unmark_stepped",
    "waits_for_copies",
]
