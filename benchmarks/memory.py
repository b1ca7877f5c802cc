"""Live memory of a rank, at rest and at the step's peak: this library beside DDP, FSDP1 and FSDP2.

    python benchmarks/memory.py

Each engine runs in processes of its own. What is counted is what malloc has given out and not
got back (glibc's ``mallinfo2``), on all threads, less what it was before the model was built,
when a model of one such block had already been trained the same way. That is the bytes of live tensors,
whoever holds them, and little else: some Python objects, and what gloo holds at the moment.
torch's own profiler cannot be used: it misses what a thread of gloo's releases.

*At rest* is after a step, gradients freed. *Peak* is the most after any operation of the last
step, forward, backward and optimizer: a dispatch mode looks after each one.
"""

import argparse
import ctypes
import gc
import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import CONFIGS, DEFAULT_ENGINES, ENGINES, Config, GPTBlock, annotate, make_batch, make_gpt, train_step
from ranks import environment, run_ranks
from step_time import parse_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from composable import fully_shard

COLUMNS = (("at_rest", 10), ("peak", 10), ("resident_growth", 18))


class _MallocStatistics(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def malloc_bytes() -> int:
    """Return the bytes that malloc has given out and not got back."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise OSError("this benchmark needs glibc 2.33 or newer: mallinfo2 is missing") from None
    mallinfo2.restype = _MallocStatistics
    statistics = mallinfo2()
    return int(statistics.uordblks + statistics.hblkhd)


class PeakMode(TorchDispatchMode):
    """Looks at the memory after every operation, also those of backward."""

    sees_hooks = True

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak_bytes = max(self.peak_bytes, malloc_bytes())
        return result


def train(config: Config, engine: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Train a new model and return it, its optimizer, and the peak of the last step."""
    model = annotate(make_gpt(config), engine, GPTBlock)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    for index in range(steps - 1):
        train_step(model, optimizer, make_batch(config, seed=index))
    gc.collect()
    with PeakMode() as mode:
        train_step(model, optimizer, make_batch(config, seed=steps))
    gc.collect()
    return model, optimizer, mode.peak_bytes


def measure(rank: int, config: Config, engine: str, steps: int) -> dict[str, float]:
    """Return this rank's bytes: at rest, at the peak, growth of the resident set, what the plan predicts."""
    train(replace(config, layers=1), engine, steps)
    dist.barrier()
    gc.collect()
    before = malloc_bytes()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, optimizer, peak = train(config, engine, steps)
    dist.barrier()
    figures = {"at_rest": float(malloc_bytes() - before), "peak": float(peak - before)}
    figures["resident_growth"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024.0
    state = fully_shard.state(model) if engine == "fully_shard" else None
    if state is not None:
        figures["plan_at_rest"] = float(state.plan.bytes_per_rank_at_rest())
    del optimizer  # alive until here: its state is part of what rests
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=parse_config, default=CONFIGS[0], metavar="WIDTH/LAYERS/BATCH/CONTEXT")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=DEFAULT_ENGINES)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one engine (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures as lines of JSON")
    args = parser.parse_args()
    parameter_bytes = sum(param.numel() * param.itemsize for param in make_gpt(args.config).parameters())
    print(
        f"width/layers/batch/context {args.config}, {args.world_size} ranks, AdamW, {parameter_bytes / 1e6:.1f} MB of"
    )
    print("parameters; MB of live tensors per rank (the most of any rank)")
    print(f"{'':16}{'at rest':>10}{'peak':>10}{'resident growth':>18}")
    results: dict[str, dict[str, float]] = {}
    for engine in args.engines:
        per_rank = run_ranks(measure, args.world_size, args.config, engine, args.steps, timeout_s=args.timeout)
        row = results[engine] = {key: max(rank[key] for rank in per_rank) for key in per_rank[0]}
        note = ""
        if "plan_at_rest" in row:
            excess = row["at_rest"] / row["plan_at_rest"] - 1
            note = f"   plan: {row['plan_at_rest'] / 1e6:.1f} at rest, {excess:+.1%} off"
        columns = "".join(f"{row[key] / 1e6:{width}.1f}" for key, width in COLUMNS)
        print(f"{engine:16}{columns}{note}")
    if "fsdp2" in results and "fully_shard" in results:
        for key in ("at_rest", "peak"):
            ratio = results["fully_shard"][key] / results["fsdp2"][key]
            print(f"fully_shard / fsdp2 {key}: {ratio:.3f}  target 1.00 {'met' if ratio <= 1 else 'MISSED'}")
    if args.json:
        line: dict[str, Any] = {
            "benchmark": "memory",
            "config": str(args.config),
            "world_size": args.world_size,
            "parameter_bytes": parameter_bytes,
            "engines": results,
            **environment(),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        with args.json.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
