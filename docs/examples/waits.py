import torch
import torch.distributed as dist

from composable import explain_waits, set_divergence_timeout

set_divergence_timeout(30.0)  # seconds; the default
loss = torch.tensor(1.0 + dist.get_rank())
with explain_waits():
    dist.all_reduce(loss)
assert loss.item() == 3.0
