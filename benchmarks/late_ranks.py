"""Delays that are planted in one rank: does ``watch`` name the rank, and the place?

    python benchmarks/late_ranks.py --planted 120 --calm 30 --on threads
    python benchmarks/late_ranks.py --planted 20 --calm 10 --on processes
    python benchmarks/late_ranks.py --planted 60 --calm 10 --on device

Each case has 2 to 4 ranks, one annotation, and a delay of 5 to 200 ms in each step of one rank: as it gets data, in a
forward or a backward of a block, or for the optimizer. A calm case has no delay, and no rank may be named. Ranks are
threads, processes, or threads on a device that is made up: its streams have a clock, and the host never waits for it.
Other jobs on the machine are the noise that such a command needs. Prints each case that went wrong, and counts.
"""

import argparse
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from ranks import environment, run_ranks
from torch import nn

from composable import fully_shard, replicate, watch
from composable.annotation import states_of
from composable.engine import StepListener, Work
from composable.extras import watched_run
from composable.testing import simulate

BLOCKS, STEPS = 5, 24
PHASES = ("data", "forward", "backward", "optimizer")


class Case(NamedTuple):
    """What is planted where; ``delay_ms``: 0 for nothing."""

    world_size: int
    annotation: str
    rank: int
    phase: str
    block: int
    delay_ms: float
    width: int

    @property
    def place(self) -> str:
        in_block = self.annotation == "fully_shard" and self.phase in ("forward", "backward")
        return f"{self.phase} of {self.block}" if in_block else self.phase

    @classmethod
    def drawn(cls, chance: random.Random, *, planted: bool) -> "Case":
        world_size, delay_ms = chance.choice([2, 3, 4]), round(5 * 40 ** chance.random(), 1)
        annotation = chance.choice(["fully_shard", "fully_shard", "replicate"])
        place = chance.randrange(world_size), chance.choice(PHASES), chance.randrange(BLOCKS)
        return cls(world_size, annotation, *place, delay_ms if planted else 0.0, chance.choice([64, 128, 256]))


class Block(nn.Module):
    def __init__(self, width: int, passes: Callable[[str], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.passes = passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).relu()
        self.passes("forward")
        y = self.down(y)
        y.register_hook(lambda grad: self.passes("backward"))
        return x + y


class Device:
    """The streams of some ranks on a device that is made up: notes what each is given, and when it gets there."""

    def __init__(self) -> None:
        self._given: dict[int, list[tuple[str, Any]]] = {}
        self._done: Counter[int] = Counter()
        self._ms: dict[int, float] = {}
        self._starts: dict[Any, list[float]] = {}
        self._lock = threading.Lock()

    def give(self, rank: int, what: str, value: Any) -> None:
        with self._lock:
            self._given.setdefault(rank, []).append((what, value))

    def go_on(self, ranks: int, behind: int = 30) -> None:
        """Let streams do what they can, but for the last things that were given to each."""
        with self._lock:
            before = -1
            while before != (before := sum(self._done.values())):
                for rank in range(ranks):
                    self._run(rank, ranks, behind)

    def _run(self, rank: int, ranks: int, behind: int) -> None:
        given = self._given.get(rank, [])
        while self._done[rank] < len(given) - behind:
            what, value = given[self._done[rank]]
            now = self._ms.setdefault(rank, 1000.0 * rank)  # Clocks differ.
            if what == "work":
                self._ms[rank] = now + value
            elif what == "moment":
                value.ms = now
            elif what == "start":
                self._starts.setdefault(value, []).append(now - 1000.0 * rank)
            elif len(self._starts.get(value, ())) < ranks:
                return
            else:
                self._ms[rank] = max(now, max(self._starts[value]) + 1000.0 * rank + 0.3)
            self._done[rank] += 1


class Moment:
    """An event in the stream of this rank."""

    def __init__(self, device: Device) -> None:
        self.ms, self._device = -1.0, device
        device.give(dist.get_rank(), "moment", self)

    def query(self) -> bool:
        self._device.go_on(dist.get_world_size())
        return self.ms >= 0

    def synchronize(self) -> None:
        self._device.go_on(dist.get_world_size(), behind=0)

    def elapsed_time(self, other: "Moment") -> float:
        return other.ms - self.ms


class Streams(StepListener):
    """Gives the device the messages of this rank, and its waits for them."""

    def __init__(self, device: Device) -> None:
        self._device, self._counts, self._under_way = device, Counter[str](), list[Any]()

    @contextmanager
    def work(self, work: Work, handle: Any, name: str) -> Iterator[None]:
        rank = dist.get_rank()
        if work in (Work.GATHER, Work.REDUCE):
            key = work, name, self._counts[work.value + name]
            self._counts[work.value + name] += 1
            self._under_way.append(key)
            self._device.give(rank, "start", key)
        else:
            kind = Work.GATHER if work is Work.WAIT_FOR_GATHER else Work.REDUCE
            for key in [one for one in self._under_way if one[0] is kind and name in (one[1], "buckets")]:
                self._under_way.remove(key)
                self._device.give(rank, "wait", key)
        yield


def train(rank: int, case: Case, device: Device | None) -> dict[str, Any]:
    """Return the last figures of the watch on rank 0."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    chance = random.Random(rank)

    def passes(phase: str, block: int | None = None) -> None:
        is_there = (phase, rank) == (case.phase, case.rank) and block in (None, case.block)
        if device is not None:
            device.give(rank, "work", chance.uniform(0.8, 1.2) + is_there * case.delay_ms)
        elif is_there and case.delay_ms:
            time.sleep(case.delay_ms / 1000)

    model: nn.Module = nn.Sequential(*[Block(case.width, partial(passes, block=block)) for block in range(BLOCKS)])
    model = fully_shard(model, policy={Block}) if case.annotation == "fully_shard" else replicate(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if device is not None:
        for state in states_of(model.modules()):
            state.listeners.add(Streams(device))
    x = torch.randn(16, case.width)
    with watch(model, every=1, show=False) as w:
        for _ in range(STEPS):
            passes("data")
            model(x).square().mean().backward()
            passes("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            w.step()
    return w.figures


def run(case: Case, on: str) -> dict[str, Any]:
    if on == "processes":
        return run_ranks(train, case.world_size, case, None, timeout_s=300)[0]
    device = Device() if on == "device" else None
    with mock.patch.object(watched_run, "moment", side_effect=lambda _: Moment(device)) if device else mock.MagicMock():
        return simulate(case.world_size, train, case, device)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--planted", type=int, default=60)
    parser.add_argument("--calm", type=int, default=20)
    parser.add_argument("--on", choices=["threads", "processes", "device"], default="threads")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(environment())
    chance, counts = random.Random(given.seed), Counter[str]()
    for index in range(given.planted + given.calm):
        case = Case.drawn(chance, planted=index < given.planted)
        figures = run(case, given.on)
        late = figures["late"] or ""
        if not case.delay_ms:
            counts["named without a delay"] += bool(late)
            if late:
                print(f"named: {case}: {late}", flush=True)
            continue
        has_rank = figures["last_rank"] == case.rank
        has_place = has_rank and late.partition("most in ")[2].partition(";")[0] == case.place
        counts += Counter(rank=has_rank, place=has_place)
        if not has_place:
            print(f"missed: {case}: {late}", flush=True)
    rank, place, named = (counts[one] for one in ("rank", "place", "named without a delay"))
    print(f"{given.on}: of {given.planted} delays, the rank is right in {rank}, the place in {place}")
    print(f"{given.on}: of {given.calm} runs without a delay, {named} name a rank")


if __name__ == "__main__":
    main()
