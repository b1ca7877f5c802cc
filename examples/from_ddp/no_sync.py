"""Gradient accumulation with `no_sync`."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model = DDP(net)
# -> model = replicate(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
losses = []
for _ in range(3):
    for micro in range(4):
        with model.no_sync() if micro < 3 else nullcontext():
            loss = model(torch.randn(4, 8)).square().mean() / 4
            loss.backward()
            losses.append(loss.item())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
