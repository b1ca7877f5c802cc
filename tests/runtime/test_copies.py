"""``copy.deepcopy`` of annotated models: independent, annotated, trained like two plain models."""

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import _traversal_utils
from composable import (
    FSDPModule,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    RaggedDTensor,
    UsageError,
    as_ddp,
    fully_shard,
    no_sync,
    reduce_gradients,
    register_comm_hook,
    replicate,
    unshard_params,
)
from composable.annotation import handle_of_module
from composable.engine import handle_of
from tests.models import BLOCK_CLASSES, MLPBlock, loss_of, make_model
from tests.parity import assert_equal_params, full, full_params, global_inputs, inputs_of
from tests.world import on_ranks, run_threads

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: None,
    "whole": fully_shard,
    "policy": lambda model: fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES)),
    "by_hand": lambda model: [fully_shard(block) for block in (*model.blocks, model)],
    "list": lambda model: (fully_shard([model.inp, model.out]), fully_shard(model, policy={MLPBlock})),
    "replicate": replicate,
    "nested": lambda model: (replicate(model.blocks[1]), fully_shard(model, policy={MLPBlock})),
    "nested_in_replicate": lambda model: (fully_shard(model.blocks[0]), replicate(model)),
}
CASES = [
    *(("policy", name) for name in ("tied_across", "frozen_mixed", "mixed_dtypes")),
    ("whole", "with_buffers"),
    *((way, "mlp") for way in ("by_hand", "list", "nested", "nested_in_replicate")),
    *(("replicate", name) for name in ("gpt_tied", "with_buffers")),
]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, world_size: int) -> None:
    """One step on this rank's inputs, or on the global batch in one process."""
    inputs = (
        inputs_of(model, seed, dist.get_rank()) if dist.is_initialized() else global_inputs(model, seed, world_size)
    )
    loss_of(model(*inputs[0], **inputs[1])).backward()
    optimizer.step()
    optimizer.zero_grad()


def gradients_in_copies(way: str) -> list[dict[str, torch.Tensor]]:
    """Return gradients: those that a copy has, and those that one adds up in a backward of its own."""
    model = make_model("mlp")
    WAYS[way](model)

    def backward(one: nn.Module, seed: int) -> None:
        args, _ = inputs_of(one, seed, dist.get_rank())
        loss_of(one(*args)).backward()

    backward(model, 0)
    first = copy.deepcopy(model)
    # An optimizer that comes first, and a model that is unsharded, go the same way.
    optimizer = torch.optim.SGD(model.parameters())
    model(*inputs_of(model, 0, 0)[0])
    copied_optimizer, last = copy.deepcopy((optimizer, model))
    assert {*copied_optimizer.param_groups[0]["params"]} == {*last.parameters()}
    backward(last, 1)
    model.zero_grad()
    return [{fqn: full(param.grad) for fqn, param in twin.named_parameters()} for twin in (first, last)]


@pytest.mark.parametrize("way", ["by_hand", "replicate", "nested"])
def test_copies_have_the_gradients(way: str) -> None:
    model = make_model("mlp")
    expected = []
    for seed in range(2):
        loss_of(model(*global_inputs(model, seed, 2)[0])).backward()
        expected.append({fqn: param.grad.clone() for fqn, param in model.named_parameters()})
    for found in run_threads(gradients_in_copies, 2, way):
        for one, right in zip(found, expected, strict=True):
            assert_equal_params(one, right, tolerance=1e-6)


