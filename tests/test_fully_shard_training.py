"""Optimizers, clipping and checkpoints on a sharded model, against one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from composable import ModuleWrapPolicy, fully_shard
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.parity import assert_equal_params, full, full_params, global_inputs, inputs_of
from tests.world import on_ranks, run_threads


def sharded(name: str = "gpt") -> nn.Module:
    return fully_shard(make_model(name), policy=ModuleWrapPolicy(BLOCK_CLASSES))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    args, _ = inputs_of(model, seed, dist.get_rank())
    loss_of(model(*args)).backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_gradients_zeroed_in_place_are_added_to() -> None:
    model, plain = sharded(), make_model("gpt")
    for seed in range(2):
        args, _ = inputs_of(model, seed, dist.get_rank())
        loss_of(model(*args)).backward()
        if seed == 0:
            model.zero_grad(set_to_none=False)
            held = [param.grad for param in model.parameters()]
    assert all(param.grad is grad for param, grad in zip(model.parameters(), held, strict=True))
    loss_of(plain(*global_inputs(model, 1, 2)[0])).backward()
    expected = {fqn: param.grad for fqn, param in plain.named_parameters()}
    assert_equal_params({fqn: full(param.grad) for fqn, param in model.named_parameters()}, expected, tolerance=1e-6)


def save(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = sharded()
    optimizer = adamw(model)
    for seed in range(2):
        train_step(model, optimizer, seed)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
    return full_params(model), full_state(model, optimizer)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    states = get_optimizer_state_dict(model, optimizer)["state"]
    return {f"{fqn}.{key}": full(value) for fqn, state in states.items() for key, value in state.items()}


def load(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = sharded()
    optimizer = adamw(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state, optimizer_state = get_state_dict(model, optimizer)
    loaded = {"model": state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    params, states = full_params(model), full_state(model, optimizer)
    train_step(model, optimizer, 5)
    return params, states


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_checkpoint_loads_at_another_world_size_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    params, states = run_threads(save, 2, str(tmp_path / "checkpoint"))[0]
    for loaded_params, loaded_states in run_threads(load, world_size, str(tmp_path / "checkpoint")):
        assert_equal_params(loaded_params, params, tolerance=0)
        assert_equal_params(loaded_states, states, tolerance=0)


@on_ranks(2)
def test_full_state_dicts_go_out_and_in() -> None:
    model, expected = sharded(), make_model("gpt").state_dict()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert_equal_params(whole, expected, tolerance=0)
    model.load_state_dict({fqn: value + 1 for fqn, value in expected.items()})
    assert all(torch.equal(value, expected[fqn] + 1) for fqn, value in full_params(model).items())
    # Between forward and backward the root is unsharded; its state dict is sharded even then.
    model(*inputs_of(model, 0, dist.get_rank())[0])
    assert {type(value).__name__ for value in model.state_dict().values()} == {"RaggedDTensor"}
