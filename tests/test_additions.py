"""What is added below an annotated module after its annotation, and what of torch averages gradients too."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from composable import fully_shard, replicate, unannotate
from composable.errors import ComposableError
from tests.models import random_input
from tests.parity import full
from tests.world import on_ranks, run_ranks

DIM = 4
APIS = {"replicate": replicate, "fully_shard": fully_shard}


class Adapter(nn.Module):
    """As adapters do it: a trained detour around a frozen module."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.detour = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.detour(x)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), nn.Linear(DIM, DIM))


def backward(model: nn.Module, rank: int) -> None:
    model(random_input(rank, 3, DIM)).square().mean().backward()


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ComposableError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


ADDITIONS: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "append": (lambda model: model.append(nn.Linear(DIM, DIM)), "'3.weight', '3.bias'"),
    "replaced": (lambda model: model.__setitem__(2, nn.Linear(DIM, DIM)), "'2.weight', '2.bias'"),
    "deep inside": (lambda model: model[1].append(nn.Linear(DIM, DIM)), "'1.2.weight', '1.2.bias'"),
    "adapter": (lambda model: model.__setitem__(2, Adapter(model[2])), "'2.detour.weight'"),
    "new parameter": (lambda model: setattr(model[1], "scale", nn.Parameter(torch.ones(DIM))), "'1.scale'"),
    "insert": (lambda model: model.insert(1, nn.Linear(DIM, DIM)), "'1.weight', '1.bias'"),
    "insert deep inside": (lambda model: model[1].insert(0, nn.Linear(DIM, DIM)), "'1.0.weight', '1.0.bias'"),
    "written among modules": (lambda model: model._modules.update({"2": nn.Linear(DIM, DIM)}), "'2.weight', '2.bias'"),
    "written into a leaf": (lambda model: model[0]._modules.update(new=nn.Linear(DIM, DIM)), "'0.new.weight'"),
    "written among parameters": (lambda model: model[0]._parameters.update(new=nn.Parameter(torch.ones(1))), "'0.new'"),
    "deleted before": (lambda model: (model.__delitem__(2), model.insert(1, nn.Linear(DIM, DIM))), "'1.weight'"),
}


# Below `fully_shard` a parameter in the place of another one is an error of its own.
ONLY_REPLICATE: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "parameter": (lambda model: setattr(model[1][0], "bias", nn.Parameter(torch.ones(DIM))), "'1.0.bias'"),
    "written": (lambda model: model[1][0]._parameters.update(bias=nn.Parameter(torch.ones(DIM))), "'1.0.bias'"),
}


@on_ranks(2, api=APIS)
def test_what_is_added_and_trained_is_named_at_the_next_forward(api: str) -> None:
    for has_run in (False, True):
        for add, names in [*ADDITIONS.values(), *(ONLY_REPLICATE.values() if api == "replicate" else ())]:
            model = APIS[api](make_model())
            if has_run:
                backward(model, 0)
                model.zero_grad()
            add(model)
            for _ in range(2):  # until it is mended
                text = error_of(lambda model=model: backward(model, dist.get_rank()))
                assert text.startswith(f"UsageError: parameters were added after {api} was called"), text
                assert f"  at:  rank {dist.get_rank()}, {names}" in text, text
            with torch.no_grad():
                model(torch.ones(1, DIM))


@on_ranks(2, api=APIS, way=["annotate it too", "anew", "remove"])
def test_the_step_after_an_addition_is_mended_is_right(api: str, way: str) -> None:
    model = APIS[api](make_model())
    backward(model, dist.get_rank())
    model.zero_grad()
    model.append(nn.Linear(DIM, DIM))
    error_of(lambda: backward(model, 0))
    if way == "annotate it too":
        APIS[api](model[3])
    elif way == "anew":
        APIS[api](unannotate(model))
    else:
        del model[3]
    plain = make_model()
    if way != "remove":
        plain.append(nn.Linear(DIM, DIM))
        plain.load_state_dict({fqn: full(param) for fqn, param in model.named_parameters()})
    for _ in range(2):
        model.zero_grad()
        backward(model, dist.get_rank())
    for rank in range(2):
        backward(plain, rank)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(own.grad), other.grad / 2)


@on_ranks(2, api=APIS)
def test_frozen_parameters_and_modules_without_any_may_be_added(api: str) -> None:
    model = APIS[api](make_model(), ignored_modules=None)
    backward(model, 0)
    model[1].append(nn.Linear(DIM, DIM).requires_grad_(False))
    model.append(nn.Tanh())
    backward(model, 0)
    copied = copy.deepcopy(model)
    backward(copied, 0)
    nn.Sequential(nn.Linear(DIM, DIM))  # elsewhere
    backward(model, 0)
    for one in (model, copied):
        one[1][2].weight.requires_grad_(True)
        assert "1.2.weight" in error_of(lambda one=one: backward(one, 0))
        one[1][2].weight.requires_grad_(False)
        backward(one, 0)


