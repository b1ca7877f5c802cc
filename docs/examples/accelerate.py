import torch
from torch import nn

from composable import accelerate_optimizer, fully_shard

model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
optimizer = accelerate_optimizer(torch.optim.AdamW(model.parameters()), model)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
