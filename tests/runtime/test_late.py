"""Programs on a device that executes late: right ones give right numbers, and a wait that is missing shows."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from composable.errors import UsageError
from tests.parity import assert_equal_params, assert_equal_runs, train_reference
from tools.streams.bench import Case
from tools.streams.late import LateDevice
from tools.streams.late_cases import (
    FOUND,
    PROGRAMS,
    broken,
    broken_sources,
    run_late,
    run_on_cpu,
    train_late,
)

SEEDS = pytest.mark.parametrize("seed", range(8))
# Gathers, the computation or the collectives themselves come as late as they may; or in an order by chance.
SCHEDULES: dict[str, Callable[[], LateDevice]] = {
    "unshard last": lambda: LateDevice(last=["unshard"]),
    "default last": lambda: LateDevice(last=["default"]),
    "collectives last": lambda: LateDevice(last=["other"]),
    "by chance": lambda: LateDevice(falls_after=5),
}


# The device itself


@SEEDS
def test_operations_wait_for_what_events_order(seed: int) -> None:
    device = LateDevice(seed)
    side = device.Stream(name="side")
    with device:
        x = torch.ones(3)
        side.wait_stream(device.current_stream())
        with device.stream(side):
            x.add_(1)
            event = side.record_event()
            y = x * 2
        device.current_stream().wait_event(event)
        z = x.sum()
        assert device.current_stream().queue and not side.query()
        event.synchronize()
        event.wait(device.current_stream())
        assert z.item() == 6
        side.synchronize()
        assert y.tolist() == [4, 4, 4]
        assert torch.equal(y, x + x)


@SEEDS
def test_a_stream_that_waits_for_no_event_computes_other_numbers(seed: int) -> None:
    device = LateDevice(seed)
    side = device.Stream(name="side")
    with device:
        x = torch.ones(3)
        with device.stream(side):
            x.add_(1)
        assert x.sum().item() != 6


@pytest.mark.parametrize("last", ["side", "default"])
def test_freed_memory_that_is_still_read_may_be_written_by_its_next_owner(last: str) -> None:
    device = LateDevice(last=[last])
    side = device.Stream(name="side")

    def sum_aside(*, waits: bool) -> float:
        x = torch.ones(3)
        side.wait_stream(device.current_stream())
        with device.stream(side):
            total = x.sum()
        if waits:
            device.current_stream().wait_stream(side)
        del x
        torch.zeros(3)
        side.wait_stream(device.current_stream())
        with device.stream(side):
            return total.item()

    with device:
        assert sum_aside(waits=True) == 3
        assert str(sum_aside(waits=False)) == ("nan" if last == "side" else "3.0")


def test_memory_that_is_freed_by_its_size_and_used_or_never_written_is_nan() -> None:
    device = LateDevice()
    with device:
        x = torch.ones(3)
        assert torch.empty(2).isnan().all().item() and x.sum().item() == 3
        x.untyped_storage().resize_(0)
        assert x.sum().isnan().item()
        x.untyped_storage().resize_(12)
        assert x.isnan().all().item()
        assert x.fill_(2).sum().item() == 6


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_races_with_copies_that_it_does_not_wait_for(waits: bool) -> None:
    device = LateDevice()
    with device:
        host, back = torch.ones(3, pin_memory=True), torch.zeros(3, pin_memory=True)
        there = torch.empty(3)
        there.copy_(host, non_blocking=True)
        if waits:
            device.current_stream().synchronize()
        host.add_(1)
        back.copy_(there, non_blocking=True)
        if waits:
            device.synchronize()
        early = back.clone()
        assert early.is_pinned() and not there.is_pinned()
        assert early.tolist() == ([1, 1, 1] if waits else [0, 0, 0])
        assert there.tolist() == ([1, 1, 1] if waits else [2, 2, 2])
        there.zero_()
        back.copy_(there)
        assert back.tolist() == [0, 0, 0]
        seen = there.fill_(3).cpu()
        seen.add_(1)
        assert device.is_on_host(seen) and seen.tolist() == [4, 4, 4] and there.tolist() == [3, 3, 3]


def numbers() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True)
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.LayerNorm(6), nn.GELU())
    y = layer(x.to(torch.float64).float()).view(2, 2, 6)
    mask = y > 0
    picked = y[mask]
    values, indices = y.topk(2)
    (y.sum() + picked.square().mean() * 2 + values.prod() + nn.functional.embedding(indices[0] % 4, x).sum()).backward()
    with torch.inference_mode():
        z = (torch.rand_like(x) + torch.arange(6) + float(y[0, 0, 0])).clamp_(min=0.5)
        z[:, 1:3] = 7
        torch._foreach_add_([z[0], z[1]], 1)
    assert x.grad is not None
    grads = [param.grad for param in layer.parameters() if param.grad is not None]
    return [y, picked, indices, z, torch.cat([z, x]), x.grad, *grads]


@SEEDS
def test_numbers_are_the_same_as_without_the_device(seed: int) -> None:
    expected = numbers()
    device = LateDevice(seed)
    with device:
        found = list(map(device.values_of, numbers()))
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=0)
    assert not {"tolist", "numpy", "cpu"} & vars(torch.Tensor).keys() and "resize_" not in vars(torch.UntypedStorage)


# Right programs


@cache
def right_numbers(name: str) -> list[dict[str, torch.Tensor]]:
    return run_on_cpu(PROGRAMS[name])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {"reshard_after_forward": False}),
        ("gpt_tied", {}),
        ("frozen_mixed", {}),
        ("called_twice", {"reshard_after_forward": False}),
    ],
)
def test_training_equals_one_process(model: str, options: dict[str, Any], schedule: str) -> None:
    runs = train_late(Case("train", model, lambda bench: None, options), SCHEDULES[schedule]())
    assert_equal_runs(runs, train_reference(model, len(runs)))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("train", "two branches, two steps")])
def test_programs_compute_the_same_as_without_a_device(name: str) -> None:
    expected = right_numbers(name)
    for schedule, device in SCHEDULES.items():
        for rank, values in enumerate(run_late(PROGRAMS[name], device())):
            assert_equal_params(values, expected[rank], tolerance=1e-6, where=f"{schedule}, rank {rank}")


# Broken ones


def is_noticed(program: str, device: LateDevice, name: str) -> bool:
    try:
        found = run_late(PROGRAMS[program], device, broken(name))
    except UsageError as error:
        # The library compares values of parameters by itself.
        if "an unsharded parameter was written to" not in str(error):
            raise
        return True
    return not all(
        torch.allclose(values[fqn], right[fqn], rtol=1e-6, atol=1e-6)
        for values, right in zip(found, right_numbers(program), strict=True)
        for fqn in right
    )


@pytest.mark.parametrize(
    ("program", "last", "name"), [(*where, name) for where, names in FOUND.items() for name in names]
)
def test_what_is_broken_in_the_order_shows_in_the_numbers(program: str, last: str, name: str) -> None:
    assert name in broken_sources(), "the file has changed: `broken_sources()` has what can be broken in it now"
    # Memory comes back when a collection of garbage says so, which moves what is overwritten: three orders.
    if not any(is_noticed(program, LateDevice(seed, last=[last]), name) for seed in range(3)):
        pytest.fail("every number is right")
