"""torch's own state dicts of optimizers: before the first step, after some, into another cut, and of steps in backward."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from composable import (
    UsageError,
    accelerate_optimizer,
    fully_shard,
    no_sync,
    rebind_optimizer,
    replicate,
    step_in_backward,
)
from tests.models import seeded
from tests.world import on_ranks, run_threads

State = dict[str, Any]
WHOLE = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw, lr a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}
ANNOTATIONS = ("plain", "fully_shard", "replicate", "mixed")


def make(api: str, kind: str, *, in_backward: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)), 0)
    if api == "mixed":
        fully_shard(model[0])
    if api in ("replicate", "mixed"):
        replicate(model, bucket_cap_mb=0.0001)
    elif api == "fully_shard":
        fully_shard(model, policy={nn.Linear})
    optimizer = MAKERS[kind](model.parameters())
    if in_backward:
        step_in_backward(optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, in_backward: bool = False) -> None:
    for step in steps:
        model(torch.linspace(-1, 1 + step, 12).view(4, 3)).square().mean().backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    # Of a plain model they are the tensors themselves.
    found = get_model_state_dict(model, options=WHOLE), get_optimizer_state_dict(model, optimizer, options=WHOLE)
    return copy.deepcopy(found)


def begin(api: str, kind: str, *, in_backward: bool = False) -> list[tuple[State, State]]:
    """Return the states before the first step, and after two."""
    model, optimizer = make(api, kind, in_backward=in_backward)
    before = states(model, optimizer)
    again = states(model, optimizer)
    assert_alike(again, before)
    train(model, optimizer, range(2), in_backward=in_backward)
    return [before, states(model, optimizer)]


def go_on(api: str, kind: str, saved: tuple[State, State], *, in_backward: bool = False) -> tuple[State, State]:
    """Return the states of a run that takes up what another one saved, after another step."""
    model, optimizer = make(api, kind, in_backward=in_backward)
    # An optimizer of a plain model steps the tensors that it was given.
    saved = copy.deepcopy(saved)
    set_model_state_dict(model, saved[0], options=WHOLE)
    if kind != "sgd":
        # torch itself loads no whole state without a tensor, whatever the model.
        set_optimizer_state_dict(model, optimizer, saved[1], options=WHOLE)
    train(model, optimizer, range(2, 3), in_backward=in_backward)
    return states(model, optimizer)


def assert_alike(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert_alike(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected


def alone(kind: str) -> tuple[list[tuple[State, State]], tuple[State, State]]:
    begun = begin("plain", kind)
    return begun, go_on("plain", kind, begun[1])


@pytest.mark.parametrize(
    ("kind", "in_backward"), [*((kind, False) for kind in MAKERS), ("momentum", True), ("adamw", True)]
)
def test_states_of_optimizers_are_those_of_a_plain_model_in_any_cut(kind: str, *, in_backward: bool) -> None:
    begun, ended = alone(kind)
    draw = random.Random(kind)
    for api in ANNOTATIONS[1:]:
        # The first rank has the whole values.
        found = run_threads(begin, draw.choice([1, 2, 3]), api, kind, in_backward=in_backward)[0]
        assert_alike(found, begun)
        other, world_size = draw.choice(ANNOTATIONS[1:]), draw.choice([1, 2, 3])
        after = run_threads(go_on, world_size, other, kind, found[1], in_backward=in_backward)[0]
        assert_alike(after, ended)


def with_one_step(state: State) -> State:
    """Return the state of an optimizer, a deep copy, with one ``step`` for all parameters, as FSDP1 leaves it."""
    entries = list((state := copy.deepcopy(state))["state"].values())
    for entry in entries:
        entry["step"] = entries[0]["step"]
    return state


LOADS = {
    "numbered": lambda model, optimizer, one: optimizer.load_state_dict(
        {**optimizer.state_dict(), "state": dict(enumerate(one["state"].values()))}
    ),
    "named": lambda model, optimizer, one: set_optimizer_state_dict(model, optimizer, one, options=WHOLE),
    "from the first rank": lambda model, optimizer, one: set_optimizer_state_dict(
        model, optimizer, one if dist.get_rank() == 0 else {}, options=FROM_FIRST
    ),
}


def goes_on_from_one_step(api: str, saved: tuple[State, State], way: str, mode: str) -> tuple[State, State]:
    """Go on as ``go_on`` does, from a state with one ``step``, loaded in a way, before or after first steps."""
    model, optimizer = make(api, "adamw", in_backward=mode == "in backward")
    one, in_backward = with_one_step(saved[1]), mode == "in backward"
    if mode == "accelerated":
        accelerate_optimizer(optimizer, model)
    if mode == "after steps":
        train(model, optimizer, range(2))
    set_model_state_dict(model, copy.deepcopy(saved[0]), options=WHOLE)
    LOADS[way](model, optimizer, one)
    train(model, optimizer, range(2, 3), in_backward=in_backward)
    return states(model, optimizer)


@pytest.mark.parametrize("mode", ["plain steps", "accelerated", "in backward", "after steps"])
@pytest.mark.parametrize("way", LOADS)
def test_parameters_that_were_loaded_with_one_step_count_their_own(way: str, mode: str) -> None:
    begun, ended = alone("adamw")
    for api in ["fully_shard"] if mode == "accelerated" else ANNOTATIONS[1:]:
        assert_alike(run_threads(goes_on_from_one_step, 2, api, begun[1], way, mode)[0], ended)


def rebinds_with_one_step(saved: tuple[State, State]) -> tuple[State, State]:
    model, optimizer = make("plain", "adamw")
    train(model, optimizer, range(2))
    set_model_state_dict(model, copy.deepcopy(saved[0]), options=WHOLE)
    LOADS["numbered"](model, optimizer, with_one_step(saved[1]))
    rebind_optimizer(optimizer, fully_shard(model))
    train(model, optimizer, range(2, 3))
    return states(model, optimizer)


def test_an_optimizer_that_is_rebound_with_one_step_has_one_for_each_parameter() -> None:
    begun, ended = alone("adamw")
    assert_alike(run_threads(rebinds_with_one_step, 2, begun[1])[0], ended)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as libraries write them: without ``Optimizer.__init__``, hooks and state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def steps_in_a_wrapper(api: str, saved: tuple[State, State]) -> tuple[State, State]:
    model, optimizer = make(api, "adamw")
    set_model_state_dict(model, copy.deepcopy(saved[0]), options=WHOLE)
    LOADS["numbered"](model, optimizer, with_one_step(saved[1]))
    model(torch.linspace(-1, 3, 12).view(4, 3)).square().mean().backward()
    wrapper = Wrapper(optimizer)
    # As torch does for the class of each optimizer that it makes.
    torch.optim.Optimizer.profile_hook_step(Wrapper.step)(wrapper)
    optimizer.zero_grad()
    return states(model, optimizer)


@pytest.mark.parametrize("api", ["fully_shard", "replicate"])
def test_an_optimizer_in_a_wrapper_without_hooks_or_state_steps_as_alone(api: str) -> None:
    begun, ended = alone("adamw")
    assert_alike(run_threads(steps_in_a_wrapper, 2, api, begun[1])[0], ended)


@on_ranks(2, api=["fully_shard", "replicate"])
def test_a_step_by_hand_that_would_move_something_stays_an_error(api: str) -> None:
    model, optimizer = make(api, "adamw", in_backward=True)
    inputs = torch.ones(2, 3)
    with pytest.raises(UsageError, match="an optimizer that steps inside backward"):
        optimizer.step()
    with no_sync(model):
        model(inputs).sum().backward()
    with pytest.raises(UsageError, match=r"an optimizer that steps inside backward|gradients that are not complete"):
        optimizer.step()
