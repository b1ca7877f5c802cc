"""Where the host's time goes in a step of many small layers, ours and others': functions, and calls into the runtime.

A row is of one engine and one number of layers. ``functions`` has for each function of Python its place, calls, and
microseconds of its own, for each layer, the most expensive first; autograd runs in the same thread, which cProfile
sees. ``calls`` has for each layer how often the step asked the device's runtime for what: events made, recorded and
waited for, kernels, copies, memory; on the CPU, where there is none, operations of torch.
"""

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.gpu.figures import (
    ENGINES,
    TOY,
    Row,
    Sizes,
    Trained,
    few_objects,
    few_warnings,
    process_group,
    small_layers,
    wait_for_device,
)

__all__ = ["host", "host_text"]

# Of the functions, in a row.
MOST = 25
# The names of runtimes' functions begin so.
_RUNTIMES = ("cuda", "cu", "hip")


def host(device: torch.device, report: Callable[[Row], None], *, until: float, is_toy: bool) -> None:
    """Profile a step of every engine, and report each row as soon as it is known.

    Args:
        device: A CUDA device, or the CPU.
        report: Called with each row.
        until: By ``time.monotonic()``: no row begins later.
        is_toy: Small sizes, to test this file.
    """
    sizes = TOY if is_toy else Sizes()
    with process_group(device), few_warnings(), few_objects():
        for layers in sizes.small_layers:
            for engine in ENGINES:
                if time.monotonic() < until:
                    trained = small_layers(sizes, layers, engine, device)
                    for _ in range(sizes.warmup):
                        trained.step()
                    report({"kind": "host", "layers": layers, "engine": engine, **_profiled(trained, layers, device)})
                else:
                    report({"kind": "skipped", "what": f"host {layers} {engine}"})


def _profiled(trained: Trained, layers: int, device: torch.device) -> Row:
    wait_for_device(device)
    # The threads of autograd would not be profiled.
    with torch.autograd.set_multithreading_enabled(False):
        profile = cProfile.Profile()
        profile.enable()
        trained.step()
        profile.disable()
    wait_for_device(device)
    with torch.profiler.profile() as traced:
        trained.step()
        wait_for_device(device)
    calls = Counter({one.key: one.count for one in traced.key_averages()})
    names = _RUNTIMES if device.type == "cuda" else ("aten::",)
    stats: Any = pstats.Stats(profile)
    own = sorted(((own_s, count, place) for place, (_, count, own_s, *_) in stats.stats.items()), reverse=True)
    return {
        "python_us": 1e6 * stats.total_tt / layers,
        "functions": [
            (_place(*place), round(count / layers, 1), round(1e6 * own_s / layers, 1))
            for own_s, count, place in own[:MOST]
        ],
        "calls": {name: round(count / layers, 1) for name, count in calls.most_common() if name.startswith(names)},
    }


def _place(file: str, line: int, function: str) -> str:
    return function if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"


def host_text(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown: a table of the calls of each engine, and our most expensive functions."""
    most = max(int(str(row["layers"])) for row in rows)
    of_engine: dict[str, Any] = {str(row["engine"]): row for row in rows if row["layers"] == most}
    names = Counter[str]()
    for row in of_engine.values():
        names.update(row["calls"])
    lines = [
        f"For each of {most} layers:",
        "",
        "| |" + " | ".join(of_engine) + " |",
        "|---" * (1 + len(of_engine)) + "|",
    ]
    lines.append(
        "| us of Python, profiled | " + " | ".join(f"{row['python_us']:.0f}" for row in of_engine.values()) + " |"
    )
    for name, _ in names.most_common(MOST):
        lines.append(f"| {name} | " + " | ".join(str(row["calls"].get(name, 0)) for row in of_engine.values()) + " |")
    for engine in ("fully_shard", "replicate"):
        if engine in of_engine:
            lines += ["", f"{engine}, us and calls for each layer:", ""]
            lines += [f"    {us:8.1f} {count:6} {place}" for place, count, us in of_engine[engine]["functions"]]
    return "\n".join(lines) + "\n"
