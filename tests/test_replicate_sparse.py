"""Sparse gradients below ``replicate``: averaged as the dense ones of one process are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composable import UsageError, no_sync, replicate, unannotate
from tests.models import DIM, random_tokens, seeded
from tests.world import on_ranks, run_ranks

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


def mean_of_plain(steps: list[int], world_size: int, *, is_tied: bool = False) -> dict[str, torch.Tensor]:
    model = tables()
    model.is_tied = is_tied
    for step in steps:
        for rank in range(world_size):
            (loss_at(model, step, rank) / world_size).backward()
    return gradients_of(model)


def train(*, as_ddp: bool = False) -> list[dict[str, torch.Tensor]]:
    model = tables()
    whole: Any = DistributedDataParallel(model) if as_ddp else replicate(model, find_unused_parameters=True)
    found = []
    for step in [0] if as_ddp else range(4):
        model.zero_grad()
        loss_at(whole, step, dist.get_rank()).backward()
        found.append(gradients_of(model))
        if not as_ddp:
            torch.testing.assert_close(found[-1], mean_of_plain([step], dist.get_world_size()))
            assert model.table.weight.grad.is_sparse
    return found


def test_sparse_gradients_equal_those_of_torchs_wrapper() -> None:
    ours, theirs = (run_ranks(train, 2, as_ddp=as_ddp) for as_ddp in (False, True))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own[0], other[0])


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
