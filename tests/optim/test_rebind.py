"""An optimizer follows its model into an annotation and out of it, and training goes on as in one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable import ConfigError, RaggedDTensor, UsageError, accelerate_optimizer, fully_shard, rebind_optimizer
from composable.planning import mark_replaced
from tests.parity import full
from tests.world import on_ranks

CONFIGS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adam fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class Net(nn.Module):
    """Tied, scalar and frozen parameters among others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 6)
        self.third = nn.Linear(6, 10)
        self.third.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Linear(10, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.third(self.second(self.first(x).tanh()) * self.scale))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_optimizer(name: str, model: Net) -> torch.optim.Optimizer:
    kind, options = CONFIGS[name]
    groups = [
        {"params": [model.scale, model.second.bias], "lr": 0.02},
        {"params": [p for p in model.parameters() if p is not model.scale and p is not model.second.bias]},
    ]
    return kind(groups, **options)


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def global_batch(step: int, world_size: int) -> torch.Tensor:
    return torch.cat([batch_of(step, rank) for rank in range(world_size)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_reference(name: str, world_size: int) -> dict[str, nn.Parameter]:
    model = make_net()
    optimizer = make_optimizer(name, model)
    for step in range(6):
        train(model, optimizer, global_batch(step, world_size))
    return dict(model.named_parameters())


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("world_size", "name", "accelerate"),
    [
        *((2, "adamw", True), (3, "adam fused", False), (2, "momentum", False)),
        *((1, "nadam", True), (2, "adafactor", False)),
    ],
)
@on_ranks()
def test_training_goes_on_through_an_annotation_and_out_of_it(name: str, accelerate: bool) -> None:
    model, rank, world_size = make_net(), dist.get_rank(), dist.get_world_size()
    optimizer = make_optimizer(name, model)
    for step in range(2):
        train(model, optimizer, global_batch(step, world_size))
    before, options = [group["params"] for group in optimizer.param_groups], options_of(optimizer)
    names = [
        [fqn for param in params for fqn, other in model.named_parameters() if other is param] for params in before
    ]

    fully_shard(model, policy={nn.Linear})
    with pytest.raises(UsageError, match="rebind_optimizer"):
        optimizer.step()
    assert rebind_optimizer(optimizer, model) is optimizer
    assert [group["params"] for group in optimizer.param_groups] == before  # the same lists
    assert [[fqn for p in ps for fqn, q in model.named_parameters() if q is p] for ps in before] == names
    assert options_of(optimizer) == options
    weights = [param for param in model.parameters() if param.requires_grad]
    assert set(optimizer.state) == set(weights)
    if accelerate:
        accelerate_optimizer(optimizer, model)
    for step in range(2, 4):
        train(model, optimizer, batch_of(step, rank))

    plain = make_net()
    for (fqn, sharded), param in zip(list(model.named_parameters()), plain.parameters(), strict=True):
        param.data = full(sharded)
        owner, _, attribute = fqn.rpartition(".")
        mark_replaced(sharded, fqn, plain.get_submodule(owner), attribute)
    with pytest.raises(UsageError, match="rebind_optimizer"):
        optimizer.step()
    rebind_optimizer(optimizer, plain)
    assert options_of(optimizer) == options
    for entry in optimizer.state.values():
        assert not any(isinstance(value, DTensor) for value in entry.values())
    for step in range(4, 6):
        train(plain, optimizer, global_batch(step, world_size))
    torch.testing.assert_close(dict(plain.named_parameters()), train_reference(name, world_size), rtol=1e-4, atol=1e-5)


@on_ranks(3)
def test_no_bit_of_the_state_changes() -> None:
    """Right after rebinding the state is, to the bit, what it was."""
    model = make_net()
    optimizer = make_optimizer("adamw", model)
    for step in range(2):
        train(model, optimizer, global_batch(step, 2))
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    fully_shard(model, policy={nn.Linear})
    rebind_optimizer(optimizer, model)
    rebind_optimizer(optimizer, model)  # nothing left to do
    found = optimizer.state_dict()["state"]
    assert list(found) == list(saved)
    for index, entry in saved.items():
        assert list(found[index]) == list(entry)
        for key, value in entry.items():
            assert type(found[index][key]) is (torch.Tensor if key == "step" else RaggedDTensor)
            assert torch.equal(full(found[index][key]), value)
    # Another cut of the same parameters: through the whole.
    other = fully_shard(make_net())
    for (fqn, sharded), _ in zip(list(model.named_parameters()), other.parameters(), strict=True):
        owner, _, attribute = fqn.rpartition(".")
        mark_replaced(sharded, fqn, other.get_submodule(owner), attribute)
    rebind_optimizer(optimizer, other)
    found = optimizer.state_dict()["state"]
    for index, entry in saved.items():
        for key, value in entry.items():
            assert torch.equal(full(found[index][key]), value)


@on_ranks(2)
def test_what_cannot_be_rebound_is_an_error_and_changes_nothing() -> None:
    model, other = make_net(), fully_shard(make_net())
    optimizer = make_optimizer("adamw", model)
    before = [list(group["params"]) for group in optimizer.param_groups]
    lbfgs = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad])

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = model(batch_of(0, 0)).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    model.zero_grad()
    fully_shard(model)
    with pytest.raises(ConfigError, match=r"no parameter that this model has or had[\s\S]*fix:"):
        rebind_optimizer(optimizer, other)
    model.unshard()
    with pytest.raises(ConfigError) as caught:
        rebind_optimizer(optimizer, model)
    assert "nothing took the place of 8 parameters" in str(caught.value)
    assert "'scale' []" in str(caught.value) and "'first.weight' [10, 6]" in str(caught.value)
    model.reshard()
    with pytest.raises(UsageError, match="LBFGS"):
        rebind_optimizer(lbfgs, model)
    assert all(
        found is expected
        for group, params in zip(optimizer.param_groups, before, strict=True)
        for found, expected in zip(group["params"], params, strict=True)
    )
    rebind_optimizer(optimizer, model)
    mine = torch.optim.SGD([nn.Parameter(torch.ones(2)), *model.parameters()], lr=0.1)
    assert rebind_optimizer(mine, model).param_groups[0]["params"][0].shape == (2,)
