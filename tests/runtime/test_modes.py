"""Modes around a forward: inference, no gradient, transforms of ``torch.func``. They harm nothing that comes after."""

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

from composable import fully_shard, replicate
from tests.models import DIM, MLP, loss_of, random_input, seeded
from tests.pairwise import pairs_of
from tests.world import on_ranks, run_ranks, run_threads, told

MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "train": nullcontext,
}


def annotate(model: nn.Module, how: str, *, reshard: bool | None = None) -> None:
    if how == "fully_shard":
        fully_shard(model, policy={nn.Linear}, reshard_after_forward=reshard)
    else:
        replicate(model)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param), other, msg=name)
        if other.grad is not None:
            torch.testing.assert_close(full(param.grad), other.grad)


def run_in_random_modes(seed: int, how: str) -> None:
    draw, rank = random.Random(seed), dist.get_rank()
    model, plain = (seeded(MLP, 0) for _ in range(2))
    fills = how == "fully_shard" and draw.random() < 0.4
    if fills:
        model = model.to("meta")
    annotate(model, how, reshard=draw.choice([None, True, False]))
    if fills:
        model.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()}, assign=True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for number in range(6):
        mode = draw.choice(list(MODES)) if number < 5 else "train"
        x = random_input(10 * number + rank, 4, DIM)
        with MODES[mode]():
            output = model(x)
            torch.testing.assert_close(output, plain(x))
        if mode == "train":
            loss_of(output).backward()
            for one in range(2):
                (loss_of(plain(random_input(10 * number + one, 4, DIM))) / 2).backward()
            compare(model, plain)
            if draw.random() < 0.6:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    compare(model, plain)


@pytest.mark.parametrize(("seed", "how"), [(seed, ["fully_shard", "replicate"][seed % 4 == 3]) for seed in range(16)])
@on_ranks(2)
def test_forwards_in_any_order_of_modes_train_as_one_process(seed: int, how: str) -> None:
    run_in_random_modes(seed, how)


X = random_input(5, 3, DIM)
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda run: grad(lambda x: loss_of(run(x)))(X),
    "jvp": lambda run: jvp(run, (X,), (torch.ones_like(X),)),
    "jacrev": lambda run: jacrev(run)(X),
    "hessian": lambda run: hessian(lambda x: loss_of(run(x)))(X[:1]),
    "vmap": lambda run: vmap(run)(torch.stack([X, X + 1])),
    "vmap of grad": lambda run: vmap(grad(lambda x: loss_of(run(x))))(torch.stack([X, X + 1])),
}


# Processes: threads share torch's level of forward-mode differentiation.
@pytest.mark.parametrize(
    *pairs_of(
        name=list(TRANSFORMS),
        annotated=[("fully_shard", None), ("fully_shard", True), ("replicate", None)],
        is_warm=[False, True],
    )
)
@on_ranks(2, run=run_ranks)
def test_transforms_with_respect_to_inputs_are_right_and_harm_no_step(
    name: str, annotated: tuple[str, bool | None], is_warm: bool
) -> None:
    # Of torch itself, on the first use of forward-mode differentiation.
    warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
    rank = dist.get_rank()
    model, plain = (seeded(MLP, 0) for _ in range(2))
    annotate(model, annotated[0], reshard=annotated[1])
    if is_warm:
        model(X).sum().backward()
    ours, theirs = TRANSFORMS[name](model), TRANSFORMS[name](plain)
    for one, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        torch.testing.assert_close(one, other)
    model.zero_grad()
    loss_of(model(random_input(rank, 4, DIM))).backward()
    for one in range(2):
        (loss_of(plain(random_input(one, 4, DIM))) / 2).backward()
    compare(model, plain)


def annotated_in_inference_mode(call: Callable[[nn.Module], object]) -> list[str]:
    model = seeded(MLP, 0)
    plain = dict(model.named_parameters())
    with torch.inference_mode():
        messages = told(lambda: call(model))
        assert all(param is plain[name] for name, param in model.named_parameters())
        with torch.inference_mode(mode=False):
            call(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss_of(model(random_input(step, 4, DIM))).backward()
        optimizer.step()
    return messages


@pytest.mark.parametrize(
    "call",
    [fully_shard, partial(fully_shard, sync_module_states=True), replicate],
    ids=["fully_shard", "with the values of the first rank", "replicate"],
)
def test_an_annotation_in_inference_mode_is_an_error_and_changes_nothing(call: Callable[[nn.Module], object]) -> None:
    for rank, message in enumerate(run_threads(annotated_in_inference_mode, 2, call)[0]):
        assert "is called in inference mode" in message
        assert f"at:  rank {rank}" in message and "fix: annotate outside of torch.inference_mode()" in message
