import torch.distributed as dist
from torch import nn

from composable import full_state_dict, fully_shard, load_full_state_dict

model = fully_shard(nn.Linear(8, 8))
state = full_state_dict(model)  # full tensors on the first rank, {} on the others
assert len(state) == (2 if dist.get_rank() == 0 else 0)
load_full_state_dict(model, state if dist.get_rank() == 0 else None)
