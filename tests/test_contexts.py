"""Every context manager for users: left at the end or by an exception, once or nested, it restores what it found."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from composable import (
    UsageError,
    fully_shard,
    no_sync,
    replicate,
    step_in_backward,
    timeline,
    unshard_params,
)
from composable.annotation import units_of
from tests.models import MLPBlock, loss_of, make_model
from tests.parity import full, inputs_of
from tests.world import on_ranks

Context = Callable[[nn.Module], AbstractContextManager[Any]]
ANNOTATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": lambda model: fully_shard(model, policy={MLPBlock}),
    "replicate": replicate,
}


def stepping(model: nn.Module) -> AbstractContextManager[Any]:
    return step_in_backward(torch.optim.SGD(model.parameters(), lr=0.0))


CONTEXTS: dict[str, Context] = {
    "no_sync": no_sync,
    "unshard_params": unshard_params,
    "unshard_params, no writeback": lambda model: unshard_params(model, writeback=False),
    "unshard_params, on one rank": lambda model: unshard_params(model, rank0_only=True),
    "unshard_params, on the host": lambda model: unshard_params(model, offload_to_cpu=True),
    "timeline": timeline,
    "step_in_backward": stepping,
}
# Each parameter has one optimizer that steps inside backward.
ALONE = {"step_in_backward"}


def found_in(model: nn.Module) -> list[object]:
    """Return what contexts change: settings of gradients, what modules hold, hooks, and optimizers."""
    units = units_of(model.modules())
    settings = [(unit.requires_gradient_sync, unit.sync_after_context, unit.steppers) for unit in units]
    params = [(name, type(param), id(param)) for name, param in model.named_parameters()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return [settings, params, hooks]


def gradients_of(model: nn.Module, rank: int) -> list[torch.Tensor]:
    args, _ = inputs_of(model, 0, rank)
    loss_of(model(*args)).backward()
    grads = [full(param.grad).clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return grads


def leave(stack: ExitStack, *, raises: bool) -> None:
    """Leave the contexts, innermost first."""
    if not raises:
        stack.close()
        return
    with pytest.raises(KeyError, match="of the user"), stack:
        raise KeyError("of the user")


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@on_ranks(2, annotation=ANNOTATIONS, context=CONTEXTS)
def test_a_context_restores_what_it_found(annotation: str, context: str, depth: int, *, raises: bool) -> None:
    rank = torch.distributed.get_rank()
    model = ANNOTATIONS[annotation](make_model("mlp"))
    expected = gradients_of(model, rank)
    before = found_in(model)
    stack = ExitStack()
    for _ in range(1 if context in ALONE else depth):
        stack.enter_context(CONTEXTS[context](model))
    if context in ALONE and depth > 1:
        with pytest.raises(UsageError, match="an optimizer steps inside backward on one of the parameters already"):
            CONTEXTS[context](model)
    leave(stack, raises=raises)
    assert found_in(model) == before
    torch.testing.assert_close(gradients_of(model, rank), expected)


@on_ranks(2, outer=CONTEXTS)
def test_a_context_inside_of_another_kind_restores_what_it_found(outer: str) -> None:
    rank = torch.distributed.get_rank()
    model = fully_shard(make_model("mlp"), policy={MLPBlock})
    expected = gradients_of(model, rank)
    before = found_in(model)
    # Full parameters are shown with the same options, or not a second time, and no optimizer is made of them.
    others = [name for name in CONTEXTS if name.partition(",")[0] != outer.partition(",")[0]]
    if outer.startswith("unshard_params"):
        others.remove("step_in_backward")
    with CONTEXTS[outer](model):
        within = found_in(model)
        for name in others:
            for raises in (False, True):
                stack = ExitStack()
                stack.enter_context(CONTEXTS[name](model))
                leave(stack, raises=raises)
                assert found_in(model) == within, (name, raises)
    assert found_in(model) == before
    torch.testing.assert_close(gradients_of(model, rank), expected)
