"""torch's tutorial "Getting started with DDP": a model on two devices of each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate


class ToyMpModel(nn.Module):
    def __init__(self, dev0: str, dev1: str) -> None:
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1 = nn.Linear(10, 10).to(dev0)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(dev1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


torch.manual_seed(dist.get_rank())
net = ToyMpModel("cpu", "cpu")
model = DDP(net, device_ids=None)
# -> model = replicate(net, device_ids=None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
