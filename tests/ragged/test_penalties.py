"""Terms of a loss that use sharded parameters outside of forwards: penalties, and whole weights with a rank's own data.

The oracle is one process that has whole parameters and adds up the mean of all ranks' losses.
"""

import contextlib
import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable import UsageError, fully_shard, no_sync
from tests.parity import full
from tests.world import on_ranks, run_threads

Term = Callable[[torch.Tensor], torch.Tensor]


def whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


PENALTIES: dict[str, Term] = {
    "pow": lambda p: p.pow(2).sum(),
    "square": lambda p: p.square().mean(),
    "abs": lambda p: p.abs().sum(),
    "product": lambda p: (p * p).sum(),
    "2-norm": lambda p: p.norm(),
    "1-norm": lambda p: p.norm(1),
    "largest": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "norms of columns": lambda p: p.norm(dim=0).sum(),
    "std": lambda p: p.std(),
    "var": lambda p: p.var(),
    "max": lambda p: p.max(),
    "max of a dim": lambda p: p.max(0).values.square().sum(),
    "amax": lambda p: p.amax(),
    "matmul": lambda p: (p @ p.mT).square().sum() if p.dim() == 2 else p @ p,
    "orthogonal": lambda p: (p @ p.mT - torch.eye(len(p))).norm() if p.dim() == 2 else p.norm(),
    "nuclear": lambda p: torch.linalg.matrix_norm(p, "nuc") if p.dim() == 2 else p.norm(),
    "softmax": lambda p: p.softmax(0).square().sum(),
    "logsumexp": lambda p: p.logsumexp(0).sum(),
    "a row": lambda p: p[0].square().sum(),
    "flat": lambda p: p.flatten().exp().mean(),
    "without a gradient": lambda p: p.detach().norm() * p.norm(),
    "half": lambda p: p.double().square().sum().float(),
    "scaled": lambda p: torch.tensor(0.5) * p.square().sum(),
    "stacked": lambda p: torch.stack([p.norm(), torch.ones(())]).sum(),
    "whole": lambda p: whole(p).pow(2).sum(),
}


if torch.__version__.startswith(("2.11", "2.12")):
    del PENALTIES["max of a dim"]  # torch's own DTensor has no gradient of it: docs/torch.md


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.LayerNorm(5))


