"""A static graph that is set after wrapping."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
model = DDP(net)
# -> model = replicate(net, static_graph=True)
model._set_static_graph()
# ->
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(4):
    loss = model(torch.randn(4, 8)).square().mean() + model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
