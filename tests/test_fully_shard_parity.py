"""``fully_shard`` against single-process training, over models, ways of annotating and world sizes."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import CustomPolicy, HandleOptions, ModuleWrapPolicy, SizePolicy, fully_shard
from tests.models import BLOCK_CLASSES, MODELS, Conditional, MLPBlock, loss_of, make_model
from tests.parity import (
    LR,
    Run,
    assert_equal_params,
    assert_equal_runs,
    full,
    full_params,
    global_inputs,
    inputs_of,
    train_annotated,
    train_reference,
)
from tests.world import run_ranks, run_threads

WORLD_SIZES = [1, 2, 3, 4]


def by_hand(model: nn.Module) -> None:
    for module in list(model.modules()):
        if type(module) in BLOCK_CLASSES:
            fully_shard(module)
    fully_shard(model)


def by_policy(model: nn.Module) -> None:
    if any(type(module) in BLOCK_CLASSES for module in model.modules()):
        fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES))
    else:
        fully_shard(model)


def whole(model: nn.Module) -> None:
    fully_shard(model)


def every_leaf(model: nn.Module) -> None:
    fully_shard(
        model,
        policy=CustomPolicy(lambda module: not list(module.children()) and bool(list(module.parameters()))),
    )


def kept_unsharded(model: nn.Module) -> None:
    fully_shard(model, policy=SizePolicy(50), reshard_after_forward=False)


def train(name: str, annotate: Callable[[nn.Module], None]) -> Run:
    return train_annotated(name, annotate)


# Tied weights across hand-annotated handles are an error: only a policy sees the whole tree.
# bfloat16 gradients of half a batch each do not add up to those of the whole one.
TOLERANCE = {"mixed_dtypes": 2e-2}
BY_HAND = [name for name in MODELS if name != "tied_across"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_training_by_policy_equals_one_process(name: str, world_size: int) -> None:
    runs = run_threads(train, world_size, name, by_policy)
    assert_equal_runs(runs, train_reference(name, world_size), tolerance=TOLERANCE.get(name, 1e-6))


def by_policy_over(transport: str, model: nn.Module) -> None:
    fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES), options=HandleOptions(transport=transport))


@pytest.mark.parametrize("transport", ["point_to_point", "process_group"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", ["gpt_tied", "mixed_dtypes"])
def test_training_on_real_processes_equals_one_process(name: str, world_size: int, transport: str) -> None:
    runs = run_ranks(train, world_size, name, functools.partial(by_policy_over, transport))
    assert_equal_runs(runs, train_reference(name, world_size), tolerance=TOLERANCE.get(name, 1e-6))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", BY_HAND)
def test_training_by_hand_equals_one_process(name: str, world_size: int) -> None:
    runs = run_threads(train, world_size, name, by_hand)
    assert_equal_runs(runs, train_reference(name, world_size), tolerance=TOLERANCE.get(name, 1e-6))


@pytest.mark.parametrize("annotate", [whole, every_leaf, kept_unsharded])
@pytest.mark.parametrize("name", ["mlp", "gpt", "gpt_tied", "called_twice"])
def test_training_in_other_groupings_equals_one_process(name: str, annotate: Callable[[nn.Module], None]) -> None:
    assert_equal_runs(run_threads(train, 3, name, annotate), train_reference(name, 3))


def accumulate(synced: bool, forwards_first: bool) -> Run:
    """Three microbatches a step; the reference takes them as one loss."""
    model = make_model("mlp")
    by_hand(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(2):
        outputs = []
        for micro in range(3):
            if not synced:
                model.set_requires_gradient_sync(micro == 2)
            args, kwargs = inputs_of(model, 10 * step + micro, dist.get_rank())
            loss = loss_of(model(*args, **kwargs))
            if forwards_first:
                outputs.append(loss)
            else:
                loss.backward()
            losses.append(loss.detach())
        if outputs:
            torch.stack(outputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Run([], full_params(model))


def accumulate_reference(world_size: int) -> Run:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(2):
        for micro in range(3):
            args, kwargs = global_inputs(model, 10 * step + micro, world_size)
            loss_of(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Run([], {fqn: param.detach().clone() for fqn, param in model.named_parameters()})


@pytest.mark.parametrize("world_size", [1, 2, 3])
# With all forwards first there is one backward, and so none without synchronisation.
@pytest.mark.parametrize(("synced", "forwards_first"), [(False, False), (True, False), (True, True)])
def test_accumulated_gradients_equal_one_process(synced: bool, forwards_first: bool, world_size: int) -> None:
    runs = run_threads(accumulate, world_size, synced, forwards_first)
    assert_equal_runs(runs, accumulate_reference(world_size))


def train_branches(branches: list[str]) -> dict[str, torch.Tensor]:
    """Each rank takes its own branch of one block; the others' parameters get no gradient there."""
    model = make_model("conditional")
    by_policy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(3):
        (x,), _ = inputs_of(model, step, dist.get_rank())
        loss_of(model(x, branches[(dist.get_rank() + step) % len(branches)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_params(model)


@pytest.mark.parametrize("branches", [["left", "right"], ["left", "none"], ["none"], ["left", "right", "none"]])
def test_parameters_unused_on_some_ranks_equal_one_process(branches: list[str]) -> None:
    world_size = 3
    model = make_model("conditional")
    assert isinstance(model, Conditional)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(3):
        losses = []
        for rank in range(world_size):
            (x,), _ = inputs_of(model, step, rank)
            losses.append(loss_of(model(x, branches[(rank + step) % len(branches)])))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {fqn: param.detach() for fqn, param in model.named_parameters()}
    for rank, params in enumerate(run_threads(train_branches, world_size, branches)):
        assert_equal_params(params, expected, tolerance=1e-6, where=f"rank {rank}")


def two_backwards(interleaved: bool) -> dict[str, torch.Tensor]:
    model = make_model("mlp")
    by_hand(model)
    rank = dist.get_rank()
    if interleaved:
        # 1F1B: forward 0, forward 1, backward 0, forward 2, backward 1, backward 2.
        losses = [loss_of(model(*inputs_of(model, step, rank)[0])) for step in range(2)]
        losses[0].backward()
        losses.append(loss_of(model(*inputs_of(model, 2, rank)[0])))
        losses[1].backward()
        losses[2].backward()
    else:
        loss = loss_of(model(*inputs_of(model, 0, rank)[0]))
        loss.backward(retain_graph=True)
        loss.backward()
    return {fqn: full(param.grad) for fqn, param in model.named_parameters()}


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_several_backwards_add_up(interleaved: bool) -> None:
    world_size = 2
    model = make_model("mlp")
    for step in range(3) if interleaved else (0, 0):
        args, _ = global_inputs(model, step, world_size)
        loss_of(model(*args)).backward()
    expected = {fqn: param.grad for fqn, param in model.named_parameters()}
    for grads in run_threads(two_backwards, world_size, interleaved):
        assert_equal_params(grads, expected, tolerance=1e-6)


def train_with_submodule_use(first: bool) -> dict[str, torch.Tensor]:
    """A block is called on its own, before the root has ever run or after."""
    model = make_model("mlp")
    by_hand(model)
    rank = dist.get_rank()

    def use_block() -> None:
        loss_of(model.blocks[1](*inputs_of(model, 7, rank)[0])).backward()

    if first:
        use_block()
    loss_of(model(*inputs_of(model, 0, rank)[0])).backward()
    if not first:
        use_block()
    return {fqn: full(param.grad) for fqn, param in model.named_parameters()}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_called_on_its_own_is_reduced_as_well(first: bool, world_size: int) -> None:
    model = make_model("mlp")
    loss_of(model(*global_inputs(model, 0, world_size)[0])).backward()
    loss_of(model.blocks[1](*global_inputs(model, 7, world_size)[0])).backward()
    expected = {fqn: param.grad for fqn, param in model.named_parameters()}
    for grads in run_threads(train_with_submodule_use, world_size, first):
        assert_equal_params(grads, expected, tolerance=1e-6)


def checkpointed(use_reentrant: bool, inside: bool) -> dict[str, torch.Tensor]:
    from torch.utils.checkpoint import checkpoint

    model = make_model("mlp")
    for block in model.blocks:
        assert isinstance(block, MLPBlock)
        if inside:
            block.up.forward = _checkpointed_forward(block.up.forward, use_reentrant)
    by_hand(model)
    x = inputs_of(model, 0, dist.get_rank())[0][0].requires_grad_()
    if inside:
        y = model(x)
    else:
        y = checkpoint(model.blocks[0], x, use_reentrant=use_reentrant)
        y = checkpoint(lambda h: model.blocks[2](model.blocks[1](h)), y, use_reentrant=use_reentrant)
    loss_of(y).backward()
    return {fqn: full(param.grad) for fqn, param in model.named_parameters() if param.grad is not None}


def _checkpointed_forward(forward: Callable[..., torch.Tensor], use_reentrant: bool) -> Callable[..., torch.Tensor]:
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(forward, x, use_reentrant=use_reentrant)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_fsdp_submodules_use_reentrant(use_reentrant: bool, inside: bool) -> None:
    """Checkpoints inside of fully sharded modules, and around one or several of them, give one process's gradients."""
    world_size = 2
    model = make_model("mlp")
    (x,), _ = global_inputs(model, 0, world_size)
    if inside:
        y = model(x)
    else:
        y = model.blocks[2](model.blocks[1](model.blocks[0](x)))
    loss_of(y).backward()
    expected = {fqn: param.grad for fqn, param in model.named_parameters() if param.grad is not None}
    for grads in run_threads(checkpointed, world_size, use_reentrant, inside):
        assert_equal_params(grads, expected, tolerance=1e-6)
