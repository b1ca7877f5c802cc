"""Parameters that tensor parallelism has split or replicated over another mesh dim, fully sharded over data ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from composable import (
    ConfigError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    RaggedShard,
    UsageError,
    checkpoint,
    fully_shard,
    no_sync,
)
from tests.models import random_input, seeded
from tests.world import run_threads

DIM = 6


class Block(nn.Module):
    """Two split layers whose dim may not divide, behind a norm whose gradient is a sum that is still to be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A split embedding, blocks, a parameter that is no DTensor, and a layer tied to itself under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3))
        self.out = nn.Linear(DIM, 3)
        self.again = self.out

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.scale + self.again(x)


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parallelize ``model``; ``out`` and ``scale`` stay plain."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "out": PrepareModuleInput(
            input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
    }
    for index in range(2):
        plan[f"blocks.{index}.norm"] = SequenceParallel(sequence_dim=0)
        plan[f"blocks.{index}.up"] = ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
        plan[f"blocks.{index}.down"] = RowwiseParallel(output_layouts=Shard(0))
    return parallelize_module(model, mesh, plan)


def mesh_of(*sizes: int) -> DeviceMesh:
    """Return a mesh whose last dims are ``dp`` and ``tp``; of three sizes the first is for copies."""
    names = ("replicate", "dp", "tp") if len(sizes) == 3 else ("dp", "tp")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "dp"]


def data_rank(mesh: DeviceMesh) -> int:
    copies = mesh.get_local_rank("replicate") if mesh.ndim == 3 else 0
    return copies * mesh["dp"].size() + mesh.get_local_rank("dp")


def data_size(mesh: DeviceMesh) -> int:
    return mesh.size() // mesh["tp"].size()


def batch(step: int, rank: int) -> torch.Tensor:
    return (random_input(100 * step + rank, 6) * 1000).long().abs() % 9


def loss_at(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(batch(step, rank)).square().mean()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: full(param.grad) for fqn, param in model.named_parameters() if param.grad is not None}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: full(param).detach() for fqn, param in model.named_parameters()}


def cut_last_dim(param: torch.Tensor) -> Shard:
    return Shard(param.dim() - 1)


def whole_on_one_rank(fqn: str, param: torch.Tensor) -> str | None:
    return "tensor" if "up" in fqn else None


def annotated(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = split(seeded(Model, 0), mesh["tp"])
    return fully_shard(model, mesh=data_mesh(mesh), policy={Block}, **options)


def train(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = mesh_of(*sizes)
    model, plain = annotated(mesh, **options), seeded(Model, 0)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(3):
        if step == 1:
            with no_sync(model):
                loss_at(model, 7, data_rank(mesh)).backward()
        loss_at(model, step, data_rank(mesh)).backward()
        for rank in range(data_size(mesh)):
            for each in (7, 1) if step == 1 else (step,):
                (loss_at(plain, each, rank) / data_size(mesh)).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(plain), rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
    torch.testing.assert_close(values_of(model), values_of(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (1, 2, 2), (2, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("frees", [True, False])
def test_training_is_that_of_one_process_on_all_batches(sizes: tuple[int, ...], frees: bool) -> None:
    world_size = int(torch.Size(sizes).numel())
    run_threads(train, world_size, sizes, {"reshard_after_forward": frees})


def spread() -> None:
    with pytest.raises(ConfigError, match="HYBRID_SHARD_OPTIM on parameters that tensor parallelism has split"):
        annotated(mesh_of(2, 2, 2), strategy="HYBRID_SHARD_OPTIM")


def test_optimizer_state_is_not_spread_over_copies_of_split_parameters() -> None:
    run_threads(spread, 8)


def test_backward_may_gather_among_a_part_of_the_data_ranks() -> None:
    run_threads(train, 8, (4, 2), {"reshard_after_forward": 2})


def train_with_checkpoints() -> None:
    mesh = mesh_of(2, 2)
    model = split(seeded(Model, 0), mesh["tp"])
    for block in model.blocks:
        checkpoint(block)
    fully_shard(model, mesh=mesh["dp"], policy={Block})
    compare_step(model, mesh)


def compare_step(model: nn.Module, mesh: DeviceMesh, **tolerance: float) -> None:
    """Hold one step of ``model`` against one process."""
    plain = seeded(Model, 0)
    loss_at(model, 0, data_rank(mesh)).backward()
    for rank in range(data_size(mesh)):
        (loss_at(plain, 0, rank) / data_size(mesh)).backward()
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(gradients_of(model), gradients_of(plain), **tolerance)


def test_activation_checkpoints_run_split_blocks_again() -> None:
    run_threads(train_with_checkpoints, 4)


def train_with_policy(param_dtype: torch.dtype, reduce_dtype: torch.dtype, tolerance: float) -> None:
    mesh = mesh_of(2, 2)
    model = annotated(mesh, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
    with no_sync(model):
        loss_at(model, 7, data_rank(mesh)).backward()
    model.zero_grad()
    compare_step(model, mesh, rtol=tolerance, atol=tolerance)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "tolerance"),
    [(torch.float64, torch.float64, 1e-6), (torch.float64, torch.float32, 1e-6), (torch.bfloat16, torch.float32, 3e-2)],
)
def test_blocks_are_computed_in_the_dtype_of_the_policy(
    param_dtype: torch.dtype, reduce_dtype: torch.dtype, tolerance: float
) -> None:
    run_threads(train_with_policy, 4, param_dtype, reduce_dtype, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"align": whole_on_one_rank},
        {"transport": "process_group"},
        {"transport": "point_to_point"},
        {"unused_gradients": "zero"},
        {"offload_policy": CPUOffloadPolicy()},
        {"shard_placement_fn": cut_last_dim},
    ],
)
def test_options_hold_for_split_parameters(options: dict[str, Any]) -> None:
    run_threads(train, 4, (2, 2), options)


def train_with_prefetch() -> None:
    mesh = mesh_of(2, 2)
    model = annotated(mesh)
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    for _ in range(2):
        model.zero_grad()
        compare_step(model, mesh)


def test_modules_are_prefetched_as_ever() -> None:
    run_threads(train_with_prefetch, 4)


def error_of(build: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, UsageError)) as caught:
        build()
    return f"{type(caught.value).__name__}: {caught.value}"


def misuse(name: str) -> str:
    mesh = mesh_of(2, 2)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4)
    if name in ("own dim", "all ranks", "other root", "process group"):
        parallelize_module(model, mesh["tp"], ColwiseParallel())
    meshes = {"own dim": {"mesh": mesh["tp"]}, "all ranks": {}, "other root": {"mesh": other["dp"]}}
    meshes["process group"] = {"process_group": mesh["dp"].get_group()}
    if name in meshes:
        return error_of(lambda: fully_shard(model, **meshes[name]))
    if name == "partial":
        model.weight = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh["tp"], [Partial()]))
        return error_of(lambda: fully_shard(model, mesh=mesh["dp"]))
    fully_shard(model, mesh=mesh["dp"])
    if name == "split after":
        return error_of(lambda: parallelize_module(model, mesh["tp"], ColwiseParallel()))
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(0)]))
    return error_of(lambda: model(torch.zeros(4, 4)))


