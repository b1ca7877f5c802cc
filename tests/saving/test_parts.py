"""Checkpoints of a part of a model, such as adapters, with the optimizer's state of that part."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from composable import ConfigError, fully_shard, load_checkpoint, replicate, save_checkpoint
from composable.errors import warn_once
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


# -- models whose state dict is one of their own


class Shortened(Adapted):
    """A module whose state dict has its adapters alone."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if is_adapter(name)}


class Hooked(Adapted):
    """The same, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.shorten)

    @staticmethod
    def shorten(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in [name for name in state if name.startswith(prefix) and not is_adapter(name)]:
            del state[name]


class Renamed(Adapted):
    """A module whose hooks give other names, and add a value, which they take out again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.rename)
        self.register_load_state_dict_pre_hook(self.undo)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}base.")]:
            state[name.replace("base.", "original.")] = state.pop(name)
        state[f"{prefix}version"] = torch.tensor(3)

    @staticmethod
    def undo(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}original.")]:
            state[name.replace("original.", "base.")] = state.pop(name)
        state.pop(f"{prefix}version", None)


class OwnNames(Adapted):
    """A module that saves and loads its buffer and an own parameter in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        state[f"{prefix}factor"] = self.scale if keep_vars else self.scale.detach()

    def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.scale.copy_(state[f"{prefix}factor"])


def make_own(kind: type[Adapted], seed: int, how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    # What no state dict has stays as it was made.
    left_out = (
        [name for name, _ in model.named_parameters() if not is_adapter(name)] if len(model.state_dict()) == 2 else []
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.requires_grad_(name not in left_out)
            if name not in left_out:
                param.uniform_(-0.5, 0.5)
    {"fully_shard": fully_shard, "replicate": replicate, "plain": nn.Module.train}[how](model)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def resume_own(path: Path, kind: type[Adapted], how: str) -> None:
    model, optimizer = make_own(kind, 1, how)
    train(model, optimizer)
    save_checkpoint(path, 2, model, optimizer)
    model, optimizer = make_own(kind, 2, how)
    assert load_checkpoint(path, model, optimizer).step == 2
    train(model, optimizer)
    expected, plain = make_own(kind, 1, "plain")
    for _ in range(2):
        train(expected, plain)
    found, right = values_of(model, optimizer), values_of(expected, plain)
    assert found.keys() == right.keys() and len(right) >= 8
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.parametrize("how", ["fully_shard", "replicate", "plain"])
@pytest.mark.parametrize("kind", [Shortened, Hooked, Renamed, OwnNames])
def test_what_a_state_dict_of_its_own_names_is_saved_and_loaded_with_its_moments(
    kind: type[Adapted], how: str, tmp_path: Path
) -> None:
    if how == "plain":
        resume_own(tmp_path, kind, how)
    else:
        run_threads(resume_own, 2, tmp_path, kind, how)


class Unread(Adapted):
    """A module with a value in its state dict that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}note": torch.ones(1)}))


def test_a_value_that_a_hook_adds_and_no_module_reads_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    save_checkpoint(tmp_path, 1, Unread())
    assert load_checkpoint(tmp_path, Unread()).step == 1
    assert "hooks have added 'note' to the state dict, and no module reads this" in caplog.text
