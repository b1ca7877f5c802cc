"""The engine: parameters, buffers, the paths that bytes take, and when each of them is taken in a step."""

from composable.engine.buffer import FlatBuffer
from composable.engine.finish import Agreement, HandleChoices, find_stale
from composable.engine.gradients import (
    ELEMENT_WISE,
    GradientBuffer,
    Gradients,
    Stepper,
    check_backward,
    forget_torch_hooks,
    give_torch_optimizers,
    has_stepped,
    has_torch_optimizer,
    mark_stepped,
    refuse_steppers,
    step_torch_optimizers,
    stepper_of,
    unmark_stepped,
)
from composable.engine.handle import FIX_COPY, Handle, handle_of, waits_for_copies, written_too_early
from composable.engine.handle_step import HandleStep
from composable.engine.param import Lent, ShardedParam, has_own_setattr
from composable.engine.passes import SavingForbidden
from composable.engine.paths import Replicas, RestingPlace
from composable.engine.scheduler import Scheduler
from composable.engine.step import Companion, RootSettings, StepEvent
from composable.engine.unfilled import META_FIX, MarkedMemory, is_unfilled, mark_unfilled
from composable.engine.unsharded import streams_for
from composable.engine.user_comms import HookFunction, Registration, copied_registrations, nearest, reduced_otherwise

__all__ = [
    "ELEMENT_WISE",
    "FIX_COPY",
    "META_FIX",
    "Agreement",
    "Companion",
    "FlatBuffer",
    "GradientBuffer",
    "Gradients",
    "Handle",
    "HandleChoices",
    "HandleStep",
    "HookFunction",
    "Lent",
    "MarkedMemory",
    "Registration",
    "Replicas",
    "RestingPlace",
    "RootSettings",
    "SavingForbidden",
    "Scheduler",
    "ShardedParam",
    "StepEvent",
    "Stepper",
    "check_backward",
    "copied_registrations",
    "find_stale",
    "forget_torch_hooks",
    "give_torch_optimizers",
    "handle_of",
    "has_own_setattr",
    "has_stepped",
    "has_torch_optimizer",
    "is_unfilled",
    "mark_stepped",
    "mark_unfilled",
    "nearest",
    "reduced_otherwise",
    "refuse_steppers",
    "step_torch_optimizers",
    "stepper_of",
    "streams_for",
    "unmark_stepped",
    "waits_for_copies",
    "written_too_early",
]
