"""Saving, loading, and full export: time and peak memory, this library beside FSDP2, interleaved in one run.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --config 128/24/2/64 --rounds 20 --folder /dev/shm
    python benchmarks/checkpoint.py --background --world-size 1

Model and AdamW state after one step are saved and loaded with torch.distributed.checkpoint; the model is
exported to a full state dict on the first rank's host and loaded from one. Ours does the latter two with
``full_state_dict`` and ``load_full_state_dict``, FSDP2 with ``get_model_state_dict(full, cpu_offload)`` and
``set_model_state_dict(full, broadcast_from_rank0)``.

Wall time is what a user waits for, the longest of all ranks; CPU time (all threads of a rank, user and system,
summed over ranks) is what stays meaningful when other jobs run on the machine. Memory is the growth of the
resident set while one operation runs, of each engine in processes of its own: of the rank that grows most, less
the result where there is one. In handles: over the bytes of the largest block.

``--background`` measures an asynchronous save instead: how long the call keeps the rank, over plain copies of its
shards, and a training step while the checkpoint is written, over one without: wall, and CPU of the training thread.
"""

import argparse
import ctypes
import gc
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines import CONFIGS, Config, GPTBlock, annotate, make_batch, make_gpt, train_step
from ranks import environment, run_ranks
from step_time import parse_config
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from composable import full_state_dict, load_full_state_dict, save_checkpoint

ENGINES = ("fsdp2", "fully_shard")
OPERATIONS = ("save", "load", "export", "full_load")
# The most that time may be of FSDP2's, and extra memory of a full export in handles, where those are not small:
# small ones travel together.
TIME_TARGET = 1.0
HANDLES_TARGET = 2.0
# Of an asynchronous save: the call over a copy of the shards, a step beside the write over one without.
BACKGROUND_TARGETS = {"call": 1.1, "step": 1.1, "step_cpu": 1.1}
SMALL_HANDLE_BYTES = 2**20


class Run:
    """One engine's model and optimizer, and what can be done with them."""

    def __init__(self, config: Config, engine: str, folder: Path) -> None:
        self.engine = engine
        self.folder = folder / engine
        self.model: nn.Module = annotate(make_gpt(config), engine, GPTBlock)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        train_step(self.model, self.optimizer, make_batch(config, seed=0))
        self.full: dict[str, Any] = {}

    def save(self) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=self.folder)

    def load(self) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=self.folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def export(self) -> None:
        if self.engine == "fully_shard":
            self.full = full_state_dict(self.model)
        else:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            self.full = get_model_state_dict(self.model, options=options)

    def full_load(self) -> None:
        if self.engine == "fully_shard":
            load_full_state_dict(self.model, self.full)
        else:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            # torch puts shards into the dict that it is given.
            set_model_state_dict(self.model, dict(self.full), options=options)

    def prepare(self, operation: str) -> None:
        """Bring the files, or the memory, into the state that the operation starts from."""
        if operation == "save" and dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        if operation == "export":
            self.full = {}
        dist.barrier()

    def operation(self, name: str) -> Callable[[], None]:
        found: Callable[[], None] = getattr(self, name)
        return found


def measure_time(rank: int, config: Config, rounds: int, folder: str) -> dict[str, Any]:
    """Return for each engine and operation the wall and CPU milliseconds of each round of this rank."""
    runs = {engine: Run(config, engine, Path(folder)) for engine in ENGINES}
    times: dict[str, Any] = {engine: {name: {"wall_ms": [], "cpu_ms": []} for name in OPERATIONS} for engine in ENGINES}
    for index in range(1 + rounds):
        for name in OPERATIONS:
            for engine in ENGINES[:: 1 if index % 2 else -1]:
                runs[engine].prepare(name)
                gc.collect()
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                runs[engine].operation(name)()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                if index:
                    times[engine][name]["wall_ms"].append(wall * 1e3)
                    times[engine][name]["cpu_ms"].append(cpu * 1e3)
    return times


