"""Whose turn it is: repeatable, varied by a seed, and nothing that numbers depend on."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable import fully_shard
from composable.testing import Delay, Fault, simulate

# What torch renames, with a warning for the old name.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def train(rank: int, checkpointed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        inputs = torch.randn(3, 4, requires_grad=True)
        outputs = checkpoint(model, inputs, use_reentrant=True) if checkpointed else model(inputs)
        outputs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() for param in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_reentrant_backward_runs_in_the_thread_of_its_rank(world_size: int) -> None:
    torch.testing.assert_close(simulate(world_size, train, True), simulate(world_size, train, False))


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_turns_gives_the_same_numbers(seed: int) -> None:
    torch.testing.assert_close(simulate(3, train, False, seed=seed), simulate(3, train, False), rtol=0, atol=0)


def record_turns(rank: int, seen: list[int]) -> None:
    for _ in range(5):
        seen.append(rank)
        dist.barrier()


def turns(seed: int | None) -> list[int]:
    seen: list[int] = []
    simulate(3, record_turns, seen, seed=seed)
    return seen


def test_turns_are_repeatable_and_a_seed_varies_them() -> None:
    assert turns(None) == turns(None)
    assert all(turns(seed) == turns(seed) for seed in range(5))
    assert len({tuple(turns(seed)) for seed in range(10)}) > 3


def random_program(rank: int, seed: int) -> list[float]:
    """Run collectives that all ranks draw from one seed, waiting for some of them late."""
    draw = random.Random(seed)
    size = dist.get_world_size()
    odd = dist.new_group(list(range(0, size, 2)))
    started: list[tuple[Any, torch.Tensor]] = []
    for number in range(12):
        kind, in_odd, is_late = (
            draw.choice(["reduce", "gather", "ring", "cast"]),
            draw.random() < 0.3,
            draw.random() < 0.5,
        )
        if in_odd and rank % 2:
            continue
        group = odd if in_odd else None
        own = torch.full((2,), float(number + rank))
        if kind == "reduce":
            result = own
            work = dist.all_reduce(result, group=group, async_op=True)
        elif kind == "gather":
            result = torch.empty(2 * dist.get_world_size(group))
            work = gather_into(result, own, group=group, async_op=True)
        elif kind == "cast":
            result = own
            work = dist.broadcast(result, src=0, group=group, async_op=True)
        else:
            result = torch.zeros(2)
            sent = dist.isend(own, (rank + 1) % size, tag=number) if not in_odd else None
            work = dist.irecv(result, (rank - 1) % size, tag=number) if not in_odd else None
            started.append((sent, own))
        started.append((work, result))
        if not is_late and work is not None:
            work.wait()
    for work, _ in started:
        if work is not None:
            work.wait()
    return [value for _, result in started for value in result.tolist()]


@pytest.mark.parametrize("program", range(6))
def test_random_programs_give_the_same_under_random_turns_and_delays(program: int) -> None:
    size = 3 + program % 2
    expected = simulate(size, random_program, 2 * program)
    for seed in range(3):
        faults = [Fault(rank=seed % size, op="any", nth=1 + seed, action=Delay(2 + seed, holds_rank=program % 3 == 1))]
        assert simulate(size, random_program, 2 * program, seed=seed, faults=faults) == expected
