"""Ends a training step at one executed line of the package, on all ranks at the same, and looks at the next step.

A *point* is a line and how often it has run in the step by then. The ranks record those of a step that
nobody disturbs, and keep those by which all of them have started the same number of collectives; then each
step ends at one of them, and the next one has to equal one process in losses, gradients and weights. Steps of
one program follow each other on one model until one goes wrong.

    python -m tools.interrupts --count 50 --seed 1
    python -m tools.interrupts --count 500 --only "nested, no_sync"
"""

import argparse
import dis
import inspect
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch

import composable
from composable import ReplicateModule, reduction_stats, step_in_backward
from composable.engine import handle_of
from composable.ground.torch_private import _set_modes, modes_off, modes_on
from composable.testing.process_group import SimulatedGroup
from composable.testing.simulation import run
from tests.parity import full
from tools.interrupt_programs import PROGRAMS, Program

__all__ = ["Point", "Tried", "interrupted_at", "points_of", "record", "sample", "train_through", "try_points"]

_PACKAGE = str(Path(composable.__file__).parent)
_TESTING = str(Path(composable.__file__).parent / "testing")
_PROGRAMS = str(Path(__file__).parent / "interrupt_programs.py")
TOLERANCE = 1e-9


class Point(NamedTuple):
    """The ``nth`` time that a line runs in a step."""

    file: str
    line: int
    nth: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.nth})"


@dataclass
class Tried:
    """How many points of a program were tried, which some rank did not come to, and after which the step was wrong."""

    tried: int = 0
    missed: list[Point] = field(default_factory=list)
    wrong: dict[Point, str] = field(default_factory=dict)


# Raising at a line

# Simulated ranks take the modes of a thread off too, and put them on again.
_MODES = {inspect.unwrap(one).__code__ for one in (modes_off, modes_on, _set_modes)}


@cache
def _is_ours(code: CodeType) -> bool:
    file = code.co_filename
    if file == _PROGRAMS:
        return code.co_name.startswith("hook_")
    return file.startswith(_PACKAGE) and not file.startswith(_TESTING) and code not in _MODES


@cache
def _exits(code: CodeType) -> frozenset[int]:
    """Return where the calls of ``__exit__`` after a ``with`` begin.

    They count as lines, but Python runs no handler of a signal between the block's end and that call.
    """
    found = set()
    steps = list(dis.get_instructions(code))
    for first, second, third, call in zip(steps, steps[1:], steps[2:], steps[3:]):
        pushed = [one for one in (first, second, third) if one.opname == "DUP_TOP" or _is_none(one)]
        if len(pushed) == 3 and call.opname in ("PRECALL", "CALL", "CALL_FUNCTION"):
            found.add(first.offset)
    return frozenset(found)


