"""Sparse gradients below ``replicate``: averaged as the dense ones of one process are."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    ConfigError,
    MixedPrecisionPolicy,
    UsageError,
    no_sync,
    reduction_stats,
    replicate,
    step_in_backward,
    unannotate,
)
from tests.models import DIM, random_tokens, seeded
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


def mean_of_plain(steps: list[int], world_size: int) -> dict[str, torch.Tensor]:
    model = tables()
    for step in steps:
        for rank in range(world_size):
            (loss_at(model, step, rank) / world_size).backward()
    return gradients_of(model)


@on_ranks(2)
def test_sparse_gradients_are_averaged_with_what_ranks_without_one_get() -> None:
    model = replicate(tables(), find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        loss_at(model, step, dist.get_rank()).backward()
        torch.testing.assert_close(gradients_of(model), mean_of_plain([step], 2))
        assert model.table.weight.grad.is_sparse
    assert reduction_stats(model).sparse_fqns == ("table.weight", "bag.weight")


@on_ranks(2)
def test_sparse_gradients_add_up_and_are_averaged_when_the_annotation_goes() -> None:
    model = replicate(tables(), find_unused_parameters=True)
    rank = dist.get_rank()
    for _ in range(2):
        model.zero_grad()
        with no_sync(model):
            loss_at(model, 0, rank).backward()
        loss_at(model, 1, rank).backward()
        loss_at(model, 2, rank).backward()
        torch.testing.assert_close(gradients_of(model), mean_of_plain([0, 1, 2], 2))
    with no_sync(model):
        loss_at(model, 3, rank).backward()
    unannotate(model)
    torch.testing.assert_close(gradients_of(model), mean_of_plain([0, 1, 2, 3], 2))


@on_ranks(3)
def test_a_sparse_gradient_of_no_rows_on_any_rank_stays_one() -> None:
    model = replicate(tables(), find_unused_parameters=True)
    rank = dist.get_rank()
    loss_at(model, 0, rank).backward()
    model.zero_grad(set_to_none=False)
    loss_at(model, 2, rank).backward()
    assert model.bag.weight.grad.is_sparse
    expected = mean_of_plain([2], dist.get_world_size())
    torch.testing.assert_close(gradients_of(model), expected | {"bag.weight": torch.zeros(ROWS, DIM)})


@on_ranks(2)
def test_a_table_with_a_dense_gradient_on_one_rank_is_averaged_as_a_whole() -> None:
    model = tables()
    model.is_tied = dist.get_rank() == 1
    replicate(model, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        loss_at(model, 0, dist.get_rank()).backward()
        expected = {fqn: grad / 2 for fqn, grad in mean_of_plain([0], 1).items()}
        other = tables()
        other.is_tied = True
        loss_at(other, 0, 1).backward()
        for fqn, grad in gradients_of(other).items():
            expected[fqn] += grad / 2
        torch.testing.assert_close(gradients_of(model), expected)


@on_ranks(2)
def test_a_model_may_have_sparse_gradients_alone() -> None:
    model = seeded(lambda: nn.Sequential(nn.Embedding(ROWS, DIM, sparse=True)), 0)
    replicate(model)
    for step in range(3):
        model.zero_grad()
        model(random_tokens(step + dist.get_rank(), 4, vocab=ROWS)).square().sum().backward()
        plain = seeded(lambda: nn.Sequential(nn.Embedding(ROWS, DIM, sparse=True)), 0)
        for rank in range(2):
            (plain(random_tokens(step + rank, 4, vocab=ROWS)).square().sum() / 2).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError("stopped here")


@on_ranks(2)
def test_a_rank_that_stops_in_backward_does_not_hang_those_that_gather_sparse_gradients() -> None:
    model = replicate(tables(), find_unused_parameters=True)
    rank = dist.get_rank()
    loss = loss_at(model, 0, rank)
    handle = model.table.weight.register_hook(_fail) if rank == 1 else None
    said = "stopped here" if rank == 1 else "rank 1 did not finish backward: an exception stopped it there"
    with pytest.raises((UsageError, ZeroDivisionError), match=said):
        loss.backward()
    if handle is not None:
        handle.remove()
    model.zero_grad()
    loss_at(model, 0, rank).backward()
    torch.testing.assert_close(gradients_of(model), mean_of_plain([0], 2))


@on_ranks(2)
def test_a_copy_averages_sparse_gradients_too() -> None:
    model = copy.deepcopy(replicate(tables(), find_unused_parameters=True))
    loss_at(model, 1, dist.get_rank()).backward()
    torch.testing.assert_close(gradients_of(model), mean_of_plain([1], 2))


@on_ranks(1)
def test_what_takes_no_sparse_gradients_says_so() -> None:
    with pytest.raises(ConfigError, match=r"mp_policy cannot be for parameters that .* have sparse gradients"):
        replicate(tables(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model = replicate(tables())
    with pytest.raises(ConfigError, match="an optimizer cannot step inside backward beside sparse gradients"):
        step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
