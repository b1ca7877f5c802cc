"""The arguments of ``replicate``, those of ``DistributedDataParallel`` beside it: numbers, and what is refused."""

import copy
import inspect
import random
import warnings
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composable import ConfigError, DesyncError, ReplicateOptions, UsageError, replicate
from tests.models import BATCH, DIM, loss_of, make_model, random_input
from tests.parity import gradients_of
from tests.world import RankErrors, on_ranks, run_ranks, run_threads


def backward(model: nn.Module, step: int = 0) -> None:
    """Run a step of a model with float inputs on this rank's own data."""
    loss_of(model(random_input(100 * step + dist.get_rank(), BATCH, DIM))).backward()


def expected_gradients(name: str, world_size: int, step: int = 0) -> dict[str, torch.Tensor]:
    """Return the gradients of one process on everybody's data."""
    model = make_model(name)
    loss_of(model(torch.cat([random_input(100 * step + rank, BATCH, DIM) for rank in range(world_size)]))).backward()
    return gradients_of(model)


def replicated(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Replicate with arguments and with what ``ReplicateOptions`` has, as a wrapper takes them all."""
    rare = {field.name for field in fields(ReplicateOptions)} & options.keys()
    given = {name: value for name, value in options.items() if name not in rare}
    return replicate(model, **given, options=ReplicateOptions(**{name: options[name] for name in rare}))


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
        whole: nn.Module = DistributedDataParallel(model, **options) if as_ddp else replicated(model, options)
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
    if options.keys() <= inspect.signature(DistributedDataParallel).parameters.keys():  # torch 2.11 has not all of them
        assert ours == run_ranks(first_values, 2, as_ddp=True, **options)


# -- ranks and device


@on_ranks(2, name=["mesh", "device_mesh"])
def test_a_mesh_and_the_device_of_this_rank_may_be_given(name: str) -> None:
    mesh: Any = {name: dist.init_device_mesh("cpu", (2,))}
    model = replicate(make_model("mlp"), device_ids=["cpu"], **mesh)
    backward(model)
    torch.testing.assert_close(gradients_of(model), expected_gradients("mlp", 2))


@on_ranks(4, name=["mesh", "device_mesh"])
def test_gradients_are_averaged_along_the_mesh_by_either_name(name: str) -> None:
    pair: Any = {name: dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))["dp"]}
    model = replicate(make_model("mlp"), **pair)
    rank = dist.get_rank()
    for param in model.parameters():
        (param.sum() * rank).backward()
    assert all(torch.all(param.grad == rank // 2 * 2 + 0.5) for param in model.parameters())


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


@on_ranks(1)
def test_names_in_a_list_of_modules_begin_with_the_number_of_the_module() -> None:
    model = make_model("mlp")
    replicate([model.inp, *model.blocks, model.out], ignored_params=["4.weight"])
    assert [item.fqn for item in replicate.state(model.out).reducer.params if item.fqn.startswith("4")] == ["4.bias"]


def replace_ignored(draw: random.Random, several: bool) -> dict[str, bool]:
    """Return for each parameter whether its gradient is this rank's own, after what is ignored was replaced."""
    rank = dist.get_rank()
    model = make_model("mlp", seed=0)
    way = draw.choice(["names", "parameters", "modules", "mark"])
    if way == "mark" and not several:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["out.weight"])
        replicate(model)
    else:
        options: dict[str, Any] = {
            "names": {"ignored_params": ["4.weight" if several else "out.weight"]},
            "modules": {"ignored_modules": [model.out]},
        }
        chosen = options.get(way, {"ignored_params": [model.out.weight]})
        replicate([model.inp, *model.blocks, model.out] if several else model, **chosen)
    for _ in range(3):
        if way == "modules" and not several and draw.random() < 0.5:
            model.out = nn.Linear(model.out.in_features, model.out.out_features)
        else:
            model.out.weight = nn.Parameter(torch.randn_like(model.out.weight))
        if draw.random() < 0.5:
            backward(model, rank)
        if draw.random() < 0.3:
            model = copy.deepcopy(model)
    model.zero_grad()
    backward(model, rank)
    own = {}
    for fqn, param in model.named_parameters():
        mean = param.grad.clone()
        dist.all_reduce(mean)
        own[fqn] = not torch.allclose(param.grad, mean / 2)
    ignored = ["out.weight", "out.bias"] if way == "modules" else ["out.weight"]
    return {fqn: is_own == (fqn in ignored) for fqn, is_own in own.items()}


