"""Strategy x precision x offload x checkpointing x compilation: each legal combination against one process.

    python -m tests.combinations                  all of them, on 2 ranks
    python -m tests.combinations --world-size 3

The compiler keeps what it knows for the process, so compiled combinations run on ranks that are processes.
"""

import argparse
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint as run_with_checkpoint

from composable import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, checkpoint, fully_shard, no_sync
from tests.low_precision import BF16, FP16, FP32, Block, batch_of, make_net, train_in_one_process, whole
from tests.world import run_ranks, run_threads

__all__ = ["Case", "all_cases", "pairwise", "run_case"]

_CaseT = TypeVar("_CaseT", bound=tuple[str, ...])

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
PRECISIONS = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(BF16),
    "bfloat16 reduced in float32": MixedPrecisionPolicy(BF16, FP32),
    "float16 reduced in float32": MixedPrecisionPolicy(FP16, FP32),
    "float32 reduced in bfloat16": MixedPrecisionPolicy(None, BF16),
}
OFFLOADS = {"on the device": OffloadPolicy(), "on the host": CPUOffloadPolicy(pin_memory=False)}
CHECKPOINTS = ("none", "ours", "wrapper", "reentrant wrapper", "in forward")
COMPILATIONS = ("eager", "compiled before", "compiled after")


class Case(NamedTuple):
    """One combination, by the names of its options."""

    strategy: str
    precision: str
    offload: str
    checkpointing: str
    compilation: str


def all_cases() -> list[Case]:
    """Return every legal combination."""
    cases = map(Case._make, itertools.product(STRATEGIES, PRECISIONS, OFFLOADS, CHECKPOINTS, COMPILATIONS))
    # The compiler refuses reentrant checkpointing inside of a graph.
    return [case for case in cases if case.checkpointing != "reentrant wrapper" or case.compilation == "eager"]


def pairwise(cases: Sequence[_CaseT]) -> list[_CaseT]:
    """Return few of the cases in which every two values that meet in any of them meet.

    Args:
        cases: Names of values, of which no two options have the same.
    """
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen: list[_CaseT] = []
    while missing:
        best = max(cases, key=lambda case: len(missing & set(_pairs(case))))
        missing -= set(_pairs(best))
        chosen.append(best)
    return chosen


def _pairs(case: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    return itertools.combinations(case, 2)


def run_case(case: Case, world_size: int) -> None:
    """Train one combination on every rank and compare the parameters with those of one process.

    Raises:
        AssertionError: They differ.
    """
    policy = PRECISIONS[case.precision]
    run: dict[str, Any] = {"steps": 2, "micros": 2, "dtype": FP32, "make": torch.optim.SGD}
    expected = train_in_one_process(policy, world_size, **run)
    run_all: Callable[..., list[Any]] = run_threads if case.compilation == "eager" else run_ranks
    # The compiler computes some operations in more bits, and rounds later.
    is_rounded = case.compilation != "eager" and policy.param_dtype is not None
    tolerance = 2e-3 if is_rounded else 1e-6
    for found in run_all(_train, world_size, case):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class _Own(Block):
    """Runs again in backward by what its own forward says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run_with_checkpoint(super().forward, x, use_reentrant=False)
        return result


def _train(case: Case) -> dict[str, torch.Tensor]:
    model = make_net()
    is_compiled = case.compilation != "eager"
    if is_compiled:
        warnings.simplefilter("ignore")  # The compiler calls what torch has deprecated.
        torch.compiler.reset()
    if case.checkpointing == "in forward":
        for block in model.blocks:
            block.__class__ = _Own
    elif case.checkpointing != "none":
        _checkpoint(model, case.checkpointing)
    if case.compilation == "compiled before":
        _compile(model)
    for block in list(model.blocks):
        _shard(block, case)
    _shard(model, case)
    if case.compilation == "compiled after":
        _compile(model)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.05)
    for step in range(2):
        with no_sync(model):
            model(batch_of(step, dist.get_rank(), 0)).float().square().mean().backward()
        model(batch_of(step, dist.get_rank(), 1)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in whole(model).items()}


def _checkpoint(model: nn.Module, how: str) -> None:
    if how == "ours":
        for block in model.blocks:  # type: ignore[union-attr]  # a list of modules
            checkpoint(block)
        return
    kind = CheckpointImpl.REENTRANT if how == "reentrant wrapper" else CheckpointImpl.NO_REENTRANT
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=kind),
        check_fn=lambda module: isinstance(module, Block),
    )


def _shard(module: nn.Module, case: Case) -> None:
    fully_shard(
        module,
        strategy=case.strategy,
        mp_policy=PRECISIONS[case.precision],
        offload_policy=OFFLOADS[case.offload],
    )


def _compile(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world-size", type=int, default=2)
    world_size = parser.parse_args().world_size
    start, wrong = time.perf_counter(), 0
    cases = all_cases()
    for case in cases:
        try:
            run_case(case, world_size)
        except Exception as error:
            wrong += 1
            print(f"{', '.join(case)}: {type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    print(f"{len(cases)} combinations on {world_size} ranks, {wrong} not as one process, {seconds:.0f} s")


if __name__ == "__main__":
    main()
