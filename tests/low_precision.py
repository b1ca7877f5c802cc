"""One process that makes the casts of a mixed precision policy: what sharded training in low precision must equal.

Each rank's gradients are computed from its own samples, as rounding depends on what is computed together.
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from composable import MixedPrecisionPolicy
from tests.models import random_input, seeded
from tests.parity import full

__all__ = [
    *("BF16", "DIM", "FP16", "FP32", "Block", "Net", "Spy", "batch_of", "make_net"),
    *("reduced_in_one_process", "train_in_one_process", "whole"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIM = 8


class Block(nn.Module):
    """A linear layer, a norm and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM + 3)
        self.norm = nn.LayerNorm(DIM + 3)
        self.down = nn.Linear(DIM + 3, DIM)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x)))) * self.scale


class Net(nn.Module):
    """Blocks between a root's own layers; one parameter is frozen, one is used by nobody."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last = nn.Linear(DIM, 3)
        self.unused = nn.Parameter(torch.ones(5))
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Spy(nn.Module):
    """Tells what it is called with and what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.register_buffer("table", torch.linspace(0, 1, DIM))
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[tuple[torch.dtype, ...]] = []
        self.holds_params = True
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.holds_params &= isinstance(self.weight, nn.Parameter)
        self.seen.append((x.dtype, self.weight.dtype, next(self.parameters()).dtype, self.table.dtype))
        if self.error is not None:
            raise self.error
        return x * self.weight * self.table.to(x.dtype)


def make_net(dtype: torch.dtype = FP32) -> Net:
    return seeded(Net, 0).to(dtype)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every entry of the state dict, whole, on every rank. Collective."""
    return {key: full(value) for key, value in model.state_dict().items()}


def reduced_in_one_process(
    model: nn.Module, policy: MixedPrecisionPolicy, batches: Sequence[Sequence[torch.Tensor]]
) -> dict[str, torch.Tensor | None]:
    """Return what the ranks' gradients become: computed, added up and averaged in the policy's dtypes.

    Args:
        model: In its own dtype.
        policy: With dtypes for all parameters alike.
        batches: For each rank its micro-batches.
    """
    compute = policy.param_dtype
    low = model if compute is None else copy.deepcopy(model).to(compute)
    total: dict[str, torch.Tensor | None] = {fqn: None for fqn, _ in model.named_parameters()}
    for micros in batches:
        mine: dict[str, torch.Tensor] = {}
        for micro in micros:
            low.zero_grad()
            low(micro if compute is None else micro.to(compute)).float().square().mean().backward()
            for fqn, param in low.named_parameters():
                if param.grad is not None:
                    grad = param.grad.to(policy.reduce_dtype or param.dtype)
                    mine[fqn] = mine[fqn] + grad if fqn in mine else grad.clone()
        for fqn, grad in mine.items():
            held = total[fqn]
            total[fqn] = grad.double() if held is None else held + grad.double()
    low.zero_grad()
    return {fqn: None if grad is None else grad / len(batches) for fqn, grad in total.items()}


def train_in_one_process(
    policy: MixedPrecisionPolicy, world_size: int, *, steps: int, micros: int, dtype: torch.dtype, make: type
) -> dict[str, torch.Tensor]:
    model = make_net(dtype)
    optimizer = make((param for param in model.parameters() if param.requires_grad), lr=0.05)
    for step in range(steps):
        batches = [[batch_of(step, rank, micro, dtype) for micro in range(micros)] for rank in range(world_size)]
        grads = reduced_in_one_process(model, policy, batches)
        for fqn, param in model.named_parameters():
            grad = grads[fqn]
            param.grad = None if grad is None else grad.to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: param.detach().clone() for fqn, param in model.named_parameters()}


def batch_of(step: int, rank: int, micro: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return random_input(100 * step + 10 * rank + micro, 4, DIM, dtype=dtype)