def measure_memory(rank: int, config: Config, engine: str, folder: str) -> dict[str, float]:
    """Return the bytes by which this rank's resident set grows in each operation, less the result."""
    # What is imported and set up on first use is not the operations' cost.
    small = Run(replace(config, layers=1), engine, Path(folder, "small"))
    for name in OPERATIONS:
        small.prepare(name)
        small.operation(name)()
    del small
    run = Run(config, engine, Path(folder, "large"))
    growth = {}
    for name in OPERATIONS:
        run.prepare(name)
        gc.collect()
        # What was freed goes back to the system, so that using it again counts.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident_bytes("VmRSS")
        dist.barrier()
        run.operation(name)()
        dist.barrier()
        result = sum(value.nbytes for value in run.full.values()) if name == "export" else 0
        growth[name] = float(max(0, _resident_bytes("VmHWM") - before - result))
    return growth


def measure_background(rank: int, config: Config, rounds: int, folder: str) -> dict[str, list[float]]:
    """Return for each round the milliseconds of a copy, of the call, and of the median step beside a write and not."""
    run = Run(config, "fully_shard", Path(folder))
    save_checkpoint(folder, 0, run.model, run.optimizer, asynchronous=True).wait()
    tensors = [*run.model.parameters(), *(one for each in run.optimizer.state.values() for one in each.values())]
    shards = [getattr(one, "_local_tensor", one).detach() for one in tensors]
    times: dict[str, list[float]] = {name: [] for name in ("copy", "call", "step", "step_cpu", "beside", "beside_cpu")}
    for index in range(1 + rounds):
        dist.barrier()
        at = time.perf_counter()
        copies = [one.clone() for one in shards]
        copy = time.perf_counter() - at
        del copies
        dist.barrier()
        at = time.perf_counter()
        handle = save_checkpoint(folder, index + 1, run.model, run.optimizer, asynchronous=True)
        call = time.perf_counter() - at
        beside = []
        is_writing = torch.tensor(1)
        while is_writing:
            beside.append(_step_times(run, config))
            is_writing = torch.tensor(int(not handle.is_done()))
            dist.all_reduce(is_writing, dist.ReduceOp.MIN)
        handle.wait()
        alone = [_step_times(run, config) for _ in beside]
        medians = [sorted(column)[len(column) // 2] for steps in (alone, beside) for column in zip(*steps)]
        for name, value in zip(times, (copy, call, *medians), strict=True):
            if index:
                times[name].append(value * 1e3)
    return times


def _step_times(run: Run, config: Config) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.thread_time()
    train_step(run.model, run.optimizer, make_batch(config, seed=0))
    return time.perf_counter() - wall, time.thread_time() - cpu


def report_background(per_rank: list[dict[str, list[float]]]) -> dict[str, float]:
    """Print medians of all rounds and ranks, and return the ratios."""
    every = {name: sorted(value for times in per_rank for value in times[name]) for name in per_rank[0]}
    median = {name: values[len(values) // 2] for name, values in every.items()}
    print(", ".join(f"{name} {value:.1f} ms" for name, value in median.items()))
    pairs = {"call": ("call", "copy"), "step": ("beside", "step"), "step_cpu": ("beside_cpu", "step_cpu")}
    ratios = {name: median[one] / median[other] for name, (one, other) in pairs.items()}
    for name, ratio in ratios.items():
        verdict = "met" if ratio <= BACKGROUND_TARGETS[name] else "MISSED"
        print(f"{name:10}{ratio:8.2f}  target {BACKGROUND_TARGETS[name]:.2f} {verdict}")
    return {**median, **{f"{name}_ratio": ratio for name, ratio in ratios.items()}}


def _resident_bytes(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found, "this benchmark needs Linux"
    return int(found[1]) * 1024


def summarize(per_rank: list[dict[str, Any]], engine: str, operation: str) -> dict[str, float]:
    """Return the median and the least round: wall time of the slowest rank, CPU time of all."""
    wall = [max(values) for values in zip(*(times[engine][operation]["wall_ms"] for times in per_rank))]
    cpu = [sum(values) for values in zip(*(times[engine][operation]["cpu_ms"] for times in per_rank))]
    middle = len(wall) // 2
    return {
        "wall_ms_median": sorted(wall)[middle],
        "wall_ms_min": min(wall),
        "cpu_ms_median": sorted(cpu)[middle],
        "cpu_ms_min": min(cpu),
    }


def report(times: dict[str, dict[str, Any]], memory: dict[str, dict[str, float]], handle_bytes: int) -> dict[str, Any]:
    """Print the table and return the ratios."""
    print(f"{'':24}{'wall median':>12}{'wall min':>12}{'CPU median':>12}{'CPU min':>12}{'extra MB':>12}{'handles':>10}")
    ratios: dict[str, Any] = {}
    for operation in OPERATIONS:
        for engine in ENGINES:
            row, extra = times[operation][engine], memory[engine][operation]
            columns = "".join(f"{value:12.1f}" for value in row.values())
            print(f"{operation + ' ' + engine:24}{columns}{extra / 1e6:12.1f}{extra / handle_bytes:10.1f}")
        ours, theirs = times[operation]["fully_shard"], times[operation]["fsdp2"]
        ratio = {key: ours[key] / theirs[key] for key in ours}
        ratio["extra_bytes"] = memory["fully_shard"][operation] / max(memory["fsdp2"][operation], 1.0)
        is_met = ratio["wall_ms_median"] <= TIME_TARGET
        verdict = f"  target {TIME_TARGET:.2f} {'met' if is_met else 'MISSED'}"
        if operation == "export" and handle_bytes >= SMALL_HANDLE_BYTES:
            handles = memory["fully_shard"][operation] / handle_bytes
            verdict += f"; {HANDLES_TARGET:.0f} handles {'met' if handles <= HANDLES_TARGET else 'MISSED'}"
        print(f"{'  ours / fsdp2':24}" + "".join(f"{value:12.2f}" for value in ratio.values()) + verdict)
        ratios[operation] = {**ratio, "target": TIME_TARGET, "met": is_met}
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=parse_config, default=CONFIGS[0], metavar="WIDTH/LAYERS/BATCH/CONTEXT")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each part (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures as a line of JSON")
    parser.add_argument("--background", action="store_true", help="measure an asynchronous save instead")
    args = parser.parse_args()
    if args.background:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measured = run_ranks(
                measure_background, args.world_size, args.config, args.rounds, folder, timeout_s=args.timeout
            )
        print(f"width/layers/batch/context {args.config}, {args.world_size} ranks, an asynchronous save")
        line = {"benchmark": "checkpoint --background", "config": str(args.config), "world_size": args.world_size}
        append(args.json, {**line, **report_background(measured), **environment()})
        return
    handle_bytes = sum(param.numel() * param.itemsize for param in GPTBlock(args.config.width).parameters())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        per_rank = run_ranks(
            measure_time, args.world_size, args.config, args.rounds, f"{folder}/time", timeout_s=args.timeout
        )
        grown = {
            engine: run_ranks(
                measure_memory, args.world_size, args.config, engine, f"{folder}/memory", timeout_s=args.timeout
            )
            for engine in ENGINES
        }
    times = {name: {engine: summarize(per_rank, engine, name) for engine in ENGINES} for name in OPERATIONS}
    memory = {
        engine: {name: max(growth[name] for growth in ranks) for name in OPERATIONS} for engine, ranks in grown.items()
    }
    print(f"width/layers/batch/context {args.config}, {args.world_size} ranks, ms; memory of the rank that grows most")
    ratios = report(times, memory, handle_bytes)
    line = {
        "benchmark": "checkpoint",
        "config": str(args.config),
        "world_size": args.world_size,
        "rounds": args.rounds,
        "handle_bytes": handle_bytes,
        "times": times,
        "extra_bytes": memory,
        "ratios": ratios,
    }
    append(args.json, {**line, **environment()})


def append(path: Path | None, line: dict[str, Any]) -> None:
    """Append a line of JSON to a file, if there is one."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
