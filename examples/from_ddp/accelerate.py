"""Accelerate: `DistributedDataParallelKwargs` and `Accelerator.accumulate`."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

kwargs = {
    "dim": 0,
    # ->
    "broadcast_buffers": True,
    "bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "check_reduction": False,
    # ->
    "gradient_as_bucket_view": False,
    "static_graph": False,
}
torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
model = DDP(net, device_ids=None, output_device=None, **kwargs)
# -> model = replicate(net, device_ids=None, **kwargs)
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
losses = []
for step in range(6):
    with nullcontext() if step % 2 else getattr(model, "no_sync", nullcontext)():
        loss = model(torch.randn(4, 8)).square().mean() / 2
        loss.backward()
    losses.append(loss.item())
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
