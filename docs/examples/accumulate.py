import torch
from torch import nn

from composable import TokenMean, fully_shard, no_sync, reduce_gradients, token_mean

model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
with no_sync(model):  # gradients of these two backwards stay on their rank
    for batch in torch.randn(2, 4, 8):
        model(batch).sum().backward()
reduce_gradients(model)  # or one more backward, outside of no_sync
assert model[0].weight.grad is not None

mean: TokenMean = token_mean(model)
mean.add(loss_sum=model(torch.randn(4, 8)).sum(), count=4).backward()
assert mean.value.shape == ()
