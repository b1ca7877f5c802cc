"""What may happen to a model in a story: a table of operations, each for a rank and for one process, and what trains.

An operation is a function of a ``Side``. It runs on every rank and, unless it is refused there, once in one process. It
returns what has changed in ``Now``, by the names of the fields. All that it chooses follows from the number of the
operation, so that the others may be taken out of a story.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from composable import accelerate_optimizer, clip_grad_norm_, reduce_gradients, step_in_backward
from tools.fuzz.annotations import COPY_MODES
from tools.fuzz.cases import OPTIMIZERS
from tools.fuzz.nodes import Boom
from tools.fuzz.programs import PROGRAMS
from tools.fuzz.runner import make_optimizer
from tools.fuzz.story_parts import Now, Side, StoryStep

__all__ = ["OPERATIONS", "Changes", "Operation", "Skipped", "has_no_hooks", "is_closed", "is_quiet", "is_sharded"]
__all__ += ["may_change_a_part", "may_copy", "operation"]

Changes = dict[str, Any]
SYNCED: Changes = {"is_pending": False}


class Skipped(Exception):  # noqa: N818  # an outcome
    """The operation would not be legal user code now; nothing has happened."""


@dataclass(frozen=True)
class Operation:
    """One kind of operation."""

    run: Callable[[Side], Changes | None]  # what it does
    weight: int  # how often it is drawn
    is_legal: Callable[[Now], bool] = lambda now: True
    trains: bool = False  # it runs backwards: after an error in it a user drops all gradients


OPERATIONS: dict[str, Operation] = {}
Run = Callable[[Side], Changes | None]


def operation(name: str, weight: int = 1, **options: Any) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        OPERATIONS[name] = Operation(run, weight, **options)
        return run

    return register


def training(name: str, weight: int = 1, **options: Any) -> Callable[[Callable[[StoryStep], None]], None]:
    """Register a step, the last backward of which synchronises."""

    def register(run: Callable[[StoryStep], None]) -> None:
        def on_side(side: Side) -> Changes:
            side.train(run)
            return SYNCED

        OPERATIONS[f"train: {name}"] = Operation(on_side, weight, trains=True, **options)

    return register


def is_sharded(now: Now) -> bool:
    return now.annotation.mode not in COPY_MODES


def is_of_one_root(now: Now) -> bool:
    return now.annotation.mode not in ("roots", "mixed", "nested", "together")


def has_direct_parts(now: Now) -> bool:
    return {"0", "inp", "head 0", "head 1"} <= set(now.annotated)


def is_closed(now: Now) -> bool:
    """Say whether no graph waits that a write to parameters would spoil."""
    return not now.is_open


def is_quiet(now: Now) -> bool:
    return not now.has_hooks


def has_no_hooks(now: Now) -> bool:
    return not now.has_hooks and not now.has_module_hooks


def may_change_a_part(now: Now) -> bool:
    return bool(now.annotated) and not now.is_low and may_copy(now)


def may_copy(now: Now) -> bool:
    return has_no_hooks(now) and is_closed(now)


# Training: programs of the random trees, and more of them

_WEIGHTS = {"plain": 6, "no_sync": 3, "any order": 3, "forward raises": 2, "backward raises": 2, "eval between": 2}
_LEFT_OUT = {"all in a thread", "backward in a thread", "reentrant checkpoint around all", "the second leg waits"}


def _take_over(name: str) -> None:
    program = PROGRAMS[name]

    def run(side: Side) -> Changes:
        side.train(program.run)
        return {} if name == "nothing" else SYNCED

    def is_legal(now: Now) -> bool:
        return (
            (program.is_single or not now.has_hooks)
            and (not program.is_of_one_root or is_of_one_root(now))
            and (not program.needs or has_direct_parts(now))
        )

    OPERATIONS[f"train: {name}"] = Operation(run, _WEIGHTS.get(name, 1), is_legal, trains=True)


for _name, _program in PROGRAMS.items():
    if _name not in _LEFT_OUT and not _program.copies:
        _take_over(_name)


def draw_ways(step: StoryStep, ways: Sequence[str]) -> dict[int, str]:
    return {number: step.rng.choice(ways) for number in range(len(step.model.trunk.kids))}


@training("parts are left out", 4, is_legal=is_quiet)
def leave_parts_out(step: StoryStep) -> None:
    for _ in range(step.rng.randint(1, 3)):
        ways = draw_ways(step, ["skip", ""])
        step.backward(step.forward(call=step.call(ways=ways), head=step.rng.randrange(2)))


@training("parts are left out of no_sync", 2, is_legal=lambda now: is_quiet(now) and is_of_one_root(now))
def leave_parts_out_of_no_sync(step: StoryStep) -> None:
    with step.no_sync():
        for _ in range(step.rng.randint(1, 2)):
            step.backward(step.forward(call=step.call(ways=draw_ways(step, ["skip", ""]))))
    step.backward(step.forward(call=step.call(ways=draw_ways(step, ["skip", ""]))))


@training("side losses", 4, is_legal=is_quiet)
def side_losses(step: StoryStep) -> None:
    choices = ["", "skip", "side", step.rng.choice(["drop", "detach"])]
    for _ in range(step.rng.randint(1, 2)):
        step.backward(step.forward(call=step.call(ways=draw_ways(step, choices))))


@training("gradient of the input")
def gradient_of_input(step: StoryStep) -> None:
    x = step.x(requires_grad=True)
    step.backward(step.forward(x))
    assert x.grad is not None
    step.losses.append(x.grad * step.world_size if step.is_plain else x.grad)


@training("one graph twice", is_legal=is_quiet)
def one_graph_twice(step: StoryStep) -> None:
    loss = step.forward()
    with step.no_sync() if step.rng.random() < 0.5 else contextlib.nullcontext():
        step.backward(loss, retain_graph=True)
    step.backward(loss)


@operation("raise in the middle of a forward", 2, trains=True)
def raise_in_forward(side: Side) -> None:
    def run(step: StoryStep) -> None:
        ways = {step.rng.randrange(len(step.model.trunk.kids)): "raise"}
        with pytest.raises(Boom), step.no_sync() if step.rng.random() < 0.5 else contextlib.nullcontext():
            step.backward(step.forward(call=step.call(ways=ways)))

    side.train(run)


@training("raise in the middle of a backward", 3, is_legal=is_quiet)
def raise_in_backward(step: StoryStep) -> None:
    ways = {step.rng.randrange(len(step.model.trunk.kids)): "raise later"}
    with pytest.raises(Boom), step.no_sync() if step.rng.random() < 0.5 else contextlib.nullcontext():
        step.backward(step.forward(call=step.call(ways=ways)))
    step.zero_grad()


@operation("train: a forward, for later", 4, is_legal=lambda now: is_quiet(now) and not now.is_open, trains=True)
def forward_for_later(side: Side) -> Changes:
    def run(step: StoryStep) -> None:
        side.open.append(step.forward() * step._scale)

    side.train(run)
    return {"is_open": True}


@operation("train: backward of that forward", 6, is_legal=lambda now: now.is_open, trains=True)
def backward_later(side: Side) -> Changes:
    while side.open:
        side.open.pop().backward()
    return {"is_open": False, **SYNCED}


@training("a forward writes", is_legal=is_closed)
def forward_writes(step: StoryStep) -> None:
    step.backward(step.forward(call=step.call(writes=step.rng.randrange(len(step.model.trunk.kids)))))


@operation("train: no_sync of a part", 3, is_legal=lambda now: bool(now.annotated) and is_quiet(now), trains=True)
def no_sync_of_a_part(side: Side) -> Changes:
    part = side.rng.choice(side.now.annotated)

    def run(step: StoryStep) -> None:
        with step.no_sync_of(part):
            for _ in range(step.rng.randint(1, 2)):
                step.backward(step.forward())
        step.backward(step.forward())

    side.train(run)
    return SYNCED


@operation("train: no_sync and no more", 4, is_legal=is_quiet, trains=True)
def nothing_but_no_sync(side: Side) -> Changes:
    def run(step: StoryStep) -> None:
        with step.no_sync():
            step.backward(step.forward(head=step.rng.randrange(2)))

    side.train(run)
    return {"is_pending": True}


@operation(
    "train: step inside backward",
    2,
    is_legal=lambda now: is_quiet(now) and is_closed(now) and not now.is_pending,
    trains=True,
)
def step_inside(side: Side) -> None:
    side.optimizer.zero_grad()
    with contextlib.nullcontext() if side.is_plain else step_in_backward(side.optimizer):
        side.train(lambda step: step.backward(step.forward()))
    if side.is_plain:
        side.optimizer.step()
        side.optimizer.zero_grad()


# Steps and gradients


@operation("step", 4, is_legal=is_closed)
def take_step(side: Side) -> Changes:
    if side.now.is_pending and not side.is_plain:
        reduce_gradients(side.model)
    if side.rng.random() < 0.3:
        (nn.utils.clip_grad_norm_ if side.is_plain else clip_grad_norm_)(list(side.params().values()), 0.5)
    side.optimizer.step()
    drop(side, side.rng.choice(["to None", "to None", "to zeros", "keep"]))
    return SYNCED


@operation("drop gradients", 4)
def drop_gradients(side: Side) -> None:
    drop(side, side.rng.choice(["to None", "to zeros", "some"]))


def drop(side: Side, how: str) -> None:
    if how == "some":
        params = side.params()
        for name in side.rng.sample(sorted(params), len(params) // 2):
            params[name].grad = None
    elif how != "keep":
        owner = side.rng.choice([side.model, side.optimizer])
        owner.zero_grad(set_to_none=how == "to None")


@operation("write to gradients", 2, is_legal=lambda now: not now.is_pending)
def write_gradients(side: Side) -> None:
    for param in side.params().values():
        way = side.rng.choice(["scale", "scale a new one", "copy", "nothing"])
        if param.grad is not None and way == "scale":
            param.grad.mul_(0.5)
        elif param.grad is not None and way != "nothing":
            param.grad = param.grad * 0.5 if way == "scale a new one" else param.grad.clone()


@operation("another optimizer")
def other_optimizer(side: Side) -> None:
    kind = side.rng.choice(OPTIMIZERS)
    side.optimizer = make_optimizer(kind, side.params().values())


@operation("accelerate_optimizer", 2)
def accelerate(side: Side) -> None:
    if not side.is_plain:
        accelerate_optimizer(side.optimizer, side.model)


@operation("reduce_gradients", is_legal=lambda now: now.is_pending)
def reduce_now(side: Side) -> Changes:
    if not side.is_plain:
        reduce_gradients(side.model)
    return SYNCED


@operation("freeze or thaw", 4, is_legal=is_closed)
def freeze(side: Side) -> None:
    parts = [*side.model.trunk.kids, *side.model.heads]
    names = {param: name for name, param in side.params().items()}
    for part in side.rng.sample(parts, 2):
        share = side.rng.choice([0.3, 1.0])  # some of a part, or all
        for param in list(part.parameters()):
            is_trained, is_chosen = side.rng.random() < 0.5, side.rng.random() < share
            # Of a replicated module only what was trained when it was annotated may be.
            if is_chosen and (is_sharded(side.now) or names.get(param) in side.now.trained):
                param.requires_grad_(is_trained)
