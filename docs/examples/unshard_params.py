import torch
from torch import nn

from composable import fully_shard, unshard_params

model = fully_shard(nn.Linear(8, 2))
with unshard_params(model), torch.no_grad():
    model.weight.fill_(1.0)  # a plain parameter of the full shape
assert model.weight.full_tensor().sum() == 16
