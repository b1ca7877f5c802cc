"""A trace of torch's profiler shows what the package does, with the names of modules."""

from collections import Counter

import pytest
import torch
from torch import nn

from composable import fully_shard, replicate
from composable.ground.torch_private import autograd_profiler
from tests.world import on_ranks, run_ranks

STEPS = 2
SHARDED = {
    f"composable::{what} {name}": STEPS * times
    for name, gathers in (("(root)", 1), ("0", 2), ("2", 2))
    for what, times in (("gather", gathers), ("wait for gather", gathers), ("reduce", 1), ("wait for reduce", 1))
}
REPLICATED = {
    "composable::reduce bucket 1": STEPS,
    "composable::reduce bucket 2": STEPS,
    "composable::wait for reduce buckets": STEPS,
}


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) * self.scale
        return out


def make(annotation: str) -> nn.Module:
    torch.manual_seed(0)
    if annotation == "replicate":
        return replicate(Model(), bucket_cap_mb=1e-4)
    return fully_shard(Model(), policy={nn.Linear})


def run_steps(model: nn.Module) -> list[torch.Tensor]:
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize(("annotation", "regions"), [("fully_shard", SHARDED), ("replicate", REPLICATED)])
@on_ranks(2, run=run_ranks)
def test_a_trace_has_a_region_for_each_gather_and_reduction(annotation: str, regions: dict[str, int]) -> None:
    expected = run_steps(make(annotation))
    model = make(annotation)
    run_steps(model)
    # The next two steps, of which every rank keeps a trace.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        found = run_steps(model)
    assert len(found) == len(expected) and all(
        torch.equal(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other))
        for one, other in zip(found, expected, strict=True)
    )
    assert dict(Counter(event.name for event in profiler.events() if event.name.startswith("composable::"))) == regions


@on_ranks(2, run=run_ranks, annotation=["fully_shard", "replicate"])
def test_no_region_is_entered_where_no_profiler_runs(annotation: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        entered: list[str] = []
        patch.setattr(autograd_profiler, "record_function", entered.append)
        run_steps(make(annotation))
    assert entered == []
