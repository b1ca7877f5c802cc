"""State that an optimizer keeps packed, in 4, 8 or 16 bits, is after any load what it was when it was saved."""

import random
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from composable import fully_shard, load_checkpoint, save_checkpoint
from composable.dtensor.packed import values_of, write_values
from tests.models import seeded
from tests.parity import full
from tests.subclasses import MeanSquares
from tests.world import run_threads

State = dict[str, torch.Tensor]
KINDS = ("MeanSquares", "AdamW4bit", "AdamW8bit", "AdamWFp8")
WAYS = ("dcp.load", "dcp.load of torch's state dict", "set_optimizer_state_dict", "load_checkpoint")


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "MeanSquares":
        return MeanSquares(model.parameters(), {"lr": 0.1})
    made: torch.optim.Optimizer = getattr(import_module("torchao.optim"), kind)(model.parameters(), lr=0.01)
    return made


def make(kind: str, policy: set[type] | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(lambda: nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 256, bias=False)), 0)
    fully_shard(model, policy=policy)
    return model, make_optimizer(kind, model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, int]:
    """Return the whole values, and how many pieces of them are packed on this rank."""
    found, packed = {}, 0
    for fqn, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor):
                found[f"{fqn} {key}"] = full(value).clone()
                local = value._local_tensor if isinstance(value, DTensor) else value
                packed += hasattr(type(local), "__tensor_flatten__")
    return found, packed


def save(kind: str, way: str, folder: str, policy: set[type] | None) -> tuple[State, int]:
    model, optimizer = make(kind, policy)
    for seed in range(2):
        step(model, optimizer, seed)
    if way == "load_checkpoint":
        save_checkpoint(folder, 2, model, optimizer)
    elif way == "dcp.load":
        state_dict_saver.save({"state": optimizer.state_dict()["state"]}, checkpoint_id=folder)
    else:
        state_dict_saver.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
    return state_of(model, optimizer)


def load(kind: str, way: str, folder: str, policy: set[type] | None) -> tuple[State, int]:
    model, optimizer = make(kind, policy)
    step(model, optimizer, 7)
    if way == "load_checkpoint":
        load_checkpoint(folder, model, optimizer)
    elif way == "dcp.load":
        state_dict_loader.load({"state": optimizer.state_dict()["state"]}, checkpoint_id=folder)
    elif way == "set_optimizer_state_dict":
        other, its = make(kind, policy)
        step(other, its, 8)
        torch_dict: Any = get_optimizer_state_dict(other, its)
        state_dict_loader.load(torch_dict, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, torch_dict)
    else:
        state_dict_loader.load(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
    return state_of(model, optimizer)


def eagerly(fn: Callable[..., Any], ranks: int, *args: object) -> Any:
    """Run without compilation, and without other packages' warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_threads(quietly, ranks, fn, *args)


def quietly(fn: Callable[..., Any], *args: object) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):
            return fn(*args)


def skip_without(kind: str) -> None:
    if kind != "MeanSquares":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("torchao.optim")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_packed_state_comes_back_as_it_was_saved(kind: str, way: str, tmp_path: Path) -> None:
    skip_without(kind)
    saved, packed = eagerly(save, 2, kind, way, str(tmp_path), {nn.Linear})[0]
    found, packed_again = eagerly(load, 2, kind, way, str(tmp_path), {nn.Linear})[0]
    assert packed == packed_again > 0
    torch.testing.assert_close(found, saved, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [("4bit", True), ("4bit", False), ("8bit", True), ("8bit", False), ("fp8", None)])
def test_any_values_that_were_unpacked_are_packed_as_they_were(kind: tuple[str, bool | None]) -> None:
    skip_without("AdamW8bit")
    name, signed = kind
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(import_module(f"torchao.optim.subclass_{name}"), f"OptimState{name.capitalize()}")
    draw = torch.Generator().manual_seed(0)
    for size in range(60):
        values = torch.randn(2048, generator=draw) * 10.0 ** (size % 12 - 8)
        local = made.zeros((2048,), *([] if signed is None else [signed]))
        local.copy_(values.abs() if signed is False else values)
        saved = values_of(local).clone()
        write_values(local, saved)
        assert values_of(local).equal(saved), size


# Of the largest magnitude: codes of another block, cut elsewhere, stand for values that are so far apart.
ROUNDED = {"MeanSquares": 0, "AdamW4bit": 0.13, "AdamW8bit": 0.01, "AdamWFp8": 0.07}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_packed_state_is_read_in_parts_into_other_cuts(kind: str, way: str, tmp_path: Path) -> None:
    skip_without(kind)
    draw = random.Random(kind + way)
    saved, _ = eagerly(save, 2, kind, way, str(tmp_path), draw.choice([None, {nn.Linear}]))[0]
    for ranks in (1, draw.choice([2, 3])):
        found, _ = eagerly(load, ranks, kind, way, str(tmp_path), draw.choice([None, {nn.Linear}]))[0]
        for name, value in saved.items():
            atol = ROUNDED[kind] * value.abs().max().item()
            torch.testing.assert_close(found[name], value, rtol=0, atol=atol)
