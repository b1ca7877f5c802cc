"""A comparison of training on ranks with training in one process.

Losses are averaged over the ranks; full gradients and full weights are compared by FQN.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable.errors import ConfigError
from composable.ground.torch_private import tree_leaves, tree_map
from composable.testing.simulation import simulate

BatchFn = Callable[[int, int], Any]
LossFn = Callable[[nn.Module, Any], torch.Tensor]
OptimizerFn = Callable[[nn.Module], torch.optim.Optimizer]

# The label that torch's losses leave out.
_IGNORED = -100
_MEANS = (
    "\n    ranks have {counts} tokens (labels that are not -100, or what a mask lets through): the mean of their means"
    "\n    is not the mean over all tokens, which composable.token_mean trains on"
)


@dataclass(frozen=True)
class Difference:
    """The element of one tensor that differs most from the reference.

    Attributes:
        what: ``"loss"``, ``"gradient"`` or ``"weight"``.
        world_size: Number of ranks.
        rank: The rank on which it was seen.
        step: Optimizer steps done before; weights are compared after the step, and before the first as step -1.
        fqn: The parameter; empty for a loss.
        value: The value on the ranks.
        expected: The value in one process.
    """

    what: str
    world_size: int
    rank: int
    step: int
    fqn: str
    value: float
    expected: float

    @property
    def amount(self) -> float:
        """The distance between the two values."""
        return abs(self.value - self.expected)

    def __str__(self) -> str:
        name = f" of '{self.fqn}'" if self.fqn else ""
        when = f"step {self.step}" if self.step >= 0 else "before the first step"
        return (
            f"{self.what}{name} differs by {self.amount:.3g}: {self.value:.9g}, in one process {self.expected:.9g} "
            f"(world size {self.world_size}, rank {self.rank}, {when})"
        )


@dataclass(frozen=True)
class _Training:
    """A training that runs in one process and on ranks."""

    model_fn: Callable[[], nn.Module]
    batch_fn: BatchFn
    annotate: Callable[[nn.Module], Any]
    loss_fn: LossFn
    optimizer_fn: OptimizerFn
    steps: int
    tolerance: float
    seed: int


# A loss, then all gradients, then all weights of one step; weights alone before the first.
_Record = dict[tuple[str, int, str], torch.Tensor]


def check_parity(
    model_fn: Callable[[], nn.Module],
    batch_fn: BatchFn,
    annotate: Callable[[nn.Module], Any],
    *,
    world_sizes: Sequence[int] = (1, 2, 3),
    loss_fn: LossFn | None = None,
    optimizer_fn: OptimizerFn | None = None,
    steps: int = 3,
    tolerance: float = 1e-6,
    seed: int = 0,
    timeout_s: float = 60.0,
) -> dict[str, Difference]:
    """Train on ranks that are threads and in one process, and compare losses, gradients and weights.

    The one process trains on the concatenated batches of all ranks. Its loss equals the ranks' average only if the
    loss is a mean over independent samples: no dropout, no batch norm. Returns the largest difference within the
    tolerance of each kind: loss, gradient, weight.

    Args:
        model_fn: Makes the model; called after ``torch.manual_seed(seed)``, on every rank and in the one process.
        batch_fn: Called with step and rank, returns that rank's batch: tensors, also in tuples, lists and dicts, with
            the sample as first dim and as many samples on every rank. Anything else has to be equal on all ranks.
        annotate: Makes the model parallel, such as ``fully_shard``; if it returns a wrapper, the wrapper is called.
        world_sizes: Numbers of ranks to try.
        loss_fn: Called with model and batch, returns the mean loss. Default: the model is called with the batch, a
            tensor, tuple or dict, and its output is averaged.
        optimizer_fn: Called with the annotated model. Default: SGD with a learning rate of 0.1.
        steps: Optimizer steps.
        tolerance: Largest difference that passes, absolute or relative to the expected value; for low-precision
            parameters, two units in the last place always pass. If some parameters have low precision, all values
            that depend on them have too, and 1e-6 is too small.
        seed: The seed of all random generators.
        timeout_s: How long all ranks of one world size may take.

    Raises:
        AssertionError: A value differs. The message has the first difference, with world size, rank, step and FQN;
            and where ranks have different numbers of tokens, these.
        ConfigError: Batches that cannot be concatenated, or differ in size.
    """
    training = _Training(
        model_fn,
        batch_fn,
        annotate,
        loss_fn or _mean_output,
        optimizer_fn or (lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        steps,
        tolerance,
        seed,
    )
    largest: dict[str, Difference] = {}
    for world_size in world_sizes:
        expected = _in_one_process(training, world_size)
        for of_rank in simulate(world_size, _on_a_rank, training, expected, timeout_s=timeout_s):
            for kind, difference in of_rank.items():
                largest[kind] = max(largest.get(kind, difference), difference, key=lambda one: one.amount)
    return largest


def _in_one_process(training: _Training, world_size: int) -> _Record:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model = training.model_fn()
        batches = (
            _concatenated([training.batch_fn(step, rank) for rank in range(world_size)], step)
            for step in range(training.steps)
        )
        return dict(_train(training, model, model, batches))


def _on_a_rank(rank: int, training: _Training, expected: _Record) -> dict[str, Difference]:
    torch.manual_seed(training.seed)
    model = training.model_fn()
    returned = training.annotate(model)
    # A lambda that annotates a part of the model returns that part.
    is_part = any(returned is module for module in model.modules())
    called = returned if isinstance(returned, nn.Module) and not is_part else model
    largest: dict[str, Difference] = {}
    batches = (training.batch_fn(step, rank) for step in range(training.steps))
    for (kind, step, fqn), value in _train(training, model, called, batches):
        if (kind, step, fqn) not in expected:
            raise AssertionError(f"{kind} of '{fqn}' at step {step} is not there in one process")
        if kind == "loss":
            value = value.clone()
            dist.all_reduce(value)
            value /= dist.get_world_size()
        wanted = expected[kind, step, fqn]
        at, is_close = _compare(value, wanted, training.tolerance)
        found = Difference(kind, dist.get_world_size(), rank, step, fqn, _number(value, at), _number(wanted, at))
        if not is_close:
            every = [_counted(training.batch_fn(step, one)) for one in range(found.world_size if step >= 0 else 0)]
            counts = next((of_one for of_one in zip(*every) if len({*of_one}) > 1), ())
            means = _MEANS.format(counts=", ".join(map(str, counts))) if counts else ""
            raise AssertionError(f"{found}{means}")
        largest[kind] = max(largest.get(kind, found), found, key=lambda one: one.amount)
    return largest


def _train(
    training: _Training, model: nn.Module, called: nn.Module, batches: Iterator[Any]
) -> Iterator[tuple[tuple[str, int, str], torch.Tensor]]:
    """Train, and yield every tensor to compare, as soon as it has its value."""
    optimizer = training.optimizer_fn(model)
    yield from _weights(model, -1)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = training.loss_fn(called, batch)
        if loss.numel() != 1:
            raise ConfigError(f"loss has the shape {list(loss.shape)}", fix="return the mean over samples")
        loss.backward()
        yield ("loss", step, ""), loss.detach()
        for fqn, param in model.named_parameters():
            # A parameter without a gradient here may have a gradient of zeros there.
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            yield ("gradient", step, fqn), _full(grad)
        optimizer.step()
        yield from _weights(model, step)


def _weights(model: nn.Module, step: int) -> Iterator[tuple[tuple[str, int, str], torch.Tensor]]:
    for fqn, param in model.named_parameters():
        yield ("weight", step, fqn), _full(param)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _compare(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> tuple[int, bool]:
    """Return the index where the two differ most, -1 if they are empty, and whether all elements are close."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        raise AssertionError(
            f"{list(value.shape)} {value.dtype} on the ranks, {list(expected.shape)} {expected.dtype} in one process"
        )
    if not value.numel():
        return -1, True
    allowed = 0.0
    if value.is_complex():
        value, expected = torch.view_as_real(value), torch.view_as_real(expected)
    if value.is_floating_point():
        allowed = max(tolerance, 2 * torch.finfo(value.dtype).eps if value.dtype.itemsize < 4 else 0.0)
    is_close = torch.isclose(value, expected, rtol=allowed, atol=allowed, equal_nan=True)
    distance = (value.double() - expected.double()).abs()
    # NaN counts as the largest distance, unless it is expected; elements that are too far come before others.
    distance = distance.masked_fill(is_close & distance.isnan(), 0.0).nan_to_num(nan=float("inf"))
    at = int(distance.masked_fill(is_close, -1.0).argmax() if not is_close.all() else distance.argmax())
    return at, bool(is_close.all())


