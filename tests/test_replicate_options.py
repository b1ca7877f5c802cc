"""The arguments of ``replicate``, those of ``DistributedDataParallel`` beside it: numbers, and what is refused."""

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composable import ConfigError, DesyncError, UsageError, no_sync, replicate
from tests.models import BATCH, DIM, loss_of, make_model, random_input, random_tokens, seeded
from tests.world import RankErrors, run_ranks, run_threads


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: param.grad.clone() for fqn, param in model.named_parameters() if param.grad is not None}


def backward(model: nn.Module, step: int = 0) -> None:
    """Run a step of a model with float inputs on this rank's own data."""
    loss_of(model(random_input(100 * step + dist.get_rank(), BATCH, DIM))).backward()


def expected_gradients(name: str, world_size: int, step: int = 0) -> dict[str, torch.Tensor]:
    """Return the gradients of one process on everybody's data."""
    model = make_model(name)
    loss_of(model(torch.cat([random_input(100 * step + rank, BATCH, DIM) for rank in range(world_size)]))).backward()
    return gradients_of(model)


# -- where values come from


def first_values(*, as_ddp: bool, **options: Any) -> tuple[float, float, float]:
    """Return a parameter and a buffer after the annotation, and the buffer after a training forward."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM, momentum=0.0))
    for tensor in (model[0].bias, model[1].running_mean):
        nn.init.constant_(tensor, 1.0 + rank)
    with warnings.catch_warnings():
        # Of torch's wrapper, where the name that both have is an old one.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        whole: nn.Module = DistributedDataParallel(model, **options) if as_ddp else replicate(model, **options)
    start = model[0].bias[0].item(), model[1].running_mean[0].item()
    nn.init.constant_(model[1].running_mean, 5.0 + rank)
    whole(random_input(rank, BATCH, DIM)).sum().backward()
    assert model[0].bias.grad is not None
    return *start, model[1].running_mean[0].item()


@pytest.mark.parametrize(
    ("options", "of_rank_1"),
    [
        ({}, (1.0, 1.0, 5.0)),
        ({"broadcast_buffers": False}, (1.0, 2.0, 6.0)),
        ({"forward_sync_buffers": False}, (1.0, 1.0, 6.0)),
        ({"init_sync": False}, (2.0, 2.0, 5.0)),
        ({"init_sync": False, "forward_sync_buffers": False}, (2.0, 2.0, 6.0)),
    ],
)
def test_values_are_broadcast_when_torchs_wrapper_does(options: dict[str, Any], of_rank_1: tuple[float, ...]) -> None:
    ours = run_threads(first_values, 2, as_ddp=False, **options)
    assert ours == [(1.0, 1.0, 5.0), of_rank_1]
    assert ours == run_ranks(first_values, 2, as_ddp=True, **options)


def train_without_first_broadcast() -> None:
    model = make_model("mlp", seed=0)
    replicate(model, init_sync=False)
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        torch.testing.assert_close(gradients_of(model), expected_gradients("mlp", dist.get_world_size(), step))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equal_values_need_no_broadcast(world_size: int) -> None:
    run_threads(train_without_first_broadcast, world_size)


# -- ranks and device


def train_on_device_mesh() -> None:
    model = replicate(make_model("mlp"), device_mesh=dist.init_device_mesh("cpu", (2,)), device_ids=["cpu"])
    backward(model)
    torch.testing.assert_close(gradients_of(model), expected_gradients("mlp", 2))


def test_device_mesh_is_another_name_of_mesh() -> None:
    run_threads(train_on_device_mesh, 2)


# -- what is left alone


def ignore(kind: str) -> dict[str, bool]:
    """Return, of what is ignored and of the rest, whether it stayed this rank's own."""
    rank = dist.get_rank()
    model = make_model("mlp", seed=rank)
    model.register_buffer("seen", torch.full((2,), float(rank)))
    model.register_buffer("other", torch.full((2,), float(rank)))
    ignored: Any = ["out.weight", "seen"] if kind == "names" else {model.out.weight}
    ignored = iter(["out.weight"]) if kind == "iterator" else ignored
    before = {fqn: tensor.detach().clone() for fqn, tensor in model.state_dict().items()}
    replicate(model, ignored_params=ignored)
    kept = {fqn: torch.equal(tensor, before[fqn]) for fqn, tensor in model.state_dict().items()}
    for _ in range(2):
        backward(model)
    gradient = model.out.weight.grad
    mean = gradient.clone()
    dist.all_reduce(mean)
    kept["gradient"] = not torch.allclose(gradient, mean / 2)
    return {name: kept[name] for name in ("inp.weight", "out.weight", "out.bias", "seen", "other", "gradient")}


