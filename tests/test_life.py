"""One model through everything that keeps, moves or shows its state, beside a plain one in one process."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    RaggedDTensor,
    SizePolicy,
    accelerate_optimizer,
    fully_shard,
    load_checkpoint,
    rebind_optimizer,
    save_checkpoint,
    unannotate,
    unshard_params,
)
from tests.models import Block, loss_of, make_model
from tests.parity import global_inputs, inputs_of
from tests.world import run_threads

STEPS = 6


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("head.weight").mul_(0.5)


def reference(world_size: int) -> dict[str, torch.Tensor]:
    """Return the parameters after the same life in one process."""
    model = make_model("gpt")
    optimizer = sgd(model)
    for step in range(STEPS):
        args, kwargs = global_inputs(model, step, world_size)
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            halve(model)
    return {fqn: param.detach() for fqn, param in model.named_parameters()}


def step_on_share(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    args, kwargs = inputs_of(model, step, dist.get_rank())
    loss_of(model(*args, **kwargs)).backward()
    optimizer.step()
    optimizer.zero_grad()


def step_on_all(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    args, kwargs = global_inputs(model, step, dist.get_world_size())
    loss_of(model(*args, **kwargs)).backward()
    optimizer.step()
    optimizer.zero_grad()


def live(folder: str, flat: bool, expected: dict[str, torch.Tensor]) -> None:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = make_model("gpt")
    fully_shard(model, policy={Block}, sync_module_states=True)
    optimizer = accelerate_optimizer(sgd(model), model)
    for step in (0, 1):
        step_on_share(model, optimizer, step)
    with unshard_params(model, rank0_only=flat):
        if not isinstance(model.get_parameter("head.weight"), RaggedDTensor):
            halve(model)

    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    save_checkpoint(folder, 2, model, optimizer, asynchronous=flat).wait()
    step_on_share(model, optimizer, 4)  # away from the path
    load_checkpoint(folder, model, optimizer)
    for step in (2, 3):
        step_on_share(model, optimizer, step)
        step_on_share(twin, twin_optimizer, step)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own.to_local(), other.to_local())  # type: ignore[attr-defined]  # ragged

    rebind_optimizer(optimizer, unannotate(model))
    step_on_all(model, optimizer, 4)
    rebind_optimizer(optimizer, fully_shard(model, policy=SizePolicy(100)))
    step_on_share(model, optimizer, 5)
    for fqn, param in model.named_parameters():
        assert isinstance(param, RaggedDTensor)
        torch.testing.assert_close(param.full_tensor(), expected[fqn], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("world_size", "flat"), [(1, True), (2, False), (3, True)])
def test_nothing_is_lost_on_the_way(world_size: int, flat: bool, tmp_path: Path) -> None:
    run_threads(live, world_size, str(tmp_path), flat, reference(world_size))
