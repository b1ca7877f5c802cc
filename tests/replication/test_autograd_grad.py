"""A log line, once for each model, where ``torch.autograd.grad`` gives gradients of parameters that nothing averages."""

import logging

import pytest
import torch
from torch import nn

from composable import MixedPrecisionPolicy, no_sync, replicate
from tests.parity import full
from tests.world import run_threads

TEXT = "torch.autograd.grad of a replicated parameter gives the gradient of this rank, not the average"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged(options: dict[str, object], chosen: list[int]) -> tuple[list[str], list[str]]:
    """Return what a model logs in calls that average, or need no average; and in calls that should."""
    lines = Lines()
    logging.getLogger("composable").addHandler(lines)
    model = replicate(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), **options)
    x = torch.ones(2, 3, requires_grad=True)

    def loss() -> torch.Tensor:
        value: torch.Tensor = model(x).square().sum()
        return value

    loss().backward()
    (slope,) = torch.autograd.grad(loss(), x, create_graph=True)
    (loss() + slope.square().sum()).backward()
    if not options:
        loss().backward(inputs=list(model.parameters()))
    with no_sync(model):
        loss().backward()
    loss().backward()
    quiet = [line for line in lines.lines if TEXT in line]
    params = [*model.parameters()]
    before = [None if param.grad is None else full(param.grad).clone() for param in params]
    for _ in range(2):
        value = loss()
        torch.autograd.grad(value, [params[index] for index in chosen], retain_graph=True)
        torch.autograd.grad(value, [x, params[chosen[0]]])
    assert all(torch.equal(param.grad, old) for param, old in zip(params, before, strict=True))  # type: ignore[arg-type]
    loss().backward()
    logging.getLogger("composable").removeHandler(lines)
    return quiet, [line for line in lines.lines if TEXT in line]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}])
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3], [2], [3, 1]])
def test_gradients_that_nothing_averages_are_told_once_for_each_model(
    options: dict[str, object], chosen: list[int]
) -> None:
    # Threads share the logger: with one rank each line is of this rank.
    for quiet, told in run_threads(logged, 1, options, chosen):
        assert quiet == []
        assert len(told) == 1
        first = ["0.weight", "0.bias", "1.weight", "1.bias"][min(chosen)]
        assert f"rank 0, parameter {first!r}\n  fix: call backward, and read param.grad" in told[0]
    counts = [len(told) for _, told in run_threads(logged, 2, options, chosen)]
    assert max(counts) == 2  # One of each rank.


def test_a_model_with_low_precision_tells_it_too() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ((quiet, told),) = run_threads(logged, 1, {"mp_policy": policy}, [0])
    assert quiet == []
    assert len(told) == 1
