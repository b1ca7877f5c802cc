"""Lightning's `DDPStrategy` with its arguments."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate


class DDPStrategy:
    def __init__(
        self, ddp_comm_state: Any = None, ddp_comm_hook: Any = None, ddp_comm_wrapper: Any = None, **kwargs: Any
    ):
        self.ddp_kwargs = kwargs
        self.hook_state = ddp_comm_state
        self.hook: Callable[..., Any] = ddp_comm_wrapper(ddp_comm_hook) if ddp_comm_wrapper else ddp_comm_hook

    def setup(self, module: nn.Module) -> None:
        self.module = module
        self.model = DDP(module=module, device_ids=None, **self.ddp_kwargs)
        # -> self.model = replicate(module=module, device_ids=None, **self.ddp_kwargs)
        self.model.register_comm_hook(state=self.hook_state, hook=self.hook)

    def block_backward_sync(self) -> Any:
        return self.model.no_sync()


torch.manual_seed(dist.get_rank())
strategy = DDPStrategy(
    find_unused_parameters=False,
    gradient_as_bucket_view=True,
    static_graph=True,
    ddp_comm_hook=default_hooks.allreduce_hook,
    ddp_comm_wrapper=default_hooks.fp16_compress_wrapper,
)
strategy.setup(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
model = strategy.model
optimizer = torch.optim.Adam(strategy.module.parameters(), lr=0.02)
losses = []
for _ in range(3):
    strategy.model(torch.randn(4, 8)).square().mean().backward()
    with strategy.block_backward_sync():
        pass
    optimizer.step()
    optimizer.zero_grad()
    losses.append(strategy.module[0].weight.sum().item())
