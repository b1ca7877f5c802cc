"""``token_mean``: gradients are those of one process on all tokens, whatever ranks and micro-batches have."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable import (
    ConfigError,
    MixedPrecisionPolicy,
    ShardingStrategy,
    UsageError,
    allreduce_hook,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reduce_gradients,
    reduce_scatter_hook,
    register_comm_hook,
    replicate,
    step_in_backward,
    token_mean,
)
from tests.parity import full
from tests.world import run_threads

DIM = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def by_blocks(model: nn.Sequential, **kwargs: Any) -> None:
    for block in model:
        if isinstance(block, nn.Linear):
            fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)


def hybrid(model: nn.Sequential, **kwargs: Any) -> None:
    size = dist.get_world_size()
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    by_blocks(model, mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD, **kwargs)


def nested(model: nn.Sequential, **kwargs: Any) -> None:
    replicate(model[2])
    by_blocks(nn.Sequential(model[0]), **kwargs)
    fully_shard(model, **kwargs)


def roots(model: nn.Sequential, **kwargs: Any) -> None:
    fully_shard(model[0], **kwargs)
    fully_shard(model[2], **kwargs)
    replicate(model[4])


ANNOTATE: dict[str, Callable[..., object]] = {
    "one handle": fully_shard,
    "blocks": by_blocks,
    "kept": lambda model, **kwargs: by_blocks(model, reshard_after_forward=False, **kwargs),
    "hybrid": hybrid,
    "replicate": replicate,
    "copies": lambda model: replicate(model, gradient_as_bucket_view=False, bucket_cap_mb=1e-4),
    "nested": nested,
    "roots": roots,
}


def batches(seed: int, ranks: int, micro: int) -> list[list[torch.Tensor]]:
    """Return the inputs [tokens, DIM] of each rank and micro-batch."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    return [
        [torch.randn(draw.choice([0, 1, 7, draw.randint(2, 900)]), DIM) for _ in range(micro)] for _ in range(ranks)
    ]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).float().square().sum()


def whole(inputs: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], float]:
    model = make_model()
    tokens = torch.cat([one for own in inputs for one in own])
    loss = loss_of(model, tokens) / max(len(tokens), 1)
    loss.backward()
    return [param.grad for param in model.parameters() if param.grad is not None], loss.item()


def same(model: nn.Module, expected: list[torch.Tensor], atol: float = 1e-6) -> None:
    found = [full(param.grad) for param in model.parameters()]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=1e-5)


