from torch import nn

from composable import RaggedDTensor, RaggedShard, fully_shard

model = fully_shard(nn.Linear(8, 3))
weight = model.weight
assert isinstance(weight, RaggedDTensor)
placement = weight.placements[0]
assert isinstance(placement, RaggedShard)
assert placement.bounds[-1] == weight.numel() == weight.full_tensor().numel() == 24
