"""Starts the ranks of a benchmark as processes, and stops them all when time is up."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["environment", "run_ranks"]


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``world_size`` processes joined by gloo, one thread each; return every result.

    Raises:
        TimeoutError: They were not done in time; all are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_run_rank, (fn, world_size, folder, args), nprocs=world_size, join=False)
        deadline = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"the ranks were not done after {timeout_s:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(Path(folder, f"result-{rank}"), weights_only=False) for rank in range(world_size)]


def _run_rank(rank: int, fn: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size
    )
    result = fn(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    torch.save(result, Path(folder, f"result-{rank}"))


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge the figures."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "torch": torch.__version__,
        "python": sys.version.partition(" ")[0],
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
