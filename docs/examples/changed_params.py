import torch
from torch import nn

from composable import ChangedParams, apply_changes, changed_params, full_state_dict, fully_shard

model = fully_shard(nn.Linear(8, 8))
copy = full_state_dict(model)
changed: ChangedParams = changed_params(model)

with torch.no_grad():
    model.weight.mul_(2)
if changes := changed():  # rank 0 gets them
    apply_changes(copy, changes)
    assert len(changes["bias"]["positions"]) == 0
