"""Programs that ranks and one process run: a model and its plain twin, which must have the same numbers at each check.

    twins = Twins("mlp", lambda model: fully_shard(model, policy={MLPBlock}))
    accumulate(twins, kept=2)
    twins.check_gradients()

A test says once what happens: ``backward`` runs the model on the inputs of this rank, and the twin on those of every
rank, whose mean loss it takes. What changes the annotated model alone (``no_sync``, a setting) stands around the call.
The names here are those of the library that users see, so programs outlive what is behind them.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import no_sync
from tests.models import BATCH, DIM, loss_of, make_model, random_input, seeded
from tests.parity import LR, assert_equal_params, full_params, gradients_of, mean_over_ranks

__all__ = ["Build", "Loss", "Twins", "accumulate", "compare", "loss_at", "sgd", "train"]

# Of ``tests.models`` by name, or a function that makes a model.
Build: TypeAlias = str | Callable[[], nn.Module]
# Of a model, on batch ``number`` of a rank.
Loss: TypeAlias = Callable[[Any, int, int], torch.Tensor]


def loss_at(model: Any, number: int, rank: int) -> torch.Tensor:
    """Return the loss on a batch of a rank: of the model's own example inputs, or [BATCH, DIM] floats if it has none."""
    seed = 1000 * number + rank
    args, kwargs = model.example_inputs(seed) if hasattr(model, "example_inputs") else ((_floats(seed),), {})
    return loss_of(model(*args, **kwargs))


def _floats(seed: int) -> torch.Tensor:
    return random_input(seed, BATCH, DIM)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def _without_wrappers(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {fqn.replace("_checkpoint_wrapped_module.", ""): one for fqn, one in named.items()}


class Twins:
    """A model on ranks, and the same in one process that takes the inputs of all ranks.

    Args:
        build: Called twice, with the same seed.
        annotate: Called with the model of ranks only.
        make: Makes an optimizer for the parameters of each.
        loss: Of a model, on batch ``number`` of a rank.
        size: How many ranks have inputs of their own; all, by default.
        rank: Which of their inputs this rank has.

    Attributes:
        model: On ranks.
        plain: In one process.
        optimizers: Of both.
        answer: What ``annotate`` returned.
        losses: Of the last backward: on this rank, and the mean over all.
    """

    def __init__(
        self,
        build: Build,
        annotate: Callable[[Any], object] = lambda model: None,
        *,
        make: Callable[[Any], torch.optim.Optimizer] = sgd,
        loss: Loss = loss_at,
        size: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.model, self.plain = (make_model(build) if isinstance(build, str) else seeded(build, 0) for _ in range(2))  # type: Any, Any
        self.answer: Any = annotate(self.model)
        self.size = dist.get_world_size() if size is None else size
        self.rank = dist.get_rank() if rank is None else rank
        self.loss = loss
        self.optimizers = [make(one.parameters()) for one in self]

    def __iter__(self) -> Iterator[Any]:
        """Yield both models: the one on ranks first."""
        return iter((self.model, self.plain))

    def backward(self, number: int = 0, *, keeps: bool = False, loss: Loss | None = None) -> None:
        """Add the gradients of a batch: on ranks of theirs, in one process of the mean over all ranks.

        What the ranks raise leaves the twin as it was.

        Args:
            number: Of the batch, by which ``loss`` chooses inputs.
            keeps: Inside of ``no_sync``.
            loss: In place of the one of these twins.
        """
        with no_sync(self.model) if keeps else nullcontext():
            found = (loss or self.loss)(self.model, number, self.rank)
            found.backward()
        self.losses = found.detach(), self.backward_alone(number, loss=loss)

    def backward_alone(self, number: int = 0, *, loss: Loss | None = None) -> torch.Tensor:
        """Add the gradients of a batch in one process only; return the mean loss."""
        losses = []
        for rank in range(self.size):
            losses.append((loss or self.loss)(self.plain, number, rank) / self.size)
            losses[-1].backward()
        return torch.stack(losses).sum().detach()

    def step(self, *, of_ranks: bool = True, set_to_none: bool = True) -> None:
        """Step both, or one process only, and drop gradients."""
        for optimizer in self.optimizers[not of_ranks :]:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    def drop(self, *, set_to_none: bool = True) -> None:
        for one in self:
            one.zero_grad(set_to_none=set_to_none)

    def twin(self) -> "Twins":
        """Return deep copies of both, with gradients, and with optimizers of their own."""
        made = copy.copy(self)
        made.model, made.plain = (copy.deepcopy(one) for one in self)
        for param, copied in zip(self.plain.parameters(), made.plain.parameters(), strict=True):
            copied.grad = None if param.grad is None else param.grad.clone()  # torch's copies have none
        made.optimizers = [sgd(one.parameters()) for one in made]
        return made

    def copy(self) -> None:
        """Go on with a deep copy of the model on ranks and its optimizer."""
        self.model, self.optimizers[0] = copy.deepcopy((self.model, self.optimizers[0]))

    def check_gradients(self, tolerance: float = 1e-6, where: object = "") -> None:
        """Compare which gradients there are, and their values. Collective."""
        found, expected = (_without_wrappers(gradients_of(one)) for one in self)
        assert_equal_params(found, expected, tolerance=tolerance, where=str(where))

    def check(self, tolerance: float = 1e-6, where: object = "") -> None:
        """Compare all parameters. Collective."""
        found, expected = (_without_wrappers(full_params(one)) for one in self)
        assert_equal_params(found, expected, tolerance=tolerance, where=str(where))


def train(twins: Twins, steps: int = 3, *, steps_inside: bool = False, tolerance: float = 1e-6) -> None:
    """Train for some steps: losses, gradients and parameters are equal after each.

    Args:
        twins: With optimizers.
        steps: How many.
        steps_inside: The backward of ranks has stepped, and left no gradient.
        tolerance: Relative and absolute.
    """
    for number in range(steps):
        twins.backward(number)
        found, expected = twins.losses
        assert mean_over_ranks(found) == pytest.approx(expected.item(), rel=tolerance, abs=tolerance), number
        if steps_inside:
            assert all(param.grad is None for param in twins.model.parameters())
        else:
            twins.check_gradients(tolerance, number)
        twins.step(of_ranks=not steps_inside)
        twins.check(tolerance, number)


def compare(build: Build, annotate: Callable[[Any], object], tolerance: float = 1e-6) -> None:
    """Train an annotated model as one process does."""
    train(Twins(build, annotate), tolerance=tolerance)


def accumulate(twins: Twins, kept: int = 2, *, first: int = 0) -> None:
    """Keep the gradients of some batches on their ranks, and average them with those of one more."""
    for number in range(first, first + kept):
        twins.backward(number, keeps=True)
    twins.backward(first + kept)
