"""What users set at any time, and what has to be equal on all ranks: who sets otherwise is told, with all others."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from composable import ConfigError, DesyncError, HandleOptions, fully_shard, joinable, no_sync, set_divergence_timeout
from composable.errors import warn_once
from tests.models import DIM, MLPBlock, make_model, random_input
from tests.parity import full
from tests.world import on_ranks, run_ranks, run_threads

LIMIT_S = 0.3


class Identity:
    """Does nothing, as an all-reduce hook."""

    def __call__(self, shard: torch.Tensor) -> None:
        return None


# A setter, the method on a module with a value of one kind or the other, and what the message calls both.
SETTERS: dict[str, tuple[Callable[[Any, bool], object], str, str]] = {
    "divide factor": (
        lambda m, is_odd: m.set_gradient_divide_factor(3.0 if is_odd else 2.0),
        "gradient divide factor 2.0",
        "gradient divide factor 3.0",
    ),
    "older name": (
        lambda m, is_odd: m.set_reduce_scatter_divide_factor(0.5 if is_odd else None),
        "as annotated",
        "gradient divide factor 0.5",
    ),
    "sums": (lambda m, is_odd: m.set_force_sum_reduction_for_comms(is_odd), "as annotated", "sums forced"),
    "hook": (
        lambda m, is_odd: m.set_all_reduce_hook(Identity() if is_odd else None),
        "as annotated",
        "an all-reduce hook",
    ),
    "unused": (
        lambda m, is_odd: m.set_reduce_scatter_unused_params(is_odd, recurse=False),
        "as annotated",
        "reduce-scatter unused params True",
    ),
}


def backward(model: nn.Module, seed: int, rank: int, scale: float = 1.0) -> None:
    (scale * model(random_input(100 * seed + rank, 4, DIM)).square().mean()).backward()


def alone(seed: int) -> Any:
    """Return the model with the gradients of one process."""
    plain = make_model("mlp")
    for rank in range(dist.get_world_size()):
        backward(plain, seed, rank, 1 / dist.get_world_size())
    return plain


def set_otherwise(setter: str, is_first: bool) -> str:
    rank, odd = dist.get_rank(), dist.get_world_size() - 1
    model: Any = fully_shard(make_model("mlp"), policy={MLPBlock})
    if not is_first:
        backward(model, 0, rank)
    change, _, _ = SETTERS[setter]
    change(model.blocks[1], rank == odd)
    with pytest.raises(DesyncError) as caught:
        backward(model, 1, rank)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setter", "is_first", "world_size"),
    [("sums", True, 2), ("hook", True, 3), *((name, False, 3) for name in SETTERS)],
)
def test_a_choice_that_differs_between_ranks_is_an_error_on_all_that_names_it(
    setter: str, is_first: bool, world_size: int
) -> None:
    _, even, odd = SETTERS[setter]
    lines = [
        f"    rank {rank}: module 'blocks.1' (MLPBlock): {odd if rank == world_size - 1 else even}"
        for rank in range(world_size)
    ]
    for rank, text in enumerate(run_threads(set_otherwise, world_size, setter, is_first)):
        assert "\n".join(lines) in text
        assert f"\n  at:  rank {rank}\n  fix: " in text


def set_alone(name: str) -> str:
    set_divergence_timeout(LIMIT_S)
    model: Any = fully_shard(make_model("mlp"), policy={MLPBlock})
    backward(model, 0, dist.get_rank())
    if dist.get_rank() == 1:
        getattr(model.blocks[1], name)(False)

    def go_on() -> None:
        for _ in range(2000):
            backward(model, 1, dist.get_rank())

    with pytest.raises(DesyncError) as caught:
        go_on()
    return str(caught.value)


@pytest.mark.parametrize("name", ["set_requires_gradient_sync", "set_is_last_backward"])
def test_who_sets_alone_what_others_wait_for_is_told_to_all(name: str) -> None:
    for text in run_ranks(set_alone, 2, name):
        assert "rank 0: waits for " in text and "will never come" in text


# -- what may differ


@on_ranks(2, unused_gradients=["none", "zero"])
def test_a_rank_may_have_modules_of_classes_of_its_own(unused_gradients: str) -> None:
    rank, model = dist.get_rank(), make_model("mlp")
    if rank == 0:
        for block in model.blocks:
            block.__class__ = type("Logged", (MLPBlock,), {})
    sharded: Any = fully_shard(model, policy={MLPBlock}, options=HandleOptions(unused_gradients=unused_gradients))
    backward(sharded, 0, rank)
    sharded.set_gradient_divide_factor(3.0)
    backward(sharded, 1, rank)


# -- any choices at any time


def any_choices(seed: int) -> None:
    """Choose at random, at times otherwise on one rank: exactly then backward is an error, else the mean is right."""
    rng = random.Random(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model: Any = fully_shard(make_model("mlp"), policy={MLPBlock})
    modules = [model, *model.blocks]
    # For each module and setter, whether it is the other value on each rank.
    chosen: dict[tuple[int, str], list[bool]] = {}
    for step in range(12):
        for _ in range(rng.randrange(3)):
            index, setter = rng.randrange(len(modules)), rng.choice(["sums", "hook", "unused", "older name"])
            value, odd = rng.random() < 0.5, rng.randrange(world_size)
            differs = rng.random() < 0.3
            chosen[index, setter] = [value ^ (differs and other == odd) for other in range(world_size)]
            SETTERS[setter][0](modules[index], chosen[index, setter][rank])
        if any(len(set(values)) > 1 for values in chosen.values()):
            with pytest.raises(DesyncError, match=r"reduce gradients in different ways|different plans"):
                backward(model, step, rank)
            for (index, setter), values in chosen.items():
                if len(set(values)) > 1:
                    chosen[index, setter] = [False] * world_size
                    SETTERS[setter][0](modules[index], False)
            model.zero_grad()
        backward(model, step, rank)
        plain = alone(step)
        for index, module in enumerate([plain, *plain.blocks]):
            own = module.parameters() if index else [*plain.inp.parameters(), *plain.out.parameters()]
            if chosen.get((index, "older name"), [False])[0]:
                for param in own:
                    param.grad *= world_size / 0.5
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), expected.grad, atol=2e-5, rtol=1e-5)
        model.zero_grad()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_ranks_choose_gradients_are_right_or_all_are_told(seed: int) -> None:
    run_threads(any_choices, 2 + seed % 2, seed)


def fail_late(failing: int) -> str:
    """Use a parameter before its module runs, so that it is reduced twice; what runs the second time fails."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model, policy={nn.Linear})
    model(torch.ones(2, 3)).sum().backward()
    calls: list[int] = []

    def hook(shard: torch.Tensor) -> object:
        calls.append(0)
        return object() if dist.get_rank() == failing and len(calls) == 2 else None

    model[1].set_all_reduce_hook(hook)
    model[1].unshard()
    loss = model(torch.ones(2, 3) @ model[1].weight).sum()
    try:
        loss.backward()
    except ConfigError as error:
        assert len(calls) == 2
        return str(error)
    return f"no error after {len(calls)} calls"


