"""Casts on a stream of their own, on the recording device: everything is ordered, and each rule is needed."""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as run_with_checkpoint

from composable import MixedPrecisionPolicy, replicate
from composable.replication import low_precision
from tests.low_precision import BF16, DIM
from tests.models import random_input, seeded
from tests.runtime.recording import Recorder
from tests.test_replicate_precision import train_tree
from tests.world import run_threads


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """Where another test of this process has compiled something, copies are made at once."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


# The model and its programs


class Net(nn.Module):
    """Parts that are called, that are only read, that share a weight, that run again in backward or on another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.tied, self.read, self.late, self.branch = (nn.Linear(DIM, DIM) for _ in range(6))
        self.spare = nn.Linear(DIM, DIM)
        self.tied.weight = self.first.weight
        self.read.requires_grad_(False)
        self.lstm = nn.LSTM(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))
        self.does: set[str] = set()
        self.recorder: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if "raise" in self.does:
            raise ValueError("in forward")
        if self.does & {"branch", "branch last"}:
            x = self._run_branch(x)
        x = run_with_checkpoint(self.again, x, use_reentrant=False)
        x = nn.functional.linear(x, self.read.weight, self.read.bias) * self.scale
        x, _ = self.lstm(self.tied(x))
        if "write" in self.does:
            with torch.no_grad():
                self.own.mul_(0.5)
        return self.late(x) if "late" in self.does else x

    def _run_branch(self, x: torch.Tensor) -> torch.Tensor:
        home, side = self.recorder.current_stream(), self.recorder.Stream(name="branch")
        side.wait_stream(home)
        if "branch last" in self.does:
            y = self.branch(x)
            with self.recorder.stream(side):
                x = self.branch(x)
        else:
            with self.recorder.stream(side):
                y = self.branch(x)
            x = self.branch(x)
        home.wait_stream(side)
        return x + y


class Bench:
    """The model, annotated, on a recording device."""

    def __init__(self, recorder: Recorder, made: "Made") -> None:
        self.model = model = seeded(Net, 0)
        model.recorder = recorder
        object.__setattr__(model, "own", model.late.weight)
        replicate(model, mp_policy=MixedPrecisionPolicy(BF16), find_unused_parameters=True)
        for part in replicate.state(model).precision.parts:
            part.params = made.low_params(part.slots)
            part.params.casts = made.casts(recorder)
            recorder.take_names(part.params.casts.names)
        self.lending = part.params
        for fqn, param in model.named_parameters():
            recorder.call(param, f"parameter {fqn}")
        self.optimizer = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=0.1, momentum=0.9)
        self.seed = 0

    def forward(self, *does: str) -> torch.Tensor:
        self.model.does = set(does)
        self.seed += 1
        return self.model(random_input(self.seed, 4, DIM)).float().square().mean()

    def write(self) -> None:
        """Change every parameter, as an optimizer with weight decay may."""
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.9)

    def step(self, *does: str) -> None:
        self.forward(*does).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.write()


def train(bench: Bench) -> None:
    for _ in range(3):
        bench.step()


def evaluate(bench: Bench) -> None:
    for context in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with context():
            bench.forward()
        bench.write()


def raise_in_forward(bench: Bench) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="in forward"):
            bench.forward("raise")
        bench.write()
        bench.step()


def read_what_was_not_read_before(bench: Bench) -> None:
    for does in ((), ("late",), (), ("late",), ("late",), ()):
        bench.step(*does)


def write_in_forward(bench: Bench) -> None:
    bench.step()
    for _ in range(2):
        bench.step("write", "late")
        bench.step()


def branch(bench: Bench) -> None:
    for _ in range(3):
        with torch.no_grad():
            bench.forward("branch")
        bench.write()


def branch_last(bench: Bench) -> None:
    for _ in range(3):
        with torch.no_grad():
            bench.forward("branch last")
        bench.write()


def run_twice_before_backward(bench: Bench) -> None:
    for _ in range(2):
        losses = [bench.forward() for _ in range(2)]
        sum(losses[1:], losses[0]).backward()
        bench.write()


