"""Collectives of torch.distributed on ragged tensors: refused on every rank, whichever operator they are."""

import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch import nn

from composable import UsageError, fully_shard
from tests.world import run_ranks, run_threads

Call = Callable[[torch.Tensor], object]


def whole(count: int) -> list[torch.Tensor]:
    return [torch.ones(4, 6) for _ in range(count)]


def collectives() -> dict[str, Call]:
    """Return collectives of one ragged tensor, that every rank calls alike; some take it in lists."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    right, left = (rank + 1) % world, (rank - 1) % world
    root = whole(world) if rank == 0 else None
    calls: dict[str, Call] = {
        "all_reduce": lambda t: dist.all_reduce(t),
        "maximum": lambda t: dist.all_reduce(t, op=dist.ReduceOp.MAX),
        "asynchronous": lambda t: dist.all_reduce(t, async_op=True),
        "coalesced": lambda t: dist.all_reduce_coalesced([torch.ones(4, 6), t]),
        "reduce": lambda t: dist.reduce(t, 0),
        "broadcast": lambda t: dist.broadcast(t, 0),
        "gather of": lambda t: dist.gather(t, root, 0),
        "scatter into": lambda t: dist.scatter(t, root, 0),
        "all_gather of": lambda t: dist.all_gather(whole(world), t),
        "all_gather into": lambda t: dist.all_gather([t] * world, torch.ones(4, 6)),
        "single all_gather": lambda t: dist.all_gather_into_tensor(torch.ones(4 * world, 6), t),
        "reduce_scatter into": lambda t: dist.reduce_scatter(t, whole(world)),
        "reduce_scatter of": lambda t: dist.reduce_scatter(torch.ones(4, 6), [t] * world),
        "single reduce_scatter": lambda t: dist.reduce_scatter_tensor(t, torch.ones(4 * world, 6)),
        "all_to_all into": lambda t: dist.all_to_all([t] * world, whole(world)),
        "all_to_all of": lambda t: dist.all_to_all(whole(world), [t] * world),
        "single all_to_all": lambda t: dist.all_to_all_single(torch.ones(4, 6), t),
        "send": lambda t: dist.send(t, right),
        "receive": lambda t: dist.recv(t, left),
        "receive from any": lambda t: dist.recv(t),
        "isend": lambda t: dist.isend(t, right),
        "irecv": lambda t: dist.irecv(t, left),
        "batched": lambda t: dist.batch_isend_irecv([dist.P2POp(dist.isend, t, right)]),
        "functional": lambda t: funcol.all_reduce(t, "sum", group),
        "functional gather": lambda t: funcol.all_gather_tensor(t, 0, group),
        "functional in place": lambda t: funcol.all_reduce_inplace(t, "sum", group),
        "functional broadcast": lambda t: funcol.broadcast(t, 0, group),
        "differentiable": lambda t: differentiable.all_reduce(t.detach().requires_grad_(), group=group),
    }
    return calls


def forms(param: nn.Parameter) -> list[torch.Tensor]:
    """Return ragged tensors of one cut: the parameter, its gradient, aliases, results and a view."""
    grad = param.grad
    assert grad is not None
    return [param, param.data, param.detach(), grad, grad.detach(), grad * 2, grad.view(param.shape)]


def refuse_all(seed: int) -> int:
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of them
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    fully_shard(model, policy={nn.Linear})
    model(torch.ones(3, 6) * (dist.get_rank() + 1)).sum().backward()
    param = model[0].weight
    assert isinstance(param, nn.Parameter) and param.grad is not None
    before = param.full_tensor().clone(), param.grad.full_tensor().clone()  # type: ignore[attr-defined]
    draw = random.Random(seed)  # Alike on all ranks.
    calls = list(collectives().items())
    draw.shuffle(calls)
    with torch.no_grad():
        given = [*forms(param), param.grad[0:4]]
    for name, call in calls:
        tensor = draw.choice(given)
        with pytest.raises(
            UsageError, match=r"a collective of torch.distributed is called on a ragged tensor"
        ) as caught:
            pytest.fail(f"{name}: {call(tensor)}")
        assert f"rank {dist.get_rank()}, " in (caught.value.at or ""), name
        assert "full_tensor()" in (caught.value.fix or ""), name
    after = param.full_tensor(), param.grad.full_tensor()  # type: ignore[attr-defined]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return len(calls)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_on_a_ragged_tensor_is_an_error_on_every_rank(world_size: int) -> None:
    for seed in range(3):
        assert min(run_threads(refuse_all, world_size, seed)) > 25


def test_real_groups_refuse_ragged_tensors_too() -> None:
    for seed in range(2):
        assert min(run_ranks(refuse_all, 2, seed)) > 25


def test_the_error_of_a_users_average_says_that_backward_has_averaged() -> None:
    assert run_threads(average_gradients, 2) == [
        "a collective of torch.distributed is called on a ragged tensor, one tensor of which each rank holds another "
        f"piece\n  at:  rank {rank}, parameter 'weight' [4, 6]\n"
        "  fix: leave it out, backward has averaged the gradients, and optimizers step shards without "
        "ZeroRedundancyOptimizer; for whole values, on every rank, full = tensor.full_tensor(); for a number, send "
        "what tensor.to_local() of each rank gives"
        for rank in range(2)
    ]


def average_gradients() -> str:
    model = nn.Linear(6, 4)
    fully_shard(model)
    model(torch.ones(3, 6)).sum().backward()
    with pytest.raises(UsageError) as caught:
        [dist.all_reduce(param.grad) for param in model.parameters()]
    return str(caught.value)
