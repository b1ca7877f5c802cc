"""Checkpoints of a part of a model, such as adapters, with the optimizer's state of that part."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from composable import ConfigError, fully_shard, load_checkpoint, replicate, save_checkpoint
from tests.world import run_threads, told


class Adapted(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7)
        self.lora_a = nn.Linear(5, 2, bias=False)
        self.lora_b = nn.Linear(2, 7, bias=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def is_adapter(name: str) -> bool:
    return "lora_" in name


def make(seed: int, how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(7, 3))
    if how == "fully_shard":
        fully_shard(model[0])
        fully_shard(model)
    elif how == "replicate":
        replicate(model)
    adapters = [param for name, param in model.named_parameters() if is_adapter(name)]
    others = [param for name, param in model.named_parameters() if not is_adapter(name)]
    return model, torch.optim.AdamW([{"params": adapters, "lr": 0.1}, {"params": others, "lr": 0.01}])


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    values = dict(model.state_dict())
    for name, param in model.named_parameters():
        values |= {f"{name}.{key}": value for key, value in optimizer.state.get(param, {}).items()}
    return {name: getattr(one, "full_tensor", one.clone)() for name, one in values.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def part_of(values: dict[str, torch.Tensor], *, adapters: bool) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if is_adapter(name) == adapters}


def save_parts(run: Path, how: str) -> None:
    model, optimizer = make(1, how)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    every = [name for name in model.state_dict() if is_adapter(name)]
    save_checkpoint(run / "part", 2, model, optimizer, names=is_adapter)
    save_checkpoint(run / "list", 2, model, optimizer, names=every, asynchronous=True).wait()
    save_checkpoint(run / "whole", 2, model, optimizer)
    expected = values_of(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, run / "expected.pt")


def load_parts(run: Path, how: str) -> None:
    expected = torch.load(run / "expected.pt")
    for saved in ("part", "list", "whole"):
        for is_trained in (False, True):
            model, optimizer = make(2, how)
            if is_trained:
                train(model, optimizer)
            before = values_of(model, optimizer)
            assert load_checkpoint(run / saved, model, optimizer, names=is_adapter).step == 2
            after = values_of(model, optimizer)
            assert_same(part_of(after, adapters=True), part_of(expected, adapters=True))
            assert_same(part_of(after, adapters=False), part_of(before, adapters=False))
            assert optimizer.param_groups[0]["lr"] == 0.5
            train(model, optimizer)
    # Only the part is in the files.
    read = dcp.FileSystemReader(run / "part" / "step-000002").read_metadata().state_dict_metadata
    tensors = [name for name in read if name.startswith(("model.", "optimizer.state."))]
    assert len(tensors) == 2 * 4 and all("lora_" in name for name in tensors)
    # A part is no whole.
    model, optimizer = make(3, how)
    before = values_of(model, optimizer)
    for said in told(lambda: load_checkpoint(run / "part", model, optimizer)):
        assert "StateDictError: the checkpoint does not fit the model, and nothing was loaded" in said, said
        assert 'Missing key(s) in state_dict: "0.count", "0.base.weight"' in said and "names= a part" in said, said
    for said in told(lambda: load_checkpoint(run / "part", model, names=["2.weight"])):
        assert 'Missing key(s) in state_dict: "2.weight"' in said, said
    assert_same(values_of(model, optimizer), before)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("fully_shard", "replicate"), ("replicate", "fully_shard")])
def test_a_part_is_saved_and_loaded_with_its_state_and_the_rest_stays(
    saved_by: str, loaded_by: str, tmp_path: Path
) -> None:
    run_threads(save_parts, 3, tmp_path, saved_by)
    run_threads(load_parts, 2, tmp_path, loaded_by)


def misuse(run: Path) -> None:
    model, optimizer = make(1, "fully_shard")
    rank = dist.get_rank()
    wrong: list[tuple[Any, str]] = [
        (["0.lora_a.weight", "nothing"], "ConfigError: names is or holds something not in the model's state_dict()"),
        ("0.lora_a.weight", "ConfigError: names is or holds something"),
        (lambda _: False, "ConfigError: names picks nothing of the model"),
        (lambda name: name.endswith(("weight", "bias")[rank]), "names picks other entries"),
    ]
    for names, error in wrong:
        for said in told(lambda names=names: save_checkpoint(run, 1, model, optimizer, names=names)):
            assert error in said, said
        for said in told(lambda names=names: load_checkpoint(run, model, optimizer, names=names)):
            assert error in said or "no checkpoint" in said, said
    assert not run.exists()


def test_names_that_pick_nothing_or_not_the_same_are_an_error_on_every_rank(tmp_path: Path) -> None:
    run_threads(misuse, 2, tmp_path / "run")


def test_a_base_on_the_meta_device_does_not_keep_adapters_from_being_saved(tmp_path: Path) -> None:
    model, _ = make(1, "none")
    model[0].base.to("meta")
    save_checkpoint(tmp_path, 1, model, names=is_adapter)
    other, _ = make(2, "none")
    load_checkpoint(tmp_path, other, names=is_adapter)
    assert torch.equal(other[0].lora_a.weight, model[0].lora_a.weight)
    with pytest.raises(ConfigError, match="names picks nothing"):
        load_checkpoint(tmp_path, other, names=lambda name: name == "x")
