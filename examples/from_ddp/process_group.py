"""Megatron-like trainers: some parameters are averaged in a smaller group."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(dist.get_rank())
groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
everyone = dist.new_group([*range(dist.get_world_size())])
alone, shared = nn.Linear(8, 8), nn.Linear(8, 1)
model = nn.Sequential(
    DDP(alone, process_group=groups[dist.get_rank()]),
    # -> replicate(alone, process_group=groups[dist.get_rank()]),
    DDP(shared, process_group=everyone),
    # -> replicate(shared, process_group=everyone),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