@pytest.mark.parametrize("kind", ["names", "parameters", "iterator"])
def test_ignored_parameters_and_buffers_stay_this_ranks_own(kind: str) -> None:
    _, found = run_threads(ignore, 2, kind)
    own = ["out.weight", "seen", "gradient"] if kind == "names" else ["out.weight", "gradient"]
    assert [name for name, is_own in found.items() if is_own] == own


def ignore_in_a_list() -> list[str]:
    model = make_model("mlp")
    replicate([model.inp, *model.blocks, model.out], ignored_params=["4.weight"])
    return [item.fqn for item in replicate.state(model.out).reducer.params if item.fqn.startswith("4")]


def test_names_in_a_list_of_modules_begin_with_the_number_of_the_module() -> None:
    assert run_threads(ignore_in_a_list, 1) == [["4.bias"]]


# -- what is refused


def refuse(arguments: str) -> tuple[str, bool]:
    """Return what a call that is wrong on rank 1 alone says, and whether the model is as before."""
    model = make_model("mlp")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    cases: dict[str, dict[str, Any]] = {
        "two buffers": {"broadcast_buffers": True, "forward_sync_buffers": False},
        "init_sync": {"init_sync": 0},
        "two devices": {"device_ids": ["cpu", "cpu"]},
        "no devices": {"device_ids": []},
        "devices": {"device_ids": "cpu"},
        "device": {"device_ids": ["gpu"]},
        "elsewhere": {"device_ids": ["meta"]},
        "ignored": {"ignored_params": model.out.weight},
        "ignored item": {"ignored_params": [3]},
        "ignored name": {"ignored_params": ["out.wait"]},
        "ignored elsewhere": {"ignored_params": [nn.Linear(2, 2).weight]},
    }
    both = {"two meshes": {"mesh": mesh, "device_mesh": mesh}}
    wrong = both.get(arguments) or (cases[arguments] if dist.get_rank() == 1 else {})
    try:
        replicate(model, **wrong)
    except (ConfigError, DesyncError, UsageError) as error:
        is_plain = replicate.state(model) is None and not model._forward_hooks and type(model).__name__ == "MLP"
        return f"{type(error).__name__}: {error}", is_plain
    return "nothing", False


@pytest.mark.parametrize(
    ("arguments", "first_lines"),
    [
        ("two buffers", "ConfigError: both broadcast_buffers and forward_sync_buffers are given\n  at:  rank 1"),
        ("init_sync", "ConfigError: init_sync is 0, not a bool\n  at:  rank 1"),
        ("two devices", "ConfigError: device_ids is ['cpu', 'cpu']\n  at:  rank 1"),
        ("no devices", "ConfigError: device_ids is []\n  at:  rank 1"),
        ("devices", "ConfigError: device_ids is 'cpu'\n  at:  rank 1"),
        ("device", "ConfigError: device_ids[0] is 'gpu'\n  at:  rank 1"),
        (
            "elsewhere",
            "ConfigError: parameter is on cpu, and the device that was given is meta\n"
            "  at:  rank 1, parameter 'inp.weight'",
        ),
        ("two meshes", "ConfigError: both mesh and device_mesh are given\n  at:  rank "),
        ("ignored", "ConfigError: ignored_params is a torch.nn.parameter.Parameter\n  at:  rank 1"),
        ("ignored item", "ConfigError: ignored_params holds 3\n  at:  rank 1"),
        ("ignored name", "ConfigError: ignored_params holds 'out.wait', which is not in the module\n  at:  rank 1"),
        (
            "ignored elsewhere",
            "ConfigError: ignored_params holds a parameter [2, 2], which is not in the module\n  at:  rank 1",
        ),
    ],
)
def test_a_wrong_argument_is_an_error_on_every_rank(arguments: str, first_lines: str) -> None:
    for text, is_plain in run_threads(refuse, 2, arguments):
        assert text.startswith(first_lines), text
        assert "\n  fix: " in text and is_plain


