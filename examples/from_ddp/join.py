"""Uneven inputs: torch's tutorial on the `Join` context manager."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import as_ddp, replicate

torch.manual_seed(dist.get_rank())
net = nn.Linear(8, 1)
model = DDP(net)
# -> model = replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = [torch.randn(4, 8) for _ in range(4 + dist.get_rank())]
losses = []
with Join([model]):
    # -> with Join([as_ddp(model)]):
    for x in inputs:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
