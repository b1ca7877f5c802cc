"""Layout of ranks x precision x micro-batches x clipping x checkpoint: each combination against one process.

    python -m tests.many_dims                  all of them, on ranks that are threads
    python -m tests.many_dims --processes      few of them, in which any two values meet, on processes

A combination trains two steps, saves a checkpoint, loads it into a model of the same layout or of another, and trains
one more. One process trains on the batches of all ranks of data parallelism.
"""

import argparse
import copy
import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    no_sync,
    save_checkpoint,
)
from tests.combinations import pairwise
from tests.low_precision import BF16, FP32, reduced_in_one_process
from tests.models import random_input, seeded
from tests.parity import full
from tests.world import run_ranks, run_threads

__all__ = ["LAYOUTS", "Case", "all_cases", "few_cases", "run_case"]

DIM = 8
LR = 0.05
MAX_NORM = 0.3
PRECISIONS = {"float32": MixedPrecisionPolicy(), "bfloat16 reduced in float32": MixedPrecisionPolicy(BF16, FP32)}
MICRO_BATCHES = ("one batch", "no_sync", "second leg waits")
CLIPS = ("no clipping", "clipped")


class Block(nn.Module):
    """What tensor parallelism cuts by columns and rows, and what it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    """Two blocks between layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.last(x)
        return result