def _counted(batch: Any) -> list[int]:
    """Return of each tensor of labels, and of each mask, how many elements count in the loss."""
    leaves = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and not one.is_floating_point()]
    return [int((one if one.dtype == torch.bool else one != _IGNORED).sum()) for one in leaves]


def _number(tensor: torch.Tensor, at: int) -> float:
    """Return the element at the index that ``_compare`` returned."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(tensor.flatten()[at].item()) if at >= 0 else 0.0


def _concatenated(batches: Sequence[Any], step: int) -> Any:
    """Return one batch with the samples of all ``batches``."""
    sizes = [
        {len(one) for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.ndim} for batch in batches
    ]
    if any(found != sizes[0] for found in sizes):
        raise ConfigError(
            f"batches of step {step} have {', '.join(str(sorted(found)) for found in sizes)} samples on the ranks",
            fix="give every rank as many samples, or the mean over ranks is not the mean over samples",
        )
    return tree_map(lambda *parts: _joined(parts, step), batches[0], *batches[1:])


def _joined(parts: Sequence[Any], step: int) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(list(parts))
    if any(bool(part != first) for part in parts):
        raise ConfigError(
            f"batches of step {step} have {', '.join(map(repr, parts))} on the ranks",
            fix="give what has no sample dim the same value on every rank",
        )
    return first


def _mean_output(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
    values = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.is_floating_point()]
    if not values:
        raise ConfigError("the model returns no floating-point tensor", fix="pass loss_fn")
    return torch.stack([one.float().mean() for one in values]).sum()
