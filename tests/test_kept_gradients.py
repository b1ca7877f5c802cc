"""What no_sync kept of modules that the last micro-batch leaves out, over random trees of annotations and programs."""

import copy
import random
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from composable import fully_shard, joinable, no_sync, replicate
from tests.parity import assert_equal_params, full, gradients_of
from tests.world import on_ranks, run_ranks

KIDS = 3


class Chosen(nn.Module):
    """Runs those of its kids that it is told to, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(4))
        self.kids = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(KIDS))

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        out = x * self.scale
        for kid in chosen:
            out = out + self.kids[kid](x)
        return out


def annotate(module: nn.Module, how: str) -> None:
    if how == "replicate":
        replicate(module, find_unused_parameters=True)
    elif how == "shard":
        fully_shard(module)


def input_of(step: int, rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4) * (1 + step + 2 * rank) / 10


def run(seed: int) -> None:
    """Compare a random program with one process; what a module's annotation allows each rank to choose, each does."""
    rng = random.Random(seed)
    model, plain = Chosen(), Chosen()
    kinds = [rng.choice(["none", "replicate", "shard"]) for _ in range(KIDS)]
    root = rng.choice(["replicate", "shard"]) if "none" in kinds or rng.randrange(3) else "none"
    for kid, kind in zip(model.kids, kinds, strict=True):
        annotate(kid, kind)
    annotate(model, root)
    size, rank = dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    by_setting = rng.randrange(4) == 0 and root != "none"
    for number in range(3):
        count = rng.randrange(1, 4)
        for micro in range(count):
            syncs = micro == count - 1 or not rng.randrange(4)
            common = [kid for kid in range(KIDS) if rng.randrange(2)] or [rng.randrange(KIDS)]
            chosen = [list(common) for _ in range(size)]
            for one in range(size):
                for kid in range(KIDS):
                    # Without synchronisation whole copies talk to nobody: ranks may call others.
                    if kinds[kid] == "replicate" and not syncs and rng.randrange(4) == 0:
                        chosen[one] = [other for other in chosen[one] if other != kid]
            step = 3 * number + micro
            if by_setting:
                model.set_requires_gradient_sync(syncs)
            with nullcontext() if syncs or by_setting else no_sync(model):
                model(input_of(step, rank), chosen[rank]).square().mean().backward()
            for one in range(size):
                (plain(input_of(step, one), chosen[one]).square().mean() / size).backward()
        if root == "none":
            model.scale.grad = plain.scale.grad.clone()  # Nothing manages it.
        assert_equal_params(gradients_of(model), gradients_of(plain), tolerance=1e-6)
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()


@pytest.mark.parametrize(("seed", "world_size"), [(seed, 1 + seed % 3) for seed in range(36)])
@on_ranks()
def test_gradients_are_those_of_one_process(seed: int) -> None:
    run(seed)


@on_ranks(2, run=run_ranks)
def test_they_are_on_processes() -> None:
    for seed in range(100, 112):
        run(seed)


@pytest.mark.parametrize(("kid", "root"), [("replicate", "shard"), ("replicate", "replicate"), ("shard", "replicate")])
@on_ranks(3)
def test_ranks_without_inputs_follow(kid: str, root: str) -> None:
    """Let rank 0 run three steps, the others fewer; the last micro-batch of each leaves out a module."""
    model, plain = Chosen(), Chosen()
    annotate(model.kids[0], kid)
    annotate(model, root)
    size, rank = dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with Join([joinable(model, step=step)]):
        for number in range(3 - rank):
            with no_sync(model):
                model(input_of(number, rank), [0, 1, 2]).square().mean().backward()
            model(input_of(number, rank), [1, 2]).square().mean().backward()
            step()
    for number in range(3):
        for one in range(3 - number):
            for chosen in ([0, 1, 2], [1, 2]):
                (plain(input_of(number, one), chosen).square().mean() / size).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    params = {name: full(param) for name, param in model.named_parameters()}
    assert_equal_params(params, dict(plain.named_parameters()), tolerance=1e-6)


@on_ranks(2)
def test_a_backward_of_a_copy_ends_nothing_of_the_original() -> None:
    model = Chosen()
    replicate(model.kids[0])
    fully_shard(model)
    with no_sync(model):
        model(input_of(0, dist.get_rank()), [0]).square().mean().backward()
    kept = gradients_of(model.kids[0])
    copy.deepcopy(model)(input_of(1, 0), [1]).square().mean().backward()
    assert_equal_params(gradients_of(model.kids[0]), kept, tolerance=0)
    model(input_of(1, dist.get_rank()), [1]).square().mean().backward()
    assert not torch.equal(gradients_of(model.kids[0])["0.weight"], kept["0.weight"])
