"""`find_unused_parameters`: ranks take different branches of the model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.stem(x))


torch.manual_seed(dist.get_rank())
net = Branches()
model = DDP(net, find_unused_parameters=True)
# -> model = replicate(net, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for step in range(5):
    loss = model(torch.randn(4, 8), head=(step + dist.get_rank()) % 3).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
