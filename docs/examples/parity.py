import torch
from torch import nn

from composable import fully_shard
from composable.testing import Difference, check_parity


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.full((4, 8), 1.0 + step + rank)


found: dict[str, Difference] = check_parity(lambda: nn.Linear(8, 1), batch, fully_shard, world_sizes=(2,))
assert all(one.amount < 1e-4 for one in found.values())