@pytest.mark.parametrize("failing", [0, 2])
def test_what_fails_after_ranks_have_told_what_is_left_is_told_too(failing: int) -> None:
    for text in run_threads(fail_late, 3, failing):
        assert "the all-reduce hook returned a object" in text and f"rank {failing}, module '1'" in text


# Steps of optimizers, and modes of modules


class Dropping(nn.Module):
    """A handle, with a module in it that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dropout(self.linear(x))
        return output


class Loop:
    """Some steps of two models, and what this rank alone does in the one of number 1."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank, self.errors = dist.get_rank(), list[str]()
        self.models: Any = [nn.Sequential(Dropping(), nn.Linear(DIM, DIM)) for _ in range(2)]
        for model in self.models:
            fully_shard(model, policy={Dropping, nn.Linear})
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.optimizers.append(torch.optim.SGD(self.models[0][1].parameters(), lr=0.1))
        self.model, self.optimizer, self.later = self.models[0], *self.optimizers[::2]

    def backward(self, model: nn.Module | None = None) -> None:
        try:
            (model or self.model)(random_input(self.rank, 4, DIM)).square().mean().backward()
        except DesyncError as error:
            self.errors.append(str(error))

    def accumulate(self) -> None:
        with no_sync(self.model):
            self.backward()
        self.backward()


