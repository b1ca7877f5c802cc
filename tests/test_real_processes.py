"""Both annotations on real processes against single-process training, and checkpoints around sharded modules."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable import HandleOptions, ModuleWrapPolicy, fully_shard, replicate
from tests.models import BLOCK_CLASSES, loss_of
from tests.pairwise import pairs_of
from tests.parity import inputs_of
from tests.programs import Twins, compare
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
    run_ranks(compare, world_size, name, functools.partial(annotate, way), TOLERANCE.get(name, 1e-6))


@on_ranks(2, use_reentrant=[True, False], inside=[True, False])
def test_checkpoint_fsdp_submodules_use_reentrant(use_reentrant: bool, inside: bool) -> None:
    """Checkpoints inside of fully sharded modules, and around one or several of them, give one process's gradients."""
    again = functools.partial(checkpoint, use_reentrant=use_reentrant)

    def annotate_all(model: nn.Module) -> None:
        for block in model.blocks if inside else ():
            block.up.forward = functools.partial(again, block.up.forward)
        by_hand(model)

    def loss(model: nn.Module, number: int, rank: int) -> torch.Tensor:
        x = inputs_of(model, 0, rank)[0][0].requires_grad_()
        first, second, third = model.blocks
        return loss_of(model(x) if inside else again(lambda h: third(second(h)), again(first, x)))

    twins = Twins("mlp", annotate_all, loss=loss)
    twins.backward()
    twins.check_gradients()