@on_ranks(2, seed=range(12))
def test_what_is_ignored_may_be_replaced_and_stays_this_ranks_own(seed: int) -> None:
    # As in DDP, which averages what it got when it was made.
    found = replace_ignored(random.Random(seed), seed % 3 == 0)
    assert all(found.values()), found


# -- what is refused


class ForeignGroup(dist.ProcessGroup):
    """A process group of another library."""


@on_ranks(1)
def test_a_group_that_torch_does_not_know_is_refused() -> None:
    known = dist.group.WORLD
    for group in (ForeignGroup(0, 1), SimpleNamespace(rank=lambda: 0, size=lambda: 1), (known,), (known, known)):
        with pytest.raises(ConfigError, match=r"process_group is .*, not a ProcessGroup that this rank is in"):
            replicate(nn.Linear(2, 2), process_group=group)  # type: ignore[arg-type]


def refuse(wrong: dict[str, Any]) -> tuple[str, bool]:
    """Return what a call that is wrong on rank 1 alone says, and whether the model is as before."""
    model = make_model("mlp")
    if wrong.get("ignored_params") == "a parameter":
        wrong = {"ignored_params": model.out.weight}
    try:
        replicated(model, wrong if dist.get_rank() == 1 else {})
    except (ConfigError, DesyncError, UsageError) as error:
        is_plain = replicate.state(model) is None and not model._forward_hooks and type(model).__name__ == "MLP"
        return f"{type(error).__name__}: {error}", is_plain
    return "nothing", False


@pytest.mark.parametrize(
    ("wrong", "first_lines"),
    [
        (
            {"broadcast_buffers": True, "forward_sync_buffers": False},
            "both broadcast_buffers and forward_sync_buffers are given\n  at:  rank 1",
        ),
        ({"init_sync": 0}, "init_sync is 0, not a bool\n  at:  rank 1"),
        ({"device_ids": ["cpu", "cpu"]}, "device_ids is ['cpu', 'cpu']\n  at:  rank 1"),
        ({"device_ids": "cpu"}, "device_ids is 'cpu'\n  at:  rank 1"),
        ({"device_ids": ["gpu"]}, "device_ids[0] is 'gpu'\n  at:  rank 1"),
        (
            {"device_ids": ["meta"]},
            "device_ids[0] is meta, and gradients are averaged on cpu\n  at:  rank 1",
        ),
        ({"ignored_params": "a parameter"}, "ignored_params is a torch.nn.parameter.Parameter\n  at:  rank 1"),
        ({"ignored_params": [3]}, "ignored_params holds 3, which is not in the module\n  at:  rank 1"),
        (
            {"ignored_params": ["out.wait"]},
            "ignored_params holds 'out.wait', which is not in the module\n  at:  rank 1",
        ),
        (
            {"ignored_params": [nn.Linear(2, 2).weight]},
            "ignored_params holds a parameter [2, 2], which is not in the module\n  at:  rank 1",
        ),
    ],
)
def test_a_wrong_argument_is_an_error_on_every_rank(wrong: dict[str, Any], first_lines: str) -> None:
    for text, is_plain in run_threads(refuse, 2, wrong):
        assert text.startswith(f"ConfigError: {first_lines}"), text
        assert "\n  fix: " in text and is_plain


def differ(name: str) -> None:
    options: dict[str, Any] = {
        "init_sync": {"init_sync": False},
        "forward_sync_buffers": {"forward_sync_buffers": False},
        "ignored_params": {"ignored_params": ["out.bias"]},
    }[name]
    replicated(make_model("mlp"), options if dist.get_rank() else {})


@pytest.mark.parametrize("name", ["init_sync", "forward_sync_buffers", "ignored_params"])
def test_ranks_with_different_options_get_an_error(name: str) -> None:
    with pytest.raises(RankErrors) as caught:
        run_threads(differ, 2, name)
    assert {rank: type(error) for rank, error in caught.value.errors.items()} == {0: DesyncError, 1: DesyncError}


# -- options together
