"""Parameters of which most ranks have no elements, as ``docs/inside/tensors.md`` tells writers of optimizers and monitors."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import HandleOptions, fully_shard
from tests.world import on_ranks

NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda tensor: tensor.abs().amax(),
    "norm": lambda tensor: tensor.norm(),
    "mean": lambda tensor: tensor.mean(),
    "sum": lambda tensor: tensor.sum(),
}


@on_ranks(world_size=[1, 2, 3, 5])
def test_a_plan_says_of_how_many_parameters_a_rank_has_no_elements() -> None:
    """Right is the count of empty local pieces, over all ranks."""
    ranks = dist.get_world_size()
    for seed in range(12):
        drawn = random.Random(100 * ranks + seed)
        sizes = [drawn.randint(1, 9) for _ in range(drawn.randint(2, 6))]
        model = nn.Sequential(*(nn.Linear(*pair, bias=drawn.random() < 0.7) for pair in itertools.pairwise(sizes)))
        align = {"0.weight": drawn.choice(["row", "element", "tensor", 2])}
        fully_shard(model, policy=drawn.choice([None, {nn.Linear}]), options=HandleOptions(align=align))
        pieces = [param.to_local().numel() for param in model.parameters()]  # type: ignore[attr-defined]
        dist.all_reduce(empty := torch.tensor(pieces.count(0)))
        state = fully_shard.state(model)
        assert state is not None
        share = empty.item() / (len(pieces) * ranks)
        assert state.plan.empty_share == pytest.approx(share)
        line = f"no elements on a rank: {share:.0%} of parameters, on average"
        assert (line in str(state.plan)) == (share > 0.5)


@on_ranks(world_size=[2, 3, 4])
def test_numbers_of_gradients_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(32, 4), nn.LayerNorm(4), nn.Linear(4, 2)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    fully_shard(model)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for one in (model, plain):
        one(x).square().mean().backward()
    has_empty = False
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        grad, right = param.grad, expected.grad
        assert grad is not None and right is not None
        for name, number in NUMBERS.items():
            found = number(grad)
            torch.testing.assert_close(found.full_tensor(), number(right), msg=name)  # type: ignore[attr-defined]
        piece = grad.to_local()  # type: ignore[attr-defined]
        has_empty |= not piece.numel()
        largest = piece.abs().amax() if piece.numel() else piece.new_zeros(())
        total = piece.sum()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        torch.testing.assert_close(largest, right.abs().amax())
        torch.testing.assert_close(total, right.sum())
    everywhere = torch.tensor(int(has_empty))
    dist.all_reduce(everywhere)
    assert everywhere
