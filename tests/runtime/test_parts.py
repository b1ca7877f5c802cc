"""Parts of a model that run on their own, before the whole and after it: every gradient is that of one process."""

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import ConfigError, FSDPModule, fully_shard, no_sync
from tests.models import DIM, random_input, seeded
from tests.world import on_ranks


class Leaf(nn.Module):
    """A linear layer and a parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * self.scale)


class Branch(nn.Module):
    """Leaves and branches one after the other, and a parameter of its own."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x + self.bias


def random_tree(draw: random.Random, depth: int = 0) -> nn.Module:
    if depth and (depth == 3 or draw.random() < 0.4):
        return Leaf()
    return Branch(*(random_tree(draw, depth + 1) for _ in range(draw.randint(1, 3))))


def annotate(model: nn.Module, draw: random.Random) -> None:
    """Annotate by hand, by policy, or both: what is below first."""
    inner = [module for module in reversed(list(model.modules())) if isinstance(module, (Leaf, Branch))][:-1]
    policy = draw.choice([None, {Leaf}, {Leaf, Branch}, {nn.Linear}, {Branch}])
    for module in inner:
        if draw.random() < 0.3:
            reshard = draw.choice([None, True, False])
            annotate_one(module, draw.choice([None, policy]), reshard_after_forward=reshard)
    annotate_one(model, policy)


def annotate_one(module: nn.Module, policy: Any, **options: Any) -> None:
    try:
        fully_shard(module, policy=policy, **options)
    except ConfigError:  # The policy picks nothing that is left.
        fully_shard(module, **options)


def random_program(draw: random.Random, parts: int) -> list[tuple[list[int], bool]]:
    """Return backwards: the parts whose forwards they take, 0 is the whole, and whether gradients are reduced."""
    steps = []
    for _ in range(draw.randint(2, 4)):
        calls = [draw.randrange(parts) for _ in range(draw.randint(1, 3))]
        steps.append((calls, draw.random() < 0.6))
    return [*steps, ([0], True)]


@pytest.mark.parametrize("seed", range(25))
@on_ranks(2)
def test_parts_train_right_in_any_order_with_the_whole(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    draw = random.Random(seed)
    shape = draw.random()
    model, plain = (seeded(lambda: random_tree(random.Random(shape)), seed) for _ in range(2))
    annotate(model, draw)
    parts = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    def loss_of(net: nn.Module, calls: list[int], number: int, source: int) -> Any:
        inputs = (random_input(1000 * number + 10 * index + source, 3, DIM) for index in range(len(calls)))
        return sum(net.get_submodule(parts[part])(x).square().mean() for part, x in zip(calls, inputs, strict=True))

    for number, (calls, is_reduced) in enumerate(random_program(draw, len(parts))):
        for source in range(world_size):
            (loss_of(plain, calls, number, source) / world_size).backward()
        with nullcontext() if is_reduced else no_sync(model):
            loss_of(model, calls, number, rank).backward()
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        grad: Any = param.grad
        torch.testing.assert_close(
            grad.full_tensor(), expected[name].grad, msg=lambda text, name=name: f"{name}: {text}"
        )
