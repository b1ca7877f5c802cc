"""Vision trainers: each forward starts with the statistics of the first rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
model = DDP(net)
# -> model = replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
