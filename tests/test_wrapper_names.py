"""Wrappers of torch around modules add nothing to the names in plans, files and messages."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composable import ConfigError, UsageError, full_state_dict, fully_shard, iter_full_params, plan, save_safetensors
from tests.models import BATCH, DIM, make_model, random_input
from tests.world import on_ranks


@on_ranks(2, order=["before", "after"])
def test_wrappers_of_torch_add_nothing_to_names(order: str) -> None:
    model = make_model("mlp")
    blocks = list(model.blocks)
    shown = {}

    def annotate() -> None:
        for block in blocks:
            fully_shard(block)
        fully_shard(model)

    if order == "before":
        annotate()
    for index, block in enumerate(blocks):
        model.blocks[index] = checkpoint_wrapper(checkpoint_wrapper(block))
    if order == "after":
        shown["plan"] = str(plan(model, world_size=2, policy={nn.Linear}))
        annotate()
    shown["state_dict"] = str(list(model.state_dict()))
    shown["full_state_dict"] = str(list(full_state_dict(model)))
    shown["iter_full_params"] = str([fqn for fqn, _ in iter_full_params(model)])
    shown["state"] = str(fully_shard.state(model).plan)
    with tempfile.TemporaryDirectory() as folder:
        save_safetensors(model, f"{folder}/weights.safetensors")
        if dist.get_rank() == 0:
            shown["safetensors"] = str(Path(f"{folder}/weights.safetensors").read_bytes())
    for name, call in {
        "twice": lambda: fully_shard(blocks[0]),
        "load": lambda: model.load_state_dict({"blocks.0.up.weight": torch.ones(3)}, strict=False),
        "outside": lambda: blocks[0].up.forward(random_input(0, BATCH, DIM)),
        "policy": lambda: plan(
            nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2)))), world_size=2, policy=lambda _: 3
        ),
    }.items():
        with pytest.raises((ConfigError, UsageError, RuntimeError)) as caught:
            call()
        shown[name] = str(caught.value)
    rank = dist.get_rank()
    assert [name for name, text in shown.items() if "_checkpoint_wrapped_module" in text] == []
    for name in ("state_dict", "iter_full_params", "load", *["full_state_dict"] * (rank == 0)):
        assert "blocks.0.up.weight" in shown[name]
    assert "up" in shown["outside"]


def test_a_plan_aligns_parameters_below_wrappers_by_either_name() -> None:
    model = make_model("mlp")
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    plans = [
        plan(model, world_size=3, align={fqn: "tensor"})
        for fqn in ("blocks.0.up.weight", "blocks.0._checkpoint_wrapped_module.up.weight")
    ]
    assert plans[0] == plans[1]
