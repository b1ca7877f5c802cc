"""Whose turn it is: repeatable, varied by a seed, nothing that numbers depend on; also threads that a rank starts."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable import DesyncError, UsageError, find_checkpoint, fully_shard, save_checkpoint
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


def test_a_reentrant_backward_runs_in_the_thread_of_its_rank_in_any_order_of_turns() -> None:
    expected = simulate(3, train, False)
    torch.testing.assert_close(simulate(3, train, True), expected)
    for seed in range(4):
        torch.testing.assert_close(simulate(3, train, False, seed=seed), expected, rtol=0, atol=0)


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


@pytest.mark.parametrize("program", range(3))
def test_random_programs_give_the_same_under_random_turns_and_delays(program: int) -> None:
    size = 3 + program % 2
    expected = simulate(size, random_program, 2 * program)
    for seed in range(3):
        faults = [Fault(rank=seed % size, op="any", nth=1 + seed, action=Delay(2 + seed, holds_rank=program % 3 == 1))]
        assert simulate(size, random_program, 2 * program, seed=seed, faults=faults) == expected


# Threads that a rank starts


def in_background(rank: int) -> list[float]:
    """Communicate in a thread of an executor and in the rank's own, each in a group of its own."""
    group = dist.new_group()
    values = [torch.tensor(float(rank)), torch.tensor(2.0 * rank)]
    with ThreadPoolExecutor(1) as executor:
        background = executor.submit(dist.all_reduce, values[0], group=group)
        dist.all_reduce(values[1])
        background.result()
        also = threading.Thread(target=dist.broadcast, args=(values[1], 0), kwargs={"group": group})
        also.start()
        also.join()
    return [value.item() for value in values]


@pytest.mark.parametrize("seed", [None, 1])
def test_threads_of_a_rank_take_turns_and_communicate(seed: int | None) -> None:
    assert simulate(3, in_background, seed=seed) == [[3.0, 6.0]] * 3


def save_in_background(rank: int, folder: Path) -> int:
    model = nn.Linear(3, 2)
    fully_shard(model)
    handle = save_checkpoint(folder, 1, model, asynchronous=True)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    handle.wait()
    return find_checkpoint(folder).step


def test_a_checkpoint_is_written_in_the_background(tmp_path: Path) -> None:
    assert simulate(2, save_in_background, tmp_path) == [1, 1]


def wait_in_vain(rank: int) -> None:
    if rank == 0:
        threading.Event().wait()
    dist.barrier()


def test_a_rank_that_waits_for_a_thread_that_never_comes_is_found_at_once() -> None:
    with pytest.raises(DesyncError, match="rank 0 waits for another thread of its own"):
        simulate(2, wait_in_vain)


def let_time_pass(rank: int) -> list[Any]:
    waited = [threading.Event().wait(timeout=1000.0)]
    dist.barrier()
    return [*waited, threading.Condition().acquire()]


def test_a_wait_with_a_timeout_ends_when_nobody_can_go_on() -> None:
    assert simulate(2, let_time_pass) == [[False, True]] * 2


def fail_in_thread(rank: int) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(dist.barrier).result() if rank else executor.submit(lambda: 1 / 0).result()


def test_what_a_thread_raises_reaches_its_rank_and_ends_the_run() -> None:
    with pytest.raises(ZeroDivisionError):
        simulate(2, fail_in_thread)


def daemon(rank: int) -> list[str]:
    said = []
    group = dist.new_group()

    def communicate() -> None:
        try:
            dist.barrier(group=group)
        except (UsageError, ValueError) as error:
            said.append(str(error))

    thread = threading.Thread(target=communicate, daemon=True)
    thread.start()
    thread.join()
    return said


def test_a_daemon_thread_may_not_communicate() -> None:
    assert all(len(said) == 1 for said in simulate(2, daemon))
