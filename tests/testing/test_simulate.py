"""Ranks as threads: the collectives, whose turn it is, how a run ends, and that nothing is left over."""

import contextlib
import copy
import queue
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from composable import ConfigError, DesyncError, UsageError, find_checkpoint, fully_shard, save_checkpoint
from composable.testing import Delay, Drop, Fault, Raise, simulate
from tests.parity import assert_equal_runs, train_annotated, train_reference
from tests.world import RankErrors, run_ranks, run_threads

SIZES = [1, 2, 3, 8]

# What torch renames, with a warning for the old name.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduced(rank: int, op: Any, dtype: torch.dtype) -> list[float]:
    tensor = torch.tensor([rank + 1, 3 - rank], dtype=dtype)
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, [6, 6]),
        (dist.ReduceOp.AVG, [2, 2]),
        (dist.ReduceOp.MAX, [3, 3]),
        (dist.ReduceOp.MIN, [1, 1]),
        (dist.ReduceOp.PRODUCT, [6, 6]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reductions_give_every_rank_the_same(op: Any, expected: list[float], dtype: torch.dtype) -> None:
    assert simulate(3, reduced, op, dtype) == [expected] * 3


def every_collective() -> dict[str, Any]:
    """Use everything that gloo has, and return what came out; no rank in it, so that ranks are told by `dist`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(4.0) + 10 * rank
    found: dict[str, Any] = {"rank": (rank, size, dist.get_backend(), dist.get_backend_config())}

    gathered = [torch.empty(4) for _ in range(size)]
    dist.all_gather(gathered, own)
    found["all_gather"] = torch.stack(gathered)
    whole = torch.empty(size, 4)
    gather_into(whole.view(-1), own)
    found["all_gather_into_tensor"] = whole
    slices = torch.arange(4.0 * size) + rank
    found["reduce_scatter_tensor"] = torch.empty(4)
    scatter_into(found["reduce_scatter_tensor"], slices)
    found["reduce_scatter"] = torch.empty(4)
    dist.reduce_scatter(found["reduce_scatter"], list(slices.clone().chunk(size)))

    found["broadcast"] = own.clone()
    dist.broadcast(found["broadcast"], src=size - 1)
    found["reduce"] = own.clone()
    dist.reduce(found["reduce"], dst=0)
    if rank:
        del found["reduce"]  # anything may be there
    found["scatter"] = torch.empty(4)
    dist.scatter(found["scatter"], list(slices.chunk(size)) if rank == 0 else None, src=0)
    collected = [torch.empty(4) for _ in range(size)] if rank == 0 else None
    dist.gather(own, collected, dst=0)
    found["gather"] = collected
    dist.barrier()

    found["all_to_all_single"] = torch.empty(size)
    dist.all_to_all_single(found["all_to_all_single"], torch.arange(float(size)) + 10 * rank)
    uneven = torch.empty(size * (rank + 1))
    dist.all_to_all_single(
        uneven,
        torch.cat([torch.full((to + 1,), 10.0 * rank + to) for to in range(size)]),
        [rank + 1] * size,
        [to + 1 for to in range(size)],
    )
    found["all_to_all_single, uneven"] = uneven

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    found["all_gather_object"] = objects
    box = [{"from": rank}, rank]
    dist.broadcast_object_list(box, src=size - 1)
    found["broadcast_object_list"] = box
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, [f"to {to}" for to in range(size)] if rank == 0 else None, src=0)
    found["scatter_object_list"] = taken
    kept: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, kept, dst=0)
    found["gather_object"] = kept

    tensors = [own.clone(), own.clone() * 2]
    with distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    found["coalesced"] = tensors
    return found


def messages() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    found: dict[str, Any] = {"batch": torch.empty(2), "async": torch.empty(3), "tags": [torch.empty(1), torch.empty(1)]}
    if size == 1:
        return {}
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((2,), float(rank)), right), dist.P2POp(dist.irecv, found["batch"], left)]
    )
    sent = dist.isend(torch.full((3,), 10.0 * rank), right)
    received = dist.irecv(found["async"], left)
    for work in (*works, sent, received):
        assert work is not None
        work.wait()
    # The second message is taken first.
    out = [dist.isend(torch.tensor([float(tag)]), right, tag=tag) for tag in (5, 6)]
    dist.recv(found["tags"][1], left, tag=6)
    dist.recv(found["tags"][0], left, tag=5)
    for work in out:
        assert work is not None
        work.wait()
    if rank == 0:
        first = torch.empty(1)
        senders = sorted(dist.recv(first) for _ in range(size - 1))
        found["any"] = senders
    else:
        dist.send(torch.tensor([float(rank)]), 0)
    return found


def groups() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    pair = dist.new_group([2, 3])
    # One on each rank: torch 2.15 names later groups by how many a rank has made.
    own = dist.new_group([1, 0] if rank < 2 else [3, 2], use_local_synchronization=True)
    for name, group in (("pair", pair), ("own", own)):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            assert name == "pair" and rank < 2
            continue
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=group)
        members = dist.get_process_group_ranks(group)
        found[name] = tensor, dist.get_rank(group), dist.get_world_size(group), members
    dist.destroy_process_group(own)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for name in ("replicate", "shard"):
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=mesh[name].get_group())
        found[name] = tensor, mesh[name].get_local_rank()
    full = torch.arange(20.0).view(10, 2)
    tensor = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    moved = tensor.redistribute(mesh, [Shard(1), Replicate()])
    found["dtensor"] = moved.to_local(), moved.full_tensor(), (tensor + 1).sum().full_tensor()
    return found


def test_fake_tensors_may_be_made_in_one_simulation_after_another() -> None:
    def make_fake(rank: int) -> torch.Size:
        with FakeTensorMode():
            return torch.empty(2).shape

    for _ in range(20):
        assert simulate(2, make_fake) == [torch.Size([2])] * 2


def plain(found: Any) -> Any:
    """Return what can be compared with ``==``."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.tolist(), found)


@pytest.mark.parametrize(
    ("use", "world_size"),
    [
        *((every_collective, size) for size in (1, 2, 3)),
        *((messages, size) for size in (1, 2, 3)),
        (groups, 4),
    ],
)
def test_everything_gives_what_gloo_gives(use: Callable[[], dict[str, Any]], world_size: int) -> None:
    assert plain(run_threads(use, world_size)) == plain(run_ranks(use, world_size))


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


@pytest.mark.parametrize("world_size", SIZES)
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
        faults = [Fault(rank=seed % size, op="any", nth=1 + seed, action=Delay(2 + seed))]
        assert simulate(size, random_program, 2 * program, seed=seed, faults=faults) == expected


def generators(rank: int) -> list[Any]:
    import numpy

    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    found: list[Any] = []
    for _ in range(3):
        found += [torch.randn(2).tolist(), random.random(), numpy.random.rand(), numpy.random.randn()]
        dist.barrier()
    return found


def test_every_rank_has_random_generators_of_its_own() -> None:
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    alone = simulate(1, generators)[0]
    assert simulate(3, generators) == [alone] * 3
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == python_before


def test_ranks_start_with_the_callers_generators() -> None:
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    assert all(torch.equal(found, expected) for found in simulate(2, lambda rank: torch.randn(2)))


def modes(rank: int) -> list[Any]:
    found: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype(), len(warnings.filters)]
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    with warnings.catch_warnings(), torch.no_grad(), torch.autocast("cpu", enabled=rank == 0):
        warnings.simplefilter("error" if rank else "ignore")
        dist.barrier()
        found += [torch.is_grad_enabled(), torch.get_default_dtype(), warnings.filters[0][0]]
        found.append(torch.is_autocast_enabled("cpu"))
    dist.barrier()
    return [*found, len(warnings.filters)]


