"""What ``timeline`` notes: each handle's and bucket's step in the right order, as often as collectives run, and no more."""

import copy
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import composable
from composable import (
    ConfigError,
    Timeline,
    TimelineEvent,
    UsageError,
    fully_shard,
    no_sync,
    replicate,
    timeline,
    watch,
)
from composable.annotation import KeptGradients, replicate_state_of, sharded_state_of
from composable.extras import step_times
from composable.replication import moment
from composable.testing import simulate
from tests.counting import CountingTransport
from tests.world import on_ranks, run_ranks, run_threads
from tools.streams.recorded import put_on_device
from tools.streams.recording import Recorder

INPUT = torch.arange(12.0).view(3, 4) / 10


class Model(nn.Sequential):
    runs_again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        x = checkpoint(self[1], x, use_reentrant=False) if self.runs_again else self[1](x)
        out: torch.Tensor = self[2](x)
        return out


def plain() -> Model:
    torch.manual_seed(0)
    return Model(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


def sharded() -> Model:
    model = plain()
    model.scale = nn.Parameter(torch.ones(4))
    for module in model:
        fully_shard(module)
    return fully_shard(model)


def replicated() -> Model:
    return replicate(plain(), bucket_cap_mb=1e-4)


def nested() -> Model:
    model = plain()
    replicate(model[1])
    return replicate(model, bucket_cap_mb=1e-4)


def both() -> Model:
    model = plain()
    fully_shard(model[0])
    replicate(model[2])
    return model


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(INPUT).sum().backward()


def spans(events: list[TimelineEvent], row: str, kind: str) -> list[tuple[float, float]]:
    return [(one.start_ms, one.stop_ms) for one in events if (one.row, one.kind) == (row, kind)]


def counts_of(times: Timeline, step: int) -> dict[str, int]:
    return dict(Counter(f"{one.kind} {one.row}" for one in times.events if one.step == step))


def left_of(model: nn.Module) -> list[object]:
    """Return what a timeline could leave behind."""
    found: list[object] = []
    for module in model.modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        found += [hook for hook in hooks if isinstance(getattr(hook, "__self__", None), Timeline)]
        sharding, replication = sharded_state_of(module), replicate_state_of(module)
        if replication is not None:
            found += [one for one in replication.reducer.listeners.members if not isinstance(one, KeptGradients)]
        if sharding is not None and sharding.root is not None:
            found += sharding.root.scheduler.step.listeners.members
        if sharding is not None:
            found += sharding.listeners.members
    return found


# -- order and number


def run_sharded(variant: str) -> dict[str, int]:
    model = sharded()
    model.runs_again = variant == "checkpoint"
    with timeline(model) as times:
        train(model, 1)
        counting = CountingTransport.install(sharded_state_of(model).lazy_init())
        with no_sync(model) if variant == "no_sync" else ExitStack():
            train(model, 1)
    assert left_of(model) == []
    events = [one for one in times.events if one.step == 1]
    number = Counter(one.kind for one in events)
    assert number["gather"] == counting.counts()["all_gather"]
    assert number["reduce"] == counting.counts().get("reduce_scatter", 0)
    assert number["wait"] == number["gather"] + number["reduce"]
    for row in ("(root)", "0", "1", "2"):
        (forward,), (backward,) = spans(events, row, "forward"), spans(events, row, "backward")
        gathers, waits, reductions = (spans(events, row, kind) for kind in ("gather", "wait", "reduce"))
        assert forward[1] <= backward[0] < backward[1]
        for (gathered, there), (waited, ready), used in zip(gathers, waits, (forward, backward), strict=False):
            assert gathered <= waited <= ready == there <= used[0]
        for (begun, ended), wait in zip(reductions, waits[len(gathers) :], strict=True):
            assert backward[1] <= begun <= wait[0] <= wait[1] == ended
    (root,), blocks = spans(events, "(root)", "backward"), [spans(events, row, "backward")[0] for row in "210"]
    assert all(root[0] <= start and stop <= root[1] for start, stop in blocks)
    assert all(one[1] <= other[0] for one, other in pairwise(blocks))
    again, (backward,) = spans(events, "1", "recompute"), spans(events, "1", "backward")
    assert len(again) == (variant == "checkpoint") and all(
        backward[0] <= one[0] <= one[1] <= backward[1] for one in again
    )
    return counts_of(times, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("variant", ["plain", "checkpoint", "no_sync"])
def test_a_handle_gathers_waits_computes_and_reduces_in_this_order(variant: str, world_size: int) -> None:
    first, *others = run_threads(run_sharded, world_size, variant)
    assert others == [first] * (world_size - 1)
    reductions = [name for name in first if name.startswith("reduce")]
    assert len(reductions) == (0 if variant == "no_sync" else 4)


def test_ranks_that_are_processes_or_simulated_note_the_same() -> None:
    expected = run_threads(run_sharded, 2, "plain")
    assert run_ranks(run_sharded, 2, "plain") == expected
    assert simulate(2, lambda rank: run_sharded("plain")) == expected


@on_ranks(2, syncs=[True, False], makes=[replicated, nested])
def test_a_bucket_is_reduced_and_waited_for_after_its_gradients(makes: Callable[[], nn.Module], syncs: bool) -> None:
    model = makes()
    train(model, 2)
    with timeline(model) as times, ExitStack() if syncs else no_sync(model):
        train(model, 2)
    assert left_of(model) == []
    events = [one for one in times.events if one.step == 1]
    rows = {"(root)": model, "1": model[1]} if makes is nested else {"(root)": model}
    for row, module in rows.items():
        buckets = [f"{row} bucket {index + 1}" for index in range(len(composable.reduction_stats(module).bucket_bytes))]
        (forward,), (backward,) = spans(events, row, "forward"), spans(events, row, "backward")
        waits, reductions = spans(events, row, "wait"), [spans(events, name, "reduce") for name in buckets]
        assert forward[1] <= backward[0] < backward[1]
        assert list(map(len, reductions)) == [int(syncs)] * len(buckets) and len(waits) == int(syncs)
        for ((begun, ended),), (waited, ready) in zip(reductions, waits * len(buckets), strict=False):
            assert backward[0] <= begun <= waited <= ready == ended
    assert {one.fqn for one in events} == {"" if row == "(root)" else row for row in rows}


@on_ranks(2, run=run_ranks)
def test_both_annotations_are_on_one_axis() -> None:
    model = both()
    with timeline(model) as times:
        train(model, 2)
    kinds = {"gather 0": 1, "wait 0": 2, "forward 0": 1, "backward 0": 1, "reduce 0": 1}
    kinds |= {"forward 2": 1, "backward 2": 1, "reduce 2 bucket 1": 1, "wait 2": 1}
    assert counts_of(times, 1) == kinds


# -- what it leaves alone


def trained(makes: Callable[[], nn.Module], *, is_timed: bool) -> list[torch.Tensor]:
    model = makes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with timeline(model) if is_timed else ExitStack():
        for _ in range(3):
            model(INPUT).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [getattr(param, "_local_tensor", param).detach().clone() for param in model.parameters()]


@on_ranks(2, makes=[sharded, replicated, nested, both])
def test_training_gives_the_same_numbers_to_the_bit(makes: Callable[[], nn.Module]) -> None:
    pairs = zip(trained(makes, is_timed=True), trained(makes, is_timed=False), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class Stop(Exception):  # noqa: N818  # it says what it does
    pass


@on_ranks(2, where=["forward", "backward", "between"], makes=[sharded, replicated, both])
def test_an_exception_inside_leaves_nothing_behind(makes: Callable[[], nn.Module], where: str) -> None:
    def stop(*_: Any) -> None:
        raise Stop

    model = makes()
    with suppress(Stop), timeline(model) as times:
        train(model, 2)
        hook = model[1].register_forward_hook(stop) if where == "forward" else None
        with suppress(Stop):
            output = model(INPUT)
            if where == "backward":
                output.register_hook(stop)
            output.sum().backward()
        if hook is not None:
            hook.remove()
        train(model, 2)
        raise Stop
    assert left_of(model) == []
    assert counts_of(times, times.events[-1].step) == counts_of(times, 1)
    before = times.events
    train(model, 1)
    assert times.events == before


@on_ranks(2)
def test_another_timeline_of_the_same_model_notes_the_same_and_may_outlive_the_first() -> None:
    model = both()
    outer, inner = ExitStack(), ExitStack()
    first = outer.enter_context(timeline(model))
    second = inner.enter_context(timeline(model))
    train(model, 1)
    outer.close()
    train(model, 1)
    inner.close()
    assert left_of(model) == []
    assert counts_of(first, 0) == counts_of(second, 0) == counts_of(second, 1)
    assert {one.step for one in first.events} == {0}


@on_ranks(2)
def test_a_copy_of_the_model_is_not_noted() -> None:
    model = sharded()
    with timeline(model) as times:
        train(model, 1)
        twin = copy.deepcopy(model)
        train(twin, 1)
    train(twin, 1)
    assert {one.step for one in times.events} == {0}
    assert sum(one.kind == "forward" for one in times.events) == 4


@on_ranks(2)
def test_the_last_16_steps_are_kept_and_a_forward_without_gradients_is_one() -> None:
    model = both()
    with timeline(model) as times:
        train(model, 3)
        with torch.no_grad():
            for _ in range(15):
                model(INPUT)
    assert sorted({one.step for one in times.events}) == list(range(2, 18))
    assert times.events[0].start_ms >= 0


# -- what is read


def test_the_exposed_part_is_what_the_events_say_and_both_pictures_have_them() -> None:
    for times in simulate(2, _timed):
        events = [one for one in times.events if one.step == 2]
        length_ms = max(one.stop_ms for one in events) - events[0].start_ms
        waits = sorted((one.start_ms, one.stop_ms) for one in events if one.kind == "wait")
        exposed_ms = sum(
            max(0.0, stop - max([start, *(end for _, end in waits[:i])])) for i, (start, stop) in enumerate(waits)
        )
        assert times.exposed_ratio() == times.exposed_ratio(2) == pytest.approx(exposed_ms / length_ms)
        assert 0 < times.exposed_ratio() < 1

        svg = ElementTree.fromstring(times.draw())
        assert svg.get("role") == "img" and f"{times.exposed_ratio():.0%} exposed" in (svg[0].text or "")
        named = Counter(
            what.partition(", ")[0]
            for one in svg.iter()
            if ": " in (what := one.text or "") and one.tag.endswith("title")
        )
        assert {name.replace(": ", " ") for name in named} >= {f"{one.row} {one.kind}" for one in events}
        assert times.draw() == times.draw()

        found = json.loads(times.trace())["traceEvents"]
        slices = [one for one in found if one["ph"] == "X"]
        names = {(one["pid"], one.get("tid")): one["args"]["name"] for one in found if one["ph"] == "M"}
        assert len(slices) == len(times.events)
        assert {names[one["pid"], one["tid"]] for one in slices} == {one.row for one in times.events}
        assert all(
            one["dur"] >= 0 and one["name"] == one["cat"] and set(one["args"]) == {"fqn", "step"} for one in slices
        )
        for one in slices:
            beside = [
                other
                for other in slices
                if other["tid"] == one["tid"] and one["ts"] < other["ts"] < one["ts"] + one["dur"]
            ]
            assert all(other["ts"] + other["dur"] <= one["ts"] + one["dur"] + 1e-3 for other in beside)
        assert names[slices[0]["pid"], None].startswith("rank ")


def _timed(rank: int) -> Timeline:
    model = both()
    with timeline(model) as times:
        train(model, 3)
    return times


@on_ranks(1)
def test_a_picture_of_many_handles_shows_the_first_and_the_last_and_escapes_names() -> None:
    model = nn.Sequential(OrderedDict((f"<{index}&>", nn.Linear(2, 2)) for index in range(30)))
    for module in model:
        fully_shard(module)
    with timeline(model) as times:
        model(torch.ones(1, 2))
    texts = [one.text for one in ElementTree.fromstring(times.draw()).iter() if one.tag.endswith("text")]
    assert texts[-25:] == [
        *(f"<{index}&>" for index in range(12)),
        "+ 6 more",
        *(f"<{index}&>" for index in range(18, 30)),
    ]


@on_ranks(2)
def test_a_step_is_one_line_of_text_whose_times_are_those_of_its_events() -> None:
    with timeline(model := sharded()) as times:
        train(model, 2)
    pattern = r"Step 1 of rank [01]: (.*) ms, (\d+)% exposed communication; forward (.*) ms, "
    pattern += r"backward (.*) ms, gather (.*) ms, reduce (.*) ms; longest waits: (\S+) (\S+) ms, (\S+) (\S+) ms, (\S+) (\S+) ms"
    found = re.fullmatch(pattern, times.summary())
    assert found
    step, exposed, forward, backward, _, _, *longest = found.groups()
    events = [one for one in times.events if one.step == 1]
    last = max(one.stop_ms for one in events)
    assert float(step) == pytest.approx(last - events[0].start_ms, rel=0.01)
    assert float(exposed) == pytest.approx(100 * times.exposed_ratio(), abs=0.51)
    for kind, told in (("forward", forward), ("backward", backward)):
        ((start, stop),) = spans(events, "(root)", kind)  # The others are inside.
        assert float(told) == pytest.approx(stop - start, rel=0.01)
    waits = {row: sum(stop - start for start, stop in spans(events, row, "wait")) for row in ("(root)", "0", "1", "2")}
    rows = sorted(waits, key=lambda row: -waits[row])[:3]
    assert longest[::2] == rows and [float(one) for one in longest[1::2]] == pytest.approx(
        [waits[row] for row in rows], rel=0.01
    )
    assert times.summary(0).startswith("Step 0 of rank ")


@on_ranks(2)
def test_what_people_print_says_in_one_line_what_it_is() -> None:
    model, rank = both(), torch.distributed.get_rank()
    with timeline(model) as times, watch(model, show=False) as w:
        assert repr(times).startswith(f"<Timeline of rank {rank}: 0 steps; ") and repr(w) == "<Watch: no figures yet>"
        train(model, 2)
        w.step(loss=0.5)
    assert repr(times).startswith(f"<Timeline of rank {rank}: 2 steps; ")
    assert repr(w).startswith("<Watch: step 1: loss 0.5, " if rank == 0 else "<Watch: no figures yet>")
    states = repr([sharded_state_of(model[0]), replicate_state_of(model[2])])
    assert states == "[<FullyShardState of Linear over 2 ranks>, <ReplicateState of Linear over 2 ranks>]"


@on_ranks(1)
def test_what_cannot_be_drawn_is_an_error_that_says_so() -> None:
    with pytest.raises(UsageError, match="timeline found no annotated module"), timeline(nn.Linear(2, 2)):
        pass
    with timeline(both()) as times:
        for read in (times.draw, times.exposed_ratio, times.summary):
            with pytest.raises(UsageError, match="no step") as caught:
                read()
            assert caught.value.fix
    assert times.events == [] and json.loads(times.trace())
    with timeline(model := both()) as times:
        model(INPUT)
    for step in (1, -2, 1.0, True, None):
        with pytest.raises(ConfigError, match="step is"):
            times.draw(step)  # type: ignore[arg-type]


# -- on a device


class Moment:
    """An event of a device on which each takes a millisecond; ``made`` are the streams of all."""

    made: list[str] = []  # noqa: RUF012  # emptied by the test
    recorder: Recorder

    def __init__(self, device: str, *, enable_timing: bool) -> None:
        assert (device, enable_timing) == ("cuda", True)

    def record(self, stream: Any = None) -> None:
        self.made.append((stream or self.recorder.current_stream()).name)
        self.ms = len(self.made)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Moment") -> float:
        return float(other.ms - self.ms)


@on_ranks(2, run=run_ranks)
def test_on_a_device_gathers_and_reductions_are_timed_in_their_streams_and_keep_their_order() -> None:
    Moment.recorder, model = Recorder(), sharded()
    put_on_device(sharded_state_of(model).lazy_init(), Moment.recorder)
    on_cuda = partial(moment, torch.device("cuda"))
    with (
        mock.patch.object(torch, "Event", Moment),
        mock.patch.object(step_times, "moment", lambda _, stream=None: on_cuda(stream)),
        Moment.recorder,
        timeline(model) as times,
    ):
        train(model, 2)
        kinds = Counter(one.kind for one in times.events)
    assert list(map(str, Moment.recorder.violations)) == []
    assert kinds == {"gather": 14, "wait": 22, "forward": 8, "backward": 8, "reduce": 8}
    streams = Counter(Moment.made)
    assert (streams["unshard"], streams["reduce"]) == (2 * 14, 8)
    assert all(one.start_ms < one.stop_ms for one in times.events)
