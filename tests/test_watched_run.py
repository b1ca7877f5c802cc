"""What ``watch`` measures and writes, that it changes nothing, and what it refuses."""

import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from composable import (
    ConfigError,
    UsageError,
    Watch,
    clip_grad_norm_,
    fully_shard,
    iter_full_params,
    replicate,
    timeline,
    watch,
)
from composable.annotation import KeptGradients, states_of
from composable.extras import watched_run
from composable.extras.lateness import StepTimes
from tests.counting import CountingTransport
from tests.world import on_ranks, run_ranks, run_threads

REPO = Path(__file__).parent.parent


def sharded() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), policy={nn.Linear})


def replicated() -> nn.Module:
    torch.manual_seed(0)
    return replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def train(model: nn.Module, steps: int, *, told: Callable[..., None] | None = None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if told is not None:
            told(tokens=8, loss=loss, grad_norm=norm)
    return [getattr(param, "_local_tensor", param).detach().clone() for param in model.parameters()]


class Writer:
    """Has the method of TensorBoard's writers that is called."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.rows.append((tag, value, step))


def listeners_of(model: nn.Module) -> list[object]:
    members = [one for state in states_of(model.modules()) for one in state.listeners.members]
    return [one for one in members if not isinstance(one, KeptGradients)]


def run_watched(makes: Callable[[], nn.Module], folder: str) -> list[dict[str, float]]:
    model, writer, lines, given = makes(), Writer(), list[str](), list[dict[str, float]]()
    path = Path(folder) / "run.jsonl"
    with watch(model, every=3, flops=100.0, peak_flops=1e9, show=lines.append, jsonl=path, writer=writer) as w:

        def told(**figures: Any) -> None:
            given.append({name: float(value.detach() if name == "loss" else value) for name, value in figures.items()})
            w.step(**figures)

        train(model, 7, told=told)
    assert isinstance(w, Watch) and listeners_of(model) == []
    if dist.get_rank():
        assert (lines, writer.rows, w.figures) == ([], [], {})
        return []
    rows: list[dict[str, float]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 3, 6]
    assert w.figures == rows[-1]
    assert writer.rows and {(name, step): value for name, value, step in writer.rows} == {
        (name, row["step"]): row[name] for row in rows for name in row if name != "step" and row[name] is not None
    }
    for row, line in zip(rows, lines, strict=True):
        told_then = given[int(row["step"]) - 1]
        assert (row["loss"], row["grad_norm"]) == (told_then["loss"], told_then["grad_norm"])
        assert row["tokens_per_s"] == pytest.approx(8000 / row["step_ms"])
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * 100 / 1e9)
        assert 0 < row["exposed_ratio"] <= 1 and row["peak_bytes"] > 1e6
        assert line.startswith(f"step {row['step']}: loss {row['loss']:.4g}, grad_norm {row['grad_norm']:.4g}, ")
        for part in ("ms a step", " tokens/s a rank, MFU ", "% exposed communication, peak "):
            assert part in line
    return rows


@pytest.mark.parametrize("makes", [sharded, replicated])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_first_step_and_every_third_are_written_by_rank_0_alone(
    makes: Callable[[], nn.Module], world_size: int, tmp_path: Path
) -> None:
    first, *others = run_threads(run_watched, world_size, makes, str(tmp_path))
    assert len(first) == 3 and others == [[]] * (world_size - 1)


@on_ranks(2)
def test_a_watched_run_sends_the_same_messages_and_has_the_same_weights() -> None:
    found = []
    for is_watched in (False, True):
        model = sharded()
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
        counting = CountingTransport.install(states_of(model.modules())[0].lazy_init())  # type: ignore[union-attr]
        if is_watched:
            with watch(model, every=1, show=False) as w:
                weights = train(model, 4, told=w.step)
        else:
            weights = train(model, 4)
        found.append(([weight.tolist() for weight in weights], counting.counts()))
    assert found[0] == found[1]


@on_ranks(1)
def test_the_lines_that_the_page_begins_with_are_enough() -> None:
    page = (REPO / "docs" / "watch.md").read_text()
    lines = page.partition("```text\n")[2].partition("```")[0]
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = [torch.ones(2, 4)] * 3
    with redirect_stdout(io.StringIO()) as shown:
        exec(lines, {"watch": watch, "model": model, "train_step": train_step, "batches": batches})
    assert "step 1: loss" in shown.getvalue() and "tokens/s" in shown.getvalue()


@on_ranks(2, run=run_ranks)
def test_waits_are_timed_and_only_in_the_steps_that_are_written() -> None:
    model, clock, watched = sharded(), count(), []
    with (
        mock.patch.object(watched_run, "moment", side_effect=lambda device: float(next(clock))),
        watch(model, every=4, show=False) as w,
        timeline(model) as times,
    ):
        for step in range(1, 10):
            if any(isinstance(one, StepTimes) for one in listeners_of(model)):
                watched.append(step)
            train(model, 1, told=w.step)
            if step == 8:
                exposed = w.figures.get("exposed_ratio")
    assert watched == [1, 4, 8]
    if dist.get_rank():
        assert exposed is None
    else:
        # A look at the clock is a millisecond: one at each end of a wait, as a forward begins and ends, as a backward
        # reaches each module and ends, and one at the end.
        waits = [one.kind for one in times.events if one.step == 7].count("wait")
        assert waits == 6 and exposed == pytest.approx(waits / (2 * waits + 2 + 3 + 1))


class Moment:
    """An event of a device that gets there late, a millisecond after the one before."""

    made: list["Moment"] = []  # noqa: RUF012  # emptied by the test
    waited = 0

    def __init__(self) -> None:
        self.ms, self.is_reached = float(len(self.made)), False
        self.made.append(self)

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        Moment.waited += not self.is_reached

    def elapsed_time(self, other: "Moment") -> float:
        return other.ms - self.ms


@on_ranks(1, run=run_ranks)
def test_on_a_device_no_step_waits_and_lines_follow_when_their_figures_have_come() -> None:
    Moment.made, Moment.waited, lines = [], 0, list[str]()
    with (
        mock.patch.object(watched_run, "moment", side_effect=lambda device: Moment()),
        watch(model := sharded(), every=2, show=lines.append) as w,
    ):
        train(model, 3, told=w.step)
        assert (lines, Moment.waited) == ([], 0)
        for moment in Moment.made:
            moment.is_reached = True
        train(model, 1, told=w.step)
        assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]
        assert Moment.waited == 0
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2", "step 4"]


@on_ranks(1)
def test_a_resumed_run_goes_on_counting_and_adds_to_its_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jsonl")
        for done in (0, 4):
            with watch(model := sharded(), every=3, show=False, jsonl=path, done=done) as w:
                train(model, 4, told=w.step)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 3, 5, 6]
    measured = {"step_ms", "tokens_per_s", "exposed_ratio", "peak_bytes", "last_rank", "late_ms", "late"}
    assert {*rows[0]} == {"step", "loss", "grad_norm", *measured}


@on_ranks(1)
def test_figures_may_be_numbers_and_tensors_and_nan_is_null_in_json() -> None:
    with tempfile.NamedTemporaryFile("r") as file, watch(model := sharded(), show=False, jsonl=file.name) as w:
        model(torch.ones(2, 4)).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # torch's gives a DTensor
        scale = torch.ones(())
        w.step(norm=norm, lr=0.5, epoch=3, scale=scale, low=torch.ones(1, dtype=torch.bfloat16), loss=math.nan)
        row = json.loads(file.read())
    assert row == {**w.figures, "loss": None} and "tokens_per_s" not in row
    assert (row["lr"], row["epoch"], row["scale"], row["low"]) == (0.5, 3, 1, 1)
    assert isinstance(norm, DTensor) and row["norm"] == float(norm.full_tensor())


TERMINAL = """
import torch, torch.distributed as dist
from torch import nn
from composable import fully_shard, watch

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Linear(2, 2))
with watch(model, every=1) as w:
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        w.step(loss=step)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_has_one_line_that_changes_and_a_log_has_one_for_each(is_terminal: bool) -> None:
    if is_terminal:
        pytest.importorskip("rich")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}
    environ |= {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"} if is_terminal else {}
    command = [sys.executable, "-c", TERMINAL]
    done = subprocess.run(command, cwd=REPO, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    printed = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]", "", done.stdout).replace("\r", "\n")
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert [line[:12] for line in lines] == [f"step {step}: loss" for step in ([3] if is_terminal else [1, 2, 3])]


@on_ranks(1)
def test_what_makes_no_sense_is_an_error_and_leaves_nothing() -> None:
    with pytest.raises(UsageError, match="watch found no annotated module"), watch(nn.Linear(2, 2)):
        pass
    for wrong in ({"flops": 6.0}, {"peak_flops": 1e12}, {"flops": 0, "peak_flops": 1.0}):
        with pytest.raises(ConfigError, match="flops is") as caught, watch(sharded(), **wrong):
            pass
        assert caught.value.fix
    with pytest.raises(ConfigError, match="jsonl cannot be opened"), watch(model := sharded(), jsonl="/no/such/file"):
        pass
    assert listeners_of(model) == []
    mesh = dist.init_device_mesh("cpu", (1,))
    parts = DTensor.from_local(torch.ones(()), mesh, [Partial()])
    with watch(model, every=1, show=False, flops=1.0, peak_flops=1.0) as w:
        wrong_calls: list[dict[str, Any]] = [{}, {"tokens": -1}, {"tokens": 1.5}, {"tokens": True}]
        wrong_calls += [{"tokens": 1, "x": one} for one in ("text", None, True, torch.ones(2), 1j, parts)]
        wrong_calls += [{"tokens": 1, name: 3.0} for name in ("mfu", "step_ms", "exposed_ratio")]
        for call in wrong_calls:
            with pytest.raises(ConfigError) as caught:
                w.step(**call)
            assert caught.value.fix
        train(model, 1, told=w.step)
        assert w.figures["step"] == 1
    for outside in (w, watch(model, show=False)):
        with pytest.raises(UsageError, match="outside of its context"):
            outside.step(tokens=1)
    with pytest.raises(ZeroDivisionError), watch(model, every=1, show=False):
        raise ZeroDivisionError
    assert listeners_of(model) == []


@on_ranks(1)
def test_a_watch_that_is_told_of_no_step_says_so() -> None:
    model = sharded()
    with mock.patch.object(watched_run, "warn_once") as warn:
        with watch(model, show=False):
            train(model, 1)
        assert "call w.step() at the end of each step" in warn.call_args.args[0]
        with watch(model, show=False, done=3) as w:
            w.step()
        assert warn.call_count == 1


def write_to_tensorboard(folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer, watch(model := sharded(), writer=writer, show=False) as w:
        train(model, 1, told=w.step)
        for fqn, value in iter_full_params(model, rank0_only=True):
            if value is not None:
                writer.add_histogram(fqn, value, 1)


def test_tensorboard_has_the_figures_and_histograms_of_whole_weights(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(write_to_tensorboard, 2, str(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {*events.Tags()["scalars"]} == {
        "loss",
        "grad_norm",
        "step_ms",
        "tokens_per_s",
        "exposed_ratio",
        "peak_bytes",
    }
    assert {*events.Tags()["histograms"]} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert events.Histograms("0.weight")[0].histogram_value.num == 16
