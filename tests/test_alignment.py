"""``align`` and ``shard_placement_fn`` of ``fully_shard``: training, optimizers, saving and copies with promised cuts."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from composable import (
    ConfigError,
    DesyncError,
    HandleOptions,
    RaggedDTensor,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
    strict_mode,
    unannotate,
    unshard_params,
)
from tests.models import random_input, seeded
from tests.parity import full
from tests.world import on_ranks, run_ranks, run_threads

WIDTH = 6
STEPS = 3


class Net(nn.Module):
    """Convolutions, one in ``channels_last``, a tied weight, vectors, and dims smaller than three ranks."""

    def __init__(self, *, channels_last: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3, padding=1)
        self.second = nn.Conv2d(5, WIDTH, 3)
        if channels_last:
            self.second = self.second.to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.up.weight
        self.narrow = nn.Linear(WIDTH, 1)
        self.wide = nn.Linear(1, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x))).mean((2, 3))
        x = self.again(torch.tanh(self.up(self.norm(x))))
        result: torch.Tensor = self.wide(self.narrow(x))
        return result


def build(model: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Return a model in double precision, so that only a mistake makes a difference."""
    return seeded(model, seed).double()


def images(rank: int, step: int) -> torch.Tensor:
    return random_input(100 * step + rank, 2, 2, 4, 4, dtype=torch.float64)


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(-1)


def second_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


def first_dim(param: nn.Parameter) -> Shard:
    return Shard(0)


def mixed(fqn: str, param: nn.Parameter) -> Any:
    return {4: "tensor", 1: "element"}.get(param.dim(), 2)


WISHES: dict[str, dict[str, Any]] = {
    "tensor": {"options": HandleOptions(align=lambda fqn, param: "tensor")},
    "matrix": {"options": HandleOptions(align="matrix")},
    "blocks of rows": {"options": HandleOptions(align=lambda fqn, param: 2)},
    "mixed": {"options": HandleOptions(align=mixed)},
    "dict": {"options": HandleOptions(align={"second.weight": "tensor", "again.weight": 3, "norm.bias": "element"})},
    "Shard(0)": {"shard_placement_fn": first_dim},
    "Shard(1)": {"shard_placement_fn": second_dim},
    "Shard(-1)": {"shard_placement_fn": last_dim},
}


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, check_stride=False)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> list[Any]:
    """Train and return the gradients of each step."""
    grads = []
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        grads.append([None if param.grad is None else full(param.grad) for param in model.parameters()])
        optimizer.step()
    return grads


def own_batches() -> list[torch.Tensor]:
    return [images(dist.get_rank(), step) for step in range(STEPS)]


def global_batches() -> list[torch.Tensor]:
    return [torch.cat([images(rank, step) for rank in range(dist.get_world_size())]) for step in range(STEPS)]


@on_ranks(2, run=run_ranks)
def test_compiled_training_is_that_of_one_process() -> None:
    plain = build(Even)
    model = fully_shard(copy.deepcopy(plain), shard_placement_fn=second_dim)
    model.compile(backend="aot_eager")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    expected = steps(plain, optimizers[0], global_batches())
    assert_close(steps(model, optimizers[1], own_batches()), expected)


# -- beside torch's own