@on_ranks(2)
def test_a_copy_shares_the_mesh_and_nothing_else() -> None:
    model = make_model("mlp")
    fully_shard(model, policy={MLPBlock})
    model.inp.register_forward_hook(lambda module, args, output: calls.append(module))
    model.set_modules_to_forward_prefetch([model.blocks[2]])
    next(iter(model.blocks[0].parameters())).tag = ["mark"]
    calls: list[nn.Module] = []
    args, _ = inputs_of(model, 0, dist.get_rank())
    model(*args)  # The root stays unsharded: no backward follows.
    holder = nn.ModuleDict({"alias": model.blocks[0].up, "model": model})
    twin = copy.deepcopy(holder)["model"]
    state, own = fully_shard.state(model), fully_shard.state(twin)
    assert type(twin) is type(model) and isinstance(twin.blocks[0], FSDPModule)
    assert own is not state and own.mesh is state.mesh and own.plan == state.plan and own.root is None
    handles = _traversal_utils._get_fsdp_handles(twin)
    assert [find() for find in handles[0].settings.forward_prefetch] == [own._module_to_handle[twin.blocks[2]]]
    for param in twin.parameters():
        assert isinstance(param, RaggedDTensor) and isinstance(param, nn.Parameter)
    mark = next(iter(twin.blocks[0].parameters())).tag
    assert mark == ["mark"] and mark is not next(iter(model.blocks[0].parameters())).tag
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    calls.clear()
    twin(*args)
    assert calls == [twin.inp]
    loss_of(model(*args)).backward()
    again = copy.deepcopy(twin)
    loss_of(again(*args)).backward()
    assert all(param.grad is None for param in twin.parameters())


@on_ranks(2)
def test_a_part_of_a_model_is_not_copied_alone() -> None:
    model = fully_shard(make_model("mlp"), policy={MLPBlock})
    pair = make_model("mlp")
    fully_shard([pair.inp, pair.out])
    twins = copy.deepcopy([pair.inp, pair.out])
    assert fully_shard.state(twins[0]).modules == tuple(twins)
    copy.deepcopy(pair)
    replicated = make_model("mlp")
    replicate([replicated.inp, replicated.out])
    copy.deepcopy(replicated)
    # An optimizer is no part of a model.
    copy.deepcopy({"optimizer": torch.optim.SGD(model.parameters()), "other": nn.Linear(2, 2)})
    other = fully_shard(make_model("mlp"))
    both = "module 'inp' (Linear) and module 'out' (Linear)"
    for part, text in (
        (model.blocks[0], "fix: deep-copy the whole model, module MLP"),
        (other.blocks[0], "handle owns parameters inside and outside"),
        (pair.inp, f"fix: deep-copy the whole model, {both}"),
        (model.out, "module MLP"),
        (replicated.out, f"fix: deep-copy {both}"),
    ):
        with pytest.raises(UsageError) as caught:
            copy.deepcopy(part)
        assert text in str(caught.value)


