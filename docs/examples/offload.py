from torch import nn

from composable import CPUOffloadPolicy, OffloadPolicy, fully_shard

is_short_of_memory = True
policy = CPUOffloadPolicy() if is_short_of_memory else OffloadPolicy()
model = fully_shard(nn.Linear(8, 8), offload_policy=policy)
print(fully_shard.state(model).plan.host_bytes_per_rank_at_rest(), "bytes on the host")
