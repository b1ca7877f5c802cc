"""Parameters that are tied, untied, replaced, removed or loaded, in any way and at any moment.

What one process does with the same program is what all ranks do, or each of them has an error.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard, load_full_state_dict, replicate
from composable.errors import ComposableError
from tests.models import random_input, seeded
from tests.parity import full
from tests.world import run_threads

DIM = 4
STEPS = 2
MOMENTS = ["before annotation", "after annotation", "after forward", "after backward", "after a step"]
APIS: dict[str, Callable[[nn.Module], object]] = {
    "one handle": fully_shard,
    "handles": lambda model: fully_shard(model, policy={nn.Linear}),
    "kept after forward": lambda model: fully_shard(model, policy={nn.Linear}, reshard_after_forward=False),
    "replicate": replicate,
}


def make_model(*, is_tied: bool) -> nn.Sequential:
    def build() -> nn.Sequential:
        inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        model = nn.Sequential(nn.Linear(DIM, DIM), inner, nn.Linear(DIM, DIM), nn.Linear(DIM, 1))
        if is_tied:
            model[2].weight = model[0].weight
        return model

    return seeded(build, 0)


def new_value(seed: int = 7) -> torch.Tensor:
    return random_input(seed, DIM, DIM)


def new_linear() -> nn.Linear:
    return seeded(lambda: nn.Linear(DIM, DIM), 5)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return full(tensor).detach().clone()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: random_input(len(name), *param.shape) for name, param in model.state_dict().items()}


def load_all(model: nn.Sequential) -> None:
    load = load_full_state_dict if hasattr(model, "reshard") else nn.Module.load_state_dict
    load(model, values(model))


def assign(module: nn.Module, state: dict[str, torch.Tensor], *, is_sharded: bool) -> None:
    """Load with ``assign=True``: sharded parameters stay the same objects, so one process has to copy."""
    module.load_state_dict(state, assign=is_sharded)
    for param in () if is_sharded else module.parameters():
        param.grad = None


def load_by_assignment(model: nn.Sequential) -> None:
    assign(model, values(model), is_sharded=hasattr(model, "reshard"))


def load_part(model: nn.Sequential) -> None:
    state = {"weight": new_value(), "bias": torch.ones(DIM)}
    assign(model[2], state, is_sharded=hasattr(model, "reshard"))


@torch.no_grad()
def in_place(change: Callable[..., object], *args: Any) -> None:
    change(*args)


def swap(model: Any) -> None:
    first, last = model[0]._parameters, model[2]._parameters
    first["weight"], last["weight"] = last["weight"], first["weight"]


def exchange_data(model: Any) -> None:
    first, last = model[0].weight, model[2].weight
    first.data, last.data = last.data, first.data


def show_average(model: nn.Module) -> None:
    """Evaluate with other values, as most classes for averages do: the trained ones are back then."""
    backup = {name: param.data for name, param in model.named_parameters()}
    average = {name: param.data.clone().mul_(0.5) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        param.data = average[name]
    for name, param in model.named_parameters():
        param.data.mul_(2)
        param.data = backup[name]


def keep_data(model: Any) -> None:
    """Keep values in two ways: a later write to the parameter, or to what was kept, changes one of them alone."""
    param = model[2].weight
    kept, also = param.data, param.detach()
    param.data = torch.zeros_like(kept)
    kept.add_(1)
    param.data.add_(also)


def after_deletion(module: nn.Module, name: str, param: torch.Tensor) -> None:
    delattr(module, name)
    setattr(module, name, param)


WAYS: dict[str, Callable[[Any], object]] = {
    "tied": lambda m: setattr(m[2], "weight", m[0].weight),
    "tied backwards": lambda m: setattr(m[0], "weight", m[2].weight),
    "tied biases": lambda m: setattr(m[1][0], "bias", m[2].bias),
    "tied by register_parameter": lambda m: m[2].register_parameter("weight", m[0].weight),
    "tied in the dict": lambda m: m[2]._parameters.update(weight=m[0].weight),
    "tied after del": lambda m: after_deletion(m[2], "weight", m[0].weight),
    "tied modules": lambda m: m.__setitem__(2, m[0]),
    "tied modules in the dict": lambda m: m._modules.update({"2": m[0]}),
    "swapped": swap,
    "untied": lambda m: setattr(m[2], "weight", nn.Parameter(whole(m[2].weight))),
    "replaced": lambda m: setattr(m[0], "weight", nn.Parameter(new_value())),
    "replaced and frozen": lambda m: setattr(m[2], "weight", nn.Parameter(new_value(), requires_grad=False)),
    "replaced by register_parameter": lambda m: m[1][0].register_parameter("weight", nn.Parameter(new_value())),
    "replaced in the dict": lambda m: m[2]._parameters.update(weight=nn.Parameter(new_value())),
    "replaced after del": lambda m: after_deletion(m[0], "weight", nn.Parameter(new_value())),
    "replaced module": lambda m: m.__setitem__(2, new_linear()),
    "inserted module": lambda m: m.insert(1, new_linear()),
    "inserted inside": lambda m: m[1].insert(0, new_linear()),
    "removed": lambda m: setattr(m[2], "bias", None),
    "removed in the dict": lambda m: m[1][0]._parameters.update(bias=None),
    "deleted": lambda m: delattr(m[2], "weight"),
    "plain tensor": lambda m: after_deletion(m[2], "weight", new_value()),
    "data assigned": lambda m: setattr(m[0].weight, "data", new_value()),
    "data written": lambda m: m[2].weight.data.copy_(new_value()),
    "detached written": lambda m: m[2].weight.detach().mul_(0.5),
    "copied": lambda m: in_place(m[2].weight.copy_, new_value()),
    "scaled": lambda m: in_place(torch._foreach_mul_, [m[1][0].weight, m[2].weight], 0.5),
    "initialised": lambda m: nn.init.constant_(m[2].weight, 0.3),
    "drawn": lambda m: nn.init.normal_(m[2].weight, generator=torch.Generator().manual_seed(3)),
    "loaded": lambda m: m.load_state_dict(values(m)),
    "loaded by assignment": load_by_assignment,
    "loaded in part": load_part,
    "loaded in full": load_all,
    "frozen": lambda m: m[2].weight.requires_grad_(False),
    "data exchanged": exchange_data,
    "data put back": show_average,
    "data kept": keep_data,
    "swapped by torch": lambda m: torch.utils.swap_tensors(m[0].weight, m[2].weight),
    "untouched": lambda m: m[2].weight,
}


class Case(NamedTuple):
    way: str
    moment: str
    is_tied: bool
    is_new_optimizer: bool


class Outcome(NamedTuple):
    """What a program ended with: losses and values, or what was raised."""

    losses: list[float]
    values: dict[str, torch.Tensor]
    error: BaseException | None


def run_case(case: Case, annotate: Callable[[nn.Module], object], batches: list[torch.Tensor]) -> Outcome:
    model = make_model(is_tied=case.is_tied)
    losses = []
    optimizer: Any = None

    def pass_moment(moment: str) -> None:
        nonlocal optimizer
        if case.moment == moment:
            WAYS[case.way](model)
        if moment == "before annotation":
            annotate(model)
        if optimizer is None or (case.is_new_optimizer and case.moment == moment):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    try:
        for moment in MOMENTS[:2]:
            pass_moment(moment)
        for _ in range(STEPS):
            outputs = [model(batch) for batch in batches]
            loss = sum(output.square().mean() for output in outputs) / len(batches)
            losses.append(loss.item())
            pass_moment("after forward")
            loss.backward()
            pass_moment("after backward")
            optimizer.step()
            optimizer.zero_grad()
            pass_moment("after a step")
        with torch.no_grad():
            model(batches[0])
        return Outcome(losses, {name: whole(param) for name, param in model.named_parameters()}, None)
    except Exception as error:
        return Outcome(losses, {}, error.with_traceback(None))


def batch_of(rank: int) -> torch.Tensor:
    return random_input(rank, 3, DIM)


def run_cases(cases: list[Case], api: str) -> list[tuple[list[float], dict[str, torch.Tensor], str]]:
    found = []
    for case in cases:
        outcome = run_case(case, APIS[api], [batch_of(dist.get_rank())])
        error = outcome.error
        kind = "" if error is None else "ours" if isinstance(error, ComposableError) else repr(error)
        found.append((outcome.losses, outcome.values, kind))
    return found


def check(case: Case, plain: Outcome, ranks: list[tuple[list[float], dict[str, torch.Tensor], str]]) -> None:
    kinds = [kind for _, _, kind in ranks]
    assert all(kinds) or not any(kinds), f"{case}: only some ranks raised: {kinds}"
    if any(kinds):
        of_torch = {kind for kind in kinds if kind != "ours"}
        assert not of_torch or plain.error is not None, f"{case}: {of_torch}"
        return
    assert plain.error is None, f"{case}: nothing was raised, and one process has {plain.error!r}"
    means = torch.tensor([losses for losses, _, _ in ranks], dtype=torch.float64).mean(0)
    expected = torch.tensor(plain.losses, dtype=torch.float64)
    torch.testing.assert_close(means, expected, rtol=1e-5, atol=1e-6, msg=f"{case}: losses {means} {expected}")
    for _, own, _ in ranks:
        assert list(own) == list(plain.values), case
        for name, value in own.items():
            torch.testing.assert_close(value, plain.values[name], msg=f"{case}: {name}")


def sample(world_size: int, seed: int) -> list[Case]:
    """Return each way at some moments, at others with other numbers of ranks; the rest is drawn."""
    draw = random.Random(10 * seed + world_size)
    return [
        Case(way, MOMENTS[(seed + number + place) % len(MOMENTS)], draw.random() < 0.3, draw.random() < 0.5)
        for number, way in enumerate(WAYS)
        for place in {1: [0], 2: [1, 2], 3: [3, 4]}[world_size]
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("api", APIS)
def test_whatever_is_done_to_parameters_equals_one_process_or_is_an_error_on_every_rank(
    api: str, world_size: int
) -> None:
    cases = sample(world_size, list(APIS).index(api))
    ranks = run_threads(run_cases, world_size, cases, api)
    for number, case in enumerate(cases):
        batches = [batch_of(rank) for rank in range(world_size)]
        plain = run_case(case, lambda model: model, batches)
        is_mixed = plain.error is not None or (case.way.startswith("data ") and api != "replicate")
        if case.moment == "after forward" and is_mixed and not ranks[0][number][2]:
            # Unsharded parameters that were kept have the values of the forward: as if written after backward.
            plain = run_case(case._replace(moment="after backward"), lambda model: model, batches)
        check(case, plain, [found[number] for found in ranks])