def loss_of(seed: int, batch: int, model: nn.Sequential, rank: int) -> torch.Tensor:
    """Return a random loss of a rank in a micro-batch; all but the rank's own data is equal on all ranks."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * seed + 10 * batch + rank))
    rng = random.Random(f"{seed} {batch}")
    loss: torch.Tensor = model(x).square().mean()
    if rng.random() < 0.5:
        loss = loss + F.linear(x, whole(model[0].weight)).square().mean()  # type: ignore[arg-type]
    if rng.random() < 0.8:
        terms = [PENALTIES[rng.choice(list(PENALTIES))](param) for param in model.parameters()]
        penalty = 0.1 * sum(terms, torch.zeros(()) if rng.random() < 0.3 else 0)
        # A product has another gradient on each rank.
        loss = loss + penalty if rng.random() < 0.6 else loss * (1 + penalty)
    # As with losses that are weighed by a rank's number of tokens.
    return loss * (1 + rank) if rng.random() < 0.3 else loss


def gradients_of_one_process(seed: int, world_size: int, batches: int) -> list[torch.Tensor]:
    model = make_model()
    for batch in range(batches):
        for rank in range(world_size):
            (loss_of(seed, batch, model, rank) / world_size).backward()
    return [param.grad for param in model.parameters()]  # type: ignore[misc]


def gradients_of_ranks(seed: int, batches: int, policy: Any, *, hybrid: bool) -> list[torch.Tensor]:
    model = make_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")) if hybrid else None
    fully_shard(model, mesh=mesh, policy=policy)
    rank = dist.get_rank()
    for batch in range(batches):
        with no_sync(model) if batch + 1 < batches else contextlib.nullcontext():
            loss_of(seed, batch, model, rank).backward()
    return [full(param.grad) for param in model.parameters()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world_size", "seeds"), [(1, range(3)), (2, range(12)), (3, range(12, 18)), (4, range(18, 22))]
)
def test_any_loss_with_parameters_in_it_has_the_gradients_of_one_process(world_size: int, seeds: range) -> None:
    for seed in seeds:
        batches, policy = 1 + seed % 3, [None, {nn.Linear}][seed % 2]
        expected = gradients_of_one_process(seed, world_size, batches)
        for found in run_threads(gradients_of_ranks, world_size, seed, batches, policy, hybrid=world_size == 4):
            for one, right in zip(found, expected, strict=True):
                torch.testing.assert_close(one, right, msg=lambda text, seed=seed: f"seed {seed}: {text}")


def gradients_of_each_penalty(*, is_annotated: bool) -> list[list[torch.Tensor]]:
    found = []
    for term in PENALTIES.values():
        model = make_model()
        if is_annotated:
            fully_shard(model, policy={nn.Linear})
        (model(torch.ones(2, 5)).sum() + 0.1 * sum(map(term, model.parameters()))).backward()
        found.append([full(param.grad) for param in model.parameters()])  # type: ignore[arg-type]
    return found


def test_each_kind_of_penalty_has_the_gradient_of_one_process() -> None:
    expected = gradients_of_each_penalty(is_annotated=False)
    for found in run_threads(gradients_of_each_penalty, 2, is_annotated=True):
        for name, ours, theirs in zip(PENALTIES, found, expected, strict=True):
            for one, right in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, right, msg=lambda text, name=name: f"{name}: {text}")


# Each with another plain tensor, which may differ between ranks.
REFUSED: list[Callable[[torch.Tensor], object]] = [
    lambda p: (p * torch.ones(p.shape)).sum(),
    lambda p: F.mse_loss(p, torch.zeros(p.shape)),
    lambda p: (p - torch.zeros(p.shape)).norm(),
    lambda p: torch.cat([p.flatten(), torch.ones(1)]),
    lambda p: torch.where(torch.ones(p.shape).bool(), p, 0.0),
    lambda p: torch.ones(5) @ p.mT,
    lambda p: p * torch.tensor(0.5, requires_grad=True),
    lambda p: p.detach() * torch.ones(p.shape, requires_grad=True),
    lambda p: p.flatten()[torch.tensor([0, 3])],
    lambda p: p.mT * torch.ones(5, 7),
]


@on_ranks(2)
def test_what_meets_a_plain_tensor_is_an_error_at_once_that_says_what_to_write() -> None:
    model = make_model()
    fully_shard(model, policy={nn.Linear})
    model(torch.ones(2, 5)).sum().backward()
    for number, term in enumerate(REFUSED):
        with pytest.raises(UsageError, match="plain") as caught:
            term(model[0].weight)  # type: ignore[arg-type]
        assert "'0.weight'" in str(caught.value), number
        assert "full_tensor()" in (caught.value.fix or ""), number
    with torch.no_grad():  # No gradient could be wrong.
        assert (model[0].weight * torch.ones(7, 5)).norm() == model[0].weight.norm()  # type: ignore[operator]


@on_ranks(2)
def test_a_gradient_that_waits_is_still_only_autograd_s_to_change() -> None:
    model = fully_shard(make_model(), policy={nn.Linear})
    with no_sync(model):
        (model(torch.ones(2, 5)).sum() + model[0].weight.norm()).backward()
    with pytest.raises(UsageError, match="not complete"):
        model[0].weight.grad.add_(1)  # type: ignore[union-attr,operator]


@on_ranks(2)
def test_terms_are_plain_for_whoever_asks_and_copies_of_them_hold_no_parameter() -> None:
    model = fully_shard(make_model(), policy={nn.Linear})
    weight: torch.Tensor = model[0].weight  # type: ignore[assignment]
    term = weight.norm()
    for plain in (
        term.full_tensor(),
        term.to_local(),
        torch.ones(()) * term,
        torch.stack([term, torch.ones(())]).sum(),
    ):  # type: ignore[attr-defined]
        assert type(plain) is torch.Tensor
    total = weight.abs().mean()
    total *= 2
    total += weight.sum(1)[0]
    total.backward()
    expected = weight.full_tensor().sign() * 2 / 35  # type: ignore[attr-defined]
    expected[0] += 1
    torch.testing.assert_close(full(weight.grad), expected)  # type: ignore[arg-type]
    for copied in (copy.deepcopy(term.detach()), copy.deepcopy({"norm": term.detach()})["norm"]):
        assert type(copied) is DTensor
        assert copied.item() == term.item()
    written = io.BytesIO()
    torch.save(term.detach(), written)
    written.seek(0)
    assert type(torch.load(written, weights_only=False)) is DTensor
