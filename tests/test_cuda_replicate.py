"""Mixed precision of ``replicate`` on one GPU: what one process computes that makes the same casts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import MixedPrecisionPolicy, no_sync, replicate
from composable.comm import resolve_ranks
from tests.low_precision import BF16, FP16, FP32, batch_of, make_net, reduced_in_one_process
from tests.test_cuda import allocated

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("nccl")]


def train(model: nn.Module, gradients: Callable[[torch.Tensor], object]) -> dict[str, torch.Tensor]:
    """Train on four batches; ``gradients`` of a batch are left in the parameters."""
    optimizer = torch.optim.SGD((param for param in model.parameters() if param.requires_grad), lr=0.1)
    for step in range(4):
        gradients(batch_of(step, 0, 0).cuda())
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: param.detach().clone() for fqn, param in model.named_parameters()}


@pytest.mark.parametrize("reduce_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("param_dtype", [BF16, FP16], ids=str)
def test_weights_are_those_of_one_process_that_makes_the_casts(
    param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    ours, plain = make_net().cuda(), make_net().cuda()
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)

    def cast(batch: torch.Tensor) -> None:
        grads = reduced_in_one_process(plain, policy, [[batch]])
        for fqn, param in plain.named_parameters():
            grad = grads[fqn]
            param.grad = None if grad is None else grad.to(param.dtype)

    for model in (ours, plain):
        model.unused.requires_grad_(False)
    replicate(ours, mp_policy=policy)
    expected = train(plain, cast)
    found = train(ours, lambda batch: ours(batch).float().square().mean().backward())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_module_without_parameters_is_on_the_device_of_a_group_of_nccl() -> None:
    # As ``update_process_group`` asks, for a module whose parameters belong to another annotation.
    assert resolve_ranks(None, dist.new_group(), []).device.type == "cuda"


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
    before = allocated()
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    resting = []
    for _ in range(5):
        loss = model(torch.ones(4, 512, device="cuda")).float().sum()
        loss.backward()
        model.zero_grad()
        resting.append(allocated() - before)
    assert resting[-1] == resting[2]
    elements = sum(param.numel() for param in model.parameters())
    # Parameters in four bytes, buckets in two; the rest is the loss and rounding.
    assert resting[-1] < 6 * elements + 2**20