class Even(nn.Module):
    """Dims that one, two and three ranks divide: torch cuts other dims than the first only there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, WIDTH, 3)
        self.mixer = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.up = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.again = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.again.weight = self.up.weight
        self.narrow = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mixer(torch.tanh(self.conv(x)).flatten(2)).mean(2)
        result: torch.Tensor = self.narrow(self.again(torch.tanh(self.up(x))))
        return result


def cut_where_even(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 and param.shape[1] % WIDTH == 0 else None


@pytest.mark.parametrize(("place", "world_size"), [(first_dim, 2), (cut_where_even, 3)])
@on_ranks(run=run_ranks)
def test_training_is_that_of_torchs_fully_shard(place: Callable[[nn.Parameter], Shard | None]) -> None:
    ours, theirs = build(Even), build(Even)
    fully_shard(ours, shard_placement_fn=place)
    fsdp.fully_shard(theirs, shard_placement_fn=place)
    found, expected = (
        steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), own_batches()) for model in (ours, theirs)
    )
    assert_close(found, expected)
    assert_close([full(param) for param in ours.parameters()], [full(param) for param in theirs.parameters()])
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(other, DTensor)
        (placement,) = other.placements
        assert isinstance(placement, Shard)
        # Both hold whole slices of one dim, though not always the same ones.
        assert isinstance(mine, RaggedDTensor)
        assert (
            place(ours.up.weight) is None or mine.to_local().numel() % (mine.numel() // mine.shape[placement.dim]) == 0
        )


# -- what a whole tensor on one rank is good for


def orthogonal_step(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Move a whole matrix along its gradient with singular values near 1, but for those that are near none."""
    square = grad @ grad.T
    values, vectors = torch.linalg.eigh(square + 0.1 * square.trace() * torch.eye(len(grad), dtype=grad.dtype))
    param -= 0.1 * (vectors / values.sqrt()) @ (vectors.T @ grad)


@on_ranks(3)
def test_the_rank_that_holds_a_whole_matrix_can_orthogonalise_its_step_alone() -> None:
    plain = build(Even)
    model = fully_shard(
        copy.deepcopy(plain), options=HandleOptions(align=lambda _, param: "tensor" if param.dim() == 2 else None)
    )
    steps_here = torch.zeros(())
    for batch, own in zip(global_batches(), own_batches(), strict=True):
        plain(batch).square().mean().backward()
        model(own).square().mean().backward()
        with torch.no_grad(), strict_mode():
            for whole, sharded in zip(plain.parameters(), model.parameters(), strict=True):
                if whole.dim() != 2:
                    continue
                orthogonal_step(whole, whole.grad)
                local = sharded.to_local()
                assert local.shape in (sharded.shape, (0, *sharded.shape[1:]))
                if len(local):
                    orthogonal_step(local, sharded.grad.to_local())
                    steps_here += 1
        for one in (plain, model):
            one.zero_grad()
    assert_close([full(param) for param in model.parameters()], list(plain.parameters()))
    dist.all_reduce(steps_here)
    assert steps_here == 2 * STEPS  # Two matrices, and each is stepped on one rank.


# -- saving, copies, and back to a plain model


def save(folder: str, wish: str) -> Any:
    model = fully_shard(build(Net), **WISHES[wish])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer, own_batches())
    save_checkpoint(folder, 1, model, optimizer)
    return values_of(model, optimizer)


def load(folder: str, wish: str) -> Any:
    model = fully_shard(build(Net, 1), **WISHES[wish])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    load_checkpoint(folder, model, optimizer)
    return values_of(model, optimizer)


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    averages = [full(optimizer.state[param]["exp_avg"]) for param in model.parameters()]
    params = [full(param) for param in model.parameters()]
    exported = full_state_dict(model)
    if dist.get_rank() == 0:
        assert exported is not None
        assert_close([exported[fqn] for fqn, _ in model.named_parameters()], params)
    return params, averages


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tensor", "Shard(1)"),
        ("Shard(1)", "mixed"),
        ("Shard(-1)", "blocks of rows"),
        ("matrix", "dict"),
        ("dict", "matrix"),
    ],
)
def test_a_checkpoint_of_one_cut_loads_into_another_on_other_ranks(saved: str, loaded: str, tmp_path: Path) -> None:
    expected = run_threads(save, 2, str(tmp_path), saved)[0]
    for found in run_threads(load, 3, str(tmp_path), loaded):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, check_stride=False)


