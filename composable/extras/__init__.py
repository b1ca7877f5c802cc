"""Features that training does not need; only the package itself gives their names, at the first use."""

from composable.extras.flat_step import accelerate_optimizer
from composable.extras.matrix_step import MatrixOptimizer
from composable.extras.row_shards import as_torch_shards
from composable.extras.safetensors import load_safetensors, save_safetensors
from composable.extras.signals import SaveNotice, save_on_signal
from composable.extras.step_times import Timeline, TimelineEvent, timeline
from composable.extras.uneven_inputs import DDPView, UnevenInputs, as_ddp, joinable
from composable.extras.watched_run import Watch, watch
