"""What ``reshard_after_forward=n`` and ``HYBRID_SHARD_OPTIM`` are held to alike: a small net and its oracle, checks.

What checks an annotation takes it as ``shard``, a function of a module and of options of ``fully_shard``.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable import (
    ConfigError,
    MixedPrecisionPolicy,
    fully_shard,
    no_sync,
    unannotate,
    unshard_params,
)
from composable.annotation.root import Root
from composable.engine import RestingPlace
from composable.ground.contract import get_registry, managing_state
from tests.models import BLOCK_CLASSES, DIM, MLPBlock, random_input, seeded
from tests.parity import LR, Run, full, train_annotated

__all__ = [
    "BF16",
    "Shard",
    "accumulate",
    "copy_between",
    "fail_in_backward",
    "fail_in_forward",
    "grads",
    "loss",
    "mesh_of",
    "net",
    "reference_grads",
    "refusal",
    "rest_elsewhere",
    "root_of",
    "secondary_bytes",
    "step_alike",
    "take_off_between",
    "train",
    "write",
    "write_between",
    "x_of",
]

BF16 = torch.bfloat16

Shard: TypeAlias = Callable[..., Any]


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    """Return a mesh of all ranks: those along the second dim share shards, those along the first hold copies."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


# A net and its oracle


def net(seed: int = 0) -> nn.Sequential:
    """Return the plain net."""
    return seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), MLPBlock(), MLPBlock(), nn.LayerNorm(DIM)), seed)


def root_of(model: nn.Module) -> Root:
    """Return the root of an annotated model."""
    return fully_shard.state(model).lazy_init()


def x_of(seed: int = 0) -> torch.Tensor:
    """Return the inputs of this rank."""
    return random_input(100 * seed + dist.get_rank(), 4, DIM)