def steps(annotate: str, seed: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = random.Random(seed)
    model = make_model()
    ANNOTATE[annotate](model)
    mean = token_mean(model)
    for step in range(3):
        inputs = batches(10 * seed + step, size, draw.randint(1, 5))
        is_by_hand = draw.random() < 0.3
        for number, tokens in enumerate(inputs[rank]):
            count: Any = len(tokens) if draw.random() < 0.5 else torch.tensor(len(tokens))
            is_last = number == len(inputs[rank]) - 1 and not is_by_hand
            with nullcontext() if is_last else no_sync(model):
                mean.add(loss_of(model, tokens), count).backward()
        if is_by_hand:
            reduce_gradients(model)
        expected, loss = whole(inputs)
        same(model, expected)
        assert mean.value.item() == pytest.approx(loss, rel=1e-5)
        model.zero_grad(set_to_none=draw.random() < 0.5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("annotate", ANNOTATE)
def test_gradients_are_those_of_one_process_on_all_tokens(annotate: str, world_size: int) -> None:
    for seed in range(3):
        run_threads(steps, world_size, annotate, seed)


def low_precision(annotate: str, kind: str) -> None:
    policy = {
        "reduce": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32),
        "bfloat16": MixedPrecisionPolicy(torch.bfloat16),
        "whole": None,
    }[kind]
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    if kind == "whole":
        model.to(torch.bfloat16)
    ANNOTATE[annotate](model, **({} if policy is None else {"mp_policy": policy}))
    mean = token_mean(model)
    inputs = batches(3, size, 3)
    expected, _ = whole(inputs)
    for number, tokens in enumerate(inputs[rank]):
        with nullcontext() if number == 2 else no_sync(model):
            mean.add(loss_of(model, tokens.to(next(model.parameters()).dtype)), len(tokens)).backward()
    for param, other in zip(model.parameters(), expected, strict=True):
        one = full(param.grad).float()
        assert (one - other).norm() < 0.03 * other.norm()


@pytest.mark.parametrize("kind", ["reduce", "bfloat16", "whole"])
@pytest.mark.parametrize("annotate", ["blocks", "replicate"])
def test_in_low_precision_they_are_those_of_one_process_within_a_bound(annotate: str, kind: str) -> None:
    run_threads(low_precision, 2, annotate, kind)


def added(mean: Any, model: nn.Module, count: int = 2) -> torch.Tensor:
    loss: torch.Tensor = mean.add(loss_of(model, torch.ones(count, DIM)), count)
    return loss


NOT_THOSE = "not those of a mean over tokens, on rank"


def one_adds(annotate: str) -> None:
    model = make_model()
    ANNOTATE[annotate](model)
    mean = token_mean(model)
    loss = loss_of(model, torch.ones(2, DIM)) if dist.get_rank() == 1 else added(mean, model)
    with pytest.raises(UsageError, match=f"{NOT_THOSE} 1: a backward without TokenMean.add"):
        loss.backward()
    model.zero_grad()
    added(mean, model).backward()
    same(model, whole([[torch.ones(2, DIM)]])[0])


def mixed(annotate: str) -> None:
    model = make_model()
    ANNOTATE[annotate](model)
    mean = token_mean(model)
    loss_of(model, torch.ones(2, DIM)).backward()  # Plain averages of sums.
    expected = [grad * 2 for grad in whole([[torch.ones(2, DIM)]])[0]]
    same(model, expected, 1e-5)
    model.zero_grad()
    for is_first in (True, False):
        with no_sync(model):
            (loss_of(model, torch.ones(2, DIM)) if is_first else added(mean, model)).backward()
        with pytest.raises(UsageError, match=f"{NOT_THOSE} 0: a backward without TokenMean.add"):
            (added(mean, model) if is_first else loss_of(model, torch.ones(2, DIM))).backward()
        model.zero_grad()


def after_failures(annotate: str) -> None:
    model = make_model()
    ANNOTATE[annotate](model)
    mean = token_mean(model)
    expected, loss = whole([[torch.ones(2, DIM)]])
    added(mean, model, 7)  # No backward runs.
    with no_sync(model):
        added(mean, model, 9).backward()
    model.zero_grad()  # Dropped.
    added(mean, model).backward()
    same(model, expected)
    model.zero_grad()
    with no_sync(model):
        added(mean, model, 9).backward()
    hook = model[2].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        added(mean, model, 5).backward()
    hook.remove()
    for state in {fully_shard.state(model)} if annotate != "replicate" else ():
        state.abandon_step()
    model.zero_grad()
    if annotate == "replicate":
        model(torch.ones(1, DIM))
        model.zero_grad()
    (added(mean, model, 1) + added(mean, model, 1)).backward()
    same(model, expected)
    assert mean.value.item() == pytest.approx(loss)
    added(mean, model)
    with pytest.raises(UsageError, match="no backward has reduced"):
        mean.value  # noqa: B018
    model.zero_grad()
    inputs = torch.ones(8, DIM, requires_grad=True)
    torch.autograd.grad(mean.add(loss_of(model, inputs), 8), inputs)
    added(mean, model).backward()
    same(model, expected)


def nothing_counted(annotate: str) -> None:
    model = make_model()
    ANNOTATE[annotate](model)
    mean = token_mean(model)
    for _ in range(2):
        (added(mean, model, 0) * 8.0).backward()
        assert all(not full(param.grad).any() for param in model.parameters())
        assert mean.value.item() == 0


@pytest.mark.parametrize("case", [one_adds, mixed, after_failures, nothing_counted])
@pytest.mark.parametrize("annotate", ["blocks", "hybrid", "replicate"])
def test_what_has_no_mean_is_an_error_on_all_ranks_or_forgotten(annotate: str, case: Callable[[str], None]) -> None:
    run_threads(case, 2, annotate)


def by_hook(annotate: str) -> None:
    model = make_model()
    ANNOTATE[annotate](model)
    register_comm_hook(model, None, allreduce_hook if annotate == "replicate" else reduce_scatter_hook)
    mean = token_mean(model)
    inputs = batches(5, dist.get_world_size(), 1)
    for _ in range(2):
        mean.add(loss_of(model, inputs[dist.get_rank()][0]), len(inputs[dist.get_rank()][0])).backward()
        same(model, whole(inputs)[0])
        model.zero_grad()


@pytest.mark.parametrize("annotate", ["blocks", "replicate"])
def test_hooks_that_average_are_known(annotate: str) -> None:
    run_threads(by_hook, 2, annotate)


def a_sum(state: object, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    raise AssertionError("never called")


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# What excludes a mean over tokens, and how the error calls it.
EXCLUDED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "set_gradient_divide_factor": ("one handle", lambda model: model.set_gradient_divide_factor(2.0)),
    "set_all_reduce_hook": ("one handle", lambda model: model.set_all_reduce_hook(lambda shard: None)),
    "step_in_backward": ("blocks", lambda model: step_in_backward(optimizer(model))),
    "step_in_backward cannot": ("replicate", lambda model: step_in_backward(optimizer(model))),
    "a communication hook": ("replicate", lambda model: register_comm_hook(model, None, a_sum)),
    "a communication hook that may": ("blocks", lambda model: register_comm_hook(model, None, a_sum)),
}


def refused(text: str) -> None:
    annotate, exclude = EXCLUDED[text]
    model = make_model()
    ANNOTATE[annotate](model)
    mean = token_mean(model)
    exclude(model)
    with pytest.raises(UsageError, match=text):
        added(mean, model)
    with pytest.raises(UsageError, match=text):
        token_mean(model)


@pytest.mark.parametrize("text", EXCLUDED)
def test_what_divides_or_uses_gradients_otherwise_is_refused_by_name(text: str) -> None:
    run_threads(refused, 2, text)


def wrong_calls() -> None:
    with pytest.raises(UsageError, match="token_mean found no annotated module"):
        token_mean(make_model())
    model = make_model()
    replicate(model)
    mean = token_mean(model)
    loss = loss_of(model, torch.ones(1, DIM))
    for wrong in (-1, True, 1.5, "1", torch.ones(2)):
        with pytest.raises(ConfigError, match="count is"):
            mean.add(loss, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loss_sum is"):
        mean.add(torch.ones(2), 1)
    with pytest.raises(UsageError, match="needs no gradient"):
        mean.add(loss.detach(), 1)
    other = token_mean(model)
    with pytest.raises(UsageError, match="others than those of token_mean"):
        mean.add(loss, 1)
    other.add(loss, 1).backward()
    same(model, whole([[torch.ones(1, DIM)]])[0])
    # Averaged gradients that were not dropped are a part of what is averaged again.
    with pytest.raises(UsageError, match="averaged already"):
        other.add(loss_of(model, torch.ones(1, DIM)), 1).backward()


def test_wrong_calls_say_what_to_do() -> None:
    run_threads(wrong_calls, 2)


def on_top() -> None:
    model = make_model()
    by_blocks(model)
    mean = token_mean(model)
    expected = [torch.zeros_like(param) for param in make_model().parameters()]
    for seed in range(2):  # No zero_grad between: what is there stays as it is.
        inputs = batches(seed, dist.get_world_size(), 1)
        mean.add(loss_of(model, inputs[dist.get_rank()][0]), len(inputs[dist.get_rank()][0])).backward()
        for total, grad in zip(expected, whole(inputs)[0], strict=True):
            total += grad
        same(model, expected)


def kept_copies() -> None:
    model = make_model()
    hybrid(model)
    mean = token_mean(model)
    inputs = batches(1, dist.get_world_size(), 3)
    for number, tokens in enumerate(inputs[dist.get_rank()]):
        model.set_requires_all_reduce(number == 2)  # type: ignore[operator]
        mean.add(loss_of(model, tokens), len(tokens)).backward()
    same(model, whole(inputs)[0])


def put_off() -> None:
    model = make_model()
    by_blocks(model)
    mean = token_mean(model)
    for seed in range(2):
        inputs = batches(seed, dist.get_world_size(), 3)
        for number, tokens in enumerate(inputs[dist.get_rank()]):
            model.set_is_last_backward(number == 2)  # type: ignore[operator]
            mean.add(loss_of(model, tokens), len(tokens)).backward()
        same(model, whole(inputs)[0])
        model.zero_grad()


def in_part() -> None:
    model = make_model()
    by_blocks(model)
    mean = token_mean(model)
    model[0].set_requires_gradient_sync(False)  # type: ignore[operator]
    with pytest.raises(UsageError, match="some modules reduce and others wait"):
        added(mean, model).backward()


def split_blocks() -> None:
    """Two blocks of tensor parallelism run the same tokens, which count once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    by_blocks(model, mesh=mesh["dp"])
    mean = token_mean(model)
    place = mesh.get_local_rank("dp")
    inputs = batches(7, 2, 2)
    for number, tokens in enumerate(inputs[place]):
        with nullcontext() if number else no_sync(model):
            mean.add(loss_of(model, tokens), len(tokens)).backward()
    expected, loss = whole(inputs)
    same(model, expected)
    assert mean.value.item() == pytest.approx(loss, rel=1e-5)


def scaled_and_clipped() -> None:
    for annotate in ("blocks", "replicate"):
        model, plain = make_model(), make_model()
        ANNOTATE[annotate](model)
        mean = token_mean(model)
        inputs = batches(4, dist.get_world_size(), 2)
        for number, tokens in enumerate(inputs[dist.get_rank()]):
            with nullcontext() if number else no_sync(model):
                (mean.add(loss_of(model, tokens), len(tokens)) * 1024.0).backward()
        every = torch.cat([one for own in inputs for one in own])
        (loss_of(plain, every) / len(every)).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(1 / 1024)  # As a GradScaler does.
        clip_grad_norm_(model.parameters(), 0.05)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        same(model, [param.grad for param in plain.parameters() if param.grad is not None])
        assert mean.value.item() == pytest.approx((loss_of(plain, every) / len(every)).item(), rel=1e-5)


def two_losses() -> None:
    model = make_model()
    replicate(model)
    mean = token_mean(model)
    torch.autograd.backward([added(mean, model), added(mean, model, 3)])
    same(model, whole([[torch.ones(5, DIM)]])[0])
    model = make_model()
    roots(model)
    mean = token_mean(model)
    loss = added(mean, model[0]) + added(mean, model)
    with pytest.raises(UsageError, match="comes after the gradients of this backward were sent"):
        loss.backward()


def dropped_in_part() -> None:
    for annotate in ("blocks", "replicate"):
        model = make_model()
        ANNOTATE[annotate](model)
        mean = token_mean(model)
        with no_sync(model):
            added(mean, model).backward()
        model[0].zero_grad()
        with pytest.raises(UsageError, match="dropped or changed"):
            added(mean, model).backward()


def not_reached() -> None:
    model = make_model()
    roots(model)
    mean = token_mean(model)
    with no_sync(model):
        added(mean, model[0]).backward()
    with pytest.raises(UsageError, match="did not reach all annotated modules"):
        added(mean, model).backward()


@pytest.mark.parametrize(
    "case",
    [on_top, kept_copies, put_off, in_part, split_blocks, scaled_and_clipped, two_losses, dropped_in_part, not_reached],
)
def test_other_ways_to_reduce_are_right_or_an_error(case: Callable[[], None]) -> None:
    run_threads(case, 4)
