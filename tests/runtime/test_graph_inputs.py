"""Parameters that are named to ``torch.autograd.backward``."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard, replicate
from tests.parity import full
from tests.world import on_ranks, run_threads

SHAPE = (4, 6)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def annotated(form: str) -> nn.Sequential:
    model = make()
    if form == "replicate":
        replicate(model, find_unused_parameters=True)
    else:
        fully_shard(model, policy={nn.Linear} if form == "policy" else None, reshard_after_forward=form != "kept")
    return model


def batch(rank: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else full(param.grad).clone() for param in model.parameters()]


def loss_of(model: nn.Module, ranks: range) -> torch.Tensor:
    losses = [model(batch(rank)).square().mean() for rank in ranks]
    return torch.stack(losses).mean()


def compare(form: str, seed: int) -> None:
    """Train with some parameters named in each step, and see that these alone have the gradients of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, plain = annotated(form), make()
    draw = torch.Generator().manual_seed(seed)
    for step in range(4):
        named = [torch.rand((), generator=draw) < 0.6 for _ in plain.parameters()] if step else [True] * 6
        named[0] = named[0] or not any(named)
        for one, ranks in ((model, range(rank, rank + 1)), (plain, range(size))):
            inputs = [param for param, is_named in zip(one.parameters(), named, strict=True) if is_named]
            loss = loss_of(one, ranks)
            if step % 2:
                torch.autograd.backward(loss, inputs=inputs[0] if len(inputs) == 1 else inputs)
            else:
                loss.backward(inputs=inputs)
        for found, expected in zip(gradients(model), gradients(plain), strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for one in (model, plain):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()


@pytest.mark.parametrize("form", ["root", "policy", "kept", "replicate"])
def test_the_parameters_that_backward_names_get_the_gradients_of_one_process(form: str) -> None:
    for seed in range(3):
        run_threads(compare, 1 + seed, form, seed)


@on_ranks(2)
def test_parameters_may_be_named_as_forward_holds_them() -> None:
    """Name parameters as modules hold them inside forward."""
    model = annotated("policy")
    met: list[nn.Parameter] = []
    model[2].register_forward_pre_hook(lambda module, _: met.append(module.weight))
    model(batch(0)).sum().backward(inputs=met)
    assert [param.grad is not None for param in model.parameters()] == [number == 2 for number in range(6)]


@on_ranks(2)
def test_a_loss_of_the_sharded_parameters_themselves_is_as_before() -> None:
    """Name sharded parameters to a loss that is computed from themselves."""
    model = annotated("policy")
    model(batch(0)).sum().backward()
    model.zero_grad()
    params = list(model.parameters())
    penalty = sum((param.square().sum() for param in params), torch.zeros(()))
    penalty.backward(inputs=params)
    assert all(torch.allclose(full(param.grad), 2 * full(param)) for param in params)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(model(batch(0)).sum(), params)


@on_ranks(1)
def test_other_tensors_go_to_torchs_own_code() -> None:
    """Run torch's function with every kind of input that they take, on tensors that are not ours."""
    annotated("root")
    x = torch.ones(3, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(x)
    torch.autograd.backward((x * 2).sum(), inputs=(x,))
    torch.autograd.backward((x * 2).sum(), None, None, False, None, [x])
    torch.autograd.backward((x * 2).sum(), inputs=edge)
    assert x.grad is not None and x.grad.tolist() == [6.0] * 3