@pytest.mark.parametrize(("wish", "world_size"), [(wish, 2 + number % 2) for number, wish in enumerate(WISHES)])
@on_ranks()
def test_copies_and_plain_models_have_the_values_and_train(wish: str) -> None:
    plain = build(Net)
    model = fully_shard(copy.deepcopy(plain), policy={nn.Conv2d}, **WISHES[wish])
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, twin)]
    untrained = [param.detach().clone() for param in plain.parameters()]
    assert_close(steps(twin, optimizers[1], own_batches()), steps(plain, optimizers[0], global_batches()))
    assert_close([full(param) for param in model.parameters()], untrained)
    with unshard_params(twin), torch.no_grad():
        assert_close(list(twin.parameters()), list(plain.parameters()))
        for one in (twin, plain):
            one.up.weight.mul_(2.0)
            one.second.weight[:, 1] = 3.0
    unannotate(twin)
    assert type(twin.up.weight) is nn.Parameter and twin.again.weight is twin.up.weight
    assert_close(list(twin.parameters()), list(plain.parameters()))
    twin.zero_grad()
    # Annotated anew, in the memory order that it was left in.
    fully_shard(twin)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, twin)]
    assert_close(steps(twin, optimizers[1], own_batches()), steps(plain, optimizers[0], global_batches()))


# -- errors


@pytest.mark.parametrize(
    ("name", "said", "is_synced"),
    [("align", "whole on one rank", True), ("shard_placement_fn", "cut between slices of dim 1", False)],
)
@on_ranks(2)
def test_a_function_that_answers_otherwise_on_one_rank_is_told_on_all(name: str, said: str, is_synced: bool) -> None:
    rank = dist.get_rank()
    chosen: dict[str, Any] = {
        "align": {
            "options": HandleOptions(align=lambda fqn, _: "tensor" if rank == 1 and fqn == "up.weight" else None)
        },
        "shard_placement_fn": {
            "shard_placement_fn": lambda param: Shard(1) if rank == 1 and param.shape == (WIDTH, WIDTH) else None
        },
    }[name]
    with pytest.raises(DesyncError) as caught:
        fully_shard(build(Net), sync_module_states=is_synced, **chosen)(images(0, 0))
    start = "parameter 'up.weight' [6, 6] float64, requires_grad=True"
    assert f"    rank 0: {start}, module Net\n    rank 1: {start}, {said}, module Net\n" in str(caught.value)


@on_ranks(2)
def test_after_a_function_raised_the_module_is_as_it_was() -> None:
    model = build(Net)
    before = [sorted(vars(module)) for module in model.modules()], list(model.parameters())
    asked: list[str] = []

    def fail(fqn: str, param: nn.Parameter) -> None:
        asked.append(fqn)
        if fqn == "norm.bias":
            raise ZeroDivisionError

    with pytest.raises(ConfigError, match="align raised ZeroDivisionError"):
        fully_shard(model, policy={nn.Conv2d}, options=HandleOptions(align=fail))
    assert asked[-1] == "norm.bias"
    after = [sorted(vars(module)) for module in model.modules()], list(model.parameters())
    assert before[0] == after[0] and all(map(lambda a, b: a is b, before[1], after[1]))
    fully_shard(model, policy={nn.Conv2d}, **WISHES["mixed"])(images(0, 0)).sum().backward()


# -- torch's ShardPlacementResult


def placed_with(mesh: DeviceMesh, dim: int | None) -> Callable[[nn.Parameter], Any]:
    placement, info = None if dim is None else Shard(dim), FSDPMeshInfo(mesh, 0)
    return lambda param: ShardPlacementResult(placement if param.dim() > 1 else None, info)


def train_placed(api: Callable[..., Any], dim: int | None) -> list[torch.Tensor]:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), 0)
    api(model, shard_placement_fn=placed_with(init_device_mesh("cpu", (2,)), dim))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.full((2, 4), 1.0 + step + dist.get_rank())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("dim", [0, 1, None])
def test_a_shard_placement_result_with_the_mesh_of_the_call_trains_as_on_fsdp2(dim: int | None) -> None:
    expected = run_ranks(train_placed, 2, fsdp.fully_shard, dim)
    torch.testing.assert_close(run_threads(train_placed, 2, fully_shard, dim), expected)


@on_ranks(2)
def test_a_shard_placement_result_with_another_mesh_says_what_to_write() -> None:
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    with pytest.raises(ConfigError, match=r"ShardPlacementResult for a parameter.*\n.*'weight'.*\n.*mesh= its mesh"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=placed_with(alone, 0))
