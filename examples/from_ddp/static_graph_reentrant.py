"""Reentrant activation checkpointing, several times in one forward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.never = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


torch.manual_seed(dist.get_rank())
net = Blocks()
model = DDP(net, static_graph=True)
# -> model = replicate(net, static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
