import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from composable import DDPView, as_ddp, replicate

model = replicate(nn.Linear(8, 1))
view: DDPView = as_ddp(model)
with Join([view]):
    for _ in range(1 + dist.get_rank()):
        model(torch.randn(4, 8)).sum().backward()
