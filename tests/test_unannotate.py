"""``unannotate``: an ordinary module again, and nothing half-undone."""

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import _traversal_utils
from composable import (
    DesyncError,
    ModuleWrapPolicy,
    UsageError,
    fully_shard,
    no_sync,
    replicate,
    unannotate,
    unshard_params,
)
from composable.ground.contract import get_registry
from tests.models import BLOCK_CLASSES, MLPBlock, loss_of, make_model
from tests.parity import (
    assert_equal_params,
    full,
    full_params,
    inputs_of,
)
from tests.programs import Twins, compare, loss_at
from tests.world import on_ranks, run_threads

Annotate = Callable[[nn.Module], Any]
WAYS: dict[str, Annotate] = {
    "whole": fully_shard,
    "policy": lambda model: fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES)),
    "by_hand": lambda model: [fully_shard(block) for block in (*model.blocks, model)],
    "list": lambda model: (fully_shard([model.inp, model.out]), fully_shard(model, policy={MLPBlock})),
    "replicate": replicate,
    "nested": lambda model: (replicate(model.blocks[1]), fully_shard(model, policy={MLPBlock})),
    "nested_in_replicate": lambda model: (fully_shard(model.blocks[0]), replicate(model)),
}
CASES = [
    *(("policy", name) for name in ("gpt_tied", "tied_across", "frozen_mixed", "mixed_dtypes", "scalars")),
    *(("whole", name) for name in ("empty_params", "uneven", "with_buffers")),
    *((way, "mlp") for way in ("by_hand", "list", "nested", "nested_in_replicate")),
    *(("replicate", name) for name in ("gpt_tied", "frozen_mixed", "mixed_dtypes")),
]


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    loss = loss_at(model, seed, dist.get_rank())
    loss.backward()
    return loss


def is_plain(model: nn.Module, reference: nn.Module) -> bool:
    """Compare classes and attributes of two trees, hook dicts by their lengths."""
    for module, expected in zip(model.modules(), reference.modules(), strict=True):
        assert type(module) is type(expected)
        assert vars(module).keys() == vars(expected).keys()
        for name, value in vars(module).items():
            assert not (name.endswith(("_hooks", "_with_kwargs", "_always_called")) and value), (type(module), name)
        assert not get_registry(module)
    for param in model.parameters():
        assert type(param) is nn.Parameter and param.untyped_storage().nbytes() == param.nbytes
        assert not any(name.startswith("_composable") for name in vars(param))
        assert not param._post_accumulate_grad_hooks
    return _traversal_utils._get_fsdp_states(model) == []


def tag_and_annotate(way: str, model: nn.Module) -> None:
    for param in model.parameters():
        param.tag = "mark"
    WAYS[way](model)


@on_ranks(world_size=[1, 2, 3])
def test_parameters_gradients_and_everything_else_are_as_in_one_process() -> None:
    for way, name in CASES[dist.get_world_size() - 1 :: 3]:
        twins = Twins(name, functools.partial(tag_and_annotate, way), make=sgd_of_trained)
        twins.backward(0)
        twins.step()
        twins.backward(1)
        other = copy.deepcopy(twins.model)
        with no_sync(other):
            backward(other, 2)
        twins.backward(2, keeps=True)
        model = twins.model
        assert unannotate(model) is model
        assert is_plain(model, twins.plain)
        assert is_plain(unannotate(other), twins.plain)
        for param, twin in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(param.grad, twin.grad)
            assert param.tag == "mark"
        tolerance = 1e-2 if name == "mixed_dtypes" else 1e-6
        twins.check(tolerance, (way, name))
        twins.check_gradients(tolerance, (way, name))
        for found, expected in zip(*(one.named_parameters(remove_duplicate=False) for one in twins), strict=True):
            assert (found[0], found[1].requires_grad) == (expected[0], expected[1].requires_grad)
        if "gpt_tied" in name:
            assert model.head.weight is model.tokens.weight


def sgd_of_trained(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.1)


def undo_one_block(model: nn.Module, block: nn.Module) -> None:
    backward(model, 7)
    model.zero_grad()
    unannotate(block)
    assert is_plain(block, MLPBlock())
    handles = _traversal_utils._get_fsdp_handles(model)
    assert all(block not in handle.modules for handle in handles)
    backward(model, 7)
    assert fully_shard.state(model).root.handles == handles
    model.zero_grad()
    replicate(block)


def picked(model: nn.Module) -> None:
    fully_shard(model, policy={MLPBlock})
    model.inp.register_forward_hook(lambda *_: None)
    model.set_modules_to_forward_prefetch([model.blocks[1]])
    undo_one_block(model, model.blocks[1])
    state = fully_shard.state(model)
    assert [handle.module_fqns for handle in state.plan.handles] == [("",), ("blocks.0",), ("blocks.2",)]
    assert "blocks.1.up.weight" in state.plan.ignored_fqns


def by_hand(model: nn.Module) -> None:
    for module in (*model.blocks, model):
        fully_shard(module)
    undo_one_block(model, model.blocks[1])


