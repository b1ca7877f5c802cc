"""Which rank ``watch`` calls late, and where: from given numbers, then from clocks that tests set."""

import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import UsageError, fully_shard, replicate, timeline, watch
from composable.engine import Rider, Work
from composable.extras import watched_run
from composable.extras.lateness import LateRanks, StepTimes, ToldStep, find_late
from tests.world import on_ranks, run_threads

PHASES = ("data", "forward", "backward", "optimizer")
NAMES = [f"blocks.{index}" for index in range(9)]
NOBODY = {"last_rank": None, "late_ms": None, "late": None}
# Milliseconds by rank, phase and the number of a module; 0: it is in none.
Planted = dict[tuple[int, str, int], float]


def told(
    chance: random.Random, planted: Planted, *, steps: int = 30, ranks: int = 4, noise: float = 0.1
) -> list[ToldStep]:
    """Return what ranks tell that work 1 ms in each phase of each module, less or more by chance, and the planted."""
    found = []
    for step in range(steps):
        bit, rows = step % len(NAMES).bit_length(), {}
        for rank in range(ranks):
            row = [0.0] * 5
            for number in range(len(NAMES) + 1):
                for phase, name in enumerate(PHASES):
                    # At times the machine does something else.
                    ms = chance.uniform(1 - noise, 1 + noise) + (chance.random() < 0.005) * chance.uniform(0, 30)
                    ms = (ms if bool(number) is (phase in (1, 2)) else 0.0) + planted.get((rank, name, number), 0.0)
                    row[phase] += ms
                    row[4] += ms * (number >> bit & 1)
            rows[rank] = row
        found.append((bit, rows))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_is_late_in_one_place_is_named_with_it(ranks: int) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        rank, phase, late_ms = chance.randrange(ranks), chance.choice(PHASES), 5 * 40 ** chance.random()
        number = chance.randint(1, len(NAMES)) if phase in ("forward", "backward") else 0
        found = find_late(told(chance, {(rank, phase, number): late_ms}, ranks=ranks), NAMES)
        place = f"{phase} of {NAMES[number - 1]}" if number else phase
        assert found["last_rank"] == rank and found["late"].endswith(f"most in {place}"), (seed, found)
        assert found["late_ms"] == pytest.approx(late_ms, abs=2)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("noise", [0.01, 0.9])
def test_no_rank_is_named_where_all_are_late_at_times(ranks: int, noise: float) -> None:
    for seed in range(40):
        assert find_late(told(random.Random(seed), {}, ranks=ranks, noise=noise), NAMES) == NOBODY, seed


def test_little_is_no_lateness_and_few_steps_or_one_rank_show_nothing() -> None:
    planted = {(1, "data", 0): 100.0}
    assert find_late(told(random.Random(0), planted, steps=8), NAMES)["last_rank"] == 1
    assert find_late(told(random.Random(0), planted, steps=7), NAMES) == NOBODY == find_late([], NAMES)
    assert find_late(told(random.Random(0), planted, ranks=1), NAMES) == NOBODY

    def of(late_ms: float, step_ms: float) -> Any:
        rows = {rank: [late_ms * (rank == 2), step_ms, 0.0, 0.0, 0.0] for rank in range(3)}
        return find_late([(0, rows)] * 8, NAMES)["last_rank"]

    # From two milliseconds on, and from a fiftieth of the step.
    assert (of(1.99, 10), of(2.01, 10), of(2.99, 150), of(3.01, 150)) == (None, 2, None, 2)


def test_no_rank_is_named_that_others_seldom_wait_for() -> None:
    steps: list[ToldStep] = []
    for step in range(20):
        # Rank 0 is always late by 3 ms, and in 13 of 20 steps another one is by 9 ms.
        rows = {
            rank: [3.0 * (rank == 0) + 9.0 * (step < 13 and rank == 1 + step % 4), 10.0, 0, 0, 0] for rank in range(5)
        }
        steps.append((0, rows))
    assert find_late(steps, NAMES) == NOBODY
    assert find_late(steps[4:], NAMES)["late"] == "rank 0 last in 44% of steps, by 3 ms, most in data"
    for width, rank in ((10.0, None), (1.0, 0)):  # Late by 3 ms in the median, more or less from step to step.
        spread = [[100.0 + 3.0 + width * (step % 5 - 2), 0, 0, 0, 0] for step in range(20)]
        found = find_late([(0, {0: row, 1: [100.0, 0, 0, 0, 0]}) for row in spread], NAMES)
        assert found["last_rank"] == rank, width


