"""torch's performance guide: gradients as views of small buckets, kept between steps, and clipped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(dist.get_rank())
net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
model = DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=0.02)
# -> model = replicate(net, gradient_as_bucket_view=True, bucket_cap_mb=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
losses = []
for _ in range(4):
    loss = model(torch.randn(4, 64)).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    losses += [loss.item(), norm.item()]
