"""Sparse gradients below ``replicate``: averaged as the dense ones of one process are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    ConfigError,
    MixedPrecisionPolicy,
    UsageError,
    reduction_stats,
    replicate,
    step_in_backward,
    unannotate,
)
from tests.models import DIM, random_tokens, seeded
from tests.programs import Twins, accumulate
from tests.world import on_ranks

ROWS = 32


class Tables(nn.Module):
    """Two sparse tables, of which the second is used by ranks that ask for it, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.bag = nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum")
        self.head = nn.Linear(DIM, 3)
        self.is_tied = False

    def forward(self, tokens: torch.Tensor, *, uses_bag: bool) -> torch.Tensor:
        x = self.table(tokens).mean(dim=1)
        if uses_bag:
            x = x + self.bag(tokens)
        out = self.head(x).square().mean()
        return out + (x @ self.table.weight.t()).square().mean() if self.is_tied else out


def tables() -> Tables:
    return seeded(Tables, 0)


def uses_bag(step: int, rank: int) -> bool:
    """Both, one and no rank use the bag."""
    return (step, rank) in {(0, 0), (0, 1), (1, 0)}


def loss_at(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(random_tokens(10 * step + rank, 4, 5, vocab=ROWS), uses_bag=uses_bag(step, rank))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: p.grad.to_dense().clone() for fqn, p in model.named_parameters() if p.grad is not None}


def twins_of(*, is_copied: bool = False) -> Twins:
    twins = Twins(Tables, lambda model: replicate(model, find_unused_parameters=True), loss=loss_at)
    if is_copied:
        twins.copy()
    return twins


def check(twins: Twins) -> None:
    torch.testing.assert_close(*map(gradients_of, twins))


@on_ranks(2)
def test_sparse_gradients_are_averaged_with_what_ranks_without_one_get() -> None:
    twins = twins_of()
    for step in range(4):
        twins.drop()
        twins.backward(step)
        check(twins)
        assert twins.model.table.weight.grad.is_sparse
    assert reduction_stats(twins.model).sparse_fqns == ("table.weight", "bag.weight")


@on_ranks(2)
def test_sparse_gradients_add_up_and_are_averaged_when_the_annotation_goes() -> None:
    twins = twins_of()
    for _ in range(2):
        twins.drop()
        accumulate(twins, kept=1)
        twins.backward(2)
        check(twins)
    twins.backward(3, keeps=True)
    unannotate(twins.model)
    check(twins)


@on_ranks(3)
def test_a_sparse_gradient_of_no_rows_on_any_rank_stays_one() -> None:
    twins = twins_of()
    twins.backward(0)
    twins.drop(set_to_none=False)
    twins.backward(2)
    assert twins.model.bag.weight.grad.is_sparse
    check(twins)


@on_ranks(2)
def test_a_table_with_a_dense_gradient_on_one_rank_is_averaged_as_a_whole() -> None:

    def loss(model: Any, step: int, rank: int) -> torch.Tensor:
        model.is_tied = rank == 1
        return loss_at(model, step, rank)

    twins = Twins(Tables, lambda model: replicate(model, find_unused_parameters=True), loss=loss)
    for _ in range(2):
        twins.drop()
        twins.backward()
        check(twins)


@on_ranks(2)
def test_a_model_may_have_sparse_gradients_alone() -> None:
    twins = Twins(
        lambda: nn.Sequential(nn.Embedding(ROWS, DIM, sparse=True)),
        replicate,
        loss=lambda model, step, rank: model(random_tokens(step + rank, 4, vocab=ROWS)).square().sum(),
    )
    for step in range(3):
        twins.drop()
        twins.backward(step)
        check(twins)


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError("stopped here")


@on_ranks(2)
def test_a_rank_that_stops_in_backward_does_not_hang_those_that_gather_sparse_gradients() -> None:
    twins, rank = twins_of(), dist.get_rank()
    handle = twins.model.table.weight.register_hook(_fail) if rank == 1 else None
    said = "stopped here" if rank == 1 else "rank 1 did not finish backward: an exception stopped it there"
    with pytest.raises((UsageError, ZeroDivisionError), match=said):
        twins.backward()
    if handle is not None:
        handle.remove()
    twins.drop()
    twins.backward()
    check(twins)


@on_ranks(2)
def test_a_copy_averages_sparse_gradients_too() -> None:
    twins = twins_of(is_copied=True)
    twins.backward(1)
    check(twins)


@on_ranks(1)
def test_what_takes_no_sparse_gradients_says_so() -> None:
    with pytest.raises(ConfigError, match=r"mp_policy cannot be for parameters that .* have sparse gradients"):
        replicate(tables(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model = replicate(tables())
    with pytest.raises(ConfigError, match="an optimizer cannot step inside backward beside sparse gradients"):
        step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
