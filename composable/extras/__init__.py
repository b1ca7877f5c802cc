"""Features that training does not need; only the package itself gives their names, at the first use."""

from composable.extras.changes import ChangedParams, apply_changes, changed_params
from composable.extras.drawing import draw_plan as draw_plan
from composable.extras.flat_step import accelerate_optimizer
from composable.extras.matrix_step import MatrixOptimizer
from composable.extras.step_times import Timeline, TimelineEvent, timeline
from composable.extras.uneven_inputs import DDPView, UnevenInputs, as_ddp, joinable
from composable.extras.watched_run import Watch, watch
