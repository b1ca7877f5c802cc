"""Collectives, messages and groups: what they give on threads, held against gloo."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

from composable.testing import simulate
from tests.testing.programs import groups
from tests.world import run_ranks, run_threads

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


def plain(found: Any) -> Any:
    """Return what can be compared with ``==``."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.tolist(), found)


@pytest.mark.parametrize(
    ("use", "world_size"),
    [
        *((every_collective, size) for size in (1, 3)),
        *((messages, size) for size in (1, 3)),
        (groups, 4),
    ],
)
def test_everything_gives_what_gloo_gives(use: Callable[[], dict[str, Any]], world_size: int) -> None:
    assert plain(run_threads(use, world_size)) == plain(run_ranks(use, world_size))


def poll(rank: int) -> tuple[bool, float]:
    tensor = torch.tensor(1.0 + rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    at_once = rank > 0 or tensor.item() == 1.0
    while not work.is_completed():
        pass
    return at_once, tensor.item()


def test_an_async_result_is_there_once_all_have_called_also_for_ranks_that_ask_in_a_loop() -> None:
    assert simulate(3, poll) == [(True, 6.0)] * 3
