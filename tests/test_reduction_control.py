"""The methods that choose how one module's gradients are reduced and its parameters gathered."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    ConfigError,
    DefaultState,
    DesyncError,
    HandleOptions,
    MixedPrecisionPolicy,
    UsageError,
    fully_shard,
    no_sync,
    reduce_scatter_hook,
    register_comm_hook,
    unannotate,
)
from composable.ground.contract import managing_state
from tests.counting import CountingTransport
from tests.parity import gradients_of
from tests.test_comm_hooks import DTYPES, Net, backward, close, make_net
from tests.world import on_ranks


def sharded(dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    return fully_shard(make_net(dtype), policy={nn.Linear}, **options)


def linears(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def plain_grads() -> dict[str, torch.Tensor]:
    model = sharded()
    backward(model, dist.get_rank())
    return gradients_of(model)


# Divisors


@on_ranks(
    world_size=[1, 2, 3],
    setter=["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"],
    factor=[1, 0.25, 3, None],
)
def test_sums_of_one_module_are_divided_by_the_factor(factor: float | None, setter: str) -> None:
    plain, model = plain_grads(), sharded()
    getattr(model.blocks[0], setter)(factor)
    backward(model, dist.get_rank())
    for fqn, grad in gradients_of(model).items():
        due = dist.get_world_size() / factor if factor is not None and fqn.startswith("blocks.0") else 1
        close({fqn: grad}, {fqn: plain[fqn] * due}, 0 if due == 1 else 2 * torch.finfo(grad.dtype).eps)


@on_ranks(2)
def test_gradients_that_waited_are_divided_by_the_factor_also_in_unannotate() -> None:
    grads = []
    for is_undone in (False, True):
        model = sharded()
        for module in linears(model):
            module.set_gradient_divide_factor(1)
        with no_sync(model):
            backward(model, dist.get_rank())
        if is_undone:
            unannotate(model)
        else:
            backward(model, dist.get_rank())
        grads.append({fqn: grad * (2 if is_undone else 1) for fqn, grad in gradients_of(model).items()})
    reduced, undone = grads[0], grads[1]
    close(undone, reduced, 1e-6)


# Sums


def summed(dtype: torch.dtype, is_forced: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = sharded(dtype)
    for module in linears(model):
        module.set_force_sum_reduction_for_comms(is_forced)
    CountingTransport.install(fully_shard.state(model).lazy_init())
    transport = fully_shard.state(model)._handles[0].buffers[0].routes.gradient_path.transport
    begin, scales = transport.begin_reduce_scatter, []

    def noted(source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0) -> Any:
        scales.append(scale)
        return begin(source, shard, key, scale=scale)

    transport.begin_reduce_scatter = noted
    backward(model, dist.get_rank(), dtype)
    return scales, gradients_of(model)


@pytest.mark.parametrize(("dtype", "world_size"), [(DTYPES[0], 3), *((dtype, 2) for dtype in DTYPES[1:])])
@on_ranks()
def test_forced_sums_are_divided_by_a_step_of_their_own(dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    scales, plain = summed(dtype, False)
    assert set(scales) == {1 / world_size}
    scales, grads = summed(dtype, True)
    assert set(scales) == {1.0} and len(scales) == 4
    close(grads, plain, 0 if world_size < 3 else 4 * torch.finfo(dtype).eps)


@on_ranks(4)
def test_no_sum_in_float16_overflows_where_the_mean_fits() -> None:
    model: Any = fully_shard(nn.Linear(4, 1, bias=False).half())
    model.set_force_sum_reduction_for_comms(True)
    model(torch.full((1, 4), 60000.0, dtype=torch.float16)).sum().backward()
    assert gradients_of(model)["weight"].tolist() == [[60000.0] * 4]


# A hook on the reduced shard


@on_ranks(2, options=[{}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}])
def test_an_all_reduce_hook_gets_each_reduced_shard_once(options: dict[str, Any]) -> None:
    plain = sharded(**options)
    model = sharded(**options)
    seen = []

    def double(shard: torch.Tensor) -> None:
        seen.append(shard.dtype)
        shard.mul_(2)

    for module in linears(model):
        module.set_all_reduce_hook(lambda shard: seen.append(None))
        module.set_all_reduce_hook(double)
    model.last.set_all_reduce_hook(None)
    for one in (plain, model):
        backward(one, dist.get_rank())
    assert seen == [torch.float32] * 3
    wanted = {fqn: grad if fqn.startswith("last") else 2 * grad for fqn, grad in gradients_of(plain).items()}
    close(gradients_of(model), wanted, 0)


@on_ranks(4)
def test_an_all_reduce_hook_may_average_over_copies_of_the_shards() -> None:
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    whole = sharded()
    backward(whole, rank)
    model = sharded(mesh=mesh["shards"])

    def average(shard: torch.Tensor) -> None:
        dist.all_reduce(shard, group=mesh["copies"].get_group())
        shard.div_(2)

    for module in linears(model):
        module.set_all_reduce_hook(average)
    backward(model, rank)
    whole, hybrid = gradients_of(whole), gradients_of(model)
    close(hybrid, whole, 1e-6)


@on_ranks(2)
def test_an_all_reduce_hook_may_return_what_a_work_returns() -> None:
    model, rank = sharded(), dist.get_rank()

    def add_up(shard: torch.Tensor) -> object:
        work = dist.all_reduce(shard, async_op=True, group=own[rank])
        return work is not None and work.wait()

    own = [dist.new_group([0]), dist.new_group([1])]
    for module in linears(model):
        module.set_all_reduce_hook(add_up)
    backward(model, rank)
    close(gradients_of(model), plain_grads(), 1e-6)


RETURNED: dict[str, Callable[[torch.Tensor], object]] = {
    "Tensor": lambda shard: 2 * shard,
    "Work": lambda shard: dist.all_reduce(shard, async_op=True),
}


@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        ("Tensor", (1,), {}),
        ("Work", (0, 1), {}),
        ("Work", (0, 1), {"options": HandleOptions(unused_gradients="zero")}),
    ],
)
@on_ranks(2)
def test_what_an_all_reduce_hook_returns_is_an_error_on_every_rank(
    kind: str, ranks: Sequence[int], options: dict[str, Any]
) -> None:
    model = sharded(**options)
    is_one = dist.get_rank() in ranks
    model.first.set_all_reduce_hook(RETURNED[kind] if is_one else lambda shard: shard.mul_(1))
    with pytest.raises(ConfigError) as caught:
        backward(model, dist.get_rank())
    model.first.set_all_reduce_hook(None)
    model.zero_grad()
    backward(model, dist.get_rank())
    close(gradients_of(model), plain_grads(), 0)
    text = str(caught.value)
    rank = dist.get_rank()
    found = rank if rank in ranks else ranks[0]
    assert text.startswith("the all-reduce hook returned") and f"at:  rank {found}, module 'first'" in text


# How long choices last, and what they exclude


def choices_of(module: nn.Module) -> tuple[object, ...]:
    comms = managing_state(module, "fully_shard")._module_to_handle[module].comms
    return comms.divide_factor, comms.sums_only, comms.all_reduce_hook is not None


@on_ranks(2)
def test_choices_stay_with_another_root_and_in_a_copy_and_end_with_unannotate() -> None:
    model = make_net()
    fully_shard(model.blocks)
    module: Any = model.blocks
    module.set_gradient_divide_factor(1)
    module.set_force_sum_reduction_for_comms(True)
    module.set_all_reduce_hook(lambda shard: shard.mul_(2))
    module(torch.ones(2, 9)).sum().backward()
    model.zero_grad()
    fully_shard(model)
    backward(model, dist.get_rank())
    whole = sharded()
    backward(whole, dist.get_rank())
    got, plain = gradients_of(model), gradients_of(whole)
    close(got, {fqn: grad * (4 if fqn.startswith("blocks") else 1) for fqn, grad in plain.items()}, 1e-6)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    backward(twin, dist.get_rank())
    close(gradients_of(twin), got, 0)
    is_kept = choices_of(twin.blocks) == choices_of(model.blocks) == (1.0, True, True)
    unannotate(model)
    with pytest.raises(AttributeError):
        module.set_gradient_divide_factor(1)
    model.zero_grad()
    fully_shard(model.blocks)
    assert (is_kept, choices_of(model.blocks) == (None, False, False)) == (True, True)


@on_ranks(2)
def test_a_communication_hook_excludes_what_it_would_replace() -> None:
    model = sharded()
    handle = register_comm_hook(model.first, DefaultState(dist.group.WORLD), reduce_scatter_hook)
    changes: dict[str, Callable[[], None]] = {
        "a gradient divide factor": lambda: model.first.set_gradient_divide_factor(2),
        "sums forced": lambda: model.first.set_force_sum_reduction_for_comms(True),
    }
    for name, change in changes.items():
        with pytest.raises(UsageError, match=f"a module cannot have {name} and a communication hook") as caught:
            change()
        assert f"at:  rank {dist.get_rank()}, module 'first'" in str(caught.value)
    handle.remove()
    model.first.set_gradient_divide_factor(2)


@on_ranks(2)
def test_an_all_reduce_hook_comes_after_a_communication_hook() -> None:
    model = sharded()
    register_comm_hook(model, DefaultState(dist.group.WORLD), reduce_scatter_hook)
    for module in linears(model):
        module.set_all_reduce_hook(lambda shard: shard.mul_(2))
    backward(model, dist.get_rank())
    close(gradients_of(model), {fqn: 2 * grad for fqn, grad in plain_grads().items()}, 0)


@on_ranks(1)
def test_the_cpu_has_no_streams() -> None:
    with pytest.raises(ConfigError, match="that is cpu"):
        sharded().first.set_all_reduce_hook(lambda shard: None, stream=object())


@on_ranks(2)
def test_ranks_that_chose_differently_before_the_first_forward_are_told() -> None:
    model = sharded()
    model.first.set_gradient_divide_factor(2 + dist.get_rank())
    with pytest.raises(DesyncError) as caught:
        backward(model, dist.get_rank())
    text = str(caught.value)
    assert (
        "rank 0: module 'first' (Linear): gradient divide factor 2.0\n    rank 1: module 'first' (Linear): gradient"
        in text
    )
