"""Ranks that share a device: the rules of NCCL, on a device that executes late."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composable import ConfigError, DesyncError
from composable.ground.torch_private import AllgatherOptions
from composable.testing import Delay, Drop, Fault, simulate
from composable.testing.device_streams import SimulatedDevice, poison
from tools.streams.late import LateDevice

# Names of newer and older releases of torch.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SEEDS = range(4)
BOTH = pytest.mark.parametrize("adverse", [False, True])


def on_late_ranks(world_size: int, fn: Callable[..., Any], *args: Any, seed: int = 0, **options: Any) -> list[Any]:
    """Run ``fn`` on ranks that share a late device."""
    late = LateDevice(seed)
    shared = SimulatedDevice(torch.device("cpu"), module=late, owns=lambda tensor: not late.is_on_host(tensor))
    with late:
        return simulate(world_size, fn, *args, device=shared, **options)


def mine(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100.0 * rank


def every_collective(rank: int) -> list[Any]:
    """Call all of them, and return what this rank has then."""
    size, found = dist.get_world_size(), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        summed = mine(rank, 3)
        dist.all_reduce(summed, op)
        found.append(summed)
    whole = torch.empty(2 * size)
    all_gather_single(whole, mine(rank, 2))
    part = torch.empty(2)
    reduce_scatter_single(part, mine(rank, 2 * size))
    sent = mine(rank, 4)
    dist.broadcast(sent, 1)
    reduced = mine(rank, 4)
    dist.reduce(reduced, 0)
    pieces = [torch.empty(3) for _ in range(size)]
    dist.all_gather(pieces, mine(rank, 3))
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, mine(rank, size))
    gathered = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine(rank, 2), gathered, 0)
    scattered = torch.empty(2)
    dist.scatter(scattered, [mine(other, 2) for other in range(size)] if rank == 0 else None, 0)
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(5)
    ops = [dist.P2POp(dist.isend, mine(rank, 5), ahead), dist.P2POp(dist.irecv, got, behind)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.barrier()
    found += [whole, part, sent, *pieces, swapped, *(gathered or ()), scattered, got]
    return [one.tolist() for one in found] + ([reduced.tolist()] if rank == 0 else [])


@BOTH
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_gives_what_it_gives_on_the_cpu(world_size: int, adverse: bool) -> None:
    expected = simulate(world_size, every_collective)
    for seed in SEEDS:
        assert on_late_ranks(world_size, every_collective, seed=seed, adverse=adverse) == expected


def read_early(rank: int, *, waits: bool) -> list[float]:
    x = mine(rank, 3)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    if waits:
        work.wait()
    early = x + 0
    work.wait()
    found: list[float] = early.tolist()
    return found


def test_what_does_not_wait_for_a_collective_reads_other_numbers() -> None:
    expected = [[100.0, 102.0, 104.0]] * 2
    assert all(on_late_ranks(2, read_early, seed=seed, adverse=True, waits=True) == expected for seed in SEEDS)
    assert all(on_late_ranks(2, read_early, seed=seed, adverse=True, waits=False) != expected for seed in SEEDS)


def write_early(rank: int, *, waits: bool) -> list[float]:
    x = mine(rank, 3)
    whole = torch.empty(6)
    work = all_gather_single(whole, x, async_op=True)
    assert work is not None
    if waits:
        work.wait()
    x.zero_()
    work.wait()
    found: list[float] = whole.tolist()
    return found


def test_what_a_collective_has_not_read_yet_must_not_be_written() -> None:
    expected = [[0.0, 1.0, 2.0, 100.0, 101.0, 102.0]] * 2
    assert all(on_late_ranks(2, write_early, seed=seed, waits=True) == expected for seed in SEEDS)
    assert any(on_late_ranks(2, write_early, seed=seed, waits=False) != expected for seed in range(20))


def wait_on_the_stream(rank: int) -> tuple[bool, list[float]]:
    x = mine(rank, 2)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return work.is_completed(), x.tolist()


def test_the_host_goes_on_while_the_stream_waits() -> None:
    found = [one for seed in range(20) for one in on_late_ranks(2, wait_on_the_stream, seed=seed)]
    assert all(values == [100.0, 102.0] for _, values in found)
    assert not all(is_completed for is_completed, _ in found)  # A question lets the device do one thing more.


def future_of_a_sum(rank: int) -> list[float]:
    work = dist.all_reduce(mine(rank, 2), async_op=True)
    assert work is not None
    found: list[float] = work.get_future().wait()[0].tolist()
    return found


def test_futures_have_the_results() -> None:
    assert on_late_ranks(2, future_of_a_sum, adverse=True) == [[100.0, 102.0]] * 2


def sum_in_a_thread(rank: int) -> list[float]:
    x = mine(rank, 2)
    thread = threading.Thread(target=lambda: dist.all_reduce(x.mul_(2)))
    thread.start()
    thread.join()
    found: list[float] = x.tolist()
    return found


@BOTH
def test_threads_of_a_rank_have_its_stream(adverse: bool) -> None:
    for seed in SEEDS:
        assert on_late_ranks(2, sum_in_a_thread, seed=seed, adverse=adverse) == [[200.0, 204.0]] * 2


def test_late_and_lost_messages_are_those_of_the_cpu() -> None:
    late = [Fault(1, "all_reduce", Delay(3))]
    assert on_late_ranks(2, read_early, waits=True, faults=late) == [[100.0, 102.0, 104.0]] * 2
    with pytest.raises(DesyncError, match="a fault dropped its message"):
        on_late_ranks(2, read_early, waits=True, faults=[Fault(1, "all_reduce", Drop())])


def step(rank: int) -> list[float]:
    weight = mine(rank, 2).requires_grad_(True)
    grads = []

    def reduce(grad: torch.Tensor) -> None:
        # In backward: each rank waits for the others.
        dist.all_reduce(grad)
        grads.append(grad)

    weight.register_hook(reduce)
    (weight * mine(rank, 2)).sum().backward()
    found: list[float] = grads[0].tolist()
    return found


def test_backwards_of_ranks_wait_for_each_other() -> None:
    assert on_late_ranks(3, step, adverse=True) == [[300.0, 303.0]] * 3


@pytest.mark.parametrize("device", ["cuda", "nothing", 3, "meta", None])
def test_a_device_that_is_not_here_is_an_error(device: object) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    with pytest.raises(ConfigError, match="which torch cannot use here"):
        simulate(2, every_collective, device=device)


def test_nothing_is_late_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="adverse=True on the CPU"):
        simulate(2, every_collective, adverse=True)


@pytest.mark.cuda
@BOTH
def test_every_collective_on_a_gpu_gives_what_it_gives_on_the_cpu(adverse: bool) -> None:
    def on_the_gpu(rank: int) -> list[Any]:
        with torch.device("cuda"):
            return every_collective(rank)

    assert simulate(3, on_the_gpu, device="cuda", adverse=adverse) == simulate(3, every_collective)


def gather_on_the_current_stream(rank: int) -> list[float]:
    whole, options = torch.empty(4), AllgatherOptions()
    options.asyncOp = False
    dist.group.WORLD._allgather_base(whole, mine(rank, 2), options)
    found: list[float] = whole.tolist()
    return found


def test_a_call_on_the_current_stream_comes_before_what_follows() -> None:
    for seed in SEEDS:
        assert on_late_ranks(2, gather_on_the_current_stream, seed=seed, adverse=True) == [[0.0, 1.0, 100.0, 101.0]] * 2


def test_poison_is_nan_or_zero() -> None:
    tensors = [torch.ones(2), torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2, 2).t(), torch.ones(2).long()]
    poison(tensors)
    assert all(one.float().isnan().all() for one in tensors[:3]) and not tensors[3].any()


def sum_on_the_host(rank: int, late: LateDevice) -> None:
    x = torch.ones(2)
    late.put_on_host(x)
    dist.all_reduce(x)


def test_groups_of_nccl_alone_take_no_host_tensors() -> None:
    late = LateDevice()
    owns = lambda tensor: not late.is_on_host(tensor)  # noqa: E731
    shared = SimulatedDevice(torch.device("cpu"), module=late, owns=owns, backend="cuda:nccl")
    with late, pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        simulate(2, sum_on_the_host, late, device=shared)


def read_a_full_buffer_early(rank: int) -> list[float]:
    whole = torch.zeros(4)
    work = all_gather_single(whole, mine(rank, 2), async_op=True)
    early = whole + 0
    work.wait()
    found: list[float] = early.tolist()
    return found


def test_outputs_are_nan_until_they_are_filled_where_the_device_is_adverse() -> None:
    found = [
        value
        for seed in range(40)
        for values in on_late_ranks(2, read_a_full_buffer_early, seed=seed, adverse=True)
        for value in values
    ]
    assert any(value != value for value in found)
