"""CPU time of an optimizer's step and of clipping, for many small sharded parameters.

    python benchmarks/optimizer.py
    python benchmarks/optimizer.py --handles 30 --layers 5 --rounds 500
    python benchmarks/optimizer.py --rows Muon Adafactor --layers 4 --width 128 --rounds 5 --repeats 1

Each way holds the same model: ``handles`` chains of ``layers`` Linear(width, width), two parameters a
layer. ``plain`` are this rank's pieces of our layout as plain tensors, empty ones among them;
``owned`` leaves the empty ones out; ``stock`` are DTensors placed ``Shard(0)``; ``ours`` what
``fully_shard`` gives; ``accelerated`` the same after ``accelerate_optimizer``. Clipping is torch's
``clip_grad_norm_``; for ``accelerated`` this library's, of the optimizer. Muon and Adafactor step the matrices alone;
``matrix`` is ``accelerated`` with ``align="matrix"``.

Every round measures each way a few times in a row, in an order that rotates. CPU time of the
calling thread, so that other jobs on the machine count little: the minimum is meaningful even
when it is busy.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import environment, run_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from composable import HandleOptions, accelerate_optimizer, clip_grad_norm_, fully_shard

COLUMNS = ("plain", "owned", "stock", "ours", "accelerated")
# torch's Adafactor raises on DTensors placed ``Shard(0)``.
WHOLE = {"Muon": ("stock", "ours", "accelerated", "matrix"), "Adafactor": ("ours", "accelerated", "matrix")}
ROWS = {"AdamW foreach": COLUMNS, "AdamW fused": COLUMNS, "clip_grad_norm_": COLUMNS, **WHOLE}
# (column, over, the most that the ratio of the minima may be), in every row that has both.
TARGETS = (("ours", "stock", 1.0), ("accelerated", "plain", 0.2))
WHOLE_TARGETS = {row: tuple((column, over, 0.5) for column in rest[-2:]) for row, (over, *rest) in WHOLE.items()}
# Never clips, but still scales, as torch does to spare a wait for the norm.
MAX_NORM = 1e9


def make_model(handles: int, layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    chains = (nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))) for _ in range(handles))
    return nn.Sequential(*chains)


def make_params(column: str, handles: int, layers: int, width: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return the model and its parameters with gradients, of the kind that ``column`` names."""
    model = make_model(handles, layers, width)
    if column == "stock":
        model(torch.ones(1, width)).sum().backward()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        params: list[torch.Tensor] = []
        for param in model.parameters():
            assert param.grad is not None
            params.append(nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
            params[-1].grad = distribute_tensor(param.grad, mesh, [Shard(0)])
        return model, params
    options = HandleOptions(align="matrix" if column == "matrix" else None)
    fully_shard(model, policy=lambda module: isinstance(module, nn.Sequential) and module is not model, options=options)
    model(torch.ones(1, width)).sum().backward()
    sharded = list(model.parameters())
    if column not in ("plain", "owned"):
        return model, list(sharded)
    params = []
    for param in sharded:
        params.append(nn.Parameter(param.to_local().detach().clone()))
        params[-1].grad = param.grad.to_local().clone()
    return model, [param for param in params if param.numel() or column == "plain"]


def make_calls(rows: list[str], handles: int, layers: int, width: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Return what is measured, by row and column."""
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    for row in rows:
        calls[row] = {}
        for column in ROWS[row]:
            model, params = make_params(column, handles, layers, width)
            optimizer: torch.optim.Optimizer
            if row in WHOLE:
                optimizer = getattr(torch.optim, row)([param for param in params if param.ndim == 2], lr=1e-4)
            else:
                kernel = {"fused" if row.endswith("fused") else "foreach": True}
                optimizer = torch.optim.AdamW(params, lr=1e-4, **kernel)
            is_accelerated = column in ("accelerated", "matrix")
            if is_accelerated:
                accelerate_optimizer(optimizer, model)
            if row != "clip_grad_norm_":
                # The model has to live on: its handles know how the parameters lie.
                calls[row][column] = lambda optimizer=optimizer, model=model: optimizer.step()
            elif is_accelerated:
                calls[row][column] = lambda optimizer=optimizer, model=model: clip_grad_norm_(optimizer, MAX_NORM)
            else:
                calls[row][column] = lambda params=params: nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
    return calls


def measure(
    rank: int, rows: list[str], handles: int, layers: int, width: int, rounds: int, repeats: int, warmup: int
) -> dict[str, dict[str, list[float]]]:
    """Return the CPU milliseconds of each call of this rank, by row and column."""
    calls = make_calls(rows, handles, layers, width)
    times: dict[str, dict[str, list[float]]] = {row: {column: [] for column in ROWS[row]} for row in rows}
    gc.collect()
    gc.freeze()
    gc.disable()
    for index in range(warmup + rounds):
        for row in rows:
            start = index % len(ROWS[row])
            for column in ROWS[row][start:] + ROWS[row][:start]:
                for _ in range(repeats):
                    started = time.thread_time()
                    calls[row][column]()
                    seconds = time.thread_time() - started
                    if index >= warmup:
                        times[row][column].append(seconds * 1e3)
    gc.enable()
    return times


def summarize(per_rank: list[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return median and minimum over the rounds of all ranks."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for row in per_rank[0]:
        summary[row] = {}
        for column in ROWS[row]:
            every = [ms for times in per_rank for ms in times[row][column]]
            summary[row][column] = {"cpu_ms_median": statistics.median(every), "cpu_ms_min": min(every)}
    return summary


def compare(summary: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Return the ratios that have a target, and whether they meet it."""
    ratios = []
    for row, columns in summary.items():
        for column, over, target in WHOLE_TARGETS.get(row, TARGETS):
            ratio = {key: columns[column][key] / columns[over][key] for key in columns[column]}
            met = ratio["cpu_ms_min"] <= target
            ratios.append({"row": row, "column": column, "over": over, "target": target, "met": met, **ratio})
    return ratios


def report(summary: dict[str, dict[str, dict[str, float]]], ratios: list[dict[str, Any]]) -> None:
    shown: tuple[str, ...] = ()
    for row, columns in summary.items():
        if ROWS[row] != shown:
            shown = ROWS[row]
            print(f"{'':16}" + "".join(f"{column:>18}" for column in shown))
        cells = (f"{columns[column]['cpu_ms_min']:.3f} ({columns[column]['cpu_ms_median']:.3f})" for column in shown)
        print(f"{row:16}" + "".join(f"{cell:>18}" for cell in cells))
    for row in ratios:
        print(
            f"{row['row']:16}{row['column']:>12} / {row['over']:6}{row['cpu_ms_min']:8.2f} ({row['cpu_ms_median']:.2f})"
            f"  target {row['target']:.2f} {'met' if row['met'] else 'MISSED'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--handles", type=int, default=10)
    parser.add_argument("--layers", type=int, default=15, help="layers in a handle, two parameters each (default: 15)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[row for row in ROWS if row not in WHOLE])
    parser.add_argument("--width", type=int, default=16, help="features of each layer (default: 16)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10, help="calls in a row (default: 10)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before (default: 1)")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600, help="seconds (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures as a line of JSON")
    args = parser.parse_args()
    per_rank = run_ranks(
        measure,
        args.world_size,
        args.rows,
        args.handles,
        args.layers,
        args.width,
        args.rounds,
        args.repeats,
        args.warmup,
        timeout_s=args.timeout,
    )
    summary = summarize(per_rank)
    ratios = compare(summary)
    count = 2 * args.handles * args.layers
    print(f"\n{count} parameters in {args.handles} handles, {args.world_size} ranks: CPU ms a call, minimum (median)")
    report(summary, ratios)
    if args.json:
        line = {
            "benchmark": "optimizer",
            "handles": args.handles,
            "params": count,
            "world_size": args.world_size,
            "rounds": args.rounds,
            "repeats": args.repeats,
            "rows": summary,
            "ratios": ratios,
            **environment(),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        with args.json.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
