import torch
from torch import nn

from composable import ShardPlan, plan

with torch.device("meta"):  # no memory, and no process group
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
found: ShardPlan = plan(model, policy={nn.Linear}, world_size=64)
print(found)
print(found.bytes_per_rank_at_rest(), "bytes on each rank")