def not_below(model: nn.Module) -> None:
    """Undo the root's call only; blocks annotated by hand become roots of their own."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    backward(model, 7)
    model.zero_grad()
    unannotate(model, recurse=False)
    assert fully_shard.state(model) is None and len(_traversal_utils._get_fsdp_states(model)) == 3
    replicate(model)


@pytest.mark.parametrize("annotate", [picked, by_hand, not_below])
def test_a_part_is_undone_and_the_rest_trains_on(annotate: Annotate) -> None:
    run_threads(compare, 2, "mlp", annotate)


@on_ranks(2)
def test_what_cannot_be_undone_is_refused_on_every_rank_and_changes_nothing() -> None:
    model = make_model("mlp")
    fully_shard([model.blocks[0], model.blocks[2]])
    fully_shard(model, policy={MLPBlock})
    replicated = replicate(make_model("mlp"))

    def attempt(module: Any, text: str, error: type[Exception] = UsageError) -> None:
        with pytest.raises(error) as caught:
            unannotate(module)
        said = str(caught.value)
        assert text in said and f"rank {dist.get_rank()}" in said and "fix:" in said, said

    for one in (model, replicated):
        before = dict(one.named_parameters())
        hook = one.inp.register_forward_hook(lambda *_, one=one: attempt(one, "unannotate inside a forward"))
        output = one(*inputs_of(one, 0, dist.get_rank())[0])
        hook.remove()
        output.register_hook(lambda _, one=one: attempt(one, "unannotate inside a backward"))
        output.sum().backward()
        assert all(param is before[fqn] for fqn, param in one.named_parameters())
    with unshard_params(model):
        attempt(model, "cannot be unannotated while unshard_params shows its parameters")
    attempt(model.blocks[1].up, "fix: call unannotate on module 'blocks.1' (MLPBlock) or a module around")
    attempt(model.inp, "fix: call unannotate on module MLP or")
    attempt(model.blocks[0], "unannotate on module 'blocks.0' (MLPBlock) and module 'blocks.2' (MLPBlock) or")
    attempt(nn.Linear(2, 2), "unannotate found no annotated module")
    attempt(3, "unannotate got int", ValueError)
    if dist.get_rank():
        model.inp.weight.grad = None
    weight = "inp.weight [8, 8] torch.float32"
    attempt(
        model, f"different parameters or gradients\n    rank 0: {weight} with a gradient\n    rank 1: inp", DesyncError
    )
    assert type(model).__name__ == "FSDPMLP"
    model.zero_grad()
    backward(model, 1)
    backward(replicated, 1)


@on_ranks(2)
def test_an_error_on_one_rank_is_one_on_every_rank() -> None:
    model = fully_shard(make_model("mlp"), policy={MLPBlock})
    before = full_params(model)
    with pytest.raises(UsageError, match="handle owns parameters inside and outside") as caught:
        # As in a forward that only one rank runs.
        unannotate(model.blocks[0] if dist.get_rank() else model.blocks[0].up)
    assert_equal_params(full_params(model), before, tolerance=0)
    assert "at:  rank 0" in str(caught.value)


class Watching(nn.Linear):
    """Runs a function when it is given a parameter."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "watch" in self.__dict__:
            self.watch()
        super().__setattr__(name, value)


@on_ranks(1)
def test_shards_are_freed_handle_by_handle_and_a_stale_backward_is_an_error() -> None:
    # One rank, since a thread of gloo may hold a tensor a moment longer than its collective takes.
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Watching(8, 8))
    fully_shard(model, policy={nn.Linear})
    loss = model(torch.ones(2, 8)).sum()
    stale = model(torch.ones(2, 8)).sum()
    loss.backward()
    shards = [weakref.ref(handle.buffers[0].shard) for handle in fully_shard.state(model)._handles]
    found: list[list[bool]] = []
    pending = model[0].unshard(async_op=True)
    model[2].__dict__["watch"] = lambda: found.append([shard() is None for shard in shards])
    unannotate(model)
    pending.wait()
    assert found[-1] == [True, True, False]
    assert all(shard() is None for shard in shards)
    with pytest.raises(UsageError, match="before the model's annotation was changed"):
        stale.backward()


@on_ranks(2)
def test_a_stale_optimizer_is_an_error() -> None:
    model = fully_shard(make_model("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, 0)
    unannotate(model)
    with pytest.raises(UsageError, match=r"holds a parameter that no module has.*\n.*'inp.weight'"):
        optimizer.step()


@on_ranks(world_size=[1, 2])
def test_buckets_are_freed_and_the_process_group_is_used_again() -> None:
    model = replicate(make_model("mlp"))
    backward(model, 0)
    backward(model, 0)
    stale = loss_of(model(*inputs_of(model, 1, 0)[0]))
    grads = {fqn: param.grad.clone() for fqn, param in model.named_parameters()}
    buckets = [weakref.ref(bucket.flat) for bucket in replicate.state(model).reducer.buckets]
    groups = len(dist.distributed_c10d._world.pg_map)
    unannotate(model)
    # A thread of gloo may hold a tensor a moment longer than its collective takes.
    assert dist.get_world_size() > 1 or all(bucket() is None for bucket in buckets)
    assert_equal_params({fqn: param.grad for fqn, param in model.named_parameters()}, grads, tolerance=0)
    with pytest.raises(UsageError, match="annotation was removed"):
        stale.backward()
    replicate(model)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    model.zero_grad()
    backward(model, 0)
    found = {fqn: full(param.grad) * 2 for fqn, param in model.named_parameters()}
    assert_equal_params(found, grads, tolerance=1e-5)


@on_ranks(2, annotate=["policy", "replicate"])
def test_a_step_that_an_exception_stopped_does_not_stand_in_the_way(annotate: str) -> None:
    model = make_model("mlp")
    WAYS[annotate](model)
    backward(model, 0)
    hook = model.blocks[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    hook.remove()
    unannotate(model)
    assert is_plain(model, make_model("mlp"))
    assert_equal_params(dict(model.named_parameters()), dict(make_model("mlp").named_parameters()), tolerance=0)
