"""Models with parts from ``torch.jit``: trained whole, or refused by the annotation."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import ConfigError, fully_shard, no_sync, plan, replicate
from tests.models import random_input
from tests.parity import full
from tests.world import on_ranks

KINDS = ["script", "trace", "script of a leaf"]


def model_with(kind: str) -> Any:
    warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
    torch.manual_seed(0)
    part: Any = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())
    if kind == "script":
        part = torch.jit.script(part)
    elif kind == "trace":
        part = torch.jit.trace(part, torch.ones(2, 4))
    elif kind == "script of a leaf":
        part[0] = torch.jit.script(part[0])
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 2))


def steps_of(model: nn.Module, batches: Callable[[int], list[torch.Tensor]]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        own = batches(number)
        sum((model(one).square().mean() for one in own), torch.zeros(())).div(len(own)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(param.detach()) if hasattr(param, "full_tensor") else param.detach() for param in model.parameters()]


def batch(number: int, rank: int) -> torch.Tensor:
    return random_input(10 * number + rank, 4, 4)


@on_ranks(2, kind=KINDS, options=[{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_a_replicated_model_trains_its_scripted_part(*, kind: str, options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    found = steps_of(replicate(model_with(kind), **options), lambda number: [batch(number, rank)])
    expected = steps_of(model_with("plain"), lambda number: [batch(number, one) for one in range(2)])
    torch.testing.assert_close(found, expected)


@on_ranks(2, kind=KINDS)
def test_gradients_of_a_scripted_part_that_no_sync_kept_are_averaged(*, kind: str) -> None:
    rank, model, plain = dist.get_rank(), replicate(model_with(kind)), model_with("plain")
    with no_sync(model):
        model(batch(0, rank)).square().mean().backward()
    model(batch(1, rank)).square().mean().backward()
    for number, one in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        (plain(batch(number, one)).square().mean() / 2).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@on_ranks(2, kind=KINDS)
def test_a_scripted_part_that_is_left_out_stays_each_rank_s_own(*, kind: str) -> None:
    """The same batch on all ranks: then the part needs no average."""
    model = model_with(kind)
    fully_shard(model, ignored_modules=[model[1]], policy=lambda module: isinstance(module, nn.Linear))
    found = steps_of(model, lambda number: [batch(number, 0)])
    torch.testing.assert_close(found, steps_of(model_with("plain"), lambda number: [batch(number, 0)]))


@on_ranks(2, kind=KINDS)
def test_a_scripted_part_in_a_handle_is_refused_and_the_model_stays_as_it_was(*, kind: str) -> None:
    model = model_with(kind)
    before = {fqn: id(param) for fqn, param in model.named_parameters()}
    whole: list[Callable[[], object]] = [
        lambda: fully_shard(model),
        lambda: fully_shard([model[0], model[1]]),
        lambda: fully_shard(model, policy={nn.Linear}),
        lambda: plan(model, world_size=8),
    ]
    for call in whole:
        with pytest.raises(ConfigError, match="a scripted or traced module keeps its parameters whole") as caught:
            call()
        assert ".0.weight'" in str(caught.value) or "'weight'" in str(caught.value) or "Module" in str(caught.value)
    assert {fqn: id(param) for fqn, param in model.named_parameters()} == before
    scripted = model[1][0] if kind == "script of a leaf" else model[1]
    with pytest.raises(ConfigError, match="keeps its parameters whole"):
        fully_shard(scripted)
    with pytest.raises(ConfigError, match=r"replicate\(nn.Sequential\(module\)\)"):
        replicate(scripted)
    assert len(steps_of(replicate(nn.Sequential(model)), lambda number: [batch(number, 0)])) == len(before)
