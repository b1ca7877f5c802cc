"""A replicated model that is dropped leaves nothing behind: no memory, no thread, no open file."""

import copy
import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import MixedPrecisionPolicy, as_ddp
from composable.replicate import replicate
from tests.world import on_ranks, run_ranks


def count_of_process() -> tuple[int, int]:
    """Return how many threads and open files this process has."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def make_trained(**options: Any) -> nn.Module:
    model = replicate(nn.Linear(4, 4), **options)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    return model


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux lists")
@on_ranks(2, run=run_ranks, deep=[False, True])
def test_dropped_models_are_collected_with_their_threads_and_files(deep: bool) -> None:
    counts = []
    for number in range(4):
        models = [make_trained()]
        if deep:
            models.append(copy.deepcopy(models[0]))
            models[1](torch.ones(2, 4)).sum().backward()
        found = [weakref.ref(one) for model in models for one in (model, model.weight, model.weight.grad)]
        del models
        # Ranks collect their garbage at different times.
        if number % 2 == 0 or dist.get_rank() == 0:
            gc.collect()
            assert [one() for one in found] == [None] * len(found)
        if number % 2 == 0:
            dist.barrier()
            counts.append(count_of_process())
    gc.collect()
    counts.append(count_of_process())
    # Where one rank had not collected yet, the next model could not take the group that the other one had left.
    assert all(own - first <= limit for own, first, limit in zip(counts[-1], counts[0], (6, 10), strict=True)), counts
    for _ in range(3):
        make_trained()
        gc.collect()
        dist.barrier()
    assert count_of_process() == counts[-1]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux lists")
@on_ranks(2, run=run_ranks, kind=["plain", "casts", "as_ddp"])
def test_copies_that_are_thrown_away_use_one_group_in_turn(kind: str) -> None:
    casts = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if kind == "casts" else {}
    model = make_trained(find_unused_parameters=True, **casts)
    model.bias.requires_grad_(False)
    gc.collect()
    gc.disable()
    counts = []
    try:
        for _ in range(20):
            twin = copy.deepcopy(model)
            if kind == "as_ddp":
                as_ddp(model)
                as_ddp(twin)
            twin(torch.ones(2, 4)).sum().backward()
            del twin
            counts.append(count_of_process())
    finally:
        gc.enable()
    assert counts[-1] == counts[0]


@on_ranks(2, run=run_ranks)
def test_a_group_in_which_something_never_ended_is_not_used_again() -> None:
    """Drop a model whose backward was stopped on one rank: nobody takes its group."""
    model = make_trained()
    other = make_trained()
    transport = replicate.state(model).transport
    group = transport.groups[0]
    if dist.get_rank() == 1:
        pending = transport.begin_broadcast(torch.ones(2), 0, 0)
    del model, transport
    gc.collect()
    for _ in range(2):
        fresh = make_trained()
        assert replicate.state(fresh).transport.groups[0] is not group
        assert fresh.weight.grad is not None
        del fresh
        gc.collect()
    assert other.weight.grad is not None
    # Else the process would wait for it when the group is destroyed.
    if dist.get_rank() == 1:
        pending.finish()
    else:
        dist.broadcast(torch.ones(2), group=group, group_src=0)
