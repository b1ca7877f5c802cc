"""Mixed precision of ``replicate`` on one GPU, beside ``DistributedDataParallel``'s own, which runs on no CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from composable import MixedPrecisionPolicy, no_sync, replicate
from tests.low_precision import BF16, FP16, FP32, batch_of, make_net

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("nccl")]


def train(model: nn.Module, wrapped: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD((param for param in model.parameters() if param.requires_grad), lr=0.1)
    for step in range(4):
        wrapped(batch_of(step, 0, 0).cuda()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: param.detach().clone() for fqn, param in model.named_parameters()}


@pytest.mark.parametrize("reduce_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("param_dtype", [BF16, FP16], ids=str)
def test_weights_are_those_of_ddps_own_mixed_precision(param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    ours, theirs = make_net().cuda(), make_net().cuda()
    for model in (ours, theirs):
        model.unused.requires_grad_(False)
    replicate(ours, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
    casts = _MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    expected = train(theirs, DistributedDataParallel(theirs, mixed_precision=casts))
    torch.testing.assert_close(train(ours, ours), expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_a_low_model_also_where_they_wait() -> None:
    model = make_net().cuda()
    model.unused.requires_grad_(False)
    low: Any = copy.deepcopy(model).to(BF16)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    for _ in range(3):
        model.zero_grad()
        total: dict[str, torch.Tensor] = {}
        with no_sync(model):
            model(batch_of(0, 0, 0).cuda()).float().square().mean().backward()
        model(batch_of(0, 0, 1).cuda()).float().square().mean().backward()
        for micro in range(2):
            low.zero_grad()
            low(batch_of(0, 0, micro, BF16).cuda()).float().square().mean().backward()
            for fqn, param in low.named_parameters():
                if param.grad is not None:
                    total[fqn] = total.get(fqn, torch.zeros((), device="cuda")) + param.grad.float()
        found = {fqn: param.grad for fqn, param in model.named_parameters() if param.grad is not None}
        torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-6)


def test_between_steps_a_device_holds_parameters_and_buckets_alone() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    resting = []
    for _ in range(5):
        loss = model(torch.ones(4, 512, device="cuda")).float().sum()
        loss.backward()
        model.zero_grad()
        resting.append(torch.cuda.memory_allocated())
    assert resting[-1] == resting[2]
    elements = sum(param.numel() for param in model.parameters())
    # Parameters in four bytes, buckets in two; the rest is the loss, workspaces and rounding.
    assert resting[-1] < 6 * elements + 16 * 2**20
