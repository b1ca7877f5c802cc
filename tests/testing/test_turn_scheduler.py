"""Whose turn it is: repeatable, varied by a seed, nothing that numbers depend on; also threads that a rank starts."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

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


def test_a_rank_that_waits_for_a_thread_that_never_comes_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process without threads of other tests, each of which might wake the rank.
    monkeypatch.setattr(threading, "enumerate", list)
    with pytest.raises(DesyncError, match="rank 0 waits for another thread of its own"):
        simulate(2, wait_in_vain)


def fail_in_thread(rank: int) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(dist.barrier).result() if rank else executor.submit(lambda: 1 / 0).result()


def test_what_a_thread_raises_reaches_its_rank_and_ends_the_run() -> None:
    with pytest.raises(ZeroDivisionError):
        simulate(2, fail_in_thread)


# Threads that a library starts on its first use, and keeps


class Library:
    """A library whose event loop runs in a thread, which the first call starts; it lives until the end of the process.

    Args:
        is_daemon: Whether the thread is a daemon.
    """

    def __init__(self, *, is_daemon: bool) -> None:
        self._is_daemon = is_daemon
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread()

    def submit(self, coroutine: "Coroutine[object, object, float]") -> "Future[float]":
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="library", daemon=self._is_daemon)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def end(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


@pytest.fixture(params=[True, False], ids=["daemon", "thread"])
def library(request: pytest.FixtureRequest) -> "Iterator[Library]":
    library = Library(is_daemon=request.param)
    yield library
    library.end()


async def twice(value: float) -> float:
    """Return twice the value, after it has waited in the loop some times."""
    for _ in range(3):
        await asyncio.sleep(1e-3)
    return 2 * value


def wait_without_limit(future: "Future[float]") -> float:
    return future.result()


def wait_again_and_again(future: "Future[float]") -> float:
    has_come = threading.Event()
    future.add_done_callback(lambda _: has_come.set())
    while not has_come.wait(600):
        raise AssertionError("the time of a wait has passed while its end was under way")
    return future.result()


def use(rank: int, library: Library, wait: "Callable[[Future[float]], float]") -> list[float]:
    """Use the library before, within and after communication, also in a thread of the rank's own."""
    values = [torch.tensor(wait(library.submit(twice(rank + 1))))]
    dist.all_reduce(values[0])
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(lambda: wait(library.submit(twice(rank))))
        dist.barrier()
        values.append(torch.tensor(pending.result()))
    dist.all_reduce(values[1])
    return [value.item() for value in values]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("wait", [wait_without_limit, wait_again_and_again])
def test_a_library_may_start_a_loop_in_a_thread_on_first_use(
    library: Library, wait: "Callable[[Future[float]], float]", seed: int | None
) -> None:
    for _ in range(2):  # The second time, the thread is there before.
        assert simulate(3, use, library, wait, seed=seed) == [[12.0, 6.0]] * 3


def loop_of_own(rank: int) -> float:
    async def run() -> float:
        value = torch.tensor(await asyncio.to_thread(float, rank))
        await asyncio.to_thread(dist.all_reduce, value)
        return value.item()

    return asyncio.run(run())


@pytest.mark.parametrize("seed", [None, 1])
def test_a_rank_may_run_an_event_loop(seed: int | None) -> None:
    assert simulate(3, loop_of_own, seed=seed) == [3.0] * 3


def differ_beside(rank: int, library: Library) -> None:
    library.submit(twice(1.0)).result()
    dist.barrier() if rank else dist.all_reduce(torch.ones(1))


def test_ranks_that_part_beside_an_idle_thread_are_told(library: Library) -> None:
    with pytest.raises(DesyncError):
        simulate(2, differ_beside, library)


def wait_in_vain_beside(rank: int, library: Library) -> None:
    library.submit(twice(1.0)).result()
    dist.barrier(group=dist.new_group([0])) if rank == 0 else threading.Event().wait()


def test_a_wait_that_a_thread_of_others_might_end_lasts_until_the_limit(library: Library) -> None:
    with pytest.raises(TimeoutError, match="rank 1 waits for another thread of its own, at "):
        simulate(2, wait_in_vain_beside, library, timeout_s=0.5)


def fail_beside(rank: int, library: Library) -> None:
    library.submit(twice(1.0)).result()
    if rank == 0:
        raise ZeroDivisionError
    threading.Event().wait()


def test_what_a_rank_raises_beside_an_idle_thread_ends_the_run(library: Library) -> None:
    with pytest.raises(ZeroDivisionError):
        simulate(2, fail_beside, library)


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
