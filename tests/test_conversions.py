"""Conversions of a model of which a part is sharded: all of it, or nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable import UsageError, fully_shard, replicate, unshard_params
from tests.world import on_ranks

CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "to a dtype": lambda model: model.to(torch.float16),
    "to a device and a dtype": lambda model: model.to("cpu", torch.float64),
    "to as a tensor": lambda model: model.to(torch.zeros(1, dtype=torch.float64)),
}


class Inner(nn.Module):
    """A plain module around a sharded one, with a layer whose class converts in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4)
        self.part = nn.Linear(4, 4)


def partly_sharded(place: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Inner(), nn.Linear(4, 4)).bfloat16()
    parts: dict[str, Any] = {"deep": model[2].part, "first": model[0], "last": model[3], "in a replica": model[2].part}
    fully_shard(parts[place])
    if place == "in a replica":
        replicate(model[2].rnn)
    return model


def contents(model: nn.Module) -> list[tuple[str, torch.dtype, int]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor.dtype, id(tensor)) for name, tensor in tensors]


@on_ranks(2, place=["deep", "first", "last", "in a replica"])
def test_a_refused_conversion_changes_nothing(*, place: str) -> None:
    model = partly_sharded(place)
    before = contents(model)
    for name, convert in CONVERSIONS.items():
        if name == "bfloat16":
            continue
        for root in (model, nn.ModuleList([model])):
            with pytest.raises(UsageError, match="a sharded parameter of bfloat16 cannot become"):
                convert(root)
            assert contents(model) == before


@on_ranks(2)
def test_a_conversion_while_parameters_are_in_use_changes_nothing() -> None:
    model = partly_sharded("last")
    before = contents(model)
    model[3](torch.ones(2, 4, dtype=torch.bfloat16))  # decides the root
    with unshard_params(model):
        with pytest.raises(UsageError, match="cannot be converted while its parameters are in use"):
            model.cpu()
        assert model[0].weight.dtype == torch.bfloat16
    assert contents(model) == before


@on_ranks(2)
def test_a_conversion_that_no_part_refuses_is_made() -> None:
    """Cast to the dtype that the shards have: the rest is cast, as in a plain model."""
    model = partly_sharded("deep")
    model[0].float()
    model.bfloat16()
    assert {dtype for name, dtype, _ in contents(model) if "tracked" not in name} == {torch.bfloat16}
    assert model.to("cpu") is model
    plain = Inner().double()
    assert {param.dtype for param in plain.half().parameters()} == {torch.float16}
