"""Gradients that are not finite: the errors that name them."""

import math
import random
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable import UsageError, clip_grad_norm_, fully_shard, get_total_norm, has_finite_gradients, replicate
from tests.parity import full
from tests.world import run_threads


def annotated(rng: random.Random) -> nn.Sequential:
    """Return a model, annotated in a random way, with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))
    kind = rng.choice(["each", "whole", "replicate", "mixed", "copies"])
    if kind == "copies" and dist.get_world_size() == 4:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    elif kind == "replicate":
        replicate(model)
    elif kind == "mixed":
        replicate(model[0])
        fully_shard(model, ignored_modules=[model[0]])
    else:
        fully_shard(model, policy={nn.Linear} if kind == "each" else None)
    model(torch.ones(1, 3)).sum().backward()
    return model


def spoil(model: nn.Module, rng: random.Random) -> dict[str, list[int]]:
    """Make random pieces of gradients not finite; return the ranks that hold such pieces, by FQN of the parameter."""
    found: dict[str, list[int]] = {}
    for fqn, param in rng.sample([*model.named_parameters()], rng.randint(1, 3)):
        is_whole = not isinstance(param.grad, DTensor)
        piece: torch.Tensor = param.grad if is_whole else param.grad.to_local()  # type: ignore[assignment,union-attr]
        size, value = dist.get_world_size(), rng.choice([math.nan, math.inf])
        chosen = range(size) if is_whole else sorted(rng.sample(range(size), rng.randint(1, size)))
        if size == 4:  # Ranks 0 and 2, or 1 and 3, may be copies of each other, which have equal gradients.
            chosen = sorted({(rank + more) % size for rank in chosen for more in (0, 2)})
        if dist.get_rank() in chosen and piece.numel():
            piece.view(-1)[-1] = value
        sizes = [0] * size
        dist.all_gather_object(sizes, piece.numel())
        found[fqn] = [rank for rank in chosen if sizes[rank]]
    return {fqn: ranks for fqn, ranks in found.items() if ranks}


def clip_what_is_not_finite(seed: int) -> tuple[str, dict[str, list[int]]]:
    rng = random.Random(seed)
    model = annotated(rng)
    spoilt = spoil(model, rng)
    order = rng.choice([1.0, 2.0, math.inf])
    if not spoilt:
        clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
        return "", {}
    with pytest.raises(UsageError) as caught:
        clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
    return caught.value.what, spoilt


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_error_names_every_gradient_that_is_not_finite_and_its_ranks(world_size: int) -> None:
    for seed in range(10):
        (text, spoilt), *others = run_threads(clip_what_is_not_finite, world_size, seed)
        assert all(other == (text, spoilt) for other in others), f"seed {seed}: {text}, {others}"
        named = {int(rank): names.split(", ") for rank, names in re.findall(r"not finite on rank (\d): (.*)", text)}
        assert sum(map(len, named.values())) == sum(map(len, spoilt.values())), f"seed {seed}: {text}"
        for fqn, ranks in spoilt.items():
            for rank in ranks:  # Names begin at the annotated module, here the model or its first layer.
                assert {repr(fqn), repr(fqn[2:])} & {*named[rank]}, f"seed {seed}: {text}"


def names_without_an_annotation() -> str:
    grads = [torch.ones(2), torch.tensor([math.nan])]
    with pytest.raises(UsageError) as caught:
        get_total_norm(grads, error_if_nonfinite=True)
    return caught.value.what


def test_a_plain_tensor_is_named_by_its_shape_and_a_sum_that_is_too_large_by_nothing() -> None:
    for rank, text in enumerate(run_threads(names_without_an_annotation, 2)):
        assert text == f"the norm of order 2 is nan\n    not finite on rank {rank}: a tensor [1]"
    with pytest.raises(UsageError, match=r"is inf\n  fix"):
        get_total_norm([torch.full((2,), 1e308, dtype=torch.float64)], error_if_nonfinite=True)


def step_while_finite(seed: int) -> tuple[list[bool], str, int, list[torch.Tensor]]:
    """Train some steps with NaN in the inputs of one rank in one of them; return what was said, and the weights."""
    rng = random.Random(seed)
    culprit, when = rng.randrange(dist.get_world_size()), rng.randrange(3)
    model = annotated(rng)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said, text = [], ""
    for step in range(3):
        optimizer.zero_grad()
        x = torch.full((1, 3), math.nan if (step, dist.get_rank()) == (when, culprit) else 1.0)
        loss = model(x).square().mean()
        loss.backward()
        grads = optimizer if rng.random() < 0.5 else model.parameters()
        said.append(has_finite_gradients(grads, loss))
        if said[-1]:
            optimizer.step()
        else:
            with pytest.raises(UsageError) as caught:
                has_finite_gradients(model.parameters(), loss, error_if_nonfinite=True)
            text = caught.value.what
    assert said == [step != when for step in range(3)]
    return said, text, culprit, [full(param.detach()) for param in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_leave_out_a_step_that_is_not_finite_on_one_of_them(world_size: int) -> None:
    # The oracle: one process that takes the two other steps, on inputs that are equal on all ranks.
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.ones(1, 3)).square().mean().backward()
        optimizer.step()
    for seed in range(5):
        for _, text, culprit, weights in run_threads(step_while_finite, world_size, seed):
            assert f"is nan\n    not finite on rank {culprit}: the loss, " in text, f"seed {seed}: {text}"
            torch.testing.assert_close(weights, [param.detach() for param in plain.parameters()])