@on_ranks(2, api=APIS)
def test_what_is_ignored_may_grow(api: str) -> None:
    torch.manual_seed(0)
    model = make_model()
    APIS[api](model, ignored_modules=[model[1]])
    backward(model, 0)
    model[1].append(nn.Linear(DIM, DIM))
    backward(model, 0)
    backward(copy.deepcopy(model), 0)
    if api == "fully_shard":
        model = make_model()
        fully_shard(model, ignored_params=[model[0].bias])
        model.append(nn.Tanh())
        backward(model, 0)
        model[0].bias = nn.Parameter(torch.ones(DIM))
        backward(copy.deepcopy(model), 0)
        backward(model, 0)


# -- two averages


def ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


class Around(nn.Module):
    """A model around a part that something else has wrapped before."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.own = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.part(x))


def inside_first(wrap: Callable[[nn.Module], nn.Module], api: Callable[[nn.Module], Any]) -> nn.Module:
    model = make_model()
    wrapped = wrap(model)
    api(model[1])
    return wrapped


def around_a_part(model: nn.Module) -> nn.Module:
    """Wrap a part of a model that is kept: with the model its annotation would end."""
    wrapped = ddp(model[1])  # type: ignore[index]  # a Sequential
    vars(wrapped)["whole"] = model
    return wrapped


TWICE: dict[str, Callable[[Any], nn.Module]] = {
    "DDP around": lambda api: ddp(api(make_model())),
    "DDP around, which came first": lambda api: inside_first(ddp, api),
    "DDP around a part": lambda api: around_a_part(api(make_model())),
    "DDP around, of a part": lambda api: ddp(nn.Sequential(nn.Linear(DIM, DIM), api(make_model()))),
    "DDP inside": lambda api: api(Around(ddp(make_model()))),
    "on DDP": lambda api: api(ddp(make_model())),
    "torch's replicate after": lambda api: torch_replicate(api(make_model())),
    "torch's replicate before": lambda api: api(torch_replicate(make_model())),
    "torch's replicate around": lambda api: torch_replicate(Around(api(make_model()))),
    "torch's replicate around, which came first": lambda api: inside_first(torch_replicate, api),
    "torch's replicate inside": lambda api: api(Around(torch_replicate(make_model()))),
    "on torch's fully_shard": lambda api: api(torch_fully_shard(make_model())),
    "torch's fully_shard inside": lambda api: api(Around(torch_fully_shard(make_model()))),
}


@on_ranks(2, run=run_ranks, api=APIS)
def test_two_things_that_average_the_same_gradients_are_refused_by_name(api: str) -> None:
    for name, build in TWICE.items():
        text = error_of(lambda build=build: backward(build(APIS[api]), dist.get_rank()))
        rival = next((one for one in ("torch's replicate", "torch's fully_shard") if one in name), "Distributed")
        assert re.match(r"(ConfigError|UsageError): two things (would )?average these gradients: ", text), text
        # torch's replicate is made of the other one.
        assert rival in text or ("torch" in name and "DistributedDataParallel" in text), (name, text)
        assert "at:  rank" in text and "fix:" in text
        if "torch's fully_shard" in name:
            assert text.endswith("fix: keep one of them: import fully_shard from composable everywhere, not from torch")
    backward(APIS[api](make_model()), dist.get_rank())  # The next model trains.


@on_ranks(2, run=run_ranks)
def test_a_wrapper_that_is_told_to_ignore_them_is_no_second_average() -> None:
    model = Around(replicate(make_model()))
    names = [f"part.{fqn}" for fqn, _ in model.part.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    backward(DistributedDataParallel(model), dist.get_rank())


@on_ranks(2, api=APIS)
def test_an_optimizer_inside_backward_may_have_some_parameters_before_and_after_the_annotation(api: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit, on import
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = make_model()
    _apply_optimizer_in_backward(torch.optim.SGD, [model[1][0].weight], {"lr": 0.1})
    APIS[api](model)
    backward(model, 0)
    assert [fqn for fqn, param in model.named_parameters() if param.grad is None] == ["1.0.weight"]
    _apply_optimizer_in_backward(torch.optim.SGD, [model[2].bias], {"lr": 0.1})
    backward(model, 0)
    assert [fqn for fqn, param in model.named_parameters() if param.grad is None] == ["1.0.weight", "2.bias"]
