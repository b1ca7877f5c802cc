"""The memory of rehearsals is that of ranks with values."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import (
    MixedPrecisionPolicy,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    replicate,
    step_in_backward,
)
from composable.testing.rehearsal import rehearse
from tests.live_bytes import LiveBytes
from tests.world import run_threads

# -- against ranks with values


class Block(nn.Module):
    """Two layers and what is between them, added to their input."""

    def __init__(self, width: int, *, is_inplace: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.last = nn.ReLU(is_inplace), nn.LeakyReLU(inplace=is_inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.last(self.down(self.act(self.up(x))))
        return result


def recompute(model: nn.Sequential, every: int) -> None:
    for block in model[::every]:
        checkpoint(block)


def recompute_by_torch(model: nn.Sequential, every: int, *, use_reentrant: bool) -> None:
    for block in model[::every]:
        block.forward = partial(torch_checkpoint, block.forward, use_reentrant=use_reentrant)


def shard(model: nn.Module, before: Callable[[Any], None] | None = None, **options: Any) -> None:
    if before is not None:
        before(model)
    fully_shard(model, policy={Block}, **options)


def copies(model: nn.Module, before: Callable[[Any], None] | None = None, **options: Any) -> None:
    if before is not None:
        before(model)
    replicate(model, **options)


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BY_US, BY_US_SECOND = (partial(recompute, every=every) for every in (1, 2))
BY_TORCH, BY_TORCH_SECOND = (partial(recompute_by_torch, every=every, use_reentrant=False) for every in (1, 2))
REENTRANT, REENTRANT_SECOND = (partial(recompute_by_torch, every=every, use_reentrant=True) for every in (1, 2))
ANNOTATIONS: dict[str, Callable[[nn.Module], None]] = {
    "sharded": shard,
    "stays": partial(shard, reshard_after_forward=False),
    "stays in parts": partial(shard, reshard_after_forward=1),
    "low precision": partial(shard, mp_policy=LOW),
    "low precision, stays": partial(shard, mp_policy=LOW, reshard_after_forward=False),
    "ours": partial(shard, before=BY_US),
    "ours, every second": partial(shard, before=BY_US_SECOND),
    "ours, stays": partial(shard, before=BY_US, reshard_after_forward=False),
    "ours, low precision": partial(shard, before=BY_US_SECOND, mp_policy=LOW),
    "torch's": partial(shard, before=BY_TORCH),
    "torch's, every second": partial(shard, before=BY_TORCH_SECOND),
    "torch's, reentrant": partial(shard, before=REENTRANT),
    "torch's, reentrant, every second": partial(shard, before=REENTRANT_SECOND),
    "replicated": copies,
    "replicated, views": partial(copies, gradient_as_bucket_view=True),
    "replicated, low precision": partial(copies, mp_policy=LOW),
    "replicated, ours": partial(copies, before=BY_US),
    "replicated, torch's, every second": partial(copies, before=BY_TORCH_SECOND),
    "replicated, buckets": partial(copies, bucket_cap_mb=0.05),
}


def train(name: str, *, is_inplace: bool, is_stepped: bool = False, batch: int = 128, width: int = 64) -> None:
    model = nn.Sequential(*[Block(width, is_inplace=is_inplace) for _ in range(5)])
    ANNOTATIONS[name](model)
    optimizer = torch.optim.AdamW(model.parameters())
    if is_stepped:
        step_in_backward(optimizer)
    for _ in range(3):
        model(torch.randn(batch, width)).square().mean().backward()
        if not is_stepped:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def peak_of(name: str, *, is_inplace: bool) -> int:
    with LiveBytes() as live:
        train(name, is_inplace=is_inplace)
    return live.peak


@pytest.mark.parametrize("is_inplace", [False, True])
@pytest.mark.parametrize("name", ANNOTATIONS)
def test_a_rehearsed_peak_is_that_of_ranks_with_values(name: str, is_inplace: bool) -> None:
    for ranks in (1, 2):
        fake = rehearse(ranks, partial(train, name, is_inplace=is_inplace)).peak_bytes
        assert fake == pytest.approx(run_threads(peak_of, ranks, name, is_inplace=is_inplace)[0], rel=0.02), ranks


def test_buckets_that_are_averaged_are_stepped_before_the_others() -> None:
    # Real ranks wait for each other, and step what has come: a rank that waits for nobody keeps one bucket or two.
    step = partial(train, "replicated, buckets", is_inplace=False, is_stepped=True, batch=2)
    layer = (2 * 64 * 128 + 3 * 64) * 4
    # Parameters and state of five layers.
    assert rehearse(2, step).peak_bytes < 3 * 5 * layer + 3 * layer