def in_turn(loop: Loop) -> None:
    """Step as losses of adversaries do: both models in the graph of one, and more steps of the other."""
    loop.backward(nn.Sequential(*loop.models))
    loop.optimizers[0].step()
    for _ in range(2):
        loop.backward(loop.models[1])
        loop.optimizers[1].step()


def recover(loop: Loop) -> None:
    """Raise in the forward of one rank, or in that of all, which had stepped before."""
    loop.optimizer.step()
    handle = loop.model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.backward()
    handle.remove()
    loop.optimizer.step()


def overflow(loop: Loop) -> None:
    """Let a scaler leave out a step, on all ranks, for the gradients of one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loss = loop.model(random_input(loop.rank, 4, DIM)).square().mean()
    scaler.scale(loss * (float("inf") if loop.rank == 1 else 1.0)).backward()
    before = full(loop.model[1].weight)
    scaler.step(loop.optimizer)
    loop.optimizer.zero_grad()
    assert torch.equal(full(loop.model[1].weight), before)


# What ranks do after a backward, and then run another one: alone, or all.
Way = Callable[[Loop], object]
STEPS: dict[str, Way] = {
    "a step": lambda loop: loop.optimizer.step(),
    "a step of a part": lambda loop: loop.later.step(),
    "two steps": lambda loop: [loop.optimizer.step(), loop.optimizer.step()],
}
MODES: dict[str, Way] = {
    "evaluation": lambda loop: loop.model.eval(),
    "evaluation of a handle": lambda loop: loop.model[0].eval(),
}
FREE: dict[str, Way] = {
    "evaluation of what is no handle": lambda loop: loop.model[0].dropout.eval(),
    "evaluation between forwards": lambda loop: [loop.model.eval(), loop.model.train()],
    "a step of another model that nothing compares": lambda loop: loop.optimizers[1].step(),
}
ALIKE: dict[str, Way] = {"in turn": in_turn, "recovery": recover, "overflow": overflow}


def alone_or_all(way: str, *, is_alone: bool, accumulates: bool) -> list[str]:
    loop = Loop()
    loop.backward()
    loop.optimizer.step()
    if not is_alone or loop.rank == 1:
        (STEPS | MODES | FREE | ALIKE)[way](loop)
    for _ in range(3):
        (loop.accumulate if accumulates else loop.backward)()
        loop.optimizer.step()
    return loop.errors


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    ("way", "is_alone"),
    [*((way, one) for way in STEPS | MODES | FREE for one in (False, True)), *((way, False) for way in ALIKE)],
)
def test_steps_and_modes_of_some_ranks_alone_are_told_once(
    way: str, is_alone: bool, accumulates: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    for rank, errors in enumerate(run_threads(alone_or_all, 3, way, is_alone=is_alone, accumulates=accumulates)):
        assert len(errors) == (is_alone and way in STEPS), errors
        for error in errors:
            assert error.startswith("optimizers of rank 1 have made other steps since the last backward"), error
            assert f"at:  rank {rank}" in error and "optimizer.step() on every rank" in error
    said = [text for text in caplog.messages if "modules of rank 1 were not in the mode" in text]
    assert len(said) == 3 * (is_alone and way in MODES), said


def without_inputs() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(Dropping(), nn.Linear(DIM, DIM)), policy={Dropping, nn.Linear})
    model.eval()
    with Join([joinable(model, step=lambda: None)]):
        for number in range(2 * (dist.get_rank() != 1)):
            model(random_input(number, 4, DIM)).square().mean().backward()


def test_a_rank_that_never_had_inputs_says_no_modes(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    run_threads(without_inputs, 3)
    assert not [text for text in caplog.messages if "mode" in text]
