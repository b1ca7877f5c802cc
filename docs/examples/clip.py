import torch
from torch import nn

from composable import clip_grad_norm_, fully_shard, get_total_norm, has_finite_gradients

model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
model(torch.randn(4, 8)).sum().backward()
before = clip_grad_norm_(model.parameters(), max_norm=0.5)  # alike on every rank
after = get_total_norm([param.grad for param in model.parameters()])
assert after <= 0.5 < before
assert has_finite_gradients(model.parameters())  # else every rank leaves out the step
