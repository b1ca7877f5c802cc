"""The oracle: training on many ranks must equal training in one process on the global batch.

The reference runs in the parent process on the concatenation of every rank's inputs; the
ranks run the annotated model on their own inputs. Compared are the losses (averaged over
ranks) and every full parameter after some steps of SGD.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.models import loss_of, make_model

LR = 0.1


@dataclass
class Run:
    """What one training run gives: losses and parameters by FQN."""

    losses: list[float]
    params: dict[str, torch.Tensor]


def inputs_of(model: nn.Module, step: int, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of one rank in one step."""
    return model.example_inputs(1000 * step + rank)


def global_inputs(model: nn.Module, step: int, world_size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Concatenate the inputs of every rank along the batch."""
    every = [inputs_of(model, step, rank) for rank in range(world_size)]
    return pytree.tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0], *every)


def train_reference(name: str, world_size: int, *, steps: int = 3, lr: float = LR) -> Run:
    """Train a model of ``tests.models`` in this process on the global batch."""
    model = make_model(name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(steps):
        args, kwargs = global_inputs(model, step, world_size)
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, {fqn: param.detach().clone() for fqn, param in model.named_parameters()})


def train_annotated(name: str, annotate: Callable[[nn.Module], Any], *, steps: int = 3, lr: float = LR) -> Run:
    """Train the same model on this rank's inputs, annotated by ``annotate``."""
    model = make_model(name)
    annotate(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(steps):
        args, kwargs = inputs_of(model, step, dist.get_rank())
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return Run(losses, full_params(model))


def full_params(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter whole. Collective."""
    return {fqn: full(param) for fqn, param in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every gradient that there is, whole. Collective where parameters are split."""
    return {fqn: full(param.grad) for fqn, param in model.named_parameters() if param.grad is not None}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain, whole copy of a sharded or plain tensor. Collective."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Average a scalar over ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def assert_equal_runs(runs: Sequence[Run], reference: Run, *, tolerance: float = 1e-6) -> None:
    """Hold every rank's run against the reference."""
    for rank, run in enumerate(runs):
        torch.testing.assert_close(
            run.losses,
            reference.losses,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, rank=rank: f"rank {rank}, losses: {text}",
        )
        assert_equal_params(run.params, reference.params, tolerance=tolerance, where=f"rank {rank}")


def assert_equal_params(
    params: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, tolerance: float, where: str = ""
) -> None:
    """Compare parameters by FQN: names and order, shapes, dtypes and values."""
    assert list(params) == list(expected), where
    for fqn, param in params.items():
        # Rounding of the dtype is no error of ours: bf16 keeps three digits.
        allowed = max(tolerance, 2 * torch.finfo(param.dtype).eps) if param.dtype.is_floating_point else 0
        # Parameters that rest on the host are whole there.
        torch.testing.assert_close(
            param.cpu(),
            expected[fqn].cpu(),
            rtol=allowed,
            atol=allowed,
            msg=lambda text, fqn=fqn: f"{where}, {fqn}: {text}",
        )
