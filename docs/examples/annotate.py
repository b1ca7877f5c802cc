from torch import nn

from composable import fully_shard, replicate, unannotate

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
replicate(model[0])  # every rank keeps this layer whole
fully_shard(model)  # and a piece of each other parameter
assert model[2].weight.shape == (2, 16)
assert model[2].weight.to_local().numel() < 32
unannotate(model)
assert type(model[2].weight) is nn.Parameter
