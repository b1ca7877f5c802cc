"""The engine: parameters, buffers, paths, and the order of a step."""

from composable.engine.buffer import FlatBuffer, digest_of
from composable.engine.edited import (
    ParamLabel,
    attach,
    check_held,
    lies_in_buffer,
    lost_write,
    misplaced,
    written_too_early,
)
from composable.engine.events import Listeners, StepListener, Work
from composable.engine.finish import Agreement, HandleChoices
from composable.engine.handle import (
    FIX_COPY,
    Handle,
    HandleStep,
    StepCount,
    handle_of,
    refuse_waiting_copies,
    tell_loads,
)
from composable.engine.param import Lent, ParamView, ShardedParam, has_own_setattr
from composable.engine.paths import Replicas, RestingPlace, make_resting_places_by
from composable.engine.riders import HostCopy, Rider, Riders
from composable.engine.routes import HookFunction, Registration, nearest, reduced_otherwise
from composable.engine.scheduler import Scheduler
from composable.engine.side_losses import leaves_side_loss, tensors_in_attributes
from composable.engine.step import NestedReplica, RootSettings, Step, steps_of
from composable.engine.stepping import (
    ELEMENT_WISE,
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
from composable.engine.unsharded import streams_for
