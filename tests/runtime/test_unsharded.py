"""What outlives a step to serve graphs that do goes with the model."""

import gc
import weakref

import pytest
import torch
from torch import nn

from composable import fully_shard
from tests.world import run_threads


class Leaky(nn.Module):
    """Its forward also puts a tensor into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, beside: list[torch.Tensor] | None = None) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if beside is not None:
            beside.append(y.square().sum())
        return y


def train_and_drop(how: str) -> bool:
    model = fully_shard(Leaky())
    beside: list[torch.Tensor] | None = None if how == "double" else []
    x = torch.ones(2, 4, requires_grad=True)
    loss = model(x, beside).square().sum()
    if how == "double":
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        del slope
    elif how == "backward":
        (loss + sum(beside or ())).backward()
    alive = [weakref.ref(one) for one in (model, model.linear.weight)]
    del model, x, loss, beside
    gc.collect()
    return all(one() is None for one in alive)


@pytest.mark.parametrize("how", ["forward", "backward", "double"])
def test_a_model_whose_leaves_were_watched_is_freed_with_its_last_reference(how: str) -> None:
    assert all(run_threads(train_and_drop, 1, how))
