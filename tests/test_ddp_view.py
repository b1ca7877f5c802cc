"""torch's algorithms that want its wrapper, given ``as_ddp`` of a replicated module: the same numbers."""

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from composable import (
    UsageError,
    as_ddp,
    fully_shard,
    joinable,
    no_sync,
    reduce_gradients,
    replicate,
    update_process_group,
)
from tests.models import make_model, random_input, seeded
from tests.parity import assert_equal_params, full_params
from tests.programs import Twins, loss_at
from tests.test_algorithms import adam, torch_optim
from tests.world import on_ranks, run_ranks

# Hooks

DIM = 32


def try_hook(name: str, *, as_wrapper: bool) -> tuple[str, list[torch.Tensor]]:
    """Return the gradients of four steps; or the kind of error, if torch's hook raises."""
    model = seeded(lambda: nn.Linear(DIM, DIM, bias=False), 0)
    module: nn.Module = DistributedDataParallel(model) if as_wrapper else replicate(model)
    target: Any = module if as_wrapper else as_ddp(model)
    options = {"start_powerSGD_iter": 2} if "SGD" in name else {}
    found = []
    try:
        if options:
            DDPCommHookType[name].value(model=target, state=None, **options)
        else:
            register_ddp_comm_hook(DDPCommHookType[name], target, None)
        for step in range(4):
            model.zero_grad()
            module(random_input(10 * step + dist.get_rank(), 4, DIM)).square().mean().backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad.clone())
        # A thread of gloo that still runs the last callback must not be the last to hold the group: torch would have
        # it wait for itself.
        dist.barrier()
    except (RuntimeError, TypeError, AssertionError, AttributeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error)[:60]}", []
    return "", found


# The others raise below the wrapper too, some in a thread of gloo that cannot hand on an exception and ends the process.
RUNS_ON_GLOO = ("ALLREDUCE", "FP16_COMPRESS", "POWER_SGD", "POWER_SGD_RANK2", "NOOP")


@pytest.mark.parametrize("name", [*RUNS_ON_GLOO, "BF16_COMPRESS"])
def test_every_hook_of_torchs_list_does_what_it_does_below_the_wrapper(name: str) -> None:
    ours, theirs = (run_ranks(try_hook, 2, name, as_wrapper=one) for one in (False, True))
    if name == "BF16_COMPRESS":
        # Before torch 2.15 the wrapper refuses it without CUDA; gloo itself sums bfloat16.
        assert {kind.partition(":")[0] for kind, _ in theirs} in ({"TypeError"}, {""})
        exact = run_ranks(try_hook, 2, "ALLREDUCE", as_wrapper=False)
        torch.testing.assert_close(ours[0][1], exact[0][1], rtol=2e-2, atol=1e-4)
        return
    assert [kind for kind, _ in ours] == [kind for kind, _ in theirs]
    torch.testing.assert_close([found for _, found in ours], [found for _, found in theirs], rtol=0, atol=0)
    assert len(ours[0][1]) == 4


def gather_stacked(rows: list[torch.Tensor], row: torch.Tensor, **options: Any) -> Any:
    """Gather, with a result in the one tensor that these hooks read."""
    work = ALL_GATHER(rows, row, **options)
    if work is None:
        return None
    work.wait()
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([torch.stack(rows)])
    return mock.Mock(get_future=lambda: future)


ALL_GATHER = dist.all_gather


def quantise(name: str, *, as_wrapper: bool) -> list[torch.Tensor]:
    with mock.patch.object(quantization_hooks.dist, "all_gather", gather_stacked), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao
        error, found = try_hook(name, as_wrapper=as_wrapper)
    assert not error
    return found


@pytest.mark.parametrize("name", ["QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"])
def test_quantised_gradients_are_those_below_the_wrapper(name: str) -> None:
    ours, theirs = (run_ranks(quantise, 2, name, as_wrapper=one) for one in (False, True))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    exact = run_ranks(try_hook, 2, "ALLREDUCE", as_wrapper=False)
    difference = (ours[0][0] - exact[0][1][0]).abs().max()
    assert 0 < difference < 0.05 * exact[0][1][0].abs().max()


