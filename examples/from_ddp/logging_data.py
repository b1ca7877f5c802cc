"""Dashboards that read ranks and buckets from the logging data of DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import reduction_stats, replicate

torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
model = DDP(net)
# -> model = replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
logged = model._get_ddp_logging_data()
# -> logged = reduction_stats(model)
losses.append(logged["world_size"])
# -> losses.append(logged.world_size)
losses.append(len(logged["rebuilt_bucket_sizes"].split(", ")))
# -> losses.append(len(logged.bucket_bytes))
losses += [int(index) for index in logged["rebuilt_per_bucket_param_indices"].split()]
# -> losses += [list(dict(model.named_parameters())).index(fqn) for fqns in logged.bucket_fqns for fqn in fqns]
