"""torchrec: a mark on the model lists parameters that DDP ignores."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate

torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "0.bias"])
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