def lend_parameters(bench: Bench) -> None:
    for _ in range(2):
        lent = {"first.weight": torch.ones(DIM, DIM), "scale": nn.Parameter(torch.ones(DIM))}
        functional_call(bench.model, lent, (random_input(0, 4, DIM),)).float().sum().backward()
        bench.write()


PROGRAMS: dict[str, Callable[[Bench], None]] = {
    one.__name__: one
    for one in (
        train,
        evaluate,
        raise_in_forward,
        read_what_was_not_read_before,
        write_in_forward,
        branch,
        branch_last,
        run_twice_before_backward,
        lend_parameters,
    )
}


class Made(NamedTuple):
    """The classes under test, or broken ones."""

    low_params: Any
    casts: Any


REAL = Made(low_precision.LowPrecisionParams, low_precision.DeviceCasts)


def record(program: str, mutation: "Mutation | None" = None) -> tuple[list[str], tuple[int, int, int]]:
    """Return what one rank got wrong, and how many operations, events and frees there were."""
    recorder = Recorder()
    with recorder:
        PROGRAMS[program](Bench(recorder, REAL if mutation is None else mutated(mutation)))
    counts = recorder.operations, recorder.events, recorder.frees
    return list(map(str, recorder.violations)), counts


@pytest.mark.parametrize("program", PROGRAMS)
def test_casts_are_ordered(program: str) -> None:
    [(found, (operations, events, frees))] = run_threads(record, 1, program)
    assert not found, "\n".join(found)
    assert operations > 50 and events > 10 and frees > 10


