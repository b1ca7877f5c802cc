"""The host's work for each handle does not grow with the number of handles, nor that of a step with the ranks.

Calls are counted, of Python functions and of those in C, and no time is measured.
"""

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import clip_grad_norm_, fully_shard, no_sync, plan, step_in_backward
from tests.world import run_threads

# Work that is done once, whatever the model's size, makes the figure of the larger model the smaller one.
MOST = 1.01
WORLD_SIZE = 8
ROOT = Path(__file__).parent.parent


def join(world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def chain(handles: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(handles)))


def annotate(model: nn.Module) -> None:
    fully_shard(model, policy={nn.Linear})


def annotate_by_hand(model: nn.Module) -> None:
    for module in model.children():
        fully_shard(module)
    fully_shard(model)


def step(model: nn.Module) -> None:
    model(torch.ones(1, 4)).sum().backward()


def leave_out_the_first(model: nn.Module) -> None:
    layers = list(model.children())
    with no_sync(model):
        step(model)
    torch.stack([layer(torch.ones(1, 4)) for layer in layers[:2]]).sum().backward()


def counted(call: Callable[[], object]) -> Counter[str]:
    """Return how often each function was called in ``call``."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            found[f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno} {frame.f_code.co_name}"] += 1
        elif event == "c_call":
            found[function.__qualname__] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def work(handles: int) -> dict[str, Counter[str]]:
    """Return the calls of each thing that users do with a model of so many handles, also in the way of others."""
    join(WORLD_SIZE)
    model, other = chain(handles), chain(handles)
    found = {
        "plan": counted(lambda: str(plan(model, world_size=WORLD_SIZE, policy={nn.Linear}))),
        "annotation": counted(lambda: annotate(model)),
        "annotation by hand": counted(lambda: annotate_by_hand(other)),
        "first step": counted(lambda: step(model)),
        "first step, annotated by hand": counted(lambda: step(other)),
    }
    # The next forwards compare values, the second one alone does not.
    found["step"] = counted(lambda: step(model))
    found["step with comparisons"] = counted(lambda: step(model))
    found["clip"] = counted(lambda: clip_grad_norm_(model.parameters(), 1.0))
    for name, made in (("SGD", torch.optim.SGD), ("AdamW", torch.optim.AdamW)):
        optimizer = made(model.parameters(), lr=0.1, foreach=True)
        optimizer.step()
        found[f"step of {name}"] = counted(optimizer.step)
    found["zero_grad"] = counted(optimizer.zero_grad)
    found["state_dict"] = counted(model.state_dict)
    found["state_dict of the optimizer"] = counted(optimizer.state_dict)
    found["no_sync, then a part"] = counted(lambda: leave_out_the_first(model))
    model.zero_grad()
    step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    step(model)
    found["step in backward"] = counted(lambda: step(model))
    dist.destroy_process_group()
    return found


def test_the_work_for_a_handle_is_the_same_whatever_their_number() -> None:
    work(2)  # What is imported or cached on first use is no handle's.
    few, many = work(50), work(200)
    grown = {
        f"{name}: {function}": (count, many[name][function])
        for name, calls in few.items()
        for function, count in calls.items()
        if many[name].total() / 200 > calls.total() / 50 * MOST and many[name][function] > 4 * MOST * count
    }
    assert grown == {}


def train_on(dims: tuple[int, ...], handles: int) -> None:
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])
    step(fully_shard(chain(handles), policy={nn.Linear}, mesh=mesh))


@pytest.mark.parametrize(("dims", "groups"), [((4,), "1 process group"), ((2, 2), "3 process groups")])
def test_a_model_of_more_handles_uses_no_more_process_groups(
    dims: tuple[int, ...], groups: str, caplog: pytest.LogCaptureFixture
) -> None:
    for handles in (2, 20):
        with caplog.at_level(logging.INFO, "composable"):
            run_threads(train_on, 4, dims, handles)
        assert caplog.messages[-1] == f"Sequential: {handles} handles use {groups}"


def work_among(world_size: int) -> list[int]:
    """Return the calls of ours in an annotation by policy and in one by hand, and all of each step after the first."""
    join(world_size)
    model, other = chain(20), chain(20)
    annotations = [counted(lambda: annotate(model)), counted(lambda: annotate_by_hand(other))]
    _, *steps = [counted(lambda: step(model)) for _ in range(4)]
    dist.destroy_process_group()
    # Torch 2.11 looks at each rank of a new mesh.
    ours = [sum(count for function, count in one.items() if "/composable/" in function) for one in annotations]
    return [*ours, *(one.total() for one in steps)]


def test_the_work_is_the_same_whatever_the_number_of_ranks_once_these_have_compared_their_plans() -> None:
    few, many = work_among(2), work_among(1024)
    assert all(other <= one * 1.02 for one, other in zip(few, many, strict=True)), (few, many)


# The most calls of functions of the package in one step after three others, as benchmarks/hot_path.py counts them on
# the fake group, for some handles.
CALLS = {1: 90, 4: 290}


def show_calls() -> None:
    """Print the calls for each number of handles; in a process of its own, where no test has left anything."""
    join(WORLD_SIZE)
    shown = []
    for handles in CALLS:
        model: nn.Module = nn.Linear(4, 4)
        if handles > 1:
            model = chain(handles)
            annotate_by_hand(model)
        else:
            fully_shard(model)
        for _ in range(3):
            step(model)
            model.zero_grad()
        found = counted(lambda: step(model))  # noqa: B023
        shown.append({name: count for name, count in found.items() if "/composable/" in name})
    print(json.dumps(shown))


def test_a_step_takes_few_calls() -> None:
    code = "from tests.test_cost_per_handle import show_calls; show_calls()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for most, found in zip(CALLS.values(), json.loads(done.stdout), strict=True):
        assert sum(found.values()) <= most, "\n".join(f"{count} {name}" for name, count in found.items())
        # How many look for losses that leave a forward by another way than its outputs.
        aside = [count for name, count in found.items() if "side_losses.py" in name or "_run_watched" in name]
        assert 0 < sum(aside) <= 3