@on_ranks(2, run=run_ranks)
def test_overlap_with_a_sharded_optimizer_raises_on_gloo_as_below_the_wrapper() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit
        from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    model = replicate(make_model("mlp"))
    zero = torch_optim("ZeroRedundancyOptimizer")(model.parameters(), torch.optim.AdamW, lr=0.05, overlap_with_ddp=True)
    for make in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        # What torch says of its wrapper on gloo, before it looks at anything else.
        with pytest.raises(RuntimeError, match="Gloo backend using Overlapping DDP with ZeRO may meet hangs"):
            make(default_hooks.allreduce_hook, as_ddp(model), zero)


@on_ranks(2)
def test_an_overlapped_optimizer_registers_with_a_view() -> None:
    twins = Twins("mlp", replicate, make=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    optimizer = torch_optim("_as_overlapped_optim")(torch.optim.SGD, twins.model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(NotImplementedError):
        optimizer.register_fsdp(twins.model)
    optimizer.register_ddp(as_ddp(twins.model))
    for number in range(3):
        twins.backward(number)
        twins.step(of_ranks=False)
        twins.model.zero_grad()
    twins.check()


# Uneven inputs


def drop_gradients(model: nn.Module, when: str, step: int, at: str) -> None:
    """Drop the gradients of ``model`` at the begin or the end of a step, if that is where this loop does so."""
    way, _, place = when.partition(" ")
    if place == at or (place == "in turns" and at == ("begin", "end")[step % 2]):
        model.zero_grad(set_to_none=way == "none")


def train_some_epochs(seed: int, *, as_wrapper: bool) -> list[list[torch.Tensor | None]]:
    """Train with random numbers of inputs in each epoch; returns gradients after each backward and epoch, weights."""
    draw = random.Random(seed)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), seed)
    as_views = draw.random() < 0.5
    cap_mb = draw.choice([25, 1e-5])
    ours = None if as_wrapper else replicate(model, gradient_as_bucket_view=as_views, bucket_cap_mb=cap_mb)
    module = ours or DistributedDataParallel(model, gradient_as_bucket_view=as_views, bucket_cap_mb=cap_mb)
    view: Any = module if as_wrapper else as_ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    when = draw.choice(["never", *(f"{way} {at}" for way in ("none", "zeros") for at in ("begin", "end", "in turns"))])
    divides_by_all, accumulates = draw.random() < 0.5, draw.random() < 0.3
    found: list[list[torch.Tensor | None]] = []

    def note() -> None:
        found.append([None if param.grad is None else param.grad.clone() for param in model.parameters()])

    for epoch in range(3):
        counts = [draw.choice([0, 1, 2, 4]) for _ in range(world_size)]
        with Join([view], divide_by_initial_world_size=divides_by_all):
            for step in range(counts[rank]):
                drop_gradients(model, when, step, "begin")
                is_local = accumulates and step % 2 == 0
                stop: Any = view.no_sync() if as_wrapper else no_sync(model)
                with stop if is_local else contextlib.nullcontext():
                    module(random_input(100 * epoch + 10 * step + rank, 3, 4)).square().mean().backward()
                note()
                if not is_local:
                    optimizer.step()
                drop_gradients(model, when, step, "end")
        note()
    # And as it goes on when all ranks have inputs.
    module(random_input(rank, 3, 4)).square().mean().backward()
    note()
    return [*found, [param.detach().clone() for param in model.parameters()]]


def compare_epochs(seeds: range) -> None:
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, theirs = (train_some_epochs(seed, as_wrapper=one) for one in (False, True))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, seed=seed: f"{seed}: {text}")


def test_gradients_after_epochs_of_random_length_are_those_below_the_wrapper() -> None:
    run_ranks(compare_epochs, 3, range(10))


