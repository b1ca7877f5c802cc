"""Live tensor bytes of a rank, at rest and at the step's peak: this library beside DDP, FSDP1 and FSDP2.

    python benchmarks/memory.py

Each engine runs in processes of its own. torch's profiler records every allocation and release
of the CPU allocator, on all threads, from before the model is built; the running sum of those
records is the number of live tensor bytes, exactly, whoever holds them: parameters, optimizer
state, activations, buckets. It misses what does not come from torch's allocator, such as the
buffers inside gloo; the growth of the resident set, also shown, contains them.

*At rest* is after a step, gradients freed. *Peak* is the most in any moment of the last step.
"""

import argparse
import gc
import json
import resource
from pathlib import Path
from typing import Any

import torch
from engines import CONFIGS, ENGINES, Config, GPTBlock, annotate, make_batch, make_gpt, train_step
from ranks import environment, run_ranks
from step_time import parse_config
from torch.profiler import ProfilerActivity, profile, record_function

from composable import fully_shard

COLUMNS = (("at_rest", 10), ("peak", 10), ("resident_growth", 18))
_MARK = "memory benchmark: "


def measure(rank: int, config: Config, engine: str, steps: int) -> dict[str, float]:
    """Return this rank's bytes: at rest, at the peak, resident growth, and what the plan predicts."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = [make_batch(config, seed=index) for index in range(steps)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model = annotate(make_gpt(config), engine, GPTBlock)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        for index, batch in enumerate(batches):
            gc.collect()
            _mark(f"step {index}")
            train_step(model, optimizer, batch)
        _mark("end")
        gc.collect()
        _mark("rest")
    growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    figures = _live_bytes(profiled, f"step {steps - 1}")
    figures["resident_growth"] = growth_kib * 1024.0
    state = fully_shard.state(model) if engine == "fully_shard" else None
    if state is not None:
        figures["plan_at_rest"] = state.plan.bytes_per_rank_at_rest()
    return figures


def _mark(name: str) -> None:
    with record_function(_MARK + name):
        pass


def _live_bytes(profiled: profile, last_step: str) -> dict[str, float]:
    """Sum the allocator's records up to each mark."""
    events = profiled.profiler.kineto_results.events()
    marks = {event.name().removeprefix(_MARK): event.start_ns() for event in events if event.name().startswith(_MARK)}
    records = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    assert records, "the profiler recorded no allocation"
    live = peak = rest = 0
    for moment, nbytes in records:
        live += nbytes
        if marks[last_step] <= moment <= marks["end"]:
            peak = max(peak, live)
        if moment <= marks["rest"]:
            rest = live
    return {"at_rest": float(rest), "peak": float(peak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=parse_config, default=CONFIGS[0], metavar="WIDTH/LAYERS/BATCH/CONTEXT")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
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