def test_a_line_says_who_how_often_how_long_and_where() -> None:
    steps = []
    for step in range(45):
        bit = step % 4
        late = [8.0, 10.0, 10.0 + 172.0, 10.0, 172.0 * (8 >> bit & 1)] if step >= 4 else [0.0] * 5
        rows = {rank: [0.0, 10.0, 10.0, 10.0, 0.0] for rank in (0, 1, 2, 5)}
        steps.append((bit, {**rows, 3: late}))
    text = "rank 3 last in 91% of steps, by 180 ms, most in backward of blocks.7; 4% data"
    assert find_late(steps, NAMES) == {"last_rank": 3, "late_ms": 180.0, "late": text}
    # In one annotation of all there is nothing to choose from.
    assert find_late(steps, [""])["late"] == text.replace(" of blocks.7", "")


@pytest.mark.parametrize("numbers", [(1, 2), (0, 5), (3, 4, 8), range(1, 10), (0,)])
def test_no_module_is_named_where_several_are_late_or_none(numbers: Any) -> None:
    planted = {(0, "forward", number): 60.0 / len(numbers) for number in numbers}
    assert find_late(told(random.Random(1), planted), NAMES)["late"].endswith("most in forward")


def test_four_fifths_in_one_module_name_it() -> None:
    planted = {(0, "forward", 5): 48.0, (0, "forward", 0): 12.0}
    assert find_late(told(random.Random(1), planted), NAMES)["late"].endswith("most in forward of blocks.4")


# In training


