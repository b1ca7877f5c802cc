"""Steps that would be in vain are refused, or logged."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard, replicate
from tests.models import random_input, seeded
from tests.parity import assert_equal_params, full_params
from tests.world import run_threads


class Net(nn.Module):
    """Remembers the parameters that its forward has computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 1)
        self.met: list[nn.Parameter] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.met = [self.first.weight, self.last.bias]
        return self.last(self.first(x).relu())


def take_a_step(*, annotates: bool, names: str) -> dict[str, torch.Tensor]:
    """Step after a backward whose ``inputs`` are all parameters of the model, or some as they are inside forward."""
    model = seeded(Net, 0)
    ranks = [dist.get_rank()] if annotates else [0, 1]
    if annotates:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    loss = model(torch.cat([random_input(rank, 3, 4) for rank in ranks])).square().mean()
    loss.backward(inputs=model.met if names == "inside" else list(model.parameters()))
    optimizer.step()
    return full_params(model)


def test_a_backward_for_parameters_as_forward_holds_them_is_that_of_one_process() -> None:
    expected = take_a_step(annotates=False, names="inside")
    assert not torch.equal(expected["first.weight"], seeded(Net, 0).first.weight)
    for found in run_threads(take_a_step, 2, annotates=True, names="inside"):
        assert_equal_params(found, expected, tolerance=1e-5)


def test_a_backward_for_sharded_parameters_gives_nothing_and_the_step_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for found in run_threads(take_a_step, 2, annotates=True, names="shards"):
        assert_equal_params(found, full_params(seeded(Net, 0)), tolerance=0)
    assert sorted(record.getMessage() for record in caplog.records if "AdamW" in record.getMessage()) == [
        f"AdamW.step: no parameter has a gradient\n  at:  rank {rank}\n  fix: if backward has run, call it without "
        "inputs=: sharded parameters are in no graph"
        for rank in range(2)
    ]


def take_gradients(*, is_sharded: bool) -> list[torch.Tensor]:
    model = seeded(Net, 0)
    (fully_shard if is_sharded else replicate)(model)
    x = random_input(dist.get_rank(), 3, 4).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    loss = model(x).square().mean()
    if is_sharded:
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(loss, list(model.parameters()))
        return []
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("is_sharded", [True, False])
def test_gradients_that_are_asked_for_are_those_of_a_rank_or_an_error(*, is_sharded: bool) -> None:
    for rank, found in enumerate(run_threads(take_gradients, 2, is_sharded=is_sharded)):
        plain = seeded(Net, 0)
        own = torch.autograd.grad(plain(random_input(rank, 3, 4)).square().mean(), list(plain.parameters()))
        for got, wanted in zip(found, own, strict=not is_sharded):
            torch.testing.assert_close(got, wanted)
