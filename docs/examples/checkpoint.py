import torch
from torch import nn

from composable import checkpoint, fully_shard

model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
for block in model:
    checkpoint(block)  # its activations are computed again in backward
    fully_shard(block)
fully_shard(model)
model(torch.randn(4, 8)).sum().backward()
