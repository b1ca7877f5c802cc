"""What hooks of users do to a gradient that ``replicate`` averages: done before the gradient travels.

The right value is that of plain copies, one per rank, whose gradients are averaged by hand after the backward.
"""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

import composable
from composable.replicate_module import ReplicateModule
from tests.world import run_ranks, run_threads

FEATURES = 4


class Branches(nn.Module):
    """A trunk, and two heads; a call may leave the second head out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor, *, is_whole: bool = True) -> torch.Tensor:
        h = self.trunk(x)
        found: torch.Tensor = self.first(h)
        return found + self.second(h) if is_whole else found


def write_zero(param: nn.Parameter, _: int) -> None:
    grad_of(param).zero_()


def write_product(param: nn.Parameter, rank: int) -> None:
    grad_of(param).mul_(rank + 2)


def write_sum(param: nn.Parameter, rank: int) -> None:
    grad_of(param).add_(rank + 1)


def write_limits(param: nn.Parameter, _: int) -> None:
    grad_of(param).clamp_(-0.05, 0.05)


def write_noise(param: nn.Parameter, rank: int) -> None:
    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(rank))
    grad_of(param).add_(noise)


def replace(param: nn.Parameter, rank: int) -> None:
    param.grad = grad_of(param) * (rank + 1)


def replace_by_ones(param: nn.Parameter, rank: int) -> None:
    param.grad = torch.full_like(param, rank + 1.0)


def drop(param: nn.Parameter, _: int) -> None:
    param.grad = None


def drop_on_one(param: nn.Parameter, rank: int) -> None:
    if rank == 0:
        param.grad = None


WRITES = (
    write_zero,
    write_product,
    write_sum,
    write_limits,
    write_noise,
    replace,
    replace_by_ones,
    drop,
    drop_on_one,
)
PLACES = ("post_accumulate", "node")
Case = dict[str, Any]


def grad_of(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def put_hooks(model: nn.Module, case: Case, rank: int, *, is_before: bool) -> list[object]:
    """Register the hooks of a case that come before ``replicate``, or after it; returns what they live in."""
    held: list[object] = []
    params = dict(model.named_parameters())
    for name, write, place, comes_before in case["hooks"]:
        if comes_before is not is_before:
            continue
        param = params[name]

        def hook(*_: object, param: nn.Parameter = param, write: Callable[..., None] = write) -> None:
            if param.grad is not None:  # an earlier hook may have dropped it
                write(param, rank)

        if place == "node":
            node = get_gradient_edge(param).node
            held += [node, node.register_hook(hook)]
        else:
            held.append(param.register_post_accumulate_grad_hook(hook))
    return held


def average_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        grad = param.grad
        count = torch.tensor(float(grad is not None))
        dist.all_reduce(count)
        if count:
            mean = torch.zeros_like(param) if grad is None else grad.clone()
            dist.all_reduce(mean)
            param.grad = mean / dist.get_world_size()


def run_case(case: Case) -> list[str]:
    """Run a few backwards; returns the gradients that differ from the right ones."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    right = Branches()
    model = copy.deepcopy(right)
    held = [put_hooks(right, case, rank, is_before=True), put_hooks(right, case, rank, is_before=False)]
    held.append(put_hooks(model, case, rank, is_before=True))
    composable.replicate(model, **case["options"])
    assert isinstance(model, ReplicateModule)
    found, is_late = [], True
    for number, (syncs, is_whole, drops) in enumerate(case["backwards"]):
        x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(100 * number + rank))
        with nullcontext() if syncs else model.no_sync():
            out = model(x, is_whole=is_whole)
            if is_late:
                held.append(put_hooks(model, case, rank, is_before=False))
                is_late = False
            out.square().sum().backward()
        right(x, is_whole=is_whole).square().sum().backward()
        if syncs:
            average_by_hand(right)
            for (name, param), expected in zip(model.named_parameters(), right.parameters(), strict=True):
                grad = param.grad
                if grad is None or expected.grad is None:
                    if grad is not expected.grad:
                        found.append(f"backward {number}, {name}: {grad} in place of {expected.grad}")
                elif not torch.allclose(grad, expected.grad, rtol=case["rtol"], atol=1e-5 + case["rtol"] / 4):
                    found.append(f"backward {number}, {name}: {grad} in place of {expected.grad}")
            if drops:
                model.zero_grad()
                right.zero_grad()
    return found


def draw_case(seed: int) -> Case:
    draw = random.Random(seed)
    names = [name for name, _ in Branches().named_parameters()]
    hooks = [
        (draw.choice(names), draw.choice(WRITES), draw.choice(PLACES), draw.random() < 0.3)
        for _ in range(draw.randint(1, 6))
    ]
    options: Case = {
        "bucket_cap_mb": draw.choice([25, 1e-4, 1e-6]),
        "gradient_as_bucket_view": draw.random() < 0.5,
    }
    leaves_out = draw.random() < 0.4
    is_static = not leaves_out and draw.random() < 0.3
    if leaves_out:
        options["find_unused_parameters"] = True
    if is_static:
        options["static_graph"] = True
    has_policy = draw.random() < 0.2
    if has_policy:
        options["mp_policy"] = composable.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    backwards = []
    for _ in range(draw.randint(3, 5)):
        syncs = is_static or draw.random() < 0.7
        # Averages of several backwards in a row are added up, as plain copies do it.
        backwards.append((syncs, not leaves_out or draw.random() < 0.5, draw.random() < 0.6))
    backwards.append((True, True, True))
    return {"hooks": hooks, "options": options, "backwards": backwards, "rtol": 0.05 if has_policy else 1e-4}


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_hooks_write_to_a_gradient_is_done_before_it_is_averaged(world_size: int) -> None:
    for seed in range(40):
        case = draw_case(1000 * world_size + seed)
        assert run_threads(run_case, world_size, case) == [[]] * world_size, (seed, case)


def differing_steps(place: str, *, is_before: bool) -> tuple[int, int]:
    """Return in how many of 20 backwards gradients of DDP and of ``replicate`` are not the right zeros."""
    rank, counts = dist.get_rank(), []
    for wraps in (DistributedDataParallel, composable.replicate):
        module = nn.Linear(64, 64, bias=False)
        case = {"hooks": [("weight", write_zero, place, is_before)]}
        held = put_hooks(module, case, rank, is_before=True)
        model = wraps(module)
        held += put_hooks(module, case, rank, is_before=False)
        wrong = 0
        for _ in range(20):
            model(torch.ones(8, 64) * (rank + 1)).sum().backward()
            wrong += bool(grad_of(module.weight).any())
            module.zero_grad()
        counts.append(wrong)
        del held
    return counts[0], counts[1]


@pytest.mark.parametrize("is_before", [True, False])
def test_a_hook_that_writes_zeros_leaves_zeros_in_every_step_as_under_ddp(is_before: bool) -> None:
    assert run_ranks(differing_steps, 2, "post_accumulate", is_before=is_before) == [(0, 0)] * 2


def test_a_hook_on_the_node_that_accumulates_is_done_first_though_ddp_runs_it_last() -> None:
    assert {wrong for _, wrong in run_ranks(differing_steps, 2, "node", is_before=False)} == {0}
