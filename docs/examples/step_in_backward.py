import torch
from torch import nn

from composable import BackwardSteps, fully_shard, step_in_backward

model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), policy={nn.Linear})
steps: BackwardSteps = step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
with steps:
    model(torch.randn(4, 8)).sum().backward()  # steps too
assert model[0].weight.grad is None
