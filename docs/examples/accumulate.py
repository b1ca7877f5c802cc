import torch
from torch import nn

from composable import fully_shard, no_sync, reduce_gradients

model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
with no_sync(model):  # gradients of these two backwards stay on their rank
    for batch in torch.randn(2, 4, 8):
        model(batch).sum().backward()
reduce_gradients(model)  # or one more backward, outside of no_sync
assert model[0].weight.grad is not None