def test_modes_dtypes_and_warning_filters_belong_to_a_rank() -> None:
    filters = list(warnings.filters)
    with torch.no_grad():
        found = simulate(2, modes)
    count = len(filters)
    assert found[0] == [True, torch.float32, count, False, torch.float32, "ignore", True, count]
    assert found[1] == [True, torch.float32, count, False, torch.float64, "error", False, count]
    assert torch.get_default_dtype() == torch.float32 and list(warnings.filters) == filters


def late_result(rank: int) -> tuple[bool, bool, float]:
    tensor = torch.tensor(1.0 + rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    at_once = tensor.item() == 1.0 + rank if rank == 0 else True
    work.wait()
    return at_once, work.is_completed(), tensor.item()


def test_the_result_of_an_async_call_is_there_once_all_have_called() -> None:
    assert simulate(2, late_result) == [(True, True, 3.0)] * 2


def poll(rank: int) -> float:
    tensor = torch.tensor(1.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    while not work.is_completed():
        pass
    return tensor.item()


def test_a_rank_that_asks_in_a_loop_lets_the_others_run() -> None:
    assert simulate(3, poll) == [3.0] * 3


def part_ways(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    elif rank == 1:
        dist.recv(torch.empty(3), 2, tag=4)


def test_a_deadlock_says_at_once_what_every_rank_waits_for() -> None:
    with pytest.raises(DesyncError) as caught:
        simulate(3, part_ways)
    lines = [line.split(", at test_simulate.py:")[0] for line in str(caught.value).splitlines()]
    assert lines == [
        "every rank that is left waits for another one",
        "    rank 0 waits for all_reduce (sum) [2] float32, collective 1 of group '0' of ranks 0, 1, 2",
        "    rank 1 waits for recv from rank 2 of [3] float32 with tag 4 in group '0' of ranks 0, 1, 2",
        "    rank 2 has returned",
        "  at:  rank 0",
        "  fix: make groups, and call the collectives of each, in the same order on all its ranks",
    ]
    assert ", in part_ways" in str(caught.value)


def lose_count(rank: int) -> None:
    # What a rank of torch 2.15 does with a group that only some ranks make.
    distributed_c10d._world.group_count += rank
    dist.barrier(dist.new_group([0, 1]))


def test_a_group_that_ranks_know_by_different_names_is_said_so() -> None:
    with pytest.raises(DesyncError) as caught:
        simulate(2, lose_count)
    text = str(caught.value)
    assert "of group '1' of ranks 0, 1 (not made on rank 1), at " in text
    assert "of group '2' of ranks 0, 1 (not made on rank 0), at " in text


def meet(rank: int, kind: str) -> None:
    if kind == "op" and rank:
        dist.barrier()
    elif kind == "dtype":
        dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    elif kind == "root":
        dist.broadcast(torch.ones(2), src=rank)
    elif kind == "reduction":
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    else:
        dist.all_reduce(torch.ones(2 + (rank if kind == "shape" else 0)))


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        ("op", "barrier"),
        ("dtype", "all_reduce (sum) [2] float64"),
        ("shape", "all_reduce (sum) [3] float32"),
        ("reduction", "all_reduce (max) [2] float32"),
        ("root", "broadcast root 1 [2] float32"),
    ],
)
def test_ranks_that_meet_in_different_calls_are_shown_both(kind: str, second: str) -> None:
    with pytest.raises(DesyncError, match="ranks meet in different collectives") as caught:
        simulate(2, meet, kind)
    assert f"rank 1: {second}" in str(caught.value)
    with pytest.raises(RankErrors) as each:
        run_threads(meet_here, 2, kind)
    assert [type(error) for _, error in sorted(each.value.errors.items())] == [DesyncError, DesyncError]


def meet_here(kind: str) -> None:
    meet(dist.get_rank(), kind)


def raise_on_one(rank: int, cleaned: list[int]) -> None:
    try:
        dist.barrier()
        if rank == 1:
            raise LookupError("mine")
        dist.barrier()
    finally:
        cleaned.append(rank)
        if rank != 1:
            dist.barrier()


def test_what_one_rank_raises_ends_the_run_and_the_others_clean_up() -> None:
    cleaned: list[int] = []
    with pytest.raises(LookupError, match="mine") as caught:
        simulate(3, raise_on_one, cleaned)
    assert sorted(cleaned) == [0, 1, 2]
    assert "raise_on_one" in [entry.name for entry in caught.traceback]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised on rank 1"]


def go_on_alone(rank: int) -> float:
    if rank == 0:
        raise ValueError("gone")
    tensor = torch.tensor(1.0)
    dist.all_reduce(tensor, group=dist.new_group([1, 2], use_local_synchronization=True))
    raise KeyError(rank)


def test_ranks_that_need_nothing_of_a_failed_one_raise_what_is_theirs() -> None:
    with pytest.raises(ValueError, match="gone") as caught:
        simulate(3, go_on_alone)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised on rank 0; later raised: rank 2 KeyError, rank 1 KeyError"]


def all_reduces(rank: int) -> list[float]:
    found = []
    for _ in range(3):
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor)
        found.append(tensor.item())
    return found