def train_random(seed: int, *, on_device: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train a random tree; returns its parameters, and what was not ordered."""
    recorder = Recorder()

    def adopt(model: nn.Module) -> None:
        for part in replicate.state(model).precision.parts:
            part.params.casts = low_precision.DeviceCasts(recorder)

    if not on_device:
        return train_tree(seed, steps=6, micros=2), []
    with recorder:
        params = train_tree(seed, steps=6, micros=2, adopt=adopt)
    return params, list(map(str, recorder.violations))


@pytest.mark.parametrize("seed", range(int(os.environ.get("TREE_CASES", "10"))))
def test_random_trees_are_ordered_and_train_as_without_streams(seed: int) -> None:
    [(params, found)], [(expected, _)] = (run_threads(train_random, 1, seed, on_device=one) for one in (True, False))
    assert not found, "\n".join(found)
    torch.testing.assert_close(params, expected, rtol=0, atol=0)


# Each rule is needed


class Mutation(NamedTuple):
    """One broken rule: (old, new) texts of the source, in which program that is found, and what is said then."""

    name: str
    edits: Sequence[tuple[str, str]]
    program: str
    finds: str


FILES = (low_precision,)
WAIT_FOR_WRITES = "        self._casts.wait_stream(current)\n"
FILL = "        with self._device.stream(self._casts):\n"
FILLED = "            return [(_copies_of(group), self._casts.record_event()) for group in groups]\n"
WAIT = "        current.wait_event(event)\n"
END = "            self._device.current_stream().wait_stream(self._casts)\n"
MUTATIONS = [
    Mutation(
        "a cast does not wait for the step",
        [(WAIT_FOR_WRITES, "")],
        "train",
        "race of parameter first.weight: _foreach_copy_ reads on casts, not ordered after: mul_.Tensor writes on default",
    ),
    Mutation("a copy takes memory that is still read", [(WAIT_FOR_WRITES, "")], "evaluate", "reuse of"),
    Mutation(
        "an event before the casts",
        [
            (
                FILLED,
                "            event = self._casts.record_event()\n"
                "            return [(_copies_of(group), event) for group in groups]\n",
            )
        ],
        "train",
        "reads on default, not ordered after: _foreach_copy_ writes on casts",
    ),
    Mutation(
        "an event of the current stream",
        [
            (
                FILL + FILLED,
                "        current = self._device.current_stream()\n"
                + FILL
                + FILLED.replace("self._casts.record", "current.record"),
            )
        ],
        "train",
        "reads on default, not ordered after: _foreach_copy_ writes on casts",
    ),
    Mutation(
        "a first use does not wait",
        [(WAIT, "")],
        "train",
        "reads on default, not ordered after: _foreach_copy_ writes on casts",
    ),
    Mutation(
        "another stream waits",
        [(WAIT, WAIT.replace("current", "self._casts"))],
        "train",
        "reads on default, not ordered after: _foreach_copy_ writes on casts",
    ),
    Mutation(
        "a wait of any stream stands for all",
        [("return is_home and self._is_alone", "return True")],
        "branch",
        "addmm reads on default, not ordered after: _foreach_copy_ writes on casts",
    ),
    Mutation(
        "the stream that waits first is the one for all",
        [
            ("            self._home = current\n", "            pass\n"),
            (WAIT, WAIT + "        self._home = current\n"),
            ("return is_home and self._is_alone", "return is_home"),
        ],
        "branch",
        "addmm reads on default, not ordered after: _foreach_copy_ writes on casts",
    ),
    Mutation(
        "nobody looks whether there are branches",
        [("        self._is_alone = False\n", "        self._is_alone = True\n")],
        "branch_last",
        "addmm reads on branch, not ordered after: _foreach_copy_ writes on casts",
    ),
    Mutation(
        "branches are forgotten",
        [("        self._has_branches |= not is_home\n", "")],
        "branch_last",
        "addmm reads on branch, not ordered after: _foreach_copy_ writes on casts",
    ),
    Mutation(
        "casts in vain are not waited for",
        [(END, "            pass\n")],
        "train",
        "race of parameter spare.weight: mul_.Tensor writes on default, not ordered after: _foreach_copy_ reads on casts",
    ),
    Mutation(
        "nobody ends the casts",
        [("            self.casts.end()\n", "            pass\n")],
        "raise_in_forward",
        "writes on default, not ordered after: _foreach_copy_ reads on casts",
    ),
    Mutation(
        "nobody begins the casts of a forward",
        [("        casts.begin()\n        runs_ahead", "        runs_ahead")],
        "train",
        "race of parameter",
    ),
    Mutation(
        "a late cast does not see what the forward wrote",
        [("                casts.begin()\n", "")],
        "write_in_forward",
        "race of parameter late.weight: _foreach_copy_ reads on casts, not ordered after: mul_.Tensor writes on default",
    ),
]
HARMLESS = [
    Mutation(
        "casts on the current stream",
        [
            (FILL, FILL.replace("self._casts", "self._device.current_stream()")),
            (FILLED, FILLED.replace("self._casts", "self._device.current_stream()")),
        ],
        "train",
        "",
    ),
]


def mutated_source(mutation: Mutation) -> dict[ModuleType, str]:
    sources = {module: inspect.getsource(module) for module in FILES}
    for old, new in mutation.edits:
        found = [module for module in FILES if old in sources[module]]
        assert len(found) == 1 and sources[found[0]].count(old) == 1, f"not there once: {old}"
        sources[found[0]] = sources[found[0]].replace(old, new)
    return sources


def mutated(mutation: Mutation) -> Made:
    made = {}
    for module, source in mutated_source(mutation).items():
        made[module] = ModuleType(module.__name__)
        exec(compile(source, f"<{mutation.name}>", "exec"), made[module].__dict__)
    return Made(made[low_precision].LowPrecisionParams, made[low_precision].DeviceCasts)


def find(mutation: Mutation) -> list[str]:
    [(found, _)] = run_threads(record, 1, mutation.program, mutation)
    return found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_rule_is_found(mutation: Mutation) -> None:
    found = find(mutation)
    assert any(mutation.finds in one for one in found), "\n".join(found) or "found nothing"


@pytest.mark.parametrize("mutation", HARMLESS, ids=lambda mutation: mutation.name)
def test_what_is_only_slower_is_not_found(mutation: Mutation) -> None:
    assert not find(mutation)


def test_every_line_that_orders_streams_is_broken_once() -> None:
    source = inspect.getsource(low_precision).splitlines()
    orders = re.compile(r"wait_event|wait_stream|record_event|device\.stream\(|_home = current|return is_home|\|=")
    first = inspect.getsourcelines(low_precision.DeviceCasts)[1]
    lines = {index for index in range(first, len(source)) if orders.search(source[index])}
    broken: set[int] = set()
    for mutation in [*MUTATIONS, *HARMLESS]:
        edited = mutated_source(mutation)[low_precision].splitlines()
        for tag, start, stop, _, _ in difflib.SequenceMatcher(None, source, edited, autojunk=False).get_opcodes():
            if tag in {"delete", "replace"}:
                broken.update(range(start, stop))
    assert len(lines) > 5
    assert [source[index].strip() for index in sorted(lines - broken)] == []


# What is cast when


class Noting(low_precision.DeviceCasts):
    """Notes the widths of what is cast together, and of what is waited for."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.seen: list[Any] = []
        self._widths: dict[Any, int] = {}

    def fill(self, groups: Any) -> Any:
        filled = super().fill(groups)
        for group, (_, event) in zip(groups, filled, strict=True):
            self._widths[event] = len(group[0][0])
        self.seen.append(["cast", *(len(group[0][0]) for group in groups)])
        return filled

    def wait_for(self, event: Any) -> bool:
        waits = "wait", self._widths[event]
        if self.seen[-1] != waits:  # In the first forward each read of a module's parameters waits.
            self.seen.append(waits)
        return super().wait_for(event)


class Routed(nn.Module):
    """Layers of different widths, which run as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, width) for width in (1, 2, 3, 4))
        self.route = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layers[width](x).sum() for width in self.route]).sum()


def follow_routes(routes: list[list[int]], *, on_host: bool) -> list[Any]:
    model = Routed()
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16), find_unused_parameters=True)
    (part,) = replicate.state(model).precision.parts
    casts = part.params.casts = NotingOnHost() if on_host else Noting(Recorder())
    for route in routes:
        model.route = route
        casts.seen.append(route)
        model(torch.ones(1, 1)).backward()
    return casts.seen


def test_casts_run_in_the_order_of_the_last_forward_and_each_module_waits_for_its_own() -> None:
    routes = [[2, 0, 3, 1], [2, 0, 3, 1], [1, 0], [1, 0], [3, 0, 3]]
    (seen,) = run_threads(follow_routes, 1, routes, on_host=False)
    assert [one for one in seen if one[:1] != ["cast"] or len(one) > 1] == [
        *([2, 0, 3, 1], ["cast", 1, 2, 3, 4], ("wait", 3), ("wait", 1), ("wait", 4), ("wait", 2)),
        *([2, 0, 3, 1], ["cast", 3, 1, 4, 2], ("wait", 3), ("wait", 1), ("wait", 4), ("wait", 2)),
        *([1, 0], ["cast", 3, 1, 4, 2], ("wait", 2), ("wait", 1)),
        # What did not run is left out.
        *([1, 0], ["cast", 2, 1], ("wait", 2), ("wait", 1)),
        # Until it runs.
        *([3, 0, 3], ["cast", 2, 1], ["cast", 4], ("wait", 4), ("wait", 1)),
    ]


class NotingOnHost(low_precision.HostCasts):
    """Notes the widths of what is cast together."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def fill(self, groups: Any) -> Any:
        if groups:
            self.seen.append(["cast", *(len(group[0][0]) for group in groups)])
        return super().fill(groups)


def test_on_the_host_what_runs_is_cast_in_one_pass_and_what_never_ran_is_not() -> None:
    routes = [[2, 0], [2, 0], [1, 2, 0], [0]]
    (seen,) = run_threads(follow_routes, 1, routes, on_host=True)
    assert seen == [
        *([2, 0], ["cast", 3], ["cast", 1]),
        *([2, 0], ["cast", 3, 1]),
        *([1, 2, 0], ["cast", 3, 1], ["cast", 2]),
        *([0], ["cast", 3, 1, 2]),
    ]


def test_on_the_host_what_no_longer_runs_is_found_out_after_a_while() -> None:
    (seen,) = run_threads(follow_routes, 1, [[0, 1]] + 65 * [[0]], on_host=True)
    assert seen[-2:] == [[0], ["cast", 1]]
    assert seen.count(["cast", 1, 2]) == 63