class Block(nn.Module):
    def __init__(self, passes: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.passes = passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.passes("forward")
        y.register_hook(lambda grad: self.passes("backward"))
        return x + y


class Clocks:
    """A clock for each rank, which goes on by what tests say, and by a little with each look."""

    def __init__(self) -> None:
        self.ms = Counter[int]()

    def look(self, device: torch.device) -> float:
        self.pass_ms(0.01)
        return 1000 * dist.get_rank() + self.ms[dist.get_rank()]

    def pass_ms(self, ms: float) -> None:
        self.ms[dist.get_rank()] += ms


def run_late(annotation: str, late: tuple[int, str, int], folder: str, steps: int = 14) -> Any:
    """Train with a rank that is late by 50 ms in a place; return the lines, the rows and the timeline of this rank."""
    clocks, lines, path = CLOCKS[0], list[str](), Path(folder, "run.jsonl")

    def passes(place: str, block: int = -1) -> None:
        is_there = (dist.get_rank(), place) == late[:2] and block in (-1, late[2])
        clocks.pass_ms(1.0 + 50.0 * is_there)

    blocks = nn.Sequential(*[Block(partial(passes, block=block)) for block in range(3)])
    model = fully_shard(blocks, policy={Block}) if annotation == "fully_shard" else replicate(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, every=1, show=lines.append, jsonl=path) as w, timeline(model) as times:
        for _ in range(steps):
            passes("data")
            model(torch.ones(2, 4)).sum().backward()
            passes("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            w.step()
        return lines, path.read_text().splitlines(), times.summary()


CLOCKS: list[Clocks] = []


@contextmanager
def clocks() -> Iterator[None]:
    CLOCKS[:] = [Clocks()]
    with mock.patch.object(watched_run, "moment", side_effect=CLOCKS[0].look):
        yield


@pytest.mark.parametrize("annotation", ["fully_shard", "replicate"])
@pytest.mark.parametrize("late", [(0, "data", -1), (1, "forward", 2), (2, "backward", 0), (1, "optimizer", -1)])
def test_rank_0_tells_which_rank_is_late_and_where(annotation: str, late: tuple[int, str, int]) -> None:
    with clocks(), tempfile.TemporaryDirectory() as folder:
        (lines, rows, summary), *others = run_threads(run_late, 3, annotation, late, folder)
    rank, phase, block = late
    is_named = annotation == "fully_shard" and block >= 0
    text = f"rank {rank} last in 100% of steps, by 50 ms, most in {phase}{f' of {block}' if is_named else ''}"
    assert lines[-1].endswith(f", {text}") and summary.endswith(f"; {text}")
    found = [(row["last_rank"], row["late_ms"], row["late"]) for row in map(json.loads, rows)]
    # The first step is not told; each of the others with the backward after it, and heard with the next.
    assert found[:10] == [(None, None, None)] * 10 and lines[9].endswith("iB")
    assert found[10:] == [(rank, pytest.approx(50), text)] * 4
    assert all(lines == [] and summary.endswith(text) for lines, _, summary in others)


# Times of a rank, and how they travel


def test_work_is_told_by_phase_and_module_without_waits() -> None:
    clock, modules = [0.0], [object(), object()]
    times: Any = StepTimes(lambda: clock[0], {id(module): number for number, module in enumerate(modules, 1)})

    def passes(ms: float) -> None:
        clock[0] += ms

    def waits(work: Work, owner: object, ms: float) -> None:
        with times.work(work, owner, "name"):
            passes(ms)

    passes(1)
    times.forward_begins(None, broadcasts=False)
    waits(Work.GATHER, modules[0], 2)
    waits(Work.WAIT_FOR_GATHER, modules[0], 1000)
    passes(4)
    waits(Work.WAIT_FOR_GATHER, modules[1], 1000)
    passes(8)
    times.forward_ended(None, is_awaited=True)
    passes(16)
    times.backward_reached(modules[1])
    passes(32)
    waits(Work.REDUCE, modules[1], 64)
    waits(Work.WAIT_FOR_REDUCE, modules[0], 1000)
    passes(128)
    times.backward_reached(modules[0])
    passes(256)
    times.backward_ends(averages=True, ends=True)
    passes(512)
    waits(Work.WAIT_FOR_REDUCE, modules[0], 1000)
    passes(1024)
    of_phases = [1.0, 2.0 + 4 + 8 + 16, 32.0 + 64 + 128 + 256, 512.0 + 1024]
    whole = sum(of_phases) + 4000
    assert times.read(clock[0], 0) == ([*of_phases, 4.0 + 256], pytest.approx(4000 / whole))
    assert times.read(clock[0], 1)[0] == [*of_phases, 8.0 + 32 + 64 + 128]
    # What lies between a backward and the next forward is data, of another batch.
    times.forward_begins(None, broadcasts=False)
    passes(2048)
    assert times.read(clock[0])[0][:4] == [1.0 + 512 + 1024, 30.0 + 2048, 480.0, 0.0]


class Moment:
    """The end of a step, which the device reaches when a test says so."""

    is_reached = False

    def query(self) -> bool:
        return self.is_reached


@on_ranks(1)
def test_a_step_is_told_when_the_device_has_ended_it_and_of_ranks_that_tell_it_later_too() -> None:
    late, end, host = LateRanks(fully_shard(nn.Linear(2, 2))), Moment(), torch.device("cpu")
    times = mock.Mock(read=lambda stop, bit: ([bit, 2.0, 3.0, 4.0, 5.0], 0.0))
    late.measured.append((7, times, end))
    assert late.tell(host).tolist() == [-1] * 6
    end.is_reached = True
    assert late.tell(host).tolist() == [7, 0, 2, 3, 4, 5]
    assert late.tell(host).tolist() == [-1] * 6
    nothing = [-1.0] * 6
    for step in range(9):
        slow, fast = [step, 50.0, 0.0, 0.0, 0.0, 0.0], [step, 0.0, 9.0, 0.0, 0.0, 0.0]
        late.hear(torch.tensor([slow, nothing]), (2, 5))
        late.hear(torch.tensor([nothing, fast]), (2, 5))
    # The last message is heard with the one after it.
    assert late.text() == "rank 2 last in 100% of steps, by 50 ms, most in data"
    late.hear(torch.tensor([[100.0, *slow[1:]], nothing]), (2, 5))
    for step in range(100, 160):
        late.hear(torch.tensor([[step, 0.0, 0.0, 0.0, 0.0, 0.0], [step, 0.0, 9.0, 0.0, 0.0, 0.0]]), (2, 5))
    assert late.text() == "rank 5 last in 100% of steps, by 9 ms, most in forward" and len(late._heard) == 50


class Passenger(Rider):
    name, count = "another", 1

    def __init__(self) -> None:
        self.heard = 0

    def tell(self, device: torch.device) -> torch.Tensor:
        return torch.ones(1, dtype=torch.float64, device=device)

    def hear(self, told: torch.Tensor, numbers: Any) -> None:
        self.heard += 1


@pytest.mark.parametrize("annotate", [fully_shard, replicate])
@on_ranks(2)
def test_a_watch_takes_the_place_of_an_earlier_one_and_leaves_others_that_travel(annotate: Any) -> None:
    model = annotate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    state, other = annotate.state(model), Passenger()
    state.carry(other)
    for _ in range(2):
        with watch(model, every=1, show=False) as w:
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                w.step()
    model(torch.ones(1, 2)).sum().backward()
    assert [*state.riders] == [other, w._late] and other.heard == 7


def one_step(model: nn.Module, w: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()
    w.step()


@on_ranks(4)
def test_a_watch_rides_on_the_first_root_whose_messages_reach_all_of_its_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for part in parts:
        fully_shard(part, mesh=mesh["dp"])
    with watch(fully_shard(parts), every=1, show=False) as w:
        for _ in range(3):
            one_step(parts, w)
    assert all(one is not w._late for one in fully_shard.state(parts).riders)
    replicas = nn.Sequential(replicate(nn.Linear(2, 2)), replicate(nn.Linear(2, 2)))
    with watch(replicate(replicas), every=1, show=False) as w:
        one_step(replicas, w)
    assert [*replicate.state(replicas[0]).riders] == [w._late] and not replicate.state(replicas).riders


@on_ranks(2)
def test_after_its_context_a_watch_tells_nothing() -> None:
    model = replicate(nn.Linear(2, 2))
    with watch(model, every=1, show=False) as w:
        for _ in range(4):
            one_step(model, w)
        assert w._late.measured and w._late._heard
    model(torch.ones(1, 2)).sum().backward()
    assert w._late.tell(torch.device("cpu")).tolist() == [-1.0] * w._late.count
    assert not w._late._heard and not w._late.text()


CAPTURING: set[int] = set()  # The ranks that capture a graph.


def watched_in_a_graph(annotate: Any) -> None:
    model = annotate(nn.Linear(2, 2))
    with watch(model, every=1, show=False) as w:
        for _ in range(6):
            one_step(model, w)
        heard = {number: dict(ranks) for number, ranks in w._late._heard.items()}
        if annotate is replicate:
            assert not replicate.state(model).reducer.untraceable
        CAPTURING.add(dist.get_rank())
        one_step(model, w)
        assert heard and w._late._heard == heard
        annotate.state(model).carry(Passenger())
        with pytest.raises(UsageError, match="another ran inside of a CUDA graph"):
            model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("annotate", [fully_shard, replicate])
def test_graphs_leave_a_watch_out_and_refuse_numbers_that_others_need(annotate: Any) -> None:
    CAPTURING.clear()
    with mock.patch("composable.engine.riders._is_captured", side_effect=lambda: dist.get_rank() in CAPTURING):
        run_threads(watched_in_a_graph, 2, annotate)


@on_ranks(2)
def test_buckets_that_a_graph_writes_stay_where_they_are() -> None:
    model = replicate(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    exchange = replicate.state(model).reducer.exchange
    exchange.flag_block.is_captured = dist.get_rank() == 1
    buckets = exchange.arrangement.buckets
    with watch(model, show=False):
        assert exchange.arrangement.buckets is buckets
    with pytest.raises(UsageError, match="a CUDA graph averages gradients"):
        replicate.state(model).carry(Passenger())