def _is_none(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None


@contextmanager
def _at_each_line(visit: Callable[[str, int], None], at_collective: Callable[[], None] | None = None) -> Iterator[None]:
    """Call ``visit`` before each line of the package that this thread runs, ``at_collective`` before each collective."""

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if at_collective is not None and code is SimulatedGroup._enter.__code__:
            at_collective()
        if not _is_ours(code):
            return None
        file, exits = code.co_filename, _exits(code)

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line" and frame.f_lasti not in exits:
                visit(file, frame.f_lineno)
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def record(fn: Callable[[], object]) -> dict[Point, int]:
    """Return the points that ``fn`` comes to, in their order, with the number of collectives started by then."""
    counts: Counter[tuple[str, int]] = Counter()
    points: dict[Point, int] = {}
    started = [0]

    def visit(file: str, line: int) -> None:
        counts[file, line] += 1
        points[Point(_short(file), line, counts[file, line])] = started[0]

    def at_collective() -> None:
        started[0] += 1

    with _at_each_line(visit, at_collective):
        fn()
    return points


@cache
def _short(file: str) -> str:
    return str(Path(file).relative_to(Path(_PACKAGE).parent))


def interrupted_at(point: Point, fn: Callable[[], object], error: type[BaseException]) -> BaseException | None:
    """Run ``fn`` and raise ``error`` at ``point``; returns what came out of it, ``None`` if it did not get there."""
    left = [point.nth]
    wanted = str(Path(_PACKAGE).parent / point.file)

    def visit(file: str, line: int) -> None:
        if line == point.line and file == wanted:
            left[0] -= 1
            if not left[0]:
                raise error(f"at {point}")  # Held by no frame, so that it can be forgotten.

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # Of callbacks that may not raise.
    try:
        with warnings.catch_warnings(), _at_each_line(visit):
            warnings.simplefilter("ignore")  # Of torch, that a hook raised while another exception was on its way.
            fn()
    except BaseException as caught:
        if left[0] > 0:
            raise
        return caught
    finally:
        sys.unraisablehook = hook
    # Somebody may have kept it to himself.
    return error() if left[0] <= 0 else None


# Training through interrupts


class _Twins:
    """The model of one rank, and the same in one process."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank, self.seed = program, rank, 0
        self.plain = program.make()
        self.model = program.make()
        program.annotate(self.model)
        for module in self.model.modules():
            if isinstance(module, ReplicateModule):
                # Else the first ones only are measured, and lines of later ones are others.
                reduction_stats(module, sample_rate=1)
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (self.plain, self.model)]
        # What the optimizer holds is sharded; a model that was cut short may still show unsharded parameters.
        self.params = dict(self.model.named_parameters())
        if program.steps:
            step_in_backward(self.optimizers[1])

    def step(self) -> torch.Tensor:
        """Run forward and backward of this rank."""
        self.optimizers[1].zero_grad()
        return self.program.step(self.model, self.rank, self.seed, 1.0)

    def check(self) -> None:
        """Train a step; raise unless all is as in one process."""
        self.seed += 1
        ranks = range(self.program.world_size)
        self.plain.zero_grad()
        if self.program.steps:
            # A step that was cut short may have changed some, and so may the forward that puts buckets right.
            self.program.forward(self.model, self.rank, self.seed)
            with torch.no_grad():
                for name, param in self.plain.named_parameters():
                    param.copy_(full(self.params[name]))
        losses = [self.program.step(self.plain, rank, self.seed, 1 / len(ranks), is_plain=True) for rank in ranks]
        loss = self.step()
        _equal("loss", loss, losses[self.rank])
        wanted = dict(self.plain.named_parameters())
        for name, param in self.model.named_parameters():
            _equal(f"gradient of {name}", param.grad, None if self.program.steps else wanted[name].grad)
        for optimizer in self.optimizers[: 1 if self.program.steps else 2]:
            optimizer.step()
        for name, param in self.model.named_parameters():
            _equal(name, param, wanted[name])
        # Whoever kept old weights would show it here.
        with torch.no_grad():
            outputs = [self.program.forward(one, self.rank, self.seed) for one in (self.model, self.plain)]
        _equal("output", *outputs)
        handles = {handle_of(param) for param in self.params.values()} - {None}
        transports = {one for handle in handles for flat in handle.buffers for one in flat.routes.transports()}
        assert not any(transport.in_flight for transport in transports), "a collective was never waited for"


def _equal(what: str, own: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    if own is None or wanted is None:
        assert own is None and wanted is None, f"{what} is {'there' if wanted is None else 'missing'}"
        return
    own = full(own)
    assert torch.allclose(own, wanted.detach(), atol=TOLERANCE, rtol=TOLERANCE), (
        f"{what} is off by up to {(own - wanted).abs().max():.3g}; right are up to {wanted.abs().max():.3g}"
    )


def _warm(program: Program, rank: int) -> _Twins:
    twins = _Twins(program, rank)
    for _ in range(0 if program.is_first else 3):
        twins.check()
    return twins


def points_of(program: Program) -> list[Point]:
    """Return the points that every rank comes to in a step of the program after the same number of collectives."""

    def on_rank(rank: int) -> dict[Point, int]:
        twins = _warm(program, rank)
        twins.seed += 1
        found = record(twins.step)
        if program.is_first:
            return found
        # Some forwards compare values: lines that not every step comes to are left out.
        twins.seed += 1
        again = record(twins.step)
        return {point: started for point, started in found.items() if again.get(point) == started}

    outcome = run(program.world_size, on_rank)
    _raise_first(outcome.errors)
    first, *others = (outcome.results[rank] for rank in range(program.world_size))
    return [point for point, started in first.items() if all(other.get(point) == started for other in others)]


def train_through(
    rank: int,
    program: Program,
    points: Sequence[Point],
    *,
    error: type[BaseException],
    keeps_traceback: bool,
    note: Callable[[int, bool], None],
) -> None:
    """End a step at each of the points, on this rank, and check the next one.

    The traceback may be kept while the next step runs, as in a notebook; ``note`` is told which point comes next, and
    then whether this rank came to it.
    """
    twins = _warm(program, rank)
    for number, point in enumerate(points):
        note(number, True)
        twins.seed += 1
        caught = interrupted_at(point, twins.step, error)
        if caught is None:
            note(number, False)
        if not keeps_traceback:
            caught = None
        twins.check()
        del caught


def try_points(
    program: Program,
    points: Sequence[Point],
    *,
    error: type[BaseException] = KeyboardInterrupt,
    keeps_traceback: bool = True,
) -> Tried:
    """Try all points on ranks that are threads; after one that leaves things wrong, with a new model."""
    tried = Tried()
    done = 0
    while done < len(points):
        at = [0]
        missed: set[int] = set()

        def note(number: int, came: bool, at: list[int] = at, missed: set[int] = missed) -> None:
            at[0] = max(at[0], number)
            if not came:
                missed.add(number)

        left = points[done : done + 1] if program.is_first else points[done:]
        # Ranks put back what they find, in any order.
        with mock.patch("sys.unraisablehook", return_value=None):
            outcome = run(
                program.world_size,
                train_through,
                program,
                left,
                error=error,
                keeps_traceback=keeps_traceback,
                note=note,
                timeout_s=900,
            )
        tried.missed += [left[number] for number in sorted(missed)]
        tried.tried += at[0] + 1
        done += at[0] + 1
        if outcome.errors:
            rank, raised = next(iter(outcome.errors.items()))
            tried.wrong[left[at[0]]] = f"rank {rank}: {type(raised).__name__}: {raised}"
            outcome.errors.clear()
    return tried


def sample(points: Sequence[Point], count: int, seed: int) -> list[Point]:
    """Return ``count`` of the points, drawn by lines: what runs often is no more likely than what runs once."""
    drawn = random.Random(seed)
    by_line: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        by_line.setdefault((point.file, point.line), []).append(point)
    lines = list(by_line.values())
    drawn.shuffle(lines)
    return [drawn.choice(same) for same in lines[:count]]


def _raise_first(errors: dict[int, BaseException]) -> None:
    for error in errors.values():
        raise error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return 1 if a step after an interrupt was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="lines of each program (default: 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=[program.name for program in PROGRAMS])
    options = parser.parse_args(arguments)
    is_wrong = False
    for program in PROGRAMS:
        if options.only and program.name not in options.only:
            continue
        for error in (KeyboardInterrupt, RuntimeError):
            points = sample(points_of(program), options.count, options.seed)
            # In torch 2.11 a traceback keeps checkpointing's own hooks on, for plain models too.
            tried = try_points(program, points, error=error, keeps_traceback=program.name != "checkpointing")
            is_wrong |= bool(tried.wrong)
            print(f"{program.name}, {error.__name__}: {tried.tried} steps, {len(tried.wrong)} wrong", flush=True)
            for point, what in tried.wrong.items():
                print(f"    {point}: {what}", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    raise SystemExit(main())