def test_a_dropped_message_is_a_desync_of_the_others() -> None:
    with pytest.raises(DesyncError, match=r"rank 1 waits for .*collective 2 of .*a fault dropped its message"):
        simulate(3, all_reduces, faults=[Fault(rank=1, op="all_reduce", nth=2, action=Drop())])


def test_a_fault_that_raises_does_so_in_its_call() -> None:
    error = OSError("unplugged")
    with pytest.raises(OSError, match="unplugged") as caught:
        simulate(3, all_reduces, faults=[Fault(rank=1, op="any", nth=3, action=Raise(error))])
    assert caught.value is error


@pytest.mark.parametrize("delay", [1, 3, 50])
def test_a_delayed_message_arrives_all_the_same(delay: int) -> None:
    faults = [Fault(rank=rank, op="all_reduce", nth=2, action=Delay(delay)) for rank in range(2)]
    assert simulate(3, all_reduces, faults=faults) == [[3.0] * 3] * 3


def see_arrival(rank: int) -> list[int]:
    """Return how often rank 0 asked before the message of rank 1 was there."""
    tensor = torch.empty(1)
    if rank == 1:
        work = dist.isend(torch.ones(1), 0)
    else:
        work = dist.irecv(tensor, 1)
    assert work is not None
    asked = 0
    while not work.is_completed():
        asked += 1
    return [asked]


