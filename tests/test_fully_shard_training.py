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
from tests.world import run_threads

OPTIMIZERS = {
    "sgd": lambda params, **kind: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, **kind),
    "adam": lambda params, **kind: torch.optim.Adam(params, lr=1e-2, eps=1e-3, **kind),
    "adamw": lambda params, **kind: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1, **kind),
}


def sharded(name: str = "gpt") -> nn.Module:
    return fully_shard(make_model(name), policy=ModuleWrapPolicy(BLOCK_CLASSES))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, max_norm: float | None = None
) -> float:
    """One step on this rank's inputs, or in one process on the global batch of two ranks."""
    is_sharded = fully_shard.state(model) is not None
    args, _ = inputs_of(model, seed, dist.get_rank()) if is_sharded else global_inputs(model, seed, 2)
    loss_of(model(*args)).backward()
    norm = 0.0
    if max_norm is not None:
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        norm = full(total).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def accumulate_in_place() -> dict[str, torch.Tensor]:
    """Gradients zeroed in place are added to, not replaced."""
    model = sharded()
    for seed in range(2):
        args, _ = inputs_of(model, seed, dist.get_rank())
        loss_of(model(*args)).backward()
        if seed == 0:
            model.zero_grad(set_to_none=False)
            held = [param.grad for param in model.parameters()]
    assert all(param.grad is grad for param, grad in zip(model.parameters(), held, strict=True))
    return {fqn: full(param.grad) for fqn, param in model.named_parameters()}


def test_gradients_zeroed_in_place_are_added_to() -> None:
    model = make_model("gpt")
    args, _ = global_inputs(model, 1, 2)
    loss_of(model(*args)).backward()
    expected = {fqn: param.grad for fqn, param in model.named_parameters()}
    for grads in run_threads(accumulate_in_place, 2):
        assert_equal_params(grads, expected, tolerance=1e-6)


def save(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = sharded()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
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
    optimizer = OPTIMIZERS["adamw"](model.parameters())
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


def full_and_back() -> tuple[dict[str, torch.Tensor], list[str]]:
    model = sharded()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    plain = {fqn: value + 1 for fqn, value in make_model("gpt").state_dict().items()}
    model.load_state_dict(plain)
    after = full_params(model)
    assert all(torch.equal(after[fqn], plain[fqn]) for fqn in after)
    # Between forward and backward the root is unsharded; its state dict is sharded even then.
    args, _ = inputs_of(model, 0, dist.get_rank())
    model(*args)
    return whole, sorted({type(value).__name__ for value in model.state_dict().values()})


def test_full_state_dicts_go_out_and_in() -> None:
    expected = make_model("gpt").state_dict()
    whole, kinds = run_threads(full_and_back, 2)[0]
    assert_equal_params(whole, expected, tolerance=0)
    assert kinds == ["RaggedDTensor"]