def average(way: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[str]]:
    model = make_model("gpt")
    WAYS[way](model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        step(model, optimizer, seed, 2)
        averaged.update_parameters(model)
    with torch.no_grad():
        output = averaged(*inputs_of(model, 0, 0)[0])
    return full_params(averaged), output, list(averaged.state_dict())


def test_averaged_models_equal_one_process() -> None:
    params, output, keys = average("plain")
    for way in ("policy", "replicate"):
        for found, found_output, found_keys in run_threads(average, 2, way):
            assert_equal_params(found, params, tolerance=1e-6)
            torch.testing.assert_close(found_output, output)
            assert found_keys == keys


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> "CopiesItself":
        return CopiesItself(2, 2)


def stopped(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError, match=rf"{text}(.|\n)*rank {dist.get_rank()}(.|\n)*fix:"):
        call()


RUNNING = {"step": "inside of a step", "waiting": "while its gradients wait", "hook": "with a communication hook"}


@on_ranks(2, way=["policy", "by_hand", "replicate", "nested", "nested_in_replicate"])
def test_running_state_is_not_copied(way: str) -> None:
    """Refuse a copy in a forward, a backward or ``no_sync``, of what waits, and of a hook; and copy right after."""
    model = make_model("mlp")
    WAYS[way](model)
    args, _ = inputs_of(model, 0, dist.get_rank())

    def in_hook(*_: Any) -> None:
        stopped(lambda: copy.deepcopy(model), RUNNING["step"])
        seen.append(1)

    seen: list[int] = []
    handle = model.blocks[0].register_forward_hook(in_hook)
    output = model(*args)
    handle.remove()
    output.register_hook(in_hook)
    loss_of(output).backward()
    assert len(seen) == 2
    with no_sync(model):
        stopped(lambda: copy.deepcopy(model), RUNNING["waiting"])
        loss_of(model(*args)).backward()
    stopped(lambda: copy.deepcopy(model), RUNNING["waiting"])
    reduce_gradients(model)
    copy.deepcopy(model)
    with no_sync(model):
        loss_of(model(*args)).backward()
    model.zero_grad()
    hook = register_comm_hook(model, dist.group.WORLD, lambda state, *grads: None)
    stopped(lambda: copy.deepcopy(model), RUNNING["hook"])
    hook.remove()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        loss_of(one(*args)).backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(full(param.grad), full(other.grad))


def copy_while_shown() -> None:
    shown = fully_shard(make_model("mlp"))
    with unshard_params(shown, rank0_only=True):
        copy.deepcopy(shown)


@on_ranks(2)
def test_what_cannot_be_copied_is_refused() -> None:
    own = fully_shard(nn.Sequential(CopiesItself(2, 2)), policy={CopiesItself})
    stopped(lambda: copy.deepcopy(own), "has a __deepcopy__ of its own")
    stopped(copy_while_shown, "while unshard_params shows its parameters")


class Boxed(nn.Module):
    """Holds a module itself and inside of another one, which runs it; ``is_first``: before that one."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        inside = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if is_first:
            self.inside = inside
        self.box = nn.Sequential(inside, nn.Linear(2, 2))
        self.again = inside
        self.out = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.box(x))


@on_ranks(2, outer=[fully_shard, replicate], is_first=[True, False])
def test_a_root_inside_of_a_replicated_module_is_copied_once(outer: Callable[..., Any], *, is_first: bool) -> None:
    model = Boxed(is_first=is_first)
    fully_shard(model.again[0])
    replicate(model.again)
    fully_shard(model.box)
    outer(model)
    for one in (model, copy.deepcopy(model)):
        gc.collect()
        handles = {handle_of_module(module) for module in one.modules()}
        assert {handle_of(param) for param in one.parameters() if isinstance(param, RaggedDTensor)} == handles - {None}
        one(torch.ones(1, 2)).sum().backward()


@on_ranks(2)
def test_copies_of_modules_that_share_buckets_are_of_their_classes() -> None:
    model = make_model("mlp")
    replicate([model.inp, model.out], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    twin = copy.deepcopy(model)
    assert [type(twin.inp), type(twin.out)] == [type(model.inp), type(model.out)]


FROZEN_SINCE: dict[str, dict[str, Any]] = {
    "unused": {"find_unused_parameters": True},
    "casts": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16), "find_unused_parameters": True},
    "skips": {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, skipped_module_classes={nn.Linear}),
        "find_unused_parameters": True,
    },
    "as_ddp": {"find_unused_parameters": True},
}


@on_ranks(2, way=FROZEN_SINCE)
def test_a_copy_of_a_replicated_model_with_parameters_frozen_since_trains(way: str) -> None:
    """The right gradients are those of the original, whose deep copy has none for what is frozen."""
    draw = random.Random(way)
    model = replicate(make_model("mlp"), **FROZEN_SINCE[way])
    view = as_ddp(model) if way == "as_ddp" else None
    for number in range(3):
        for param in model.parameters():
            param.requires_grad_(draw.random() < 0.7)
        next(model.parameters()).requires_grad_(True)
        twin = copy.deepcopy(model)
        assert view is None or as_ddp(twin) is not view
        args, _ = inputs_of(model, number, dist.get_rank())
        for one in (model, twin):
            loss_of(one(*args)).backward()
        for param, copied in zip(model.parameters(), twin.parameters(), strict=True):
            assert copied.requires_grad is param.requires_grad
            assert (copied.grad is None) is (param.grad is None)
            assert param.grad is None or torch.equal(copied.grad, param.grad)
        model.zero_grad()


@on_ranks(2)
def test_frozen_parameters_of_a_copy_have_names_that_do_not_depend_on_the_original() -> None:
    """Let one rank drop the original and the other one keep it: what the ranks compare is alike."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    model[0][0].bias.requires_grad_(False)
    fully_shard(model, policy={nn.Linear})
    model(torch.ones(1, 4)).sum().backward()
    twin = copy.deepcopy(model)
    if dist.get_rank():
        del model
    twin(torch.ones(1, 4)).sum().backward()
    assert twin[0][0].bias.grad is None and twin[1].bias.grad is not None
