"""Random writes to parameters, by every way that torch has, at each moment of a step.

A program is a model of equal parts, options of its annotation, and a list of writes: each has a way, a moment, and the
part that it goes to, which is then sharded, gathered ahead, gathered, or kept. ``found`` runs it in one process, or on
a rank.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from composable import ComposableError, fully_shard
from tests.parity import full

__all__ = ["EXCHANGES", "Program", "Write", "draw_program", "expected", "found"]

DIM, PARTS, STEPS = 4, 4, 3
Way = Callable[[Any, Any], object]


def _exchange(param: Any, other: Any) -> None:
    param.data, other.data = other.data, param.data


def _put_back(param: Any, other: Any) -> None:
    kept = param.data
    param.data = other.data * 2
    param.data = kept


def _set(param: Any, other: Any) -> None:
    param.data = param.data * 0.9


def _keep(param: Any, other: Any) -> None:
    kept, also = param.data, param.detach()
    param.data = torch.ones_like(kept)
    kept.mul_(0.5)
    param.data.mul_(also)


WAYS: dict[str, Way] = {
    "set data": _set,
    "exchange data": _exchange,
    "put data back": _put_back,
    "keep data": _keep,
    "write data": lambda param, _: param.data.mul_(0.9),
    "copy_": lambda param, _: param.copy_(param * 0.9),
    "foreach": lambda param, other: torch._foreach_mul_([param, other], 0.9),
    "set_": lambda param, _: param.set_(param),
    "swap_tensors": torch.utils.swap_tensors,
    "parametrize": lambda *_: None,  # in `Part.forward`, or by `_register`
}
# What works on sharded parameters between two steps.
EXCHANGES = [way for way in WAYS if way not in ("set_", "swap_tensors", "parametrize")]
BETWEEN = ["before forward", "after backward", "after step"]
INSIDE = [f"{when} {part}" for part in range(PARTS) for when in ("before", "inside", "used", "behind")]
MOMENTS = [*BETWEEN, *INSIDE, "after forward"]


@dataclass(frozen=True)
class Write:
    """One write to the weight of part ``to``, and maybe to that of part ``other``, in every step.

    In every step, since what goes through ``.data`` of gathered parameters is looked for in some of them alone.
    """

    way: str
    moment: str
    to: int
    other: int
    is_held: bool  # by a parameter that was taken before the first forward

    @property
    def is_late(self) -> bool:
        """The backward of the step needs the values from before."""
        if self.moment in BETWEEN:
            return False
        return self.moment == "after forward" or INSIDE.index(self.moment) > INSIDE.index(f"inside {self.to}")


@dataclass(frozen=True)
class Program:
    """Writes, and options of the annotation."""

    writes: tuple[Write, ...]
    grouping: int  # parts of one handle; 0: all parts are of the root's
    reshards: bool
    prefetches: bool
    has_grad: bool
    frozen: frozenset[int]


def draw_program(rng: random.Random) -> Program:
    """Draw a program with one to three writes."""
    writes = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        to, other = rng.sample(range(PARTS), 2)
        moment = rng.choice(MOMENTS if rng.random() < 0.7 else BETWEEN)
        write = Write(rng.choice([*WAYS]), moment, to, other, rng.random() < 0.4)
        # A backward would need the values of one of both.
        both = {write.is_late, Write(write.way, moment, other, to, write.is_held).is_late}
        writes += [write] if len(both) == 1 else []
    frozen = frozenset(part for part in range(PARTS) if rng.random() < 0.2)
    choices = [rng.random() < 0.5 for _ in range(3)]
    return Program(tuple(writes), rng.choice([0, 1, 1, 2]), choices[0], choices[1], choices[2] or bool(frozen), frozen)


class _Delta(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 0.1


class _Part(nn.Module):
    def __init__(self, do: Callable[[str], None], number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 2)
        self.bias = nn.Parameter(torch.randn(DIM) / 2)
        self.do, self.number = do, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.do(f"inside {self.number}")
        x = (x @ self.weight + self.bias).tanh()
        self.do(f"used {self.number}")
        return x


class _Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(_Part(self.do, number) for number in range(PARTS))
        for number in program.frozen:
            self.parts[number].requires_grad_(False)
        self.program, self.is_over = program, False
        self.held: list[list[torch.Tensor]] = []

    def do(self, moment: str) -> None:
        for write in self.program.writes:
            if write.moment == moment and not self.is_over:
                pair: list[Any] = [self.parts[number].weight for number in (write.to, write.other)]
                if write.is_held:
                    pair = [self.held[0][write.to], self.held[0][write.other]]
                with torch.no_grad():
                    WAYS[write.way](*pair)
                if write.way == "parametrize":
                    part = self.parts[write.to]
                    parametrize.register_parametrization(part, "weight", _Delta())
                    parametrize.remove_parametrizations(part, "weight", leave_parametrized=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            self.do(f"before {number}")
            x = part(x)
            self.do(f"behind {number}")
        return x


def _annotate(model: _Model) -> None:
    program, parts = model.program, list(model.parts)
    for start in range(0, PARTS, program.grouping) if program.grouping else ():
        fully_shard(parts[start : start + program.grouping], reshard_after_forward=program.reshards)
    fully_shard(model, reshard_after_forward=program.reshards)
    if program.prefetches and program.grouping == 1:
        for one, following in itertools.pairwise(parts):
            one.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def found(program: Program, *, is_plain: bool = False) -> "list[torch.Tensor] | str":
    """Return outputs and parameters; "refused": an error of the library; else the text of another error."""
    model = _Model(program)
    if not is_plain:
        _annotate(model)
    model.held = [[part.weight for part in model.parts]]  # in a list, where no module looks for parameters
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9) if trained else None
    outputs = []
    try:
        for _ in range(STEPS):
            model.do("before forward")
            with torch.set_grad_enabled(program.has_grad):
                outputs.append(model(torch.ones(2, DIM)))
            model.do("after forward")
            if program.has_grad and outputs[-1].requires_grad:
                outputs[-1].square().sum().backward()
            model.do("after backward")
            if optimizer is not None and program.has_grad:
                optimizer.step()
                optimizer.zero_grad()
            model.do("after step")
        model.is_over = True
        outputs.append(model(torch.ones(2, DIM)))
        return [one.detach() for one in (*outputs, *map(full, model.parameters()))]
    except ComposableError:
        return "refused"
    except RuntimeError as error:
        return str(error)


def expected(program: Program) -> "Iterator[list[torch.Tensor] | str]":
    """Yield what one process finds; then, if the backward needs values from before, with these writes behind it."""
    yield found(program, is_plain=True)
    if program.has_grad and any(write.is_late for write in program.writes):
        later = (
            Write(one.way, "after backward" if one.is_late else one.moment, one.to, one.other, one.is_held)
            for one in program.writes
        )
        changed = Program(tuple(later), 0, program.reshards, program.prefetches, True, program.frozen)
        yield found(changed, is_plain=True)
