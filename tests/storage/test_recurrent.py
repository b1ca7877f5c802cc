"""``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``, which keep weak references to their parameters, on the meta device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable import fully_shard
from tests.world import on_ranks

KINDS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.recurrent = KINDS[kind](4, 5, num_layers=2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(x + self.linear(x))[0]


def empty(*modules: nn.Module) -> None:
    for module in modules:
        module.to_empty(device="cpu")


# How a model on meta is annotated, and gets memory.
WAYS: dict[str, Callable[[Any], object]] = {
    "alone": lambda net: (fully_shard(net.recurrent), empty(net)),
    "in a list": lambda net: (fully_shard([net.linear, net.recurrent]), empty(net.linear, net.recurrent)),
    "in a list, first": lambda net: (fully_shard([net.recurrent, net.linear]), empty(net.recurrent, net.linear)),
    "below the root": lambda net: (fully_shard(net), empty(net)),
    "below the root, first": lambda net: (fully_shard(net), empty(net.recurrent, net)),
    "there and back": lambda net: (
        fully_shard(net, policy={nn.Linear}),
        empty(net.recurrent, net.linear),
        net.to_empty(device="meta"),
        empty(net.recurrent, net),
    ),
}


@pytest.mark.parametrize(("kind", "way"), [*(("LSTM", way) for way in WAYS), ("RNN", "alone"), ("GRU", "alone")])
@on_ranks(2)
def test_a_recurrent_module_gets_memory_in_any_order(kind: str, way: str) -> None:
    torch.manual_seed(0)
    plain = Net(kind)
    model = Net(kind).to("meta")
    WAYS[way](model)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 2, 4)
    for _ in range(2):
        plain(x).square().mean().backward()
        model(x).square().mean().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        full: Any = found.grad
        full = full.full_tensor() if hasattr(full, "full_tensor") else full
        torch.testing.assert_close(full, expected.grad)
