"""Parameters that a module also keeps elsewhere, and parameters that share memory: right, or an error by name."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from composable import ComposableError, ConfigError, UsageError, fully_shard
from tests.models import seeded
from tests.world import on_ranks, run_threads

DIM = 4


class Keeper(nn.Module):
    """Computes with a parameter that it keeps in another place too.

    Args:
        way: The place.
        reads: What ``forward`` reads: ``"kept"``, ``"own"`` or ``"shape"``.
    """

    def __init__(self, way: str, reads: str) -> None:
        super().__init__()
        self.way, self.reads = way, reads
        self.linear = nn.Linear(DIM, DIM, bias=False)
        weight = self.linear.weight
        if way == "list":
            self.kept: Any = [weight]
        elif way == "dict":
            self.kept = {"inner": {"weight": weight}}
        elif way == "closure":
            self.kept = lambda: weight
        elif way == "partial":
            self.kept = partial(F.linear, weight=weight)
        elif way == "parameters":
            self.kept = list(self.parameters())
        elif way == "data":
            self.kept = weight.data
        elif way == "rows":
            self.kept = [weight.detach()[:DIM]]
        elif way == "closure of a view":
            view = weight.detach()
            self.kept = lambda: view
        elif way == "buffer":
            self.register_buffer("kept", weight.data)
        elif way == "method":
            self.kept = self.linear.forward
        elif way == "module":
            object.__setattr__(self, "kept", self.linear)
        elif way == "copy":
            self.kept = weight.detach().clone()

    def value(self) -> torch.Tensor:
        kept = self.kept
        if self.way in ("list", "rows", "parameters"):
            kept = kept[0]
        elif self.way == "dict":
            kept = kept["inner"]["weight"]
        elif self.way in ("closure", "closure of a view"):
            kept = kept()
        elif self.way == "partial":
            kept = kept.keywords["weight"]
        elif self.way == "module":
            kept = kept.weight
        elif self.way == "method":
            kept = kept.__self__.weight
        return kept  # type: ignore[no-any-return]  # a tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads == "kept":
            return F.linear(x, self.value())
        x = F.linear(x, self.linear.weight)
        return x * self.value().shape[0] if self.reads == "shape" else x


PARAMS = ["list", "dict", "closure", "partial", "parameters"]
VIEWS = ["data", "rows", "closure of a view", "buffer"]
HARMLESS = ["method", "module", "copy"]


def story(way: str, reads: str, wraps: bool, freezes: bool) -> str:
    model, plain = (seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), Keeper(way, reads)), 0) for _ in range(2))
    for one in (model, plain):
        one[1].linear.requires_grad_(not freezes)
    if wraps:
        fully_shard(model[1])
    fully_shard(model)
    x = torch.ones(3, DIM)
    try:
        for one in (model, plain):
            one(x).square().mean().backward()
    except ComposableError as error:
        return type(error).__name__ if "linear.weight'" in (error.at or "") else str(error)
    for (name, param), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        found = None if param.grad is None else param.grad.full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(found, other.grad, msg=name)
    return "right"


@on_ranks(2, way=PARAMS + VIEWS + HARMLESS)
def test_a_parameter_that_is_kept_elsewhere_trains_or_its_use_is_an_error(way: str) -> None:
    for reads, wraps, freezes in itertools.product(("kept", "own", "shape"), (True, False), (True, False)):
        is_told = (way in PARAMS and reads == "kept") or (way in VIEWS and not freezes)
        assert story(way, reads, wraps, freezes) == ("UsageError" if is_told else "right"), (reads, wraps, freezes)


class FromParameters(nn.Module):
    """A cell by hand over ``list(self.parameters())``."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(DIM, DIM)
        self.weights = list(self.cell.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._VF.rnn_tanh_cell(x, torch.zeros_like(x), *self.weights)  # type: ignore[attr-defined]


@on_ranks(2)
def test_the_error_says_which_parameter_and_what_to_write() -> None:
    model = nn.Sequential(FromParameters())
    fully_shard(model)
    with pytest.raises(UsageError) as caught:
        model(torch.ones(2, DIM))
    assert str(caught.value) == (
        "a forward computes with a parameter that fully_shard has replaced: it would never train\n"
        f"  at:  rank {dist.get_rank()}, parameter '0.cell.weight_ih'\n"
        "  fix: read self.weight_ih in forward, from the module that has it, and not a list, dict, closure or partial "
        "that holds what it was before"
    )


@on_ranks(2)
def test_torchs_modules_that_keep_views_or_lists_run() -> None:
    model = nn.ModuleList([nn.LSTM(DIM, DIM, 2), nn.GRU(DIM, DIM)])
    model.append(nn.utils.spectral_norm(nn.Linear(DIM, DIM)))
    model.append(nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)))
    model.append(nn.MultiheadAttention(DIM, 2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[1](self.parts[0](x)[0])[0]
            for part in list(self.parts)[3:4]:  # One is never called.
                x = part(x)
            output: torch.Tensor = self.parts[4](x, x, x)[0]
            return output

    net = Net()
    before = list(net.parameters())
    fully_shard(net)
    for _ in range(2):
        net(torch.ones(3, 1, DIM)).sum().backward()
    # What users keep is of use outside of forwards.
    assert sum(param.numel() for param in before) and torch.equal(before[0] * 1, before[0].detach().clone())


def tie_data(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.data


def overlap_slices(model: nn.Sequential) -> None:
    values = torch.randn(DIM * DIM * 2)
    model[0].weight.data = values[: DIM * DIM].view(DIM, DIM)
    model[1].weight.data = values[DIM : DIM + DIM * DIM].view(DIM, DIM)


def transpose(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[0].weight.data.t())


def row_and_whole(model: nn.Sequential) -> None:
    model[1].bias.data = model[0].weight.data[1]


def columns(model: nn.Sequential) -> None:
    table = torch.randn(DIM, 2 * DIM)
    model[0].weight.data, model[1].weight.data = table[:, :DIM], table[:, DIM:]


def neighbours(model: nn.Sequential) -> None:
    values = torch.randn(DIM * DIM * 2)
    model[0].weight.data, model[1].weight.data = (half.view(DIM, DIM) for half in values.chunk(2))


def tie(model: nn.Sequential) -> None:
    model[1].weight = model[0].weight


Share = Callable[[nn.Sequential], None]
SHARED: list[Share] = [tie_data, overlap_slices, transpose, row_and_whole]
APART: list[Share] = [columns, neighbours, tie]


def annotate_shared(share: Share, how: str) -> str:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    share(model)
    if how == "frozen":
        model.requires_grad_(False)
    try:
        if how == "each":
            fully_shard(model[0])
            fully_shard(model[1])
        fully_shard(model, policy={nn.Linear} if how == "policy" else None)
    except ConfigError as error:
        what, at = error.what, error.at or ""
        assert what == "two parameters lie in one memory, and as shards they would drift apart" and "weight" in at
        return "error"
    return "right"


@pytest.mark.parametrize("how", ["one", "policy", "each", "frozen"])
def test_parameters_in_one_memory_are_an_error_that_names_both(how: str) -> None:
    for share in SHARED:
        assert run_threads(annotate_shared, 2, share, how) == ["right" if how == "frozen" else "error"] * 2, share
    for share in APART if how != "each" else APART[:2]:
        assert run_threads(annotate_shared, 2, share, how) == ["right"] * 2, share
