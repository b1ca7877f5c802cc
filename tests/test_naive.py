"""``examples/naive_fully_shard.py`` shows what ``fully_shard`` computes: the same numbers, and the same shards."""

import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard
from tests.models import seeded
from tests.world import on_ranks, run_ranks

EXAMPLE = Path(__file__).parent.parent / "examples" / "naive_fully_shard.py"


def make_model() -> nn.Module:
    """Return two blocks, one of which is annotated, around a layer of an odd number of elements."""
    inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7))
    return nn.Sequential(inner, nn.Linear(7, 5, bias=False), nn.GELU(), nn.Linear(5, 3))


def losses_of(model: nn.Module, params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Train three steps of two backwards each; every rank has data of its own."""
    optimizer = torch.optim.AdamW(params, lr=0.05)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        for _ in range(2):
            loss = model(torch.randn(4, 5, generator=draw)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def annotated(annotate: Callable[[nn.Module], Any]) -> nn.Module:
    model = seeded(make_model, 0)
    annotate(model[0])
    annotate(model)
    return model


@on_ranks(run=run_ranks, world_size=[2])
def test_the_naive_version_gives_the_same_numbers() -> None:
    naive = runpy.run_path(str(EXAMPLE))
    ours, theirs = annotated(fully_shard), annotated(naive["naive_fully_shard"])
    shards = naive["shards_of"](theirs)
    assert all(param.untyped_storage().nbytes() == 0 for param in theirs.parameters())
    assert losses_of(ours, ours.parameters()) == losses_of(theirs, shards)
    for module in theirs.modules():
        if hasattr(module, "unit"):
            module.unit.unshard()  # type: ignore[operator]  # the example's
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), its)  # type: ignore[operator]  # sharded
