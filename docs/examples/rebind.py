import torch
from torch import nn

from composable import fully_shard, rebind_optimizer

model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())  # built too early
fully_shard(model)
rebind_optimizer(optimizer, model)
assert optimizer.param_groups[0]["params"][0] is model.weight
