"""Vision trainers: each rank has its own batch norm statistics, averaged after an epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
model = DDP(net, broadcast_buffers=False)
# -> model = replicate(net, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
losses = []
for _ in range(3):
    loss = model(torch.randn(4, 3, 8, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
for buffer in model.buffers():
    if buffer.is_floating_point():
        dist.all_reduce(buffer)
        buffer /= dist.get_world_size()
model.eval()
losses.append(model(torch.ones(1, 3, 8, 8)).sum().item())
