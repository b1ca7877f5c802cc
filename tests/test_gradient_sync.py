"""Gradients that backwards leave on their ranks, and what synchronises them later."""

import torch.distributed as dist
from torch import nn

from composable import fully_shard, no_sync
from tests.counting import CountingTransport
from tests.models import make_model
from tests.parity import inputs_of
from tests.world import run_threads


def counts_of_two_backwards() -> dict[str, int]:
    model = fully_shard(make_model("mlp"), policy={nn.Linear})
    args, kwargs = inputs_of(model, 0, dist.get_rank())
    output = model(*args, **kwargs)
    counted = CountingTransport.install(fully_shard.state(model).root)
    with no_sync(model):
        output.sum().backward(retain_graph=True)
    output.square().mean().backward()
    return counted.counts()


def test_a_second_backward_of_a_forward_reduces_each_handle_once() -> None:
    assert run_threads(counts_of_two_backwards, 2) == [{"all_gather": 16, "reduce_scatter": 8}] * 2