FIX_MESH = "init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))"
MISUSES = {
    "own dim": (
        "ConfigError: the parameter is a DTensor over ranks [0, 1], some of which would share its shards ([0, 1])\n"
        f"  at:  rank 0, parameter 'weight' [4, 4]\n  fix: give the two other dims of one mesh: {FIX_MESH}"
    ),
    "all ranks": (
        "ConfigError: the parameter is a DTensor over ranks [0, 1], some of which would share its shards "
        "([0, 1, 2, 3])\n"
        f"  at:  rank 0, parameter 'weight' [4, 4]\n  fix: give the two other dims of one mesh: {FIX_MESH}"
    ),
    "other root": (
        "ConfigError: the parameter is a DTensor on a mesh that is no part of the one that it is to be sharded on\n"
        f"  at:  rank 0, parameter 'weight' [4, 4]\n  fix: make one mesh, {FIX_MESH}, and pass mesh['tp'] to "
        "parallelize_module and mesh['dp'] to fully_shard"
    ),
    "process group": (
        "ConfigError: the parameter is a DTensor on a mesh that is no part of the one that it is to be sharded on\n"
        f"  at:  rank 0, parameter 'weight' [4, 4]\n  fix: make one mesh, {FIX_MESH}, and pass mesh['tp'] to "
        "parallelize_module and mesh['dp'] to fully_shard"
    ),
    "partial": (
        "ConfigError: the parameter is a DTensor placed Partial(sum), and what can be sharded is Shard or Replicate\n"
        "  at:  rank 0, parameter 'weight' [4, 4] float32\n"
        "  fix: redistribute it before, or name it in ignored_params"
    ),
    "split after": (
        "UsageError: distribute_tensor of a parameter [4, 4] that fully_shard has sharded\n"
        "  at:  rank 0, parameter 'weight'\n  fix: call parallelize_module before fully_shard"
    ),
    "replaced after": (
        "UsageError: a parameter of shape [4, 4] was replaced by DTensor [4, 4]\n"
        "  at:  rank 0, parameter 'weight'\n  fix: call parallelize_module before fully_shard"
    ),
}


@pytest.mark.parametrize("name", list(MISUSES))
def test_what_fits_no_mesh_is_refused_on_every_rank(name: str) -> None:
    texts = run_threads(misuse, 4, name)
    assert texts[0] == MISUSES[name]
    assert len(texts) == 4


def look() -> None:
    mesh = mesh_of(2, 2)
    model = annotated(mesh)
    param = model.blocks[0].up.weight
    assert param.shape == (7, DIM)
    assert param.device_mesh == mesh
    ragged, other = param.placements
    assert isinstance(ragged, RaggedShard)
    assert other == Shard(0)
    rows = 4 if mesh.get_local_rank("tp") == 0 else 3
    assert ragged.bounds[-1] == rows * DIM
    assert (
        param.to_local().numel()
        == ragged.bounds[mesh.get_local_rank("dp") + 1] - ragged.bounds[mesh.get_local_rank("dp")]
    )
    assert model.blocks[0].norm.weight.placements[1] == Replicate()
    assert model.out.weight.device_mesh == mesh["dp"]
    torch.testing.assert_close(values_of(model), values_of(seeded(Model, 0)), rtol=0, atol=0)


def test_a_sharded_parameter_has_the_shape_of_the_whole_on_the_mesh_of_both_dims() -> None:
    run_threads(look, 4)


def annotate_two_models() -> list[bool]:
    shapes = []
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(nn.Sequential(nn.Linear(4, 6)), mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        model(torch.ones(2, 4)).sum().backward()
        shapes.append(model[0].weight.grad.shape == (6, 4))
    return shapes


def test_each_model_may_have_a_mesh_of_its_own_that_is_equal() -> None:
    assert run_threads(annotate_two_models, 4) == [[True, True]] * 4
