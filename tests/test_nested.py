"""``replicate`` inside ``fully_shard`` and the reverse, trained against one process."""

from collections.abc import Callable

import pytest
from torch import nn

from composable import ConfigError, fully_shard, replicate
from tests.models import MLPBlock, make_model
from tests.parity import assert_equal_runs, train_annotated, train_reference
from tests.world import run_threads


def replicated_block(model: nn.Module) -> None:
    replicate(model.blocks[1])
    fully_shard(model, policy={MLPBlock})


def replicated_block_by_hand(model: nn.Module) -> None:
    fully_shard(model.blocks[0])
    replicate(model.blocks[1])
    fully_shard(model.blocks[2])
    fully_shard(model)


def sharded_inside_replicated(model: nn.Module) -> None:
    fully_shard(model.blocks[1].up)
    replicate(model.blocks[1])
    fully_shard(model, policy={MLPBlock})
    root = fully_shard.state(model)
    # The inner annotation is a root of its own: the outer one does not see it.
    assert all("blocks.1" not in fqn for handle in root.plan.handles for fqn in handle.module_fqns)


def sharded_inside_replicated_root(model: nn.Module) -> None:
    fully_shard(model.blocks[0])
    replicate(model)


WAYS = [replicated_block, replicated_block_by_hand, sharded_inside_replicated, sharded_inside_replicated_root]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("annotate", WAYS)
def test_nested_annotations_equal_one_process(annotate: Callable[[nn.Module], None], world_size: int) -> None:
    assert_equal_runs(run_threads(train_annotated, world_size, "mlp", annotate), train_reference("mlp", world_size))


def incompatible(first: str) -> str:
    model = make_model("mlp")
    calls = {"fully_shard": fully_shard, "replicate": replicate}
    second = ({"fully_shard", "replicate"} - {first}).pop()
    calls[first](model)
    with pytest.raises(ConfigError) as caught:
        calls[second](model)
    return str(caught.value)


@pytest.mark.parametrize("first", ["fully_shard", "replicate"])
def test_both_on_one_module_is_an_error(first: str) -> None:
    for rank, text in enumerate(run_threads(incompatible, 2, first)):
        assert "cannot both be on one module" in text and f"rank {rank}" in text and "fix:" in text
