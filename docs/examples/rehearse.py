import torch
from torch import nn

from composable import fully_shard
from composable.rehearsal import Rehearsal, rehearse


def step() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), policy={nn.Linear})
    model(torch.randn(4, 512)).sum().backward()


found: Rehearsal = rehearse(64, step, ranks_per_host=8)
assert found.peak_bytes == sum(found.parts.values()) > 2 * 512 * 512 * 4  # the whole model, as it is made
