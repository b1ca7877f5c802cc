"""Models with other methods than `forward`, such as `generate`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 3), nn.Linear(3, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).tanh()

    def penalty(self) -> torch.Tensor:
        return self.decoder.weight.square().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encode(x))


torch.manual_seed(dist.get_rank())
net = Autoencoder()
model = DDP(net)
# -> model = replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    x = torch.randn(4, 8)
    loss = (model(x) - x).square().mean() + 0.01 * model.module.penalty()
    # -> loss = (model(x) - x).square().mean() + 0.01 * model.penalty()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
with torch.no_grad():
    losses.append(model.module.encode(torch.ones(1, 8)).sum().item())
    # -> losses.append(model.encode(torch.ones(1, 8)).sum().item())