class Layout(NamedTuple):
    """How ranks hold a model.

    Attributes:
        shape: Of the mesh, with dims called as in ``dims``.
        dims: For copies of shards, shards and tensor parallelism, as far as there are any.
        options: Of ``fully_shard``.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...] = ("shard",)
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def batches(self) -> int:
        """How many ranks have batches of their own."""
        return torch.Size(size for size, dim in zip(self.shape, self.dims, strict=True) if dim != "tp").numel()

    @property
    def is_hybrid(self) -> bool:
        return "replicate" in self.dims

    @property
    def is_split(self) -> bool:
        return "tp" in self.dims


def _strategy(name: str, *shape: int) -> Layout:
    dims = ("replicate", "shard") if name.startswith("HYBRID") else ("shard",)
    return Layout(shape, dims, (("strategy", name),))


LAYOUTS = {
    "FULL_SHARD 4": _strategy("FULL_SHARD", 4),
    "SHARD_GRAD_OP 4": _strategy("SHARD_GRAD_OP", 4),
    "FULL_SHARD 3": _strategy("FULL_SHARD", 3),
    "SHARD_GRAD_OP 3": _strategy("SHARD_GRAD_OP", 3),
    "resharded to 2 of 4": Layout((4,), ("shard",), (("reshard_after_forward", 2),)),
    "HYBRID_SHARD 2x2": _strategy("HYBRID_SHARD", 2, 2),
    "HYBRID_SHARD_ZERO2 2x2": _strategy("HYBRID_SHARD_ZERO2", 2, 2),
    "HYBRID_SHARD 1x4": _strategy("HYBRID_SHARD", 1, 4),
    "HYBRID_SHARD 4x1": _strategy("HYBRID_SHARD", 4, 1),
    "HYBRID_SHARD_ZERO2 1x3": _strategy("HYBRID_SHARD_ZERO2", 1, 3),
    "HYBRID_SHARD_ZERO2 3x1": _strategy("HYBRID_SHARD_ZERO2", 3, 1),
    "FULL_SHARD 2 x tp 2": Layout((2, 2), ("shard", "tp")),
    "SHARD_GRAD_OP 2 x tp 2": Layout((2, 2), ("shard", "tp"), (("strategy", "SHARD_GRAD_OP"),)),
    "HYBRID_SHARD 1x2 x tp 2": Layout((1, 2, 2), ("replicate", "shard", "tp")),
    "HYBRID_SHARD 2x1 x tp 2": Layout((2, 1, 2), ("replicate", "shard", "tp")),
}
# Where the checkpoint goes; the first of another name that has as many ranks.
MOVES = ("stays", "to FULL_SHARD", "to HYBRID_SHARD 2x2", "to FULL_SHARD 2 x tp 2")


class Case(NamedTuple):
    """One combination, by the names of its values."""

    layout: str
    precision: str
    micro_batches: str
    clip: str
    move: str


def all_cases() -> list[Case]:
    """Return every combination that there is."""
    values = (LAYOUTS, PRECISIONS, MICRO_BATCHES, CLIPS, MOVES)
    return [case for case in map(Case._make, itertools.product(*values)) if _is_possible(case)]


def few_cases() -> list[Case]:
    """Return some of them, in which every two values meet that meet in any."""
    return pairwise(all_cases())


def _is_possible(case: Case) -> bool:
    layout = LAYOUTS[case.layout]
    if case.micro_batches == "second leg waits" and not layout.is_hybrid:
        return False
    return case.move == "stays" or _target(case).world_size == layout.world_size


def _target(case: Case) -> Layout:
    """Return the layout of the last step."""
    if case.move == "stays":
        return LAYOUTS[case.layout]
    name = case.move.removeprefix("to ")
    return LAYOUTS.get(name) or LAYOUTS[f"{name} {LAYOUTS[case.layout].world_size}"]


def run_case(case: Case, *, in_processes: bool = False) -> None:
    """Train one combination on every rank and compare all parameters with those of one process.

    Raises:
        AssertionError: They differ.
    """
    expected = _train_in_one_process(case)
    # Sums over columns in low precision are rounded where tensor parallelism cuts them.
    is_rounded = (LAYOUTS[case.layout].is_split or _target(case).is_split) and case.precision != "float32"
    tolerance = 2e-3 if is_rounded else 1e-6
    run: Callable[..., list[Any]] = run_ranks if in_processes else run_threads
    with tempfile.TemporaryDirectory() as folder:
        for found in run(_train, LAYOUTS[case.layout].world_size, case, folder):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# In one process


def _train_in_one_process(case: Case) -> dict[str, torch.Tensor]:
    model = seeded(Net, 0)
    optimizer = _optimizer(model)
    for step in range(3):
        count = (LAYOUTS[case.layout] if step < 2 else _target(case)).batches
        batches = [[batch_of(step, rank, micro) for micro in range(_micros(case))] for rank in range(count)]
        grads = reduced_in_one_process(model, PRECISIONS[case.precision], batches)
        for fqn, param in model.named_parameters():
            grad = grads[fqn]
            param.grad = None if grad is None else grad.to(param.dtype)
        if case.clip == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: param.detach().clone() for fqn, param in model.named_parameters()}


def batch_of(step: int, rank: int, micro: int) -> torch.Tensor:
    return random_input(100 * step + 10 * rank + micro, 4, DIM)


def _micros(case: Case) -> int:
    return 1 if case.micro_batches == "one batch" else 3


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


# On ranks


def _train(case: Case, folder: str) -> dict[str, torch.Tensor]:
    layout, target = LAYOUTS[case.layout], _target(case)
    model, mesh = _sharded(layout, case)
    optimizer = _optimizer(model)
    for step in range(2):
        _step(case, layout, model, mesh, optimizer, step)
    save_checkpoint(folder, 2, model, optimizer)
    # Other values than those of the file.
    model, mesh = _sharded(target, case, seed=1)
    optimizer = _optimizer(model)
    load_checkpoint(folder, model, optimizer)
    _step(case, target, model, mesh, optimizer, 2)
    return {key: full(value) for key, value in model.state_dict().items()}


def _sharded(layout: Layout, case: Case, seed: int = 0) -> tuple[Any, DeviceMesh]:
    model = seeded(Net, seed)
    mesh = init_device_mesh("cpu", layout.shape, mesh_dim_names=layout.dims)
    if layout.is_split:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh[layout.dims[:-1]]
    options = {"mesh": mesh, "mp_policy": copy.copy(PRECISIONS[case.precision]), **dict(layout.options)}
    return fully_shard(model, policy={Block}, **options), mesh


def _step(
    case: Case, layout: Layout, model: Any, mesh: DeviceMesh, optimizer: torch.optim.Optimizer, step: int
) -> None:
    count = _micros(case)
    rank = _batch_rank(layout, mesh)
    for micro in range(count):
        is_last = micro + 1 == count
        waits = case.micro_batches == "second leg waits" and layout.is_hybrid
        if waits:
            model.set_requires_all_reduce(is_last)
        with nullcontext() if is_last or waits else no_sync(model):
            model(batch_of(step, rank, micro)).float().square().mean().backward()
    if case.clip == "clipped":
        clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def _batch_rank(layout: Layout, mesh: DeviceMesh) -> int:
    """Return which of the batches this rank has: ranks of one group of tensor parallelism have the same."""
    number = 0
    for size, dim in zip(layout.shape, layout.dims, strict=True):
        if dim != "tp":
            number = number * size + mesh.get_local_rank(dim)
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", action="store_true", help="few of them, on ranks that are processes")
    in_processes = parser.parse_args().processes
    cases = few_cases() if in_processes else all_cases()
    start, wrong = time.perf_counter(), 0
    for case in cases:
        try:
            run_case(case, in_processes=in_processes)
        except Exception as error:
            wrong += 1
            print(f"{', '.join(case)}: {type(error).__name__}: {error}")
    kind = "processes" if in_processes else "threads"
    print(f"{len(cases)} combinations on {kind}, {wrong} not as one process, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
