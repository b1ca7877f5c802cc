"""torch's tutorial "Getting started with DDP": the basic script."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


torch.manual_seed(dist.get_rank())
net = ToyModel()
model = DDP(net)
# -> model = replicate(net)
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss = loss_fn(model(torch.randn(20, 10)), torch.randn(20, 5))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
