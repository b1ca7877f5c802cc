"""nanoGPT: an attribute of the wrapper says which micro-batch averages."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
model = DDP(net)
# -> model = replicate(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
micro_batches = 3
losses = []
for _ in range(3):
    for micro in range(micro_batches):
        model.require_backward_grad_sync = micro == micro_batches - 1
        loss = model(torch.randn(4, 8)).square().mean() / micro_batches
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
