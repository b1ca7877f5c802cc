"""Whose turn it is: repeatable, varied by a seed, nothing that numbers depend on; also threads that a rank starts."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from composable import DesyncError, UsageError
from composable.testing import simulate

# What torch renames, with a warning for the old name.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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


def wait_in_vain(rank: int) -> None:
    if rank == 0:
        threading.Event().wait()
    dist.barrier()


def test_a_rank_that_waits_for_a_thread_that_never_comes_is_found_at_once() -> None:
    with pytest.raises(DesyncError, match="rank 0 waits for another thread of its own"):
        simulate(2, wait_in_vain)


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
