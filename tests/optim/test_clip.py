"""The norm of gradients of any kind on any mesh, against torch on plain tensors in one process."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from composable import ConfigError, UsageError, clip_grad_norm_, get_total_norm
from composable.dtensor.gather import strict_mode
from composable.dtensor.spec import ragged_spec
from tests.counting import counting_ranks
from tests.ragged_pairs import from_full
from tests.world import on_ranks, run_ranks

ORDERS = [2.0, 1.0, 3.0, math.inf]


def make_grads(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(6, 5), (5,), (3, 4, 2), (), (9, 2), (4, 3), (0, 4), (7,)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def with_grad(param: torch.Tensor, grad: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(param)
    parameter.grad = grad
    return parameter


def mixed(grads: list[torch.Tensor]) -> list[nn.Parameter]:
    """Give the gradients to parameters of every kind, on a mesh of one dim and one of two."""
    world_size = dist.get_world_size()
    line = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    # The last rank of the line owns nothing of the first, only the last one something of the second.
    on_line = [
        (0, *(7 * min(rank, 3) for rank in range(1, world_size - 1)), 30, 30),
        (*([0] * world_size), 5),
    ]
    made: list[nn.Parameter] = []
    for grad, bounds in zip(grads, on_line):
        spec = ragged_spec(line, grad.shape, grad.dtype, bounds)
        made.append(with_grad(from_full(grad * 0, spec), from_full(grad, spec)))
    stops = [0] * (world_size // 2) + [24]
    spec = ragged_spec(grid, grads[2].shape, grads[2].dtype, stops)
    made.append(with_grad(from_full(grads[2], spec), from_full(grads[2], spec)))
    made.append(with_grad(grads[3].clone(), grads[3].clone()))
    placed: list[tuple[Any, list[Any]]] = [
        (line, [Shard(0)]),
        (grid, [Shard(1), Shard(0)]),
        (grid["shard"], [Shard(0)]),
        (grid, [Replicate(), Replicate()]),
    ]
    for grad, (mesh, placements) in zip(grads[4:], placed):
        made.append(with_grad(distribute_tensor(grad, mesh, placements), distribute_tensor(grad, mesh, placements)))
    return made


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(("world_size", "foreach"), [(4, None), (2, True), (4, False)])
@on_ranks(run=run_ranks)
def test_each_element_counts_once_whatever_holds_it(foreach: bool | None) -> None:
    for order in ORDERS:
        params, grads = mixed(make_grads()), make_grads()
        # torch itself has no inf norm of a tensor without elements.
        plain = [with_grad(grad, grad.clone()) for grad in grads if grad.numel()]
        expected_norm = nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=foreach)
        with strict_mode(), counting_ranks() as counts:
            norm = clip_grad_norm_(iter([*params, params[0]]), 0.5, order, foreach=foreach)
        # The line and the two dims of the grid; of two ranks all of these are the same, or one rank.
        assert counts["reductions"] == (3 if dist.get_world_size() > 2 else 1)
        assert type(norm) is torch.Tensor and norm.dtype == expected_norm.dtype
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0.0)
        found = [whole(param.grad) for param in params if param.numel()]  # type: ignore[arg-type]
        for clipped, param in zip(found, plain, strict=True):
            torch.testing.assert_close(clipped, param.grad, rtol=1e-6, atol=1e-8)
        again = get_total_norm([param.grad for param in params], order)  # type: ignore[misc]
        torch.testing.assert_close(again, torch.tensor(0.5), rtol=1e-5, atol=0.0)
        norms = [torch.empty(()) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, norm)
        assert len({value.item() for value in norms}) == 1


@on_ranks(3)
def test_lists_that_are_empty_partial_or_of_few_bits() -> None:
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0).item() == 0.0
    # Every rank has a share of the sum.
    partial = DTensor.from_local(torch.tensor([3.0, 4.0]), line, [Partial()])
    param = with_grad(DTensor.from_local(torch.zeros(2), line, [Replicate()]), partial)
    world_size = dist.get_world_size()
    torch.testing.assert_close(clip_grad_norm_(param, 1.0), torch.tensor(5.0 * world_size))
    torch.testing.assert_close(whole(param.grad), torch.tensor([0.6, 0.8]))  # type: ignore[arg-type]
    # Fewer bits: added up in fp32, given back as torch does.
    spec = ragged_spec(line, (1000,), torch.bfloat16, [0] * world_size + [1000])
    low = with_grad(from_full(torch.zeros(1000), spec), from_full(torch.full((1000,), 0.1), spec))
    norm = clip_grad_norm_([low], 1.0)
    assert norm.dtype == torch.bfloat16
    torch.testing.assert_close(norm.float(), torch.tensor(0.1 * math.sqrt(1000)), rtol=1e-2, atol=0.0)
    assert clip_grad_norm_([low, with_grad(torch.zeros(1), torch.ones(1))], 9.0).dtype == torch.float32
    # A view of a gradient does not outlive the clipping.
    view = low.grad[3:5]  # type: ignore[index]
    clip_grad_norm_([low], 0.1)
    with pytest.raises(UsageError, match="no longer has"):
        view + 1


@on_ranks(2)
def test_a_gradient_that_one_rank_lacks_does_not_make_the_others_wait() -> None:
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    spec = ragged_spec(line, (4,), torch.float32, (0, 2, 4))
    param = nn.Parameter(from_full(torch.zeros(4), spec))
    if dist.get_rank() == 1:
        param.grad = from_full(torch.tensor([3.0, 0.0, 4.0, 0.0]), spec)
    assert clip_grad_norm_([param], 1.0).item() == 4.0


@on_ranks(2)
def test_a_norm_that_is_not_finite_is_seen_on_every_rank() -> None:
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    spec = ragged_spec(line, (4,), torch.float32, (0, 2, 4))
    for value in (math.nan, math.inf):
        for order in (2.0, math.inf):
            # Only the second rank holds it.
            grad = from_full(torch.tensor([1.0, 1.0, 1.0, value]), spec)
            param = with_grad(from_full(torch.zeros(4), spec), grad)
            before = param.grad.full_tensor()  # type: ignore[union-attr]
            with pytest.raises(UsageError, match=f"norm of order {order:g} is {value}"):
                clip_grad_norm_([param], 1.0, order, error_if_nonfinite=True)
            torch.testing.assert_close(whole(param.grad), before, rtol=0.0, atol=0.0, equal_nan=True)  # type: ignore[arg-type]
            norm = clip_grad_norm_([param], 1.0, order)
            torch.testing.assert_close(norm, torch.tensor(value), equal_nan=True)


@on_ranks(3)
def test_wrong_values_are_refused() -> None:
    param = nn.Parameter(torch.ones(2))
    for order in (0.0, -1.0, -math.inf, math.nan):
        with pytest.raises(ConfigError, match="norm_type is"):
            get_total_norm([param], order)
    for limit in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="max_norm is"):
            clip_grad_norm_([param], limit)
    rank = dist.get_rank()
    pair = DeviceMesh("cpu", [0, 1])
    far = distribute_tensor(torch.ones(4), pair, [Shard(0)])
    if rank == 2:
        with pytest.raises(ConfigError, match="not in the mesh"):
            get_total_norm([far])
    else:
        torch.testing.assert_close(get_total_norm([far, torch.ones(5)]), torch.tensor(3.0))


@on_ranks(4)
def test_meshes_whose_ranks_stand_in_other_orders_share_no_sums() -> None:
    full, halves = make_grads()[0][:4, :4].contiguous(), [Shard(0), Shard(1)]
    meshes = [DeviceMesh("cpu", rows) for rows in ([[0, 1], [2, 3]], [[0, 3], [2, 1]])]
    cut = [distribute_tensor(full * factor, mesh, halves, src_data_rank=None) for factor, mesh in enumerate(meshes, 1)]
    torch.testing.assert_close(get_total_norm(cut), full.norm() * math.sqrt(5))
