"""Shards and gradients that rest on the host: what is asked for, what the plan says, and the copies on the way.

Without a device nothing rests elsewhere. So that the copying paths run all the same, tests let shards rest
in host memory of their own, apart from that of the buffers; which streams wait for which copies is held by
``tests/runtime/test_streams.py``, and what only a device shows by ``tests/test_cuda_offload.py``.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy

from composable import (
    CPUOffloadPolicy,
    DesyncError,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    plan,
    unannotate,
)
from composable.engine.paths import CopyGather, ThenPath
from tests.models import BLOCK_CLASSES, MLPBlock, loss_of, make_model, random_input, seeded
from tests.parity import LR, full_params, inputs_of
from tests.world import on_ranks
from tools.options.tables import put_elsewhere

BF16, FP32 = torch.bfloat16, torch.float32
DIM = 8


def paths_of(model: nn.Module) -> list[object]:
    root = fully_shard.state(model).lazy_init()
    flats = [flat for handle in root.handles for flat in handle.buffers if not flat.is_empty]
    return [path for flat in flats for path in (flat.routes.gather_path, flat.routes.gradient_path)]


# On CPUs


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy()], ids=repr)
@on_ranks(2)
def test_on_a_mesh_of_cpus_nothing_changes_in_any_bit(policy: OffloadPolicy) -> None:
    runs = []
    for options in ({}, {"offload_policy": policy}):
        model = make_model("mlp")
        fully_shard(model, policy=BLOCK_CLASSES, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(2):
            args, kwargs = inputs_of(model, step, dist.get_rank())
            loss_of(model(*args, **kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not any(isinstance(path, CopyGather | ThenPath) for path in paths_of(model))
        runs.append(full_params(model))
    assert all(torch.equal(*values) for values in zip(*(run.values() for run in runs), strict=True))


# What is asked for


def test_policies_of_torch_are_taken() -> None:
    asked = [
        TorchOffloadPolicy(),
        OffloadPolicy,
        TorchOffloadPolicy,
        TorchCPUOffloadPolicy(),
        TorchCPUOffloadPolicy(pin_memory=False),
        CPUOffload(),
        CPUOffload(offload_params=True),
    ]
    assert [plan(nn.Linear(2, 2), world_size=2, offload_policy=one).offload_policy for one in asked] == [
        *[OffloadPolicy()] * 3,
        CPUOffloadPolicy(),
        CPUOffloadPolicy(pin_memory=False),
        OffloadPolicy(),
        CPUOffloadPolicy(),
    ]


@on_ranks(2, is_synced=[False, True])
def test_ranks_that_differ_are_told(is_synced: bool) -> None:
    model = nn.Linear(4, 4)
    policy = CPUOffloadPolicy(pin_memory=dist.get_rank() == 0)

    def run() -> None:
        fully_shard(model, offload_policy=policy, sync_module_states=is_synced)
        model(torch.ones(1, 4))

    with pytest.raises(DesyncError) as error:
        run()
    text = str(error.value)
    assert "rank 0: offloaded: shards, gradients and optimizer state rest in pinned host memory" in text
    assert "rank 1: offloaded: shards, gradients and optimizer state rest in pageable host memory" in text


# The plan


def test_the_plan_says_what_is_offloaded_and_counts_nothing_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    plain = plan(model, world_size=2, policy={nn.Linear})
    offloaded = plan(model, world_size=2, policy={nn.Linear}, offload_policy=CPUOffloadPolicy())
    assert "offloaded" not in str(plain)
    added = [line for line in str(offloaded).splitlines() if line not in str(plain).splitlines()]
    assert added == ["  offloaded: shards, gradients and optimizer state rest in pinned host memory"]
    assert plain.bytes_per_rank_at_rest() == offloaded.host_bytes_per_rank_at_rest() > 0
    assert offloaded.bytes_per_rank_at_rest() == plain.host_bytes_per_rank_at_rest() == 0
    assert plain.peak_bytes_per_rank(0) - offloaded.peak_bytes_per_rank(0) >= plain.shard_bytes
    assert plain != offloaded and plain.digest() != offloaded.digest()


@on_ranks(2)
def test_what_is_left_of_a_plan_stays_offloaded() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(model, policy={nn.Linear}, offload_policy=CPUOffloadPolicy())
    part = unannotate(model[0], recurse=True)
    assert not isinstance(part.weight, torch.distributed.tensor.DTensor)
    left = fully_shard.state(model).plan
    assert (left.bytes_per_rank_at_rest(), left.host_bytes_per_rank_at_rest(0)) == (0, 4 * (16 * 16 + 16) // 2)


# Shards that rest elsewhere


def make_net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), MLPBlock(), MLPBlock(), nn.Linear(DIM, 3)), 0)


@on_ranks(2)
def test_gradients_add_up_where_they_rest() -> None:
    model, x = make_net(), random_input(0, 4, DIM)
    fully_shard(model, policy={MLPBlock})
    put_elsewhere(model)
    model(x).square().mean().backward()
    first = {fqn: param.grad.to_local().clone() for fqn, param in model.named_parameters()}
    model(x).square().mean().backward()
    assert all(torch.equal(param.grad.to_local(), 2 * first[fqn]) for fqn, param in model.named_parameters())
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_low_precision_gradients_come_home_as_they_are() -> None:
    model = make_net()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, keep_low_precision_grads=True))
    put_elsewhere(model)
    model(random_input(0, 4, DIM)).float().sum().backward()
    assert {param.grad.to_local().dtype for param in model.parameters()} == {BF16}
