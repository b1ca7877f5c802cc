"""Gradients of each sample, by torch's ``call_for_per_sample_grads``, of annotated modules."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from composable import fully_shard, no_sync, replicate, unshard_params
from tests.models import seeded
from tests.world import on_ranks

DIM, BATCH = 4, 3


def make() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 2)), 0)


def samples(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run a step; returns the gradients of each sample, which torch leaves on the parameters."""
    call_for_per_sample_grads(model)(x).square().sum().backward()
    return {fqn: param.grad_sample for fqn, param in model.named_parameters()}  # type: ignore[misc]


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(rank))


@on_ranks(kind=["fully_shard", "replicate"], world_size=[1, 2, 3])
def test_each_sample_has_the_gradient_of_one_process(kind: str) -> None:
    rank = dist.get_rank()
    expected = samples(make(), batch_of(rank))
    model: Any = make()
    if kind == "fully_shard":
        fully_shard(model)
        with unshard_params(model):
            found = samples(model, batch_of(rank))
    else:
        replicate(model)
        with no_sync(model):
            found = samples(model, batch_of(rank))
    torch.testing.assert_close(found, expected)
