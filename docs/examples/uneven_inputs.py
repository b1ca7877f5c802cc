import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from composable import UnevenInputs, fully_shard, joinable

model = fully_shard(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs: UnevenInputs = joinable(model, step=optimizer.step)
with Join([inputs]):
    for _ in range(1 + dist.get_rank()):  # ranks have different numbers of batches
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
