"""timm's train.py: `NativeDDP`, averaged weights, checkpoints without a prefix."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP  # -> from composable import replicate
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def unwrap_model(model: nn.Module) -> nn.Module:
    return model.module if hasattr(model, "module") else model


torch.manual_seed(dist.get_rank())
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
model = NativeDDP(model, device_ids=None, broadcast_buffers=not dist.is_initialized())
# -> model = replicate(model, device_ids=None, broadcast_buffers=not dist.is_initialized())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
losses = []
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model_ema.update_parameters(unwrap_model(model))
    losses.append(loss.item())
saved = unwrap_model(model).state_dict()
assert [*saved] == [*nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).state_dict()]
losses += [param.sum().item() for param in model_ema.parameters()]
