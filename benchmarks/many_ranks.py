"""What a save and a load cost one rank of many, without the others: messages, bytes, CPU time.

    python benchmarks/many_ranks.py
    python benchmarks/many_ranks.py --world-sizes 8 2048 --saves-only

A GPT with AdamW, whose shards grow smaller with the ranks, on torch's fake process group: what the other ranks would
say is made up from the cuts of the parameters, before the clock runs. A comparison of 16 bytes is sent in log2(ranks)
rounds, and counts as one message here; ``bytes`` is what this rank gives to collectives, and ``got`` what it gets from
others. CPU is that of the process, the least of ``--rounds``. The first rank writes the description of all files.
"""

import argparse
import json
import math
import multiprocessing
import shutil
import tempfile
import time
import zlib
from ast import literal_eval
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engines import Config, GPTBlock, annotate, make_gpt
from ranks import environment
from step_time import parse_config
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable import load_checkpoint, save_checkpoint
from composable.comm import Ranks
from composable.dtensor import RaggedDTensor
from composable.planning import boxes

# The most that a rank other than the first may take at 2,048 ranks, of what it takes at 8.
TARGET = 1.5


class Others:
    """What takes the place of all other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.messages = self.sent_bytes = self.got_bytes = 0
        # CPU time of making things up within a call, which does not count.
        self.made_s = 0.0
        # What the first rank says, in order; and what each other rank tells the first of a save.
        self.said: list[Any] = []
        self.reports: list[str] = []

    def count(self, sent: int, got: int) -> None:
        self.messages += 1
        self.sent_bytes += sent
        self.got_bytes += got

    def are_alike(self, ranks: Ranks, key: str) -> bool:
        self.count(16, 16)
        return True

    def reduce(self, ranks: Ranks, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        self.count(tensor.nbytes, tensor.nbytes)
        return torch.zeros_like(tensor) if op == dist.ReduceOp.SUM else tensor

    def object_of(self, ranks: Ranks, source: int, value: Any) -> Any:
        self.count(8, 8)
        if self.rank == source:
            self.said.append(value)
        else:
            value = self.said.pop(0)
        text = repr(value)
        size = len(text)
        self.count(*((size, 0) if self.rank == source else (0, size)))
        return literal_eval(text)

    def texts_on_first(self, ranks: Ranks, text: str) -> list[str]:
        self.count(8, 8)
        got = [text, *self.reports] if self.rank == 0 else []
        self.count(len(text), sum(map(len, got[1:])))
        if self.rank:
            self.reports = [text]
        return [one.encode().decode() for one in got]

    def __enter__(self) -> "Others":
        self.stack = ExitStack()
        self.stack.enter_context(mock.patch.object(Ranks, "is_alone", False))
        for name in ("are_alike", "reduce", "object_of", "texts_on_first"):
            method = getattr(self, name)
            self.stack.enter_context(
                mock.patch.object(Ranks, name, lambda ranks, *args, method=method: method(ranks, *args))
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[list[str], torch.Tensor]]:
    """Return the sharded values, each with its path in a checkpoint, by flat name."""
    params = dict(model.named_parameters())
    found = {("model", name): param.detach() for name, param in params.items()}
    for name, param in params.items():
        found |= {("optimizer", "state", name, key): value for key, value in optimizer.state[param].items()}
    return {".".join(path): ([*path], value) for path, value in found.items() if isinstance(value, RaggedDTensor)}


def report_of(state: dict[str, tuple[list[str], torch.Tensor]], rank: int) -> str:
    """Return what a rank tells the first of a save."""
    values: dict[str, Any] = {}
    start = 0
    for fqn, (path, value) in state.items():
        layout = value._spec.layout  # type: ignore[attr-defined]  # ragged
        pieces = []
        for box in boxes(layout.shape, layout.bounds[rank], layout.bounds[rank + 1]):
            length = math.prod(box[1]) * value.itemsize + 1100
            pieces.append([start, length, *box[0], *box[1]])
            start += length
        if pieces:
            values[fqn] = [path, str(value.dtype)[6:], value.shape, pieces]
    return json.dumps(([(f"__{rank}_0.distcp", (start, zlib.crc32(bytes(start))), values)], {}))


def measure(rank: int, size: int, config: Config, folder: Path, rounds: int, said: Any, loads: bool) -> tuple[Any, ...]:
    """Return the figures of a save and a load of this rank; what the others have to know comes from one to the next."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    torch.manual_seed(0)
    model = annotate(make_gpt(config), "fully_shard", GPTBlock)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    state = state_of(model, optimizer)
    told: Any = None
    figures: dict[str, Any] = {"save": [], "load": []} if loads and not rank else {"save": []}
    for index in range(rounds + 1):
        with Others(rank, size) as others:
            run = folder / f"run-{rank}-{index}"
            partial = run / ".partial-000001-00000000"
            if rank:
                partial.mkdir(parents=True)
                others.said = [partial.name]
            else:
                others.reports = [*said["reports"], *(report_of(state, other) for other in range(2, size))]
                lengths = {name: one[0] for text in others.reports for name, one, _ in json.loads(text)[0]}
                begin = _filled(others, lengths, said["file"])
                others.stack.enter_context(mock.patch("composable.runs.run.Run.begin", begin))
            figures["save"].append(_timed(others, lambda run=run: save_checkpoint(run, 1, model, optimizer)))
            reports = others.reports
        if rank:
            told = {"reports": reports, "file": partial / f"__{rank}_0.distcp"}
        if "load" not in figures:
            continue
        with Others(rank, size) as others:
            figures["load"].append(_timed(others, lambda run=run: load_checkpoint(run, model, optimizer)))
            told = {"said": others.said, "run": run}
    return figures, told


