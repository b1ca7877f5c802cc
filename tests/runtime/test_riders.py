"""Numbers of ranks that travel with the message that ends a backward: exact, on no message of their own, or an error."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    DesyncError,
    UsageError,
    allreduce_hook,
    fully_shard,
    no_sync,
    reduce_gradients,
    register_comm_hook,
    replicate,
    set_divergence_timeout,
)
from composable.comm import Transport
from composable.engine import Rider
from tests.counting import counting_ranks
from tests.world import run_ranks, run_threads

# No short sums of powers of two, and the ends of what float64 has.
NUMBERS = (1.1, -1e300 / 3, 5e-324)


class Told(Rider):
    """Tells how often it was asked, and numbers that differ by rank; an error if rank ``wrong`` tells."""

    name = "a test"
    count = 2 + len(NUMBERS)

    def __init__(self, wrong: int = -1) -> None:
        self.asked = 0
        self.wrong = wrong
        self.heard: list[tuple[list[list[float]], list[int]]] = []

    def tell(self, device: torch.device) -> torch.Tensor:
        self.asked += 1
        return torch.tensor([dist.get_rank(), self.asked, *NUMBERS], dtype=torch.float64, device=device)

    def hear(self, told: torch.Tensor, numbers: Sequence[int]) -> UsageError | None:
        self.heard.append((told.tolist(), list(numbers)))
        return UsageError("told", fix="none") if self.wrong in told[:, 0].tolist() else None


def expected(world_size: int, asked: int) -> tuple[list[list[float]], list[int]]:
    return [[rank, asked, *NUMBERS] for rank in range(world_size)], [*range(world_size)]


def annotated(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    if kind == "fully_shard":
        fully_shard(list(model))
    annotate: Any = fully_shard if kind == "fully_shard" else replicate
    annotate(model)
    if kind == "hook":
        register_comm_hook(model, None, allreduce_hook)
    return model, annotate.state(model)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).sum().backward()


def told_by_all(kind: str, dtype: torch.dtype) -> None:
    model, state = annotated(kind, dtype)
    backward(model)
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    rider, late = Told(), Told()
    state.carry(rider, late)
    backward(model)
    with no_sync(model):
        backward(model)
    assert rider.asked == 1, "nothing was reduced"
    reduce_gradients(model)
    size = dist.get_world_size()
    assert rider.heard == late.heard == [expected(size, 1), expected(size, 2)]
    if kind != "hook":
        backward(copy.deepcopy(model))  # A copy carries nothing.
    state.carry()
    model.zero_grad()
    backward(model)
    assert rider.asked == 2
    after = [param.grad for param in model.parameters()]
    assert all(one is not None and torch.equal(one, other) for one, other in zip(after, before, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["fully_shard", "replicate", "hook"])
def test_all_ranks_hear_the_exact_numbers_of_each_when_gradients_are_reduced(
    kind: str, dtype: torch.dtype, world_size: int
) -> None:
    run_threads(told_by_all, world_size, kind, dtype)


@contextmanager
def noting(names: list[str]) -> Iterator[None]:
    """Add the name of each collective of a transport to ``names``."""
    kinds = [Transport]
    for kind in kinds:
        kinds += kind.__subclasses__()
    with ExitStack() as exits:
        for kind, name in itertools.product(dict.fromkeys(kinds[1:]), ("all_gather", "reduce_scatter", "all_reduce")):
            start = vars(kind).get(f"begin_{name}")

            def noted(*args: Any, start: Any = start, name: str = name, **kwargs: Any) -> Any:
                names.append(name)
                return start(*args, **kwargs)

            if start is not None:
                exits.enter_context(mock.patch.object(kind, f"begin_{name}", noted))
        yield


def messages(kind: str) -> list[str]:
    model, state = annotated(kind)
    backward(model)
    found: list[list[str]] = [[], []]
    for riders, names in zip(((), (Told(),)), found, strict=True):
        state.carry(*riders)
        backward(model)  # In new buckets.
        with noting(names), counting_ranks() as counts:
            backward(model)
        assert not counts.total()
    assert found[0] == found[1], "the numbers travel with messages that were there before"
    return found[0]


@pytest.mark.parametrize("kind", ["fully_shard", "replicate", "hook"])
def test_no_message_is_added(kind: str) -> None:
    assert all(run_ranks(messages, 2, kind))


def with_an_error(kind: str) -> None:
    model, state = annotated(kind)
    state.carry(Told(wrong=1))
    for _ in range(2):
        with pytest.raises(UsageError, match="told"):
            backward(model)
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_an_error_that_follows_from_the_numbers_ends_the_backward_on_all_ranks(kind: str) -> None:
    run_threads(with_an_error, 2, kind)


def carried_by_one(kind: str) -> str:
    set_divergence_timeout(0.3)
    model, state = annotated(kind)
    backward(model)
    with pytest.raises(DesyncError) as caught:
        state.carry(Told()) if dist.get_rank() == 0 else backward(model)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_a_rank_that_carries_numbers_alone_is_an_error_by_name_on_all_ranks(kind: str) -> None:
    for text in run_ranks(carried_by_one, 2, kind):
        assert "rank 0: waits for the other ranks in carry" in text


def carried_in_part(kind: str) -> None:
    model, state = annotated(kind)
    with pytest.raises(DesyncError, match="different numbers travel") as caught:
        state.carry(*[Told()] * dist.get_rank())
    assert "rank 1: a test, 5 numbers" in str(caught.value)
    backward(model)


@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_ranks_that_carry_other_numbers_are_told_so(kind: str) -> None:
    run_threads(carried_in_part, 2, kind)
