"""Time of a training step: this library beside plain, DDP, FSDP1 and FSDP2, interleaved in one run.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --configs 128/24/2/64 --rounds 60 --engines fsdp2 fully_shard
    python benchmarks/step_time.py --configs 64/64/2/32 --rounds 60 --engines fully_shard_zeros fully_shard
    python benchmarks/step_time.py --engines fsdp2_bf16 fully_shard_bf16 fsdp2 fully_shard
    python benchmarks/step_time.py --engines ddp_bf16 replicate_bf16

Every engine has a model and an AdamW(foreach=True) of its own and trains on the same batches;
in each round each engine makes one step, in an order that rotates. Wall time is what a user
waits for; CPU time (all threads of a rank, user and system) is what stays meaningful when
other jobs run on the machine. Both are of one rank; ratios compare medians over all rounds and
ranks. ``plain`` trains on the rank's own batch without communication.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import CONFIGS, DEFAULT_ENGINES, ENGINES, Config, GPTBlock, annotate, make_batch, make_gpt, train_step
from ranks import environment, run_ranks

# The most that CPU time may be of another engine's, by config.
TARGETS: dict[tuple[str, str], dict[str, float]] = {
    # What the ranks' agreement at the end of backward costs.
    ("fully_shard", "fully_shard_zeros"): {"64/64/2/32": 1.02},
    ("fully_shard", "fsdp2"): {"512/8/4/128": 0.90, "128/24/2/64": 0.60, "64/64/2/32": 0.60},
    ("fully_shard", "ddp"): {"512/8/4/128": 1.05, "128/24/2/64": 1.25, "64/64/2/32": 1.75},
    ("fully_shard_bf16", "fsdp2_bf16"): {"512/8/4/128": 0.85, "128/24/2/64": 0.60, "64/64/2/32": 0.50},
    ("replicate_bf16", "ddp_bf16"): {"512/8/4/128": 1.00, "128/24/2/64": 1.00, "64/64/2/32": 1.00},
    ("fully_shard_hybrid", "fsdp2_hybrid"): {"64/64/2/32": 0.60},
    ("replicate", "ddp"): {"512/8/4/128": 1.05, "128/24/2/64": 1.05, "64/64/2/32": 1.05},
}


def measure(rank: int, config: Config, engines: list[str], rounds: int, warmup: int, keep: bool) -> dict[str, Any]:
    """Return for each engine the wall and CPU milliseconds of each step of this rank."""
    trained = {}
    for engine in engines:
        model = annotate(make_gpt(config), engine, GPTBlock, keep_unsharded=keep)
        trained[engine] = model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    times: dict[str, Any] = {engine: {"wall_ms": [], "cpu_ms": []} for engine in engines}
    for index in range(warmup + rounds):
        batch = make_batch(config, seed=index * dist.get_world_size() + rank)
        start = index % len(engines)
        for engine in engines[start:] + engines[:start]:
            model, optimizer = trained[engine]
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            train_step(model, optimizer, batch)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if index >= warmup:
                times[engine]["wall_ms"].append(wall * 1e3)
                times[engine]["cpu_ms"].append(cpu * 1e3)
    return times


def summarize(per_rank: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return medians and minima over the steps of all ranks."""
    summary = {}
    for engine in per_rank[0]:
        wall = [ms for times in per_rank for ms in times[engine]["wall_ms"]]
        cpu = [ms for times in per_rank for ms in times[engine]["cpu_ms"]]
        summary[engine] = {
            "wall_ms_median": statistics.median(wall),
            "wall_ms_min": min(wall),
            "cpu_ms_median": statistics.median(cpu),
            "cpu_ms_min": min(cpu),
        }
    return summary


def compare(config: str, summary: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return the ratios that have a target, and whether they meet it."""
    ratios = []
    for (ours, other), limits in TARGETS.items():
        if ours in summary and other in summary:
            ratio = {key: summary[ours][key] / summary[other][key] for key in summary[ours]}
            target = limits.get(config)
            met = target is None or ratio["cpu_ms_median"] <= target
            ratios.append({"engine": ours, "over": other, "target": target, "met": met, **ratio})
    return ratios


def report(config: str, summary: dict[str, dict[str, float]], ratios: list[dict[str, Any]], world_size: int) -> None:
    print(f"\nwidth/layers/batch/context {config}, {world_size} ranks, ms per step per rank")
    print(f"{'':24}{'wall median':>12}{'wall min':>12}{'CPU median':>12}{'CPU min':>12}")
    for engine, row in summary.items():
        print(f"{engine:24}" + "".join(f"{value:12.1f}" for value in row.values()))
    for row in ratios:
        keys = ("wall_ms_median", "wall_ms_min", "cpu_ms_median", "cpu_ms_min")
        text = f"{row['engine']} / {row['over']}"
        verdict = "" if row["target"] is None else f"  target {row['target']:.2f} {'met' if row['met'] else 'MISSED'}"
        print(f"{text:24}" + "".join(f"{row[key]:12.2f}" for key in keys) + verdict)


def parse_config(text: str) -> Config:
    return Config(*(int(part) for part in text.split("/")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--configs", nargs="+", type=parse_config, default=CONFIGS, metavar="WIDTH/LAYERS/BATCH/CONTEXT"
    )
    parser.add_argument("--rounds", type=int, help="default: 8 where the width is 512 or more, else 25")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before (default: 3)")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=DEFAULT_ENGINES)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--reshard",
        choices=["default", "keep"],
        default="default",
        help="keep: parameters stay unsharded from forward to backward, in every engine that shards",
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one config (default: 900)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures as lines of JSON")
    args = parser.parse_args()
    for config in args.configs:
        rounds = args.rounds or (8 if config.width >= 512 else 25)
        keep = args.reshard == "keep"
        per_rank = run_ranks(
            measure, args.world_size, config, args.engines, rounds, args.warmup, keep, timeout_s=args.timeout
        )
        summary = summarize(per_rank)
        ratios = compare(str(config), summary)
        report(str(config), summary, ratios, args.world_size)
        if args.json:
            line = {
                "benchmark": "step_time",
                "config": str(config),
                "world_size": args.world_size,
                "rounds": rounds,
                "reshard": args.reshard,
                "engines": summary,
                "ratios": ratios,
                **environment(),
            }
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with args.json.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
