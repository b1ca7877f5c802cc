"""torch's pipelining: stages whose layers are fully sharded, driven by each of torch's schedules.

torchrun --standalone --nproc-per-node 4 pipelining.py [--engine torch]    (two stages' ranks, two ranks each)
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from engine import Report, parse_engine
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import composable

WIDTH, LAYERS, MICRO_BATCHES, STEPS, LR = 16, 8, 4, 4, 0.1
# How many stages each rank holds.
SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}


class ShardedStage(PipelineStage):
    """A stage whose module this library shards.

    A step gathers each parameter once and reduces each gradient once, whatever the number of micro batches. In between
    the module holds whole parameters, which backwards in two halves look for in the graph.
    """

    _step: ExitStack | None = None

    def forward_one_chunk(self, *args, **kwargs):
        if self._step is None and self.has_backward:
            self._step = ExitStack()
            self._step.enter_context(composable.unshard_params(self.submod, writeback=False))
            self._step.enter_context(composable.no_sync(self.submod))
        return super().forward_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor):
        self._step.close()
        self._step = None
        composable.reduce_gradients(self.submod)
        super().perform_reduce_grad(grad_scale_factor)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def stage_indices(name: str, rank: int, size: int) -> list[int]:
    """Return which stages a rank of the pipeline holds."""
    if name == "ScheduleZBVZeroBubble":
        return [rank, 2 * size - 1 - rank]
    return [rank + size * turn for turn in range(SCHEDULES[name])]


def make_layers() -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(LAYERS)]


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * (step % 2) + rank)
    return torch.randn(4 * MICRO_BATCHES, WIDTH, generator=generator)


def train(fully_shard: Callable[..., object], name: str, mesh: DeviceMesh, stage_class: type[PipelineStage]):
    """Return the losses of a few steps with a schedule, by name, on a mesh with the dims ``pp`` and ``dp``."""
    pipeline, data = mesh["pp"], mesh["dp"]
    count = SCHEDULES[name] * pipeline.size()
    layers = make_layers()
    each = LAYERS // count
    stages = []
    for index in stage_indices(name, pipeline.get_local_rank(), pipeline.size()):
        module = nn.Sequential(*layers[index * each : (index + 1) * each])
        for layer in module:
            fully_shard(layer, mesh=data, reshard_after_forward=False)
        fully_shard(module, mesh=data, reshard_after_forward=False)
        stages.append(stage_class(module, index, count, torch.device("cpu"), group=pipeline.get_group()))
    schedule = getattr(schedules, name)(
        stages[0] if SCHEDULES[name] == 1 else stages, n_microbatches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = torch.optim.SGD(params, lr=LR, momentum=0.9)
    means = []
    for step in range(STEPS):
        x = batch(step, data.get_local_rank())
        losses: list[torch.Tensor] = []
        last = {"target": x.sin(), "losses": losses} if any(stage.is_last for stage in stages) else {}
        schedule.step(*([x] if any(stage.is_first for stage in stages) else []), **last)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        means.append(mean / data.size())
    return means


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("pipelining", engine)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "dp"))
    for name in SCHEDULES:
        for loss in train(engine.fully_shard, name, mesh, ShardedStage if engine is composable else PipelineStage):
            report.add(loss)
    report.end()


if __name__ == "__main__":
    main()
