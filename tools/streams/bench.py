"""A model and its optimizer on the recording device, and the programs that are run with them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from composable import FSDPModule, fully_shard
from composable.annotation.root import Root
from composable.engine import RestingPlace
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.parity import LR, inputs_of
from tools.streams.recorded import REAL, Runtime, put_on_device
from tools.streams.recording import Recorder

__all__ = ["Bench", "Case", "run_case"]


class Bench:
    """A model with its optimizer on a recording device.

    Attributes:
        home: Where shards rest; ``None``: on the device.
        reshard: The option ``reshard_after_forward``.
    """

    def __init__(self, name: str, recorder: Recorder, runtime: Runtime = REAL, **options: Any) -> None:
        self.recorder = recorder
        self.runtime = runtime
        self.model = make_model(name)
        self.reshard = options.get("reshard_after_forward")
        self.home: RestingPlace | None = options.pop("home", None)
        fully_shard(self.model, **{"policy": BLOCK_CLASSES, **options})
        self.root = self.adopt(self.model)
        self.optimizer = self.new_optimizer()

    def adopt(self, module: nn.Module) -> Root:
        """Make ``module`` a root and put it on the device."""
        state = fully_shard.state(module)
        assert state is not None
        if self.home is not None:
            for flat in [flat for handle in state._handles for flat in handle.buffers]:
                flat.home = flat.routes.home = self.home
                self.recorder.put_on_host(flat.shard)
        root = state.lazy_init()
        put_on_device(root, self.recorder, self.runtime)
        return root

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=LR, momentum=0.9)

    def forward(self, seed: int = 0) -> torch.Tensor:
        args, kwargs = inputs_of(self.model, seed, dist.get_rank())
        return loss_of(self.model(*args, **kwargs))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 2) -> None:
        for seed in range(steps):
            self.forward(seed).backward()
            self.update()

    @property
    def blocks(self) -> list[FSDPModule]:
        """Fully sharded modules below the root, in order."""
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)][1:]


class Case(NamedTuple):
    """One program.

    Attributes:
        name: What it does.
        model: Name in ``tests.models``.
        run: Does it.
        options: For ``fully_shard``.
    """

    name: str
    model: str
    run: Callable[[Bench], None]
    options: Mapping[str, Any] = MappingProxyType({})


def run_case(case: Case, recorder: Recorder, runtime: Runtime = REAL) -> Bench:
    """Run ``case`` on ``recorder``; what it found lies there."""
    bench = Bench(case.model, recorder, runtime, **case.options)
    with recorder:
        case.run(bench)
    return bench
