"""Random models and parts of them, as parameters, state dicts and files, against the plain model."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    full_state_dict,
    fully_shard,
    iter_full_params,
    load_safetensors,
    replicate,
    save_safetensors,
)
from tests.saving.test_selection import bits
from tests.world import run_threads


class Leaf(nn.Module):
    """Parameters and buffers of random shapes and dtypes; is never run."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        for index in range(rng.randint(0, 4)):
            shape = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(rng.randint(0, 3))]
            dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
            param = nn.Parameter(torch.randn(shape).to(dtype), requires_grad=rng.random() < 0.7)
            setattr(self, f"p{index}", param)
        if rng.random() < 0.2:
            whole = torch.randint(-9, 9, (rng.randint(0, 4),), dtype=rng.choice([torch.int64, torch.int8]))
            self.whole = nn.Parameter(whole, requires_grad=False)
        if rng.random() < 0.4:
            self.register_buffer("count", torch.randint(0, 9, (2,)))
        if rng.random() < 0.3:
            self.register_buffer("running", torch.randn(3), persistent=rng.random() < 0.5)


def random_model(seed: int) -> nn.Module:
    """Return a tree of leaves, some of whose parameters are tied."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(*(Leaf(rng) for _ in range(rng.randint(1, 3)))) for _ in range(3)))
    model.append(Leaf(rng))
    model[0][0].kept = nn.Parameter(torch.randn(3, 2))
    leaves = [module for module in model.modules() if isinstance(module, Leaf)]
    for _ in range(rng.randint(0, 3)):
        source, target = rng.choice(leaves), rng.choice(leaves)
        if own := [name for name, _ in source.named_parameters()]:
            setattr(target, rng.choice(["p0", "tied"]), getattr(source, rng.choice(own)))
    return model


def annotate(model: nn.Module, rng: random.Random) -> None:
    """Replicate the model or shard it, with some parameters left alone."""
    way = rng.choice(["policy", "whole", "replicate"])
    if way == "replicate":
        replicate(model)
        return
    share = rng.choice([0, 0.2])
    ignored = [param for param in model.parameters() if rng.random() < share]
    fully_shard(model, policy={nn.Sequential} if way == "policy" else None, ignored_params=ignored)


def compare_with_plain(seed: int, folder: str) -> None:
    rng = random.Random(seed + 1000)
    plain, model, other = random_model(seed), random_model(seed), random_model(seed)
    with torch.no_grad():
        for tensor in [*other.parameters(), *other.buffers()]:
            tensor.add_(1)
    state, other_state = plain.state_dict(), {key: value.clone() for key, value in other.state_dict().items()}
    for one in (model, other):
        annotate(one, rng)
    keys = set(rng.sample(list(state), rng.randint(1, len(state)))) if rng.random() < 0.8 else set(state)
    names: Any = rng.choice([keys, keys.__contains__, sorted(keys)])
    # Each parameter once, by the first of its names that is wanted, in the order of the plain model.
    tensors = plain.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for fqn, value in tensors.items():
        if fqn in keys:
            first.setdefault(id(value), fqn)
    wanted = {first[id(param)]: param for param in plain.parameters() if id(param) in first}
    rank0_only = rng.random() < 0.3
    has_values = dist.get_rank() == 0 or not rank0_only
    options: Any = {"names": names, "rank0_only": rank0_only}
    pairs = list(iter_full_params(model, **options))
    assert [fqn for fqn, _ in pairs] == list(wanted)
    assert not has_values or all(bits(value) == bits(wanted[fqn]) for fqn, value in pairs)
    part = full_state_dict(model, names=names)
    assert list(part) == ([key for key in state if key in keys] if dist.get_rank() == 0 else [])
    assert all(bits(value) == bits(state[key]) for key, value in part.items())
    path = f"{folder}/part.safetensors"
    save_safetensors(model, path, names=names)
    load_safetensors(other, path, names=names)
    # Whoever shares a tensor with what was loaded has it too.
    loaded = {id(tensors[key]) for key in keys}
    for key, value in full_state_dict(other).items():
        assert bits(value) == bits((state if id(tensors[key]) in loaded else other_state)[key]), key


@pytest.mark.parametrize("seed", range(6))
def test_random_models_and_names_give_what_the_plain_model_has(seed: int, tmp_path: Path) -> None:
    run_threads(compare_with_plain, seed % 3 + 1, seed, str(tmp_path))