def measure_load(rank: int, size: int, config: Config, rounds: int, told: Any) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    torch.set_num_threads(1)
    model = annotate(make_gpt(config), "fully_shard", GPTBlock)
    optimizer = torch.optim.AdamW(model.parameters())
    figures = []
    for _ in range(rounds + 1):
        with Others(rank, size) as others:
            others.said = list(told["said"])
            figures.append(_timed(others, lambda: load_checkpoint(told["run"], model, optimizer)))
    return {"load": figures}


def _filled(others: Others, lengths: dict[str, int], file: Path) -> Any:
    """Return a ``begin`` of a save after which the files of all other ranks are there."""
    from composable.runs.run import Run

    original = Run.begin

    def begin(run: Run, step: int) -> str:
        partial = original(run, step)
        started = time.process_time()
        with run.room(partial) as room:
            for name, nbytes in lengths.items():
                with (room / name).open("wb") as one:
                    one.truncate(nbytes)
            shutil.copy(file, room)
        others.made_s += time.process_time() - started
        return partial

    return begin


def _timed(others: Others, call: Any) -> dict[str, float]:
    started, at = time.process_time(), time.perf_counter()
    call()
    cpu, wall = time.process_time() - started - others.made_s, time.perf_counter() - at
    return {
        "cpu_ms": cpu * 1e3,
        "wall_ms": wall * 1e3,
        "messages": others.messages,
        "bytes": others.sent_bytes,
        "got": others.got_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=parse_config, default=Config(64, 8, 2, 32), metavar="WIDTH/LAYERS/...")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves-only", action="store_true", help="measure no loads, which take longer at many ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures as a line of JSON")
    args = parser.parse_args()
    figures: dict[int, Any] = {}
    context = multiprocessing.get_context("spawn")
    print(f"{'ranks':>6} {'rank':6} {'call':5}{'messages':>9}{'bytes':>10}{'got':>12}{'CPU ms':>10}")
    for size in args.world_sizes:
        with tempfile.TemporaryDirectory() as name:
            folder, said = Path(name), None
            found: dict[str, Any] = {}
            for rank, kind in ((1, "other"), (0, "first")):
                with context.Pool(1) as pool:
                    given = rank, size, args.config, folder, args.rounds, said, not args.saves_only
                    found[kind], said = pool.apply(measure, given)
            if not args.saves_only:
                with context.Pool(1) as pool:
                    found["other"] |= pool.apply(measure_load, (1, size, args.config, args.rounds, said))
        figures[size] = {}
        for kind, calls in found.items():
            for call, rounds in calls.items():
                best = min(rounds[1:], key=lambda one: one["cpu_ms"])
                figures[size][f"{call} {kind}"] = best
                print(
                    f"{size:6,} {kind:6} {call:5}{best['messages']:9}{best['bytes']:10,}{best['got']:12,}"
                    f"{best['cpu_ms']:10.1f}"
                )
    least, most = (figures[size] for size in (args.world_sizes[0], args.world_sizes[-1]))
    for call in ("save other", "load other")[: 2 - args.saves_only]:
        ratio = most[call]["cpu_ms"] / least[call]["cpu_ms"]
        print(f"{call}: {ratio:.2f} of the CPU time at most ranks, target {TARGET}")
    if args.json:
        line = {"benchmark": "many_ranks", "config": str(args.config), "ranks": figures, **environment()}
        with args.json.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
