from torch import nn

from composable import HandleOptions, ReplicateOptions, ShardingStrategy, fully_shard, replicate

model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
options = HandleOptions(align={"0.weight": "tensor"})  # one rank holds this parameter whole
fully_shard(model, strategy=ShardingStrategy.SHARD_GRAD_OP, options=options)
assert model[0].weight.to_local().numel() in (0, 128)

norm = nn.BatchNorm1d(2)  # the same values on every rank: nothing is sent before the first step
replicate(norm, options=ReplicateOptions(init_sync=False))
