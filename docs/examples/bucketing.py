import torch
from torch import nn

from composable import bucketing_backend, replicate

model = replicate(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
backend = bucketing_backend("eager", bucket_cap_mb=25)  # "inductor" generates code


def step(batch: torch.Tensor) -> None:
    model(batch).sum().backward()


with torch._dynamo.config.patch(compiled_autograd=True):
    torch.compile(step, backend=backend)(torch.randn(4, 8))
assert model[0].weight.grad is not None
