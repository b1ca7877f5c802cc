"""Offload on one GPU: NCCL at world size 1, with delays in the copies' streams, and what memory it takes."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    accelerate_optimizer,
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    no_sync,
    save_checkpoint,
    unannotate,
    unshard_params,
)
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.parity import full, inputs_of
from tests.test_cuda import SlowTransport, allocated

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("nccl")]

POLICIES = pytest.mark.parametrize("policy", [CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)], ids=repr)
BF16 = torch.bfloat16


def sharded(policy: OffloadPolicy, name: str = "mlp", *, slow: bool = False, **options: object) -> nn.Module:
    model = make_model(name)
    fully_shard(model, policy=BLOCK_CLASSES, offload_policy=policy, **options)  # type: ignore[arg-type]
    if slow:
        SlowTransport.install(model)
    return model


def backward(model: nn.Module, seed: int) -> float:
    args, _ = inputs_of(model, seed, 0)
    loss = loss_of(model(*(arg.cuda() for arg in args)))
    loss.backward()
    return loss.item()


def train(model: nn.Module, *, accelerated: bool = False, max_norm: float | None = 0.1) -> dict[str, torch.Tensor]:
    params = [param for param in model.parameters() if param.requires_grad]
    # A large eps: the last bits of a gradient that is zero but for rounding must not count.
    optimizer = torch.optim.AdamW(params, lr=0.05, eps=1e-3)
    if accelerated:
        accelerate_optimizer(optimizer, model)
    for seed in range(4):
        with no_sync(model):
            backward(model, 10 + seed)
        backward(model, seed)
        if max_norm is not None:
            clip_grad_norm_(params, max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: full(param).cpu() for fqn, param in model.named_parameters()}


def assert_at_rest(model: nn.Module, *, pinned: bool) -> None:
    for param in model.parameters():
        local = param.to_local()
        assert param.device.type == local.device.type == "cpu"
        if param.grad is not None:
            assert param.grad.to_local().device.type == "cpu"
    for handle in fully_shard.state(model)._handles:
        assert all(flat.shard.is_pinned() is pinned for flat in handle.buffers if not flat.is_empty)


@POLICIES
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "frozen_mixed", "called_twice"])
def test_offloaded_training_equals_training_on_the_device(name: str, slow: bool, policy: CPUOffloadPolicy) -> None:
    expected = train(sharded(OffloadPolicy(), name))
    model = sharded(policy, name, slow=slow)
    torch.testing.assert_close(train(model), expected, rtol=1e-4, atol=1e-5)
    assert_at_rest(model, pinned=policy.pin_memory)


@pytest.mark.parametrize("options", [{"mp_policy": MixedPrecisionPolicy(BF16, torch.float32)}, {"policy": None}])
def test_an_accelerated_optimizer_steps_on_the_host(options: dict[str, object]) -> None:
    runs = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        model = make_model("mlp")
        fully_shard(model, offload_policy=policy, **{"policy": BLOCK_CLASSES, **options})  # type: ignore[arg-type]
        runs.append(train(model, accelerated=True))
    tolerance = 2e-2 if "mp_policy" in options else 1e-4
    torch.testing.assert_close(*runs, rtol=tolerance, atol=tolerance)


def test_the_host_may_write_shards_as_soon_as_a_forward_ends() -> None:
    outputs = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        model = sharded(policy, slow=True)
        args = [arg.cuda() for arg in inputs_of(model, 0, 0)[0]]
        found = []
        with torch.no_grad():
            for _ in range(3):
                found.append(model(*args))
                for param in model.parameters():
                    param.mul_(0.5)
        outputs.append(torch.stack([loss_of(one) for one in found]))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


def test_the_host_may_read_gradients_as_soon_as_a_backward_ends() -> None:
    grads = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        model = sharded(policy, slow=True)
        backward(model, 0)
        grads.append([param.grad.to_local().cpu().clone() for param in model.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@POLICIES
def test_a_scaler_skips_a_step_that_overflowed_and_takes_others(policy: CPUOffloadPolicy) -> None:
    model = sharded(policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for seed, poisons in enumerate([False, True, False]):
        before = [full(param) for param in model.parameters()]
        args, _ = inputs_of(model, seed, 0)
        scaler.scale(loss_of(model(*(arg.cuda() for arg in args)))).backward()
        expected = [full(param.grad) / scaler.get_scale() for param in model.parameters()]
        if poisons:
            next(model.parameters()).grad.to_local().fill_(torch.inf)
        scaler.unscale_(optimizer)
        if not poisons:
            found = [full(param.grad) for param in model.parameters()]
            torch.testing.assert_close(found, expected)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        is_same = all(torch.equal(full(param), old) for param, old in zip(model.parameters(), before, strict=True))
        assert is_same is poisons


def test_a_checkpoint_moves_between_offloaded_and_not(tmp_path: Path) -> None:
    model = sharded(CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    backward(model, 0)
    optimizer.step()
    save_checkpoint(tmp_path / "run", 1, model, optimizer).wait()
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        other = sharded(policy)
        again = torch.optim.AdamW(other.parameters(), lr=0.05)
        load_checkpoint(tmp_path / "run", other, again)
        home = "cpu" if policy.is_offloading else "cuda"
        assert {param.device.type for param in other.parameters()} == {home}
        assert {state["exp_avg"].device.type for state in again.state.values()} == {home}
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(mine).cpu(), full(theirs).cpu(), rtol=0, atol=0)


def test_copies_shown_values_and_plain_models() -> None:
    model = sharded(CPUOffloadPolicy())
    twin = copy.deepcopy(model)
    assert_at_rest(twin, pinned=True)
    with unshard_params(model):
        for param in model.parameters():
            assert param.is_cuda
            param.data.mul_(2)
    assert_at_rest(model, pinned=True)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(full(mine), 2 * full(theirs), rtol=0, atol=0)
    unannotate(model)
    assert {param.device.type for param in model.parameters()} == {"cpu"}


def test_less_memory_of_the_device_is_taken_at_rest_and_at_the_peak() -> None:
    layers, width = 12, 1024
    rests, peaks = [], []
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        before = allocated()
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        fully_shard(model, policy={nn.Linear}, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.ones(1, width, device="cuda")
        for step in range(2):
            if step:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        rests.append(allocated() - before)
        plan = fully_shard.state(model).plan
        assert plan.bytes_per_rank_at_rest() == (0 if policy.is_offloading else 3 * 4 * layers * width**2)
        del model, optimizer
    shard_bytes = 4 * layers * width**2
    assert rests[0] - rests[1] > 2.9 * shard_bytes
    assert peaks[0] - peaks[1] > 2.9 * shard_bytes
    # What is unsharded, gradients of leaves, their buffers and a result: a handful of layers, whatever their number.
    assert peaks[1] <= 8 * 4 * width**2 + 2**22


@POLICIES
@pytest.mark.parametrize("mp_policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16)], ids=str)
def test_parameters_kept_after_backward_are_gathered_again_once_the_host_has_written_them(
    policy: OffloadPolicy, mp_policy: MixedPrecisionPolicy
) -> None:
    losses = []
    for kept in (False, True):
        model = sharded(policy, mp_policy=mp_policy)
        model.set_reshard_after_backward(not kept)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(3):
            for micro in range(2):
                found.append(backward(model, 2 * step + micro))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(found)
    assert losses[0] == losses[1]
