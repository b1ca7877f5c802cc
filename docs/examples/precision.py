import torch
from torch import nn

from composable import MixedPrecisionPolicy, fully_shard

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = fully_shard(nn.Linear(8, 8), mp_policy=policy)
output = model(torch.randn(4, 8))
assert output.dtype == torch.bfloat16
assert model.weight.dtype == torch.float32
output.sum().backward()
