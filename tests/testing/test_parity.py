"""What ``check_parity`` lets pass, what it finds, and how it says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from composable import ConfigError, fully_shard, replicate
from composable.testing import check_parity
from tests.models import MODELS, loss_of
from tests.parity import inputs_of


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def shard_each(model: nn.Module) -> None:
    for child in model:  # type: ignore[attr-defined]
        if list(child.parameters()):
            fully_shard(child)
    fully_shard(model)


@pytest.mark.parametrize("annotate", [fully_shard, replicate, shard_each])
def test_what_is_right_passes_with_a_report(annotate: Callable[[nn.Module], Any]) -> None:
    report = check_parity(make, batch, annotate, world_sizes=(1, 2, 3))
    assert report.world_sizes == (1, 2, 3) and report.steps == 3
    assert list(report.largest) == ["weight", "loss", "gradient"]
    assert all(one.amount < 1e-6 for one in report.largest.values())
    assert str(report).startswith("equal to one process on 1, 2, 3 ranks over 3 steps; largest differences:\n")


@pytest.mark.parametrize("name", ["frozen_mixed", "tied_across", "kwargs", "uneven"])
def test_models_of_any_kind_pass(name: str) -> None:
    def pair(step: int, rank: int) -> Any:
        return inputs_of(MODELS[name](), step, rank)

    check_parity(
        MODELS[name],
        pair,
        fully_shard,
        world_sizes=(2,),
        steps=2,
        loss_fn=lambda model, inputs: loss_of(model(*inputs[0], **inputs[1])),
        optimizer_fn=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
    )


def test_batches_and_losses_are_the_users() -> None:
    def labelled(step: int, rank: int) -> dict[str, Any]:
        return {"x": batch(step, rank), "label": torch.arange(4) % 3, "smoothing": 0.1}

    def loss(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
        return F.cross_entropy(model(given["x"]), given["label"], label_smoothing=given["smoothing"])

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    check_parity(make, labelled, fully_shard, loss_fn=loss, optimizer_fn=adamw, tolerance=1e-5)


def test_ranks_that_are_never_averaged_are_found_with_place_and_amount() -> None:
    with pytest.raises(AssertionError) as caught:
        check_parity(make, batch, lambda model: None, world_sizes=(2,))
    text = str(caught.value)
    assert text.startswith("gradient of '0.weight' differs by 0.")
    assert "(world size 2, rank " in text and ", step 0)" in text and ", in one process " in text


def scale_second_gradient(model: nn.Module) -> None:
    replicate(model)
    model[2].bias.register_hook(lambda grad: grad * (1 + 1e-4))  # type: ignore[union-attr, operator]


def test_a_small_error_in_one_gradient_is_found_by_name() -> None:
    with pytest.raises(AssertionError, match=r"'2\.bias' differs"):
        check_parity(make, batch, scale_second_gradient, world_sizes=(1,))
    check_parity(make, batch, scale_second_gradient, world_sizes=(1,), tolerance=1e-3)


def test_weights_that_differ_before_the_first_step_are_found() -> None:
    with pytest.raises(AssertionError, match=r"weight of '0\.bias' differs by 1: .*before the first step"):
        check_parity(make, batch, lambda model: model[0].bias.data.add_(1), world_sizes=(1,))


def test_nan_is_further_than_anything() -> None:
    with pytest.raises(AssertionError, match=r"weight of '0\.bias' differs by nan"):
        check_parity(make, batch, lambda model: model[0].bias.data.fill_(float("nan")), world_sizes=(1,))


def test_a_module_that_annotate_returns_is_the_one_that_is_called() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return 2 * self.inner(x)

    with pytest.raises(AssertionError, match="loss differs"):
        check_parity(make, batch, Wrapper, world_sizes=(1,))


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (lambda step, rank: torch.ones(2 + rank, 5), "as many samples"),
        (lambda step, rank: (torch.ones(2, 5), rank), "the same value"),
        (lambda step, rank: (torch.ones(2, 5), torch.tensor(rank)), "the same value"),
    ],
)
def test_batches_that_are_no_whole_are_refused(given: Callable[[int, int], Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        check_parity(make, given, fully_shard, world_sizes=(2,), loss_fn=lambda model, one: model(one[0]).mean())


def test_a_loss_per_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="return the mean"):
        check_parity(make, batch, fully_shard, loss_fn=lambda model, x: model(x).sum(1))


def test_the_callers_generator_is_left_as_it_was() -> None:
    before = torch.get_rng_state()
    check_parity(make, batch, fully_shard, world_sizes=(2,), steps=1)
    assert torch.equal(torch.get_rng_state(), before)
