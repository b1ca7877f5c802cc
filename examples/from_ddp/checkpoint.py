"""torch's tutorial "Getting started with DDP": one rank saves, every rank loads."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
model = DDP(net)
# -> model = replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(folder)
path = os.path.join(folder[0], "model.checkpoint")
if dist.get_rank() == 0:
    torch.save(model.state_dict(), path)
dist.barrier()
with torch.no_grad():
    for param in model.parameters():
        param.zero_()
map_location = {"cpu": "cpu"}  # {"cuda:0": f"cuda:{rank}"} where there are devices
model.load_state_dict(torch.load(path, map_location=map_location, weights_only=True))

losses = []
for _ in range(3):
    loss = (model(torch.randn(20, 10)) - torch.randn(20, 5)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
dist.barrier()
if dist.get_rank() == 0:
    os.remove(path)
    os.rmdir(folder[0])
