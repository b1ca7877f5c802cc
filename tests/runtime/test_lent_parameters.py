"""``functional_call`` lends a module other parameters for one call; loads mean them to stay."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.utils import stateless

from composable import UsageError, fully_shard, replicate, unshard_params
from tests.models import DIM, random_input, seeded
from tests.world import on_ranks, run_threads


def make() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)), 0)


def step(model: nn.Module, seed: int = 0) -> None:
    model(random_input(10 * seed + dist.get_rank(), 4, DIM)).square().mean().backward()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.full_tensor() for name, param in model.named_parameters()}  # type: ignore[attr-defined]


def calls_refused(given: list[str], *, way: str, is_warm: bool, reshard: bool) -> str:
    """Return the error of a call with other parameters; before and after it the model trains as if it had not been."""
    model, untouched = make(), make()
    for one in (model, untouched):
        fully_shard(one[0], reshard_after_forward=reshard)
        fully_shard(one, reshard_after_forward=reshard)
        if is_warm:
            step(one)
    before = list(model.parameters())
    others = {name: torch.zeros(dict(make().named_parameters())[name].shape, requires_grad=True) for name in given}
    call: Any = functional_call if way == "func" else stateless._functional_call
    with pytest.raises(UsageError) as caught:
        call(model, others, (random_input(5, 4, DIM),))
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    for one in (model, untouched):
        one.train()
        step(one, 1)
    for (name, param), other in zip(model.named_parameters(), untouched.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), other.full_tensor(), msg=name)  # type: ignore[attr-defined]
        torch.testing.assert_close(param.grad.full_tensor(), other.grad.full_tensor())  # type: ignore[union-attr]
    return str(caught.value)


ALL = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("given", "at", "way", "is_warm", "reshard"),
    [
        (ALL, None, "func", True, True),
        (ALL, None, "stateless", False, False),
        (["2.bias"], "module Sequential, parameter '2.bias'", "func", True, False),
        (["0.bias"], "module '0' (Linear), parameter 'bias'", "func", False, True),
    ],
)
def test_other_parameters_are_refused_and_harm_nothing(
    given: list[str], at: str | None, way: str, is_warm: bool, reshard: bool
) -> None:
    for rank, error in enumerate(run_threads(calls_refused, 2, given, way=way, is_warm=is_warm, reshard=reshard)):
        what, where, fix = error.split("\n")
        assert what == "functional_call gave a sharded module other parameters, and its forward gathers its own"
        assert where.startswith(f"  at:  rank {rank}, module ")
        assert at is None or where.endswith(at)
        assert fix.startswith("  fix: call it inside unshard_params(model)")


@on_ranks(2)
def test_own_parameters_buffers_and_shown_parameters_are_accepted() -> None:
    x = random_input(3, 4, DIM)
    model, plain = make(), make()
    fully_shard(model[0])
    fully_shard(model)
    plain.eval()
    model.eval()
    expected = plain(x)
    # The model's own, and buffers.
    torch.testing.assert_close(functional_call(model, dict(model.named_parameters()), (x,)), expected)
    mean = {"1.running_mean": torch.ones(DIM)}
    torch.testing.assert_close(functional_call(model, mean, (x,)), functional_call(plain, mean, (x,)))
    # Plain parameters are shown: other ones are as good.
    zeros = {name: torch.zeros_like(param, requires_grad=True) for name, param in plain.named_parameters()}
    with unshard_params(model):
        output = functional_call(model, zeros, (x,))
        output.sum().backward()
    assert not output.any()
    grad = zeros["2.bias"].grad
    assert grad is not None
    assert grad.tolist() == [4.0] * DIM
    torch.testing.assert_close(model(x), expected)


@on_ranks(2, reshard=[False, True])
def test_parameters_that_loads_assign_between_steps_stay(reshard: bool) -> None:
    model, plain = make(), make()
    fully_shard(model[0], reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    known = list(model.parameters())
    for turn in range(3):
        new = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(turn))
        for one in (model, plain):
            one.eval()  # One process would norm over both batches.
            for part in (one[0], one[2]):
                part.load_state_dict({"weight": new.clone(), "bias": torch.ones(DIM)}, assign=True)
            one.zero_grad()
        step(model, turn)
        for rank in range(2):
            (plain(random_input(10 * turn + rank, 4, DIM)).square().mean() / 2).backward()
        assert all(one is other for one, other in zip(known, model.parameters(), strict=True))
        for param, expected in zip(known, plain.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), expected.detach())  # type: ignore[attr-defined]
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)  # type: ignore[union-attr]


@on_ranks(2, finds_unused=[False, True])
def test_replicated_modules_run_on_other_parameters_as_plain_ones(finds_unused: bool) -> None:
    x = random_input(3, 4, DIM)
    model, plain = make(), make()
    replicate(model, find_unused_parameters=finds_unused)
    for one in (model, plain):
        one.eval()
    given = {name: torch.randn(param.shape, requires_grad=True) for name, param in plain.named_parameters()}
    twins = {name: value.detach().clone().requires_grad_() for name, value in given.items()}
    output, expected = functional_call(model, given, (x,)), functional_call(plain, twins, (x,))
    torch.testing.assert_close(output, expected)
    expected.sum().backward()
    if finds_unused:
        output.sum().backward()
    else:
        with pytest.raises(UsageError, match="backward ended without a gradient for 6 parameters"):
            output.sum().backward()
    for name, value in given.items():
        torch.testing.assert_close(value.grad, twins[name].grad)
    assert all(param.grad is None for param in model.parameters())
    for one in (model, plain):
        one.zero_grad()
    step(model)
    for rank in range(2):
        (plain(random_input(rank, 4, DIM)).square().mean() / 2).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)
