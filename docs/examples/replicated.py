import torch
import torch.distributed as dist
from torch import nn

from composable import ReductionStats, ReplicateModule, reduction_stats, replicate, update_process_group

model = replicate(nn.Linear(8, 1))
assert isinstance(model, ReplicateModule)
model(torch.randn(4, 8)).sum().backward()
update_process_group(model, dist.new_group([0, 1]))  # after ranks have gone or come back
stats: ReductionStats = reduction_stats(model)
print(stats.world_size, "ranks, buckets of", stats.bucket_bytes, "bytes")
