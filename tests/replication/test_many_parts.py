"""Many replicated parts: in one call they share a process group, in many they are right all the same, and are told of."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import replicate
from composable.ground.torch_private import groups_of_process
from tests.models import random_input
from tests.parity import gradients_of
from tests.runtime.test_notices import recorded
from tests.world import RankErrors, on_ranks, run_ranks, run_threads

DIM = 4


class Parts(nn.Module):
    """Layers that are called in any order, some of them twice."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, dtype=torch.double) for _ in range(count))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = x + torch.tanh(self.layers[index](x))
        return x


def train(seed: int) -> None:
    """Train two models in turn, on calls of each rank's own; one process on the batches of all ranks is right."""
    choose, world = random.Random(seed), dist.get_world_size()
    counts = [choose.randint(2, 8) for _ in range(2)]
    models, twins = [[Parts(seed + number, count) for number, count in enumerate(counts)] for _ in range(2)]
    groups = len(groups_of_process())
    is_one_call = choose.random() < 0.5
    for model in models:
        if is_one_call:
            replicate([*model.layers], find_unused_parameters=True)
        else:
            for layer in model.layers:
                replicate(layer)
    assert len(groups_of_process()) - groups == (2 if is_one_call else sum(counts))
    for step in range(3):
        for number in choose.sample(range(2), 2):
            model, twin, count = models[number], twins[number], counts[number]
            # In one call, ranks may leave parts out; else every rank calls every part once, in one order.
            orders = [choose.choices(range(count), k=count) for _ in range(world)]
            if not is_one_call:
                orders = [choose.sample(range(count), count)] * world
            for rank, order in enumerate(orders):
                x = random_input(10 * step + rank, 3, DIM).double()
                if rank == dist.get_rank():
                    model(x, order).square().mean().backward()
                (twin(x, order).square().mean() / world).backward()
            expected = gradients_of(twin)
            assert gradients_of(model).keys() == expected.keys()
            torch.testing.assert_close(gradients_of(model), expected)
            for one in (model, twin):
                one.zero_grad()


def test_random_programs_of_many_parts_train_as_one_process() -> None:
    for seed in range(10):
        run_threads(train, 2 + seed % 2, seed)


def go_backward_in_another_order() -> None:
    models = [replicate(nn.Linear(DIM, DIM)) for _ in range(2)]
    losses = [model(torch.ones(1, DIM)).sum() for model in models]
    for loss in losses if dist.get_rank() else reversed(losses):
        loss.backward()


def test_backwards_of_two_models_in_another_order_on_one_rank_are_an_error_on_both() -> None:
    with pytest.raises(RankErrors) as caught:
        run_threads(go_backward_in_another_order, 2)
    assert {type(error).__name__ for error in caught.value.errors.values()} == {"DesyncError"}


@on_ranks(2, run=run_ranks)
def test_sixteen_calls_are_told_of_once() -> None:
    kept: list[nn.Module] = []  # A group of one that is gone is taken again.
    with recorded() as texts:
        for _ in range(18):
            layer = replicate(nn.Linear(1, 1))
            layer(torch.ones(1, 1)).sum().backward()
            kept.append(layer)
    expected = "16 calls of replicate have a process group each, with threads, files and on NCCL a communicator: "
    expected += "one call with the list of the modules, replicate([...]), has one group for all"
    assert texts == ([expected] if dist.get_rank() == 0 else [])