def test_a_delay_lasts_so_many_turns() -> None:
    prompt, late = (
        simulate(2, see_arrival, faults=faults)[0][0] for faults in ([], [Fault(rank=1, op="send", action=Delay(20))])
    )
    assert prompt <= 1 and 8 <= late <= 12


@pytest.mark.parametrize(
    "fault",
    [
        Fault(rank=2, op="all_reduce", action=Drop()),
        Fault(rank=0, op="gossip", action=Drop()),
        Fault(rank=0, op="any", nth=0, action=Drop()),
        Fault(rank=0, op="any", action="drop"),  # type: ignore[arg-type]
    ],
)
def test_a_fault_that_can_meet_no_call_is_refused(fault: Fault) -> None:
    with pytest.raises(ConfigError):
        simulate(2, all_reduces, faults=[fault])


def test_a_fault_that_met_no_call_is_an_error() -> None:
    with pytest.raises(UsageError, match="faults met no call"):
        simulate(2, all_reduces, faults=[Fault(rank=0, op="all_reduce", nth=4, action=Drop())])


def spin(rank: int) -> None:
    dist.barrier()
    while rank == 1:
        time.monotonic()


def test_a_rank_that_is_stuck_is_ended_and_shown() -> None:
    with pytest.raises(TimeoutError, match=r"(?s)has not ended after 0.2 s: rank 1 is stuck in.*in spin") as caught:
        simulate(2, spin, timeout_s=0.2)
    del caught
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")] == []


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


