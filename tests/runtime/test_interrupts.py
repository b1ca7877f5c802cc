"""After an exception or Ctrl-C at any line of the package, on all ranks alike, the next step is that of one process.

A few lines of each program are tried. More: ``python -m tools.interrupts``.
"""

import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composable.comm import Transport
from composable.comm.transport import transport_class
from composable.engine import Handle
from composable.engine.buffer import SecondaryShards
from composable.engine.finish import GradientFinalizer
from composable.engine.param import Faces
from composable.engine.passes import Forwards
from composable.ground.casts import CastBuffers, LentBuffer
from composable.optim import BackwardSteps
from composable.replication.buckets import Bucket
from composable.replication.reducer import BucketSteps, _arrival
from tests.world import on_ranks, run_ranks
from tools.interrupt_programs import PROGRAMS, Program
from tools.interrupts import Point, points_of, sample, train_through, try_points

NAMES = [program.name for program in PROGRAMS]


def program_named(name: str) -> Program:
    return next(program for program in PROGRAMS if program.name == name)


@pytest.mark.parametrize("name", NAMES)
def test_the_step_after_an_interrupt_is_right(name: str) -> None:
    program, seed = program_named(name), NAMES.index(name)
    points = points_of(program)
    for error, keeps_traceback in ((KeyboardInterrupt, True), (KeyboardInterrupt, False), (RuntimeError, True)):
        seed += len(NAMES)
        # In torch 2.11 a traceback keeps checkpointing's own hooks on, for plain models too.
        keeps_traceback = keeps_traceback and name != "checkpointing"
        tried = try_points(program, sample(points, 2, seed), error=error, keeps_traceback=keeps_traceback)
        assert not tried.wrong, {str(point): what for point, what in tried.wrong.items()}
        assert not tried.missed


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (BackwardSteps._step_groups, "steps in backward"),
        (BackwardSteps._widen, "steps in backward"),
        (Bucket._allocate, "replicate, steps in backward"),
        (CastBuffers._restore, "casts of shared buffers"),
        (LentBuffer.give_back, "casts of shared buffers"),
        (SecondaryShards.keep, "resharded to two ranks"),
        (Forwards._end_call, "resharded to two ranks"),
        (Handle.begin_unshard, "resharded to two ranks"),
        (Faces.show_unsharded, "resharded to two ranks"),
        (GradientFinalizer.begin, "policy, process_group"),
        # Ranks use other parameters, or have stepped other buckets.
        (_arrival, "nested"),
        (_arrival, "nested, no_sync"),
        (BucketSteps.step_rest, "replicate, steps in backward, unused parameters"),
    ],
)
def test_where_things_could_stay_half_done_steps_are_stopped_at_any_line(
    function: Callable[..., None], name: str
) -> None:
    program, file = program_named(name), inspect.getfile(function)
    lines, first = inspect.getsourcelines(function)
    # Where the optimizer has begun, some of its parameters may be stepped; that is so in any step.
    wanted = {first + number for number, line in enumerate(lines) if "self._step(" not in line}
    points = [one for one in points_of(program) if file.endswith(one.file) and one.line in wanted and one.nth <= 2]
    assert len(points) >= 6
    tried = try_points(program, points)
    assert not tried.wrong, {str(point): what for point, what in tried.wrong.items()}


@pytest.mark.parametrize("name", ["policy", "policy, process_group", "replicate", "nested, no_sync"])
def test_no_memory_is_freed_that_gloo_writes_to(name: str) -> None:
    program = dataclasses.replace(program_named(name), dim=64)
    # Where ranks start and wait; what is cut short there is what can be written to later.
    files = ("/comm/", "/engine/", "/replication/", "/torch_hooks")
    points = [point for point in points_of(program) if any(part in point.file for part in files)]
    run_ranks(interrupted_often, program.world_size, name, sample(points, 20, 0))


def interrupted_often(name: str, points: list[Point]) -> None:
    program = dataclasses.replace(program_named(name), dim=64)
    missed: list[str] = []
    # Ranks that are threads, which showed the points, have other transports, and so another number of orders.
    note = lambda number, is_there: None if is_there else missed.append(str(points[number]))  # noqa: E731
    train_through(dist.get_rank(), program, points, error=KeyboardInterrupt, keeps_traceback=True, note=note)
    assert len([one for one in missed if "/comm/" not in one]) <= 1, missed


NUMEL = 1 << 12
COLLECTIVES: dict[str, Callable[[Transport, torch.Tensor, torch.Tensor], Any]] = {
    "all_gather": lambda transport, whole, part: transport.begin_all_gather(whole, part, 0),
    "reduce_scatter": lambda transport, whole, part: transport.begin_reduce_scatter(whole, part, 0, scale=0.5),
    "all_reduce": lambda transport, whole, part: transport.begin_all_reduce(whole, 0, scale=0.5),
    "broadcast": lambda transport, whole, part: transport.begin_broadcast(whole, 1, 0),
}


@on_ranks(2, run=run_ranks, name=["process_group", "shared_memory"])
def test_a_collective_cut_short_at_any_instruction_is_settled(name: str) -> None:
    """Cut each collective short at each third instruction, settle, and run it again."""
    default = dist.group.WORLD
    assert default is not None
    transport = transport_class(name)(default)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    cuts = 0

    def ready() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((world_size * NUMEL,), rank + 1.0), torch.full((NUMEL,), rank + 1.0)

    for begin in COLLECTIVES.values():
        own = at_instructions(lambda: begin(transport, *ready()).finish())  # noqa: B023
        every: list[Any] = [None] * world_size
        dist.all_gather_object(every, own)
        for point in sorted(set(own).intersection(*every))[cuts % 3 :: 3]:
            # Memory of its own, given back at once: who writes to it later writes to that of others.
            at_instructions(lambda: begin(transport, *ready()).finish(), point)  # noqa: B023
            transport.settle()
            cuts += 1
            for repeated in COLLECTIVES.values():
                whole, part = ready()
                repeated(transport, whole, part).finish()
                check(repeated, whole, part, world_size)
    assert cuts > 50


def check(ran: Callable[..., Any], whole: torch.Tensor, part: torch.Tensor, world_size: int) -> None:
    total = sum(range(1, world_size + 1))
    if ran is COLLECTIVES["all_gather"]:
        assert torch.equal(whole, torch.arange(1.0, world_size + 1).repeat_interleave(part.numel()))
    elif ran is COLLECTIVES["reduce_scatter"]:
        assert torch.equal(part, torch.full_like(part, total / 2))
    elif ran is COLLECTIVES["all_reduce"]:
        assert torch.equal(whole, torch.full_like(whole, total / 2))
    else:
        assert torch.equal(whole, torch.full_like(whole, 2.0))


def at_instructions(fn: Callable[[], object], stop: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return which instructions of ``collectives/`` run in ``fn``, and how often by then; raise before ``stop``."""
    counts: Counter[tuple[object, ...]] = Counter()
    found: list[tuple[object, ...]] = []

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            code = frame.f_code
            at = code.co_filename, code.co_firstlineno, frame.f_lasti
            counts[at] += 1
            found.append((*at, counts[at]))
            if found[-1] == stop:
                raise KeyboardInterrupt
        return step

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        if "/composable/comm/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        fn()
    except KeyboardInterrupt:
        assert stop
    finally:
        sys.settrace(before)
    return found
