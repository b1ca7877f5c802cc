"""The memory of rehearsals: that of real ranks, and of scripts that offload, the host's apart from the device's."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import (
    CPUOffloadPolicy,
    HandleOptions,
    MixedPrecisionPolicy,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    plan,
    replicate,
    step_in_backward,
)
from composable.rehearsal.rehearsed_function import rehearse
from tests.live_bytes import LiveBytes
from tests.testing.test_rehearsed_script import rehearse as rehearse_source
from tests.testing.test_rehearsed_script import text_of
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
    # The only one that has no buffers of its own, as a device's have none.
    fully_shard(model, policy={Block}, options=HandleOptions(transport="process_group"), **options)


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
        model(torch.randn(batch, width, requires_grad=True)).square().mean().backward()
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
    for ranks in (1, 3) if is_inplace else (2, 4):
        fake = rehearse(ranks, partial(train, name, is_inplace=is_inplace)).peak_bytes
        assert fake == pytest.approx(run_threads(peak_of, ranks, name, is_inplace=is_inplace)[0], rel=0.01), ranks


class Spare(nn.Sequential):
    """Blocks, of which nobody uses what the last one gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *used, spare = self
        for block in used:
            x = block(x)
        spare(x)
        return x


def train_spare() -> None:
    model = Spare(*[Block(64, is_inplace=False) for _ in range(5)])
    shard(model)
    for _ in range(2):
        model(torch.randn(128, 64)).square().mean().backward()


def peak_of_spare() -> int:
    with LiveBytes() as live:
        train_spare()
    return live.peak


def test_what_is_freed_takes_no_memory_again_where_it_is_looked_at() -> None:
    # Backward asks for the nodes of parameters that it may reach: a view of a fake tensor fills its storage.
    fake = rehearse(2, train_spare).peak_bytes
    assert fake == pytest.approx(run_threads(peak_of_spare, 2)[0], rel=0.01)


def test_buckets_that_are_averaged_are_stepped_before_the_others() -> None:
    # Real ranks wait for each other, and step what has come: a rank that waits for nobody keeps one bucket or two.
    step = partial(train, "replicated, buckets", is_inplace=False, is_stepped=True, batch=2)
    layer = (2 * 64 * 128 + 3 * 64) * 4
    # Parameters and state of five layers.
    assert rehearse(2, step).peak_bytes < 3 * 5 * layer + 3 * layer


# -- scripts that offload what rests

START = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from composable import *

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
"""
TRAIN = """
layers = [nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(6)]
model = nn.Sequential(*layers)
{before}
fully_shard(model, policy=lambda one: one in layers, {options})
optimizer = {optimizer}(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
assert next(model.parameters()).is_cuda != {is_offloaded}
"""
RANKS = 4
# (options, tensors of state, optimizer, what happens before the annotation)
OFFLOADED: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "pinned": ({}, 2, "torch.optim.AdamW", ""),
    "from the device": ({}, 2, "torch.optim.AdamW", "model.cuda()"),
    "pageable": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 2, "torch.optim.AdamW", ""),
    "without state": ({}, 0, "torch.optim.SGD", ""),
    "stays": ({"reshard_after_forward": False}, 2, "torch.optim.AdamW", ""),
    "low precision": ({"mp_policy": LOW}, 2, "torch.optim.AdamW", ""),
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_what_is_offloaded_rests_in_the_memory_of_the_host(name: str, tmp_path: Path) -> None:
    options, states, optimizer, before = OFFLOADED[name]
    options = {"offload_policy": CPUOffloadPolicy(), **options}
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(6)]
    planned = plan(nn.Sequential(*layers), world_size=RANKS, policy=lambda one: one in layers, **options)
    found: dict[bool, dict[str, Any]] = {}
    for is_offloaded in (True, False):
        given = {key: value for key, value in options.items() if is_offloaded or key != "offload_policy"}
        shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
        source = START + TRAIN.format(before=before, options=shown, optimizer=optimizer, is_offloaded=is_offloaded)
        report = rehearse_source(tmp_path, source, ranks=RANKS, on_host=RANKS, rehearsed=(0,))
        assert report.exit_code == 0, text_of(report)
        found[is_offloaded] = report.values()
    host, device, plain = found[True]["host_memory"], found[True]["memory"], found[False]["memory"]
    rests = planned.host_bytes_per_rank_at_rest(states)
    assert rests <= host["at_rest"] <= rests + 2**10
    # A batch stays on the device.
    assert device["at_rest"] <= 64 * 256 * 4 + 2**10
    assert plain["at_rest"] - device["at_rest"] == pytest.approx(rests, abs=2**10)
    # Gradients rest on the host too; the whole model was there before the annotation, but for the device's own.
    gradients = planned.shard_bytes
    assert rests + gradients <= host["peak"] <= max(rests, RANKS * planned.shard_bytes) + 2 * gradients
    assert rests <= plain["peak"] - device["peak"] <= rests + gradients
    # What the plan counts, and the activations: the inputs of layers and the outputs of the last one, of 64 samples.
    needed = planned.peak_bytes_per_rank(states)
    assert 0.98 * needed <= device["peak"] <= needed + 64 * 4 * (7 * 256 + 6 * 2 * 1024)


def test_nothing_is_on_the_host_where_a_model_begins_on_the_meta_device(tmp_path: Path) -> None:
    source = (
        "with torch.device('meta'):\n    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))\n"
        "fully_shard(model, policy={nn.Linear})\nmodel.to_empty(device='cuda')\n"
        "for each in model: each.reset_parameters()\n"
        "for _ in range(2):\n    model(torch.randn(8, 512, device='cuda')).sum().backward()\n"
    )
    report = rehearse_source(tmp_path, START + source, ranks=RANKS, on_host=RANKS, rehearsed=(0,))
    assert report.exit_code == 0, text_of(report)
    assert report.values()["host_memory"]["peak"] < 2**14, text_of(report)


def test_parameters_that_leave_the_host_are_refused_as_on_a_device(tmp_path: Path) -> None:
    source = f"{START}model = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy())\nmodel.cuda()\nmodel(torch.ones(2, 8))"
    report = rehearse_source(tmp_path, source, ranks=2, rehearsed=(0,))
    assert report.exit_code == 1
    assert "parameters are on cuda, and offload_policy keeps them on cpu" in text_of(report)


# -- what autograd saves

SAVED = {
    "torch's": "torch.autograd.graph.save_on_cpu()",
    "torch's, pinned": "torch.autograd.graph.save_on_cpu(pin_memory=True)",
    "hooks": "torch.autograd.graph.saved_tensors_hooks(lambda one: one.cpu(), lambda one: one.cuda())",
    "hooks with names": "torch.autograd.graph.saved_tensors_hooks(lambda one: one.to('cpu'), lambda one: one.to(x.device))",
    "a wrapper": "wrapped",
}
CHAIN = """
from contextlib import nullcontext
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

class Chain(nn.Module):
    def forward(self, y):
        for _ in range(16):
            y = y.sin()
        return y

context, chain = {context}, Chain()
x = torch.ones(2**18, device="cuda", requires_grad=True)  # 1 MiB
for _ in range(2):
    with context:
        y = chain(x).sum()
    y.backward()
assert x.grad.is_cuda
"""


@pytest.mark.parametrize("name", SAVED)
def test_saved_tensors_on_the_host_are_not_on_the_device(name: str, tmp_path: Path) -> None:
    peaks = []
    for context in (SAVED[name], "nullcontext()"):
        source = START + CHAIN.format(context=context)
        if context == "wrapped":
            source = START + CHAIN.format(context="nullcontext()").replace(" Chain()", " offload_wrapper(Chain())")
        report = rehearse_source(tmp_path, source, ranks=2, rehearsed=(0,))
        assert report.exit_code == 0, text_of(report)
        peaks.append((report.values()["memory"]["peak"], report.values()["host_memory"]["peak"]))
    (device, host), (plain, least) = peaks
    assert 16 * 2**20 <= host <= 16 * 2**20 + 2**12 and least < 2**12
    assert device <= 6 * 2**20 + 2**12 and plain >= 17 * 2**20


NAMED = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.full((2,), 2.0, device=grad.device) + torch.ones(2).to("cuda")

class Places(nn.Module):
    def forward(self, x):
        return (Twice.apply(x) * torch.arange(2, device=x.device)).sin()

x = torch.ones(2, device="cuda", requires_grad=True)
checkpoint(model := Places())
model(x).sum().backward()
assert x.grad.is_cuda
"""


def test_a_backward_may_name_devices(tmp_path: Path) -> None:
    report = rehearse_source(tmp_path, START + NAMED, ranks=2, rehearsed=(0,))
    assert report.exit_code == 0, text_of(report)
