"""The plan's peak of memory against what a step takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import MixedPrecisionPolicy, fully_shard, plan
from composable.planning.estimate import HandleBytes, Reduced, peak_of_step
from tests.live_bytes import LiveBytes
from tests.pairwise import pairs_of
from tests.world import run_threads

BF16, FP32 = torch.bfloat16, torch.float32


def block(*, freed: bool) -> HandleBytes:
    return HandleBytes(1, 100, 100, (Reduced(100, 50),), freed)


def test_of_freed_handles_two_are_unsharded_and_two_are_reduced() -> None:
    root = HandleBytes(0, 0, 0, (), False)
    # When the second block is reduced: it and the first are there, its gradients, two buffers of them, three shards.
    assert peak_of_step([root, *[block(freed=True)] * 5]) == 2 * 100 + 100 + 2 * 100 + 3 * 50
    # Of kept ones all are there at the end of forward; when the last but one is reduced, the last is gone.
    assert peak_of_step([root, *[block(freed=False)] * 5]) == 4 * 100 + 100 + 2 * 100 + 50


def test_a_module_without_gradients_takes_no_more_than_its_forward() -> None:
    frozen = HandleBytes(0, 100, 0, (), True)
    assert peak_of_step([frozen, frozen, frozen]) == 200


def test_on_a_device_the_plan_is_what_a_gpu_took() -> None:
    """Eight matrices, computed and reduced in bf16 by two ranks: bytes of the rule "memory as planned" on an H200."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    made = plan(model, world_size=2, policy={nn.Linear}, mp_policy=MixedPrecisionPolicy(BF16))
    assert replace(made, is_queued=True).peak_bytes_per_rank() == pytest.approx(293_630_976, rel=0.02)
    assert made.peak_bytes_per_rank() > 1.02 * 293_630_976


WIDTH = 96


class Tower(nn.Module):
    """Blocks of matrices, with next to no activations; equal ones, or each of a width of its own."""

    def __init__(self, depth: int, growth: int) -> None:
        super().__init__()
        widths = [WIDTH + growth * number for number in range(depth)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, one), nn.Linear(one, WIDTH)) for one in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class StepBytes(LiveBytes):
    """Counts the unsharded parameters too, whose storages come and go without an operation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        handles = fully_shard.state(model).lazy_init().handles
        self._storages = [flat._storage for handle in handles for flat in handle.buffers]
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.now + sum(one.nbytes() for one in self._storages))
        return result


def peak_and_plan(growth: int, options: dict[str, Any]) -> tuple[int, int]:
    model = Tower(6, growth)
    fully_shard(model, policy={nn.Sequential}, **options)
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        model(x).float().sum().backward()
        model.zero_grad()
    with StepBytes(model) as live:
        model(x).float().sum().backward()
    plan = fully_shard.state(model).plan
    return live.most, plan.peak_bytes_per_rank(0) - plan.shard_bytes


PRECISIONS = [
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(BF16, FP32),
    MixedPrecisionPolicy(BF16),
    MixedPrecisionPolicy(None, BF16),
    MixedPrecisionPolicy(BF16, keep_low_precision_grads=True),
]


@pytest.mark.parametrize(
    *pairs_of(growth=[0, 8, -8], world_size=[1, 2, 3], strategy=["FULL_SHARD", "SHARD_GRAD_OP"], precision=PRECISIONS)
)
def test_a_step_takes_what_the_plan_says(
    precision: MixedPrecisionPolicy, world_size: int, strategy: str, growth: int
) -> None:
    options = {"mp_policy": precision, "strategy": strategy}
    for found, planned in run_threads(peak_and_plan, world_size, growth, options):
        assert found == pytest.approx(planned, rel=0.02), f"{found / planned - 1:+.1%}"


def hybrid_peak_and_plan(shape: tuple[int, int], growth: int, options: dict[str, Any]) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return peak_and_plan(growth, {**options, "mesh": mesh})


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize(("shape", "strategy"), [((2, 2), "HYBRID_SHARD"), ((2, 1), "HYBRID_SHARD_ZERO2")])
def test_a_step_with_copies_takes_what_the_plan_says(
    precision: MixedPrecisionPolicy, shape: tuple[int, int], strategy: str
) -> None:
    options = {"mp_policy": precision, "strategy": strategy}
    for found, planned in run_threads(hybrid_peak_and_plan, shape[0] * shape[1], shape, 8, options):
        assert found == pytest.approx(planned, rel=0.02), f"{found / planned - 1:+.1%}"