def loss(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """Return the loss of this rank."""
    return model(x_of(seed)).float().square().mean()


def secondary_bytes(model: nn.Module) -> int:
    """Return what the secondary shards that are there take on this rank."""
    return sum(handle.secondary.nbytes for handle in root_of(model).handles if handle.secondary is not None)


def grads(model: nn.Module) -> list[torch.Tensor]:
    """Return every gradient whole. Collective."""
    return [full(param.grad) for param in model.parameters()]


def write(model: nn.Module, factor: float) -> None:
    """Multiply every parameter."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor)


def reference_grads(seed: int = 0, factor: float = 1.0) -> list[torch.Tensor]:
    """Return the gradients of one process with the inputs of all ranks, where parameters were written."""
    model = net()
    write(model, factor)
    x = torch.cat([random_input(100 * seed + rank, 4, DIM) for rank in range(dist.get_world_size())])
    model(x).square().mean().backward()
    return [param.grad for param in model.parameters()]


def refusal(model: nn.Module, mesh: DeviceMesh, **options: Any) -> str:
    """Return why ``fully_shard`` raises; the model is as before then, and may be annotated without ``options``."""
    before, classes = dict(model.named_parameters()), [type(module) for module in model.modules()]
    with pytest.raises(ConfigError) as caught:
        fully_shard(model, mesh=mesh, **options)
    assert not any(get_registry(module) or managing_state(module, "fully_shard") for module in model.modules())
    assert [type(module) for module in model.modules()] == classes
    assert all(param is before[fqn] for fqn, param in model.named_parameters())
    fully_shard(model, mesh=mesh)
    return str(caught.value)


def assert_grads(model: nn.Module, expected: Sequence[torch.Tensor], *, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(grads(model), list(expected), rtol=tolerance, atol=tolerance)


# Numbers


def train(name: str, **options: Any) -> Run:
    """Train a model of ``tests.models`` with a handle for each block."""

    def annotate(model: nn.Module) -> None:
        has_blocks = any(type(module) in BLOCK_CLASSES for module in model.modules())
        fully_shard(model, policy=BLOCK_CLASSES if has_blocks else None, **options)

    return train_annotated(name, annotate)


def step_alike(models: Sequence[nn.Module]) -> None:
    """Take some steps with each of ``models``, on the same inputs."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()


class Tower(nn.Sequential):
    """Layers of which the last ones may be left out, and run twice, or again in backward."""

    def forward(self, x: torch.Tensor, layers: int, *, twice: bool, recompute: bool | None) -> torch.Tensor:
        for layer in list(self)[:layers]:
            for _ in range(1 + twice):
                x = layer(x) if recompute is None else checkpoint(layer, x, use_reentrant=recompute)
        return x


def accumulate(model: nn.Module) -> list[int]:
    """Run micro-batches, of which the last one reduces; return the bytes of secondary shards after each."""
    kept = []
    for number in range(3):
        with no_sync(model) if number < 2 else torch.enable_grad():
            loss(model, number).backward()
        kept.append(secondary_bytes(model))
    assert_grads(model, [sum(every) for every in zip(*map(reference_grads, range(3)), strict=True)])
    return kept


# Values


def write_between(shard: Shard) -> None:
    """Write parameters between forward and backward."""
    model = shard(net())
    value = loss(model)
    write(model, 2)
    # What shows parameters shows those of now.
    with unshard_params(model):
        assert torch.equal(model[0].weight, 2 * net()[0].weight)
    model[1].unshard()
    assert torch.equal(model[1].up.weight, 2 * net()[1].up.weight)
    model[1].reshard()
    value.backward()
    # Backward goes through the values of its forward.
    assert_grads(model, reference_grads())
    model.zero_grad()
    loss(model, 1).backward()
    assert_grads(model, reference_grads(1, factor=2.0), tolerance=1e-5)


def rest_elsewhere(shard: Shard) -> nn.Module:
    """Let shards rest where the buffers are not, and train as without; return the model."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    models = [shard(net(), mp_policy=policy) for _ in range(2)]
    home = RestingPlace(torch.device("cpu"), is_elsewhere=True)
    for flat in [flat for handle in fully_shard.state(models[0])._handles for flat in handle.buffers]:
        flat.home = flat.routes.home = home
    for step in range(2):
        for model in models:
            model.zero_grad()
            loss(model, step).backward()
            write(model, 2)
        for found, expected in zip(*map(grads, models), strict=True):
            assert torch.equal(found, expected)
    return models[0]


# What ends early


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("broken")
        return x


def fail_in_forward(shard: Shard, *, in_backward: bool) -> int:
    """Let a forward raise, alone or while another one waits for its backward; return what it left."""
    model = shard(nn.Sequential(*net(), _Fails()))
    loss(model).backward()
    model.zero_grad()
    pending = loss(model, 1) if in_backward else None
    model[4].fails = True
    with pytest.raises(RuntimeError, match="broken"):
        loss(model)
    left = secondary_bytes(model)
    model[4].fails = False
    if pending is None:
        pending = loss(model, 1)
    pending.backward()
    assert_grads(model, reference_grads(1))
    return left


def fail_in_backward(shard: Shard) -> int:
    """Let a backward raise, and take the next step; return what that leaves."""
    model = shard(net())
    hook = model[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
    value = loss(model)
    with pytest.raises(ZeroDivisionError):
        value.backward()
    hook.remove()
    model.zero_grad()
    loss(model, 1).backward()
    assert_grads(model, reference_grads(1))
    return secondary_bytes(model)


def copy_between(shard: Shard) -> None:
    """Copy a model between forward and backward."""
    model = shard(net())
    value = loss(model, 1)
    twin = copy.deepcopy(model)
    assert secondary_bytes(twin) == 0 < secondary_bytes(model)
    loss(twin, 2).backward()
    value.backward()
    assert_grads(twin, reference_grads(2))
    assert_grads(model, reference_grads(1))


def take_off_between(shard: Shard) -> None:
    """Undo an annotation between forward and backward, and annotate anew."""
    model = shard(net())
    handles = list(root_of(model).handles)
    loss(model)
    assert secondary_bytes(model)
    unannotate(model)
    assert not any(
        (handle.secondary is not None and handle.secondary.are_there) or handle.buffers for handle in handles
    )
    for param, right in zip(model.parameters(), net().parameters(), strict=True):
        assert torch.equal(param, right)
    shard(model)
    loss(model, 1).backward()
    assert_grads(model, reference_grads(1))
