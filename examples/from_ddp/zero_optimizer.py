"""Optimizer state in shards: `ZeroRedundancyOptimizer`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
model = DDP(net)
# -> model = replicate(net)
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
torch.manual_seed(dist.get_rank())
losses = []
for _ in range(3):
    loss = model(torch.randn(4, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
