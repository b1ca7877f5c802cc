"""What ``check_parity`` lets pass, what it finds, and how it says so."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from composable import ConfigError, fully_shard, no_sync, replicate
from composable.testing import check_parity


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
def test_what_is_right_passes_and_the_largest_differences_are_told(annotate: Callable[[nn.Module], Any]) -> None:
    before = torch.get_rng_state()
    largest = check_parity(make, batch, annotate, world_sizes=(1, 2, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(largest) == ["weight", "loss", "gradient"]
    assert all(one.amount < 1e-6 for one in largest.values())


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


@pytest.mark.parametrize("kind", ["labels", "mask", "alike"])
def test_a_mean_of_means_is_told_by_the_numbers_of_tokens(kind: str) -> None:
    def padded(step: int, rank: int) -> dict[str, torch.Tensor]:
        label, kept = torch.arange(4) % 3, torch.arange(4) <= (3 if kind == "alike" else 2 * rank)
        given = {"x": batch(step, rank), "label": label.where(kept, torch.tensor(-100))}
        return {**given, "label": label, "kept": kept} if kind == "mask" else given

    def loss(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        each = F.cross_entropy(model(given["x"]), given["label"], reduction="none")
        kept = given["kept"] if kind == "mask" else given["label"] != -100
        return (each * kept).sum() / kept.sum()

    if kind == "alike":
        check_parity(make, padded, fully_shard, loss_fn=loss, world_sizes=(2,))
        return
    with pytest.raises(AssertionError, match=r"(?s)ranks have \d+, \d+ tokens .*composable.token_mean trains on"):
        check_parity(make, padded, fully_shard, loss_fn=loss, world_sizes=(2,))


def test_a_module_that_was_forgotten_is_named() -> None:
    with pytest.raises(AssertionError, match=r"^gradient of '2\.weight' differs"):
        check_parity(make, batch, lambda model: fully_shard(model[0]), world_sizes=(2,))


def test_gradients_are_accumulated_in_the_loss_function() -> None:
    def in_halves(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, second = (half for half in x.chunk(2))
        with no_sync(model) if dist.is_initialized() else contextlib.nullcontext():
            early = model(first).square().mean() / 2
            early.backward()
        return model(second).square().mean() / 2 + early.detach()

    for annotate in (fully_shard, replicate):
        check_parity(make, batch, annotate, world_sizes=(2, 3), loss_fn=in_halves)


def scale_second_gradient(model: nn.Module) -> None:
    replicate(model)
    model[2].bias.register_hook(lambda grad: grad * (1 + 1e-4))  # type: ignore[union-attr, operator]


def test_a_small_error_in_one_gradient_is_found_by_name() -> None:
    with pytest.raises(AssertionError, match=r"'2\.bias' differs"):
        check_parity(make, batch, scale_second_gradient, world_sizes=(1,))
    check_parity(make, batch, scale_second_gradient, world_sizes=(1,), tolerance=1e-3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda bias: bias.add_(1), r"weight of '0\.bias' differs by 1: .*before the first step"),
        # Further than anything.
        (lambda bias: bias.fill_(float("nan")), r"weight of '0\.bias' differs by nan"),
    ],
)
def test_weights_that_differ_before_the_first_step_are_found(change: Callable[[torch.Tensor], Any], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_parity(make, batch, lambda model: change(model[0].bias.data), world_sizes=(1,))


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
    ],
)
def test_batches_and_losses_that_are_no_whole_are_refused(given: Callable[[int, int], Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        check_parity(make, given, fully_shard, world_sizes=(2,), loss_fn=lambda model, one: model(one[0]).mean())
    with pytest.raises(ConfigError, match="return the mean"):
        check_parity(make, batch, fully_shard, loss_fn=lambda model, x: model(x).sum(1))