@on_ranks(2, as_joinable=[as_ddp, joinable])
def test_what_the_others_averaged_is_no_gradient_of_a_rank_without_inputs(as_joinable: Callable[..., Any]) -> None:
    model = replicate(nn.Linear(5, 5, bias=False))
    found = []
    for _ in range(2):
        with Join([as_joinable(model)]):
            for _ in range(3 + 2 * dist.get_rank()):
                model(torch.full((1, 5), 50.0)).sum().backward()
                found.append(float(model.weight.grad[0, 0]))
                model.zero_grad()
        assert model.weight.grad is None
    assert found == [[50.0] * 6, [50.0, 50.0, 50.0, 25.0, 25.0] * 2][dist.get_rank()]


def step_once(model: nn.Module, optimizer: Any = None) -> None:
    """Step with the inputs of step 0: what differs between runs is how many there are."""
    loss_at(model, 0, dist.get_rank()).backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()


def join_with_zero(*, is_sharded: bool) -> dict[str, torch.Tensor]:
    model, other = replicate(make_model("mlp")), replicate(seeded(lambda: nn.Linear(2, 2), 1))
    joinables: list[Any] = [as_ddp(model), as_ddp(other)]
    optimizer: Any = adam(model.parameters())
    if is_sharded:
        optimizer = torch_optim("ZeroRedundancyOptimizer")(model.parameters(), torch.optim.AdamW, lr=0.05, eps=1e-3)
        # In the order of a step: those of ranks without inputs follow it.
        joinables.insert(1, optimizer)
    with Join(joinables):
        for _ in range(2 + dist.get_rank()):
            step_once(model, optimizer)
            other(torch.ones(1, 2)).sum().backward()
    # Outside of the context all is as before.
    step_once(model)
    return full_params(model)


def test_several_modules_and_a_sharded_optimizer_join() -> None:
    sharded, whole = (run_ranks(join_with_zero, 3, is_sharded=one) for one in (True, False))
    for found, expected in zip(sharded, whole, strict=True):
        assert_equal_params(found, expected, tolerance=1e-6)


@on_ranks(2)
def test_a_rank_without_inputs_follows_what_others_do_before_the_last_backward_of_a_step() -> None:
    model: Any = replicate(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model.weight.zero_()
    # Two backwards in a step: in the first step of both ranks, in the second of one of them.
    with Join([as_ddp(model)]):
        for step in range(2 + 2 * dist.get_rank()):
            model.set_is_last_backward(step % 2 == 1)
            model(torch.ones(1, 2)).sum().backward()
            if step % 2 == 1:
                with torch.no_grad():
                    model.weight -= model.weight.grad
                model.zero_grad()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), -3.0))


@on_ranks(2)
def test_gradients_are_not_reduced_where_ranks_without_inputs_would_not_follow() -> None:
    model = replicate(nn.Linear(2, 1))
    with Join([as_ddp(model)]):
        with no_sync(model):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UsageError, match="reduce_gradients inside of Join"):
            reduce_gradients(model)
    reduce_gradients(model)
    torch.testing.assert_close(model.weight.grad, torch.ones(1, 2))


@on_ranks(2)
def test_a_view_follows_its_module_to_another_group() -> None:
    model = replicate(
        make_model("mlp"), process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
    )
    view = as_ddp(model)
    update_process_group(model, dist.new_group([0, 1]))
    assert view.process_group.size() == 2
    optimizer = adam(model.parameters())
    with Join([view]):
        for _ in range(2 + dist.get_rank()):
            step_once(model, optimizer)
    for param in model.parameters():
        dist.all_gather(both := [torch.empty_like(param) for _ in range(2)], param.detach())
        assert torch.equal(*both)


@on_ranks(1)
def test_what_has_no_view_says_why() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(UsageError, match="as_ddp found no replicate"):
        as_ddp(model)
    fully_shard(model[0])
    replicate(model)
    with pytest.raises(UsageError, match="has to step its own shards"):
        Join([as_ddp(model)])
    pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
    replicate(pair)
    with pytest.raises(UsageError, match="shares buckets with others"):
        as_ddp(pair[0])
    assert as_ddp(model) is as_ddp(model)
