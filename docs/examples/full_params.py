from torch import nn

from composable import fully_shard, iter_full_params, load_full_params

model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
for fqn, value in iter_full_params(model):
    assert value.shape == model.get_parameter(fqn).shape

load_full_params(model, list(iter_full_params(model)))
