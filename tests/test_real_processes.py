"""Both annotations on real processes against single-process training, and checkpoints around sharded modules."""

import functools

import pytest
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable import HandleOptions, ModuleWrapPolicy, fully_shard, replicate
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.pairwise import pairs_of
from tests.parity import (
    assert_equal_params,
    assert_equal_runs,
    full,
    global_inputs,
    inputs_of,
    train_annotated,
    train_reference,
)
from tests.world import on_ranks, run_ranks


def by_hand(model: nn.Module) -> None:
    for module in list(model.modules()):
        if type(module) in BLOCK_CLASSES:
            fully_shard(module)
    fully_shard(model)


# bfloat16 gradients of half a batch each do not add up to those of the whole one.
TOLERANCE = {"mixed_dtypes": 2e-2}


def annotate(way: str, model: nn.Module) -> None:
    if way == "replicate":
        replicate(model)
    else:
        fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES), options=HandleOptions(transport=way))


@pytest.mark.parametrize(
    *pairs_of(name=["gpt_tied", "mixed_dtypes"], world_size=[2, 3], way=["shared_memory", "process_group", "replicate"])
)
def test_training_on_real_processes_equals_one_process(name: str, world_size: int, way: str) -> None:
    runs = run_ranks(train_annotated, world_size, name, functools.partial(annotate, way))
    assert_equal_runs(runs, train_reference(name, world_size), tolerance=TOLERANCE.get(name, 1e-6))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
@on_ranks(2)
def test_checkpoint_fsdp_submodules_use_reentrant(use_reentrant: bool, inside: bool) -> None:
    """Checkpoints inside of fully sharded modules, and around one or several of them, give one process's gradients."""
    again = functools.partial(checkpoint, use_reentrant=use_reentrant)
    model, plain = make_model("mlp"), make_model("mlp")
    for block in model.blocks if inside else ():
        block.up.forward = functools.partial(again, block.up.forward)
    by_hand(model)
    x = inputs_of(model, 0, dist.get_rank())[0][0].requires_grad_()
    (whole,), _ = global_inputs(plain, 0, 2)
    if inside:
        y, expected = model(x), plain(whole)
    else:
        y = again(lambda h: model.blocks[2](model.blocks[1](h)), again(model.blocks[0], x))
        expected = plain.blocks[2](plain.blocks[1](plain.blocks[0](whole)))
    loss_of(y).backward()
    loss_of(expected).backward()
    found, grads = (
        {fqn: full(param.grad) for fqn, param in one.named_parameters() if param.grad is not None}
        for one in (model, plain)
    )
    assert_equal_params(found, grads, tolerance=1e-6)