def differ(name: str) -> None:
    options: dict[str, Any] = {
        "init_sync": {"init_sync": False},
        "forward_sync_buffers": {"forward_sync_buffers": False},
        "ignored_params": {"ignored_params": ["out.bias"]},
    }[name]
    replicate(make_model("mlp"), **(options if dist.get_rank() else {}))


@pytest.mark.parametrize("name", ["init_sync", "forward_sync_buffers", "ignored_params"])
def test_ranks_with_different_options_get_an_error(name: str) -> None:
    with pytest.raises(RankErrors) as caught:
        run_threads(differ, 2, name)
    assert {rank: type(error) for rank, error in caught.value.errors.items()} == {0: DesyncError, 1: DesyncError}


# -- options together


class Mixed(nn.Module):
    """A table, layers, and a branch that some steps, or none, use."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(16, DIM, sparse=is_sparse)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.branch = nn.Linear(DIM, DIM)

    def forward(self, tokens: torch.Tensor, *, uses_branch: bool) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.branch(x) if uses_branch else x


def train_with_random_options(seed: int) -> None:
    rng, rank, world_size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    is_sparse = rng.random() < 0.5
    model, plain = (seeded(lambda: Mixed(is_sparse=is_sparse), 0) for _ in range(2))
    is_static, finds_unused = rng.random() < 0.5, rng.random() < 0.7
    options: dict[str, Any] = {
        "static_graph": is_static,
        "find_unused_parameters": finds_unused,
        "bucket_cap_mb": rng.choice([100 / 2**20, 25]),
        "gradient_as_bucket_view": rng.random() < 0.5,
        "init_sync": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        named = [(f"layers.{number}.weight", model.layers[number].weight) for number in rng.sample(range(3), 2)]
        trigger = rng.choice([layer.bias for layer in model.layers])
        options |= {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": trigger}
    ignored = rng.random() < 0.3
    if ignored:
        options["ignored_params"] = ["layers.1.bias"]
        if options.get("param_to_hook_all_reduce") is model.layers[1].bias:
            options["param_to_hook_all_reduce"] = model.layers[0].bias
    replicate(model, **options)
    ways = [rng.choice(["nobody", "everybody"])] * 4
    if finds_unused and not is_static:
        ways = [rng.choice(["nobody", "everybody", "first", "last"]) for _ in range(4)]
    elif not is_static:
        ways = ["everybody"] * 4

    def loss(one: Any, step: int, on: int) -> torch.Tensor:
        who = {"nobody": (), "everybody": range(world_size), "first": (0,), "last": (world_size - 1,)}[ways[step]]
        return one(random_tokens(10 * step + on, 4, vocab=16), uses_branch=on in who).square().mean()

    for step in range(4):
        keeps = rng.random() < 0.3
        for _ in range(2 if keeps else 1):
            for other in range(world_size):
                (loss(plain, step, other) / world_size).backward()
        if keeps:
            with no_sync(model):
                loss(model, step, rank).backward()
        loss(model, step, rank).backward()
        found, wanted = (
            {fqn: p.grad.to_dense() for fqn, p in one.named_parameters() if p.grad is not None}
            for one in (model, plain)
        )
        if ignored:
            found.pop("layers.1.bias"), wanted.pop("layers.1.bias")
        torch.testing.assert_close(found, wanted)
        is_dropped = rng.random() < 0.5
        for one in (model, plain):
            one.zero_grad(set_to_none=is_dropped)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_options_together_give_the_gradients_of_one_process(world_size: int) -> None:
    for seed in range(12):
        run_threads(train_with_random_options, world_size, seed)