@pytest.mark.parametrize("seed", [None, 1, 2])
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

    def communicate() -> None:
        try:
            dist.barrier(group=group)
        except (UsageError, ValueError) as error:
            said.append(str(error))

    group = dist.new_group()
    thread = threading.Thread(target=communicate, daemon=True)
    thread.start()
    thread.join()
    return said


def test_a_daemon_thread_may_not_communicate() -> None:
    assert all(len(said) == 1 for said in simulate(2, daemon))


def traces() -> list[Any]:
    """Return what simulations might leave behind in torch and in the process."""
    return [
        distributed_c10d._world,
        distributed_c10d._new_process_group_helper,
        DeviceMesh.__init__,
        sys.excepthook,
        sys.stdout,
        list(warnings.filters),
        dict(distributed_c10d.Backend._plugins),
        list(distributed_c10d.Backend.backend_list),
        dist.is_initialized(),
        threading.active_count(),
        threading.Thread.start,
        threading.Thread.join,
        threading.Condition.wait,
        queue.SimpleQueue,
        torch.get_default_dtype(),
    ]


@pytest.mark.parametrize("fn", [all_reduces, groups_here := lambda rank: groups(), part_ways, go_on_alone])
def test_nothing_is_left_over(fn: Callable[[int], Any]) -> None:
    before = traces()
    with contextlib.suppress(DesyncError, ValueError):
        simulate(4, fn)
    assert traces() == before


def test_one_simulation_at_a_time() -> None:
    with pytest.raises(UsageError, match="a simulation is running"):
        simulate(2, lambda rank: simulate(2, all_reduces))
    assert simulate(1, all_reduces) == [[0.0] * 3]


@pytest.mark.parametrize("world_size", [0, -1, True, 1.5])
def test_the_number_of_ranks_is_checked(world_size: Any) -> None:
    with pytest.raises(ConfigError, match="world_size is"):
        simulate(world_size, all_reduces)


def within_a_process() -> list[Any]:
    tensor = torch.tensor(1.0)
    dist.all_reduce(tensor)
    inside = simulate(3, all_reduces)
    dist.all_reduce(tensor)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).full_tensor()
    return [inside, tensor.item(), full.tolist(), dist.get_world_size()]


def test_a_process_with_a_group_of_its_own_may_simulate() -> None:
    assert run_ranks(within_a_process, 2) == [[[[3.0] * 3] * 3, 4.0, [0.0, 1.0, 2.0, 3.0], 2]] * 2


def test_the_package_imports_no_simulation_and_simulation_little_of_torch() -> None:
    code = (
        "import sys, torch, composable\n"
        "assert not [name for name in sys.modules if name.startswith('composable.testing')]\n"
        "before = set(sys.modules)\n"
        "import composable.testing\n"
        "more = {name for name in set(sys.modules) - before if not name.startswith('composable.testing')}\n"
        "assert not {name.partition('.')[0] for name in more} - set(sys.stdlib_module_names), more\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def copies(rank: int) -> bool:
    model = nn.Linear(3, 2)
    fully_shard(model)
    twin = copy.deepcopy(model)
    twin(torch.ones(1, 3)).sum().backward()
    return all(param.grad is None for param in model.parameters())


def test_a_copy_of_a_sharded_model_trains_by_itself() -> None:
    assert simulate(2, copies) == [True, True]


@pytest.mark.parametrize("name", ["mlp", "tied_across", "uneven"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_equals_one_process_and_gloo(name: str, world_size: int) -> None:
    threads = run_threads(train_annotated, world_size, name, fully_shard)
    assert_equal_runs(threads, train_reference(name, world_size))
    processes = run_ranks(train_annotated, world_size, name, fully_shard)
    for of_thread, of_process in zip(threads, processes):
        torch.testing.assert_close(of_thread.losses, of_process.losses, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(of_thread.params, of_process.params, rtol=1e-6, atol=1e-7)
