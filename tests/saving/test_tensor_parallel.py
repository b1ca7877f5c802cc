"""State in and out of fully sharded models that tensor parallelism has split over another mesh dim."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composable import (
    StateDictError,
    UsageError,
    full_state_dict,
    fully_shard,
    iter_full_params,
    load_checkpoint,
    load_full_params,
    load_full_state_dict,
    load_safetensors,
    rebind_optimizer,
    replicate,
    save_checkpoint,
    save_safetensors,
    unannotate,
)
from tests.counting import counting_ranks
from tests.models import seeded
from tests.test_tensor_parallel import (
    Block,
    Model,
    annotated,
    batch,
    data_mesh,
    data_rank,
    data_size,
    full,
    loss_at,
    mesh_of,
    split,
)
from tests.world import on_ranks, run_threads

Sizes = tuple[int, ...]


def ranks_in(sizes: Sizes) -> int:
    return int(torch.Size(sizes).numel())


def plain(seed: int = 0) -> nn.Module:
    return seeded(Model, seed)


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: full(param).detach() for fqn, param in model.named_parameters()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        fqn: {key: full(value) for key, value in optimizer.state[param].items()}
        for fqn, param in model.named_parameters()
    }


def same(got: Any, expected: Any) -> None:
    assert list(got) == list(expected)
    torch.testing.assert_close(dict(got), dict(expected), rtol=0, atol=0)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# -- full values


def gather_and_load_at_last(numel: int) -> None:
    mesh = mesh_of(2, 2)
    model = nn.ModuleList(nn.Linear(numel, 1, bias=False) for _ in range(4))
    for index, layer in enumerate(model[:3]):
        placement = Shard(1) if index < 2 else Replicate()
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [placement]))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    state = full_state_dict(model, dst=3)
    load_full_state_dict(model, state if dist.get_rank() == 3 else None, src=3)


def test_elements_travel_no_further_than_they_have_to() -> None:
    numel = 2**16
    with counting_ranks() as counts:  # of all ranks, which are threads
        run_threads(gather_and_load_at_last, 4, numel)
    # Out: half of each to its column's taker, of two layers in both columns, whose blocks then join. In: a block of the
    # split ones and all of the others to the other column; half of each to the other rank, in both columns.
    out = 2 * (numel // 2 + numel // 2) + 2 * numel // 2
    back = 2 * numel // 2 + 2 * numel + 2 * numel // 2 + 2 * numel
    assert counts["bytes"] == 4 * (out + back)


def go_in_and_out(sizes: Sizes) -> None:
    mesh = mesh_of(*sizes)
    model, expected, last = annotated(mesh), params_of(plain()), mesh.size() - 1
    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == last
    same(dict(iter_full_params(model, rank0_only=True)), expected if is_first else dict.fromkeys(expected))
    halves = {fqn: value.bfloat16() for fqn, value in expected.items()}
    for rank0_only in (False, True):
        found = dict(iter_full_params(model, rank0_only=rank0_only, dtype=torch.bfloat16))
        same(found, halves if is_first or not rank0_only else dict.fromkeys(halves))
    load_full_params(model, plain(2).double().named_parameters() if is_last else None, src=last)
    same(params_of(model), params_of(plain(2)))
    with torch.device("meta"):
        model = Model()
    fully_shard(split(model, mesh["tp"]), mesh=data_mesh(mesh), policy={Block})
    load_full_state_dict(model, plain(3).state_dict() if is_last else None, src=last)
    same(params_of(model), params_of(plain(3)))
    loss_at(model, 0, 0).backward()


@pytest.mark.parametrize("sizes", [(1, 3), (2, 1, 2)])
def test_whole_values_come_once_and_those_of_one_rank_are_cut_over_all_and_a_meta_model(sizes: Sizes) -> None:
    run_threads(go_in_and_out, ranks_in(sizes), sizes)


def go_in_and_out_in_batches() -> None:
    mesh = mesh_of(1, 2)
    torch.manual_seed(0)
    # The block of the first is 400 bytes here and none there; the others fit into a batch of 400, or do not.
    model = nn.ModuleList([nn.Linear(100, 1, bias=False), *(nn.Linear(1, size, bias=False) for size in (40, 50, 9))])
    expected = copy.deepcopy(model.state_dict())
    for layer in model:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
        fully_shard(layer, mesh=mesh["dp"])
    same(dict(iter_full_params(model)), expected)
    last = dist.get_rank() == 1
    same(full_state_dict(model, dst=1), expected if last else {})
    doubled = {key: 2 * value for key, value in expected.items()}
    load_full_state_dict(model, doubled if last else None, src=1)
    same(dict(iter_full_params(model)), doubled)


def test_ranks_with_larger_blocks_take_no_larger_batches() -> None:
    with mock.patch("composable.saving.entries._LEAST_BATCH_BYTES", 1):
        run_threads(go_in_and_out_in_batches, 2)


@on_ranks(4)
def test_replicated_models_count_the_same_ranks() -> None:
    mesh = mesh_of(2, 2)
    model = replicate(split(plain(), mesh["tp"]), mesh=mesh["dp"])
    same(full_state_dict(model, dst=3), plain().state_dict() if dist.get_rank() == 3 else {})
    load_full_state_dict(model, plain(1).state_dict() if dist.get_rank() == 1 else None, src=1)
    same(params_of(model), params_of(plain(1)))


def write_weights(folder: str) -> None:
    mesh = mesh_of(2, 2)
    save_safetensors(annotated(mesh), folder, max_shard_bytes=200)
    model = fully_shard(split(plain(1), mesh["tp"]), mesh=mesh["dp"])
    load_safetensors(model, folder)
    same(params_of(model), params_of(plain()))


def test_safetensors_files_hold_whole_values_once(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    run_threads(write_weights, 4, str(tmp_path / "weights"))
    found: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "weights").glob("*.safetensors")):
        held = safetensors.load_file(file)
        assert not held.keys() & found.keys()
        found |= held
    torch.testing.assert_close(found, params_of(plain()), rtol=0, atol=0)


# -- what does not fit


def load_misfit(folder: Path, call: str) -> str:
    model = annotated(mesh_of(2, 2))
    state = plain(1).state_dict()
    # Of the shape of a block: of the wrong one for the whole.
    state["blocks.1.up.weight"] = state["blocks.1.up.weight"][:4]
    calls: dict[str, Callable[[], Any]] = {
        "load_full_state_dict": lambda: load_full_state_dict(model, state if dist.get_rank() == 0 else None),
        "load_state_dict": lambda: model.load_state_dict(state),
        "set_model_state_dict": lambda: set_model_state_dict(
            model, state, options=StateDictOptions(full_state_dict=True)
        ),
        "load_checkpoint": lambda: load_checkpoint(folder, model),
    }
    with pytest.raises(StateDictError) as caught:
        calls[call]()
    same(params_of(model), params_of(plain()))
    return caught.value.what


@pytest.mark.parametrize("call", ["load_full_state_dict", "load_state_dict", "set_model_state_dict", "load_checkpoint"])
def test_a_wrong_global_shape_is_named_on_every_rank_and_nothing_is_loaded(call: str, tmp_path: Path) -> None:
    smaller = plain(1)
    smaller.blocks[1].up.weight = nn.Parameter(torch.ones(4, 6))
    save_checkpoint(tmp_path, 1, smaller)
    texts = run_threads(load_misfit, 4, tmp_path, call)
    assert texts == [
        f"the {'checkpoint' if call == 'load_checkpoint' else 'state dict'} does not fit the model, and nothing was "
        "loaded\n"
        "    Not alike: blocks.1.up.weight has shape [4, 6], not [7, 6]"
    ] * len(texts)


# -- torch's own functions


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """Return a model after two steps, and what one process has."""
    model = annotated(mesh)
    optimizer = adamw(model)
    for step in range(2):
        loss_at(model, step, data_rank(mesh)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, *trained_plain(data_size(mesh))


def trained_plain(size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain()
    optimizer = adamw(model)
    for step in range(2):
        for rank in range(size):
            (loss_at(model, step, rank) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def use_full_states(sizes: Sizes) -> None:
    mesh = mesh_of(*sizes)
    model, optimizer, alone, alone_optimizer = trained(mesh)
    expected = get_model_state_dict(alone), get_optimizer_state_dict(alone, alone_optimizer)
    for offloads in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offloads)
        state = get_model_state_dict(model, options=options)
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
        if offloads and dist.get_rank():
            assert not state
            assert not optimizer_state
        else:
            close(dict(state), dict(expected[0]))
            close(optimizer_state["state"], expected[1]["state"])
    options = StateDictOptions(full_state_dict=True)
    other = annotated(mesh)
    other_optimizer = adamw(other)
    set_model_state_dict(other, copy.deepcopy(expected[0]), options=options)
    for from_first in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        given = copy.deepcopy(expected[1]) if not from_first or dist.get_rank() == 0 else {}
        set_optimizer_state_dict(other, other_optimizer, given, options=options)
        same(state_of(other, other_optimizer), state_of(alone, alone_optimizer))
    same(params_of(other), params_of(alone))


def test_torchs_full_state_dicts_are_those_of_one_process() -> None:
    run_threads(use_full_states, 4, (2, 1, 2))


# -- checkpoints


def build(kind: str, sizes: Sizes, seed: int) -> nn.Module:
    """Return a model: ``sharded`` over data and tensor ranks, ``replicated`` over data ranks, ``split`` only, ``plain``."""
    if kind == "plain":
        return plain(seed)
    mesh = mesh_of(*sizes)
    model = split(plain(seed), mesh["tp"])
    if kind == "sharded":
        return fully_shard(model, mesh=data_mesh(mesh), policy={Block})
    return replicate(model, mesh=mesh["dp"]) if kind == "replicated" else model


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Step with the same batch on all ranks."""
    model(batch(step, 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_run(folder: str, kind: str, sizes: Sizes) -> None:
    model = build(kind, sizes, 0)
    optimizer = adamw(model)
    step_once(model, optimizer, 0)
    handle = save_checkpoint(folder, 1, model, optimizer, asynchronous=kind == "sharded")
    step_once(model, optimizer, 1)
    handle.wait()


def load_run(folder: str, kind: str, sizes: Sizes) -> None:
    model, alone = build(kind, sizes, 1), plain()
    optimizer, alone_optimizer = adamw(model), adamw(alone)
    step_once(alone, alone_optimizer, 0)
    load_checkpoint(folder, model, optimizer)
    close(params_of(model), params_of(alone))
    close(state_of(model, optimizer), state_of(alone, alone_optimizer))
    step_once(model, optimizer, 2)
    step_once(alone, alone_optimizer, 2)
    close(params_of(model), params_of(alone))


def check_stored_once(folder: Path, numel: int) -> None:
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key: entry for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
    assert all(sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel() for entry in tensors.values())
    assert sum(entry.size.numel() for key, entry in tensors.items() if key.startswith("model.")) == numel


@pytest.mark.parametrize(
    ("kind", "sizes"), [("sharded", (2, 1, 2)), ("replicated", (2, 2)), ("split", (1, 2)), ("plain", (1, 1))]
)
def test_checkpoints_move_between_meshes_and_ways_of_sharding(kind: str, sizes: Sizes, tmp_path: Path) -> None:
    run_threads(save_run, ranks_in(sizes), str(tmp_path), kind, sizes)
    for other, its_sizes in [("sharded", (1, 3)), ("plain", (1, 1))]:
        run_threads(load_run, ranks_in(its_sizes), str(tmp_path), other, its_sizes)
    check_stored_once(tmp_path / "step-000001", sum(value.numel() for value in plain().state_dict().values()))


@on_ranks(4)
def test_optimizer_state_of_blocks_does_not_follow_into_an_annotation_or_out_of_it() -> None:
    mesh = mesh_of(2, 2)
    model = split(plain(), mesh["tp"])
    stepped, fresh = adamw(model), adamw(model)
    step_once(model, stepped, 0)
    fully_shard(model, mesh=mesh["dp"], policy={Block})
    with pytest.raises(UsageError, match=r"is placed \(Shard\(dim=0\),\), its parameter"):
        rebind_optimizer(stepped, model)
    rebind_optimizer(fresh, model)
    step_once(model, fresh, 1)
    unannotate(model)
    with pytest.raises(UsageError, match="its parameter"):
        rebind_optimizer(fresh, model)


# -- random models on random meshes


class Holder(nn.Module):
    """Parameters, and nothing that computes with them."""

    def forward(self) -> None:
        pass


Case = list[tuple[list[int], list[int | None] | None, torch.dtype, bool]]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
DIM_NAMES = [("dp", "tp"), ("tp", "dp"), ("replicate", "dp", "tp"), ("dp", "a", "b"), ("a", "dp", "b")]


def random_case(rng: random.Random, kind: str) -> Case:
    """Return shape, dim split over each mesh dim (``None``: a plain parameter), dtype and place of each parameter."""
    case: Case = [([5, 3], [0, 1], torch.float32, True)]
    for _ in range(rng.randint(1, 6)):
        # Adafactor divides by the number of elements.
        can_be_empty = kind != "Adafactor" and rng.random() < 0.1
        shape = [rng.randint(0 if can_be_empty else 1, 9) for _ in range(rng.randint(0, 3))]
        splits = [rng.choice([None, *range(len(shape))]) for _ in range(2)] if rng.random() < 0.6 else None
        case.append((shape, splits, rng.choice(DTYPES), rng.random() < 0.5))
    rng.shuffle(case)
    return case


def random_mesh(rng: random.Random) -> tuple[tuple[str, ...], Sizes]:
    names = rng.choice(DIM_NAMES)
    while True:
        sizes = tuple(rng.randint(1, 3) for _ in names)
        if ranks_in(sizes) <= 6:
            return names, sizes


def hold(case: Case, seed: int, mesh: DeviceMesh | None = None) -> nn.Module:
    """Return a model with the parameters of a case; on a mesh, split and sharded."""
    model = Holder()
    model.below = Holder()
    generator = torch.Generator().manual_seed(seed)
    for index, (shape, splits, dtype, is_below) in enumerate(case):
        value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        if mesh is not None and splits is not None:
            over = mesh[tuple(name for name in mesh.mesh_dim_names or () if name not in ("dp", "replicate"))]
            placements = [Replicate() if dim is None else Shard(dim) for dim in splits[: over.ndim]]
            value = distribute_tensor(value, over, placements)
        owner = model.below if is_below else model
        owner.register_parameter(f"p{index}", nn.Parameter(value))
    if mesh is None:
        return model
    names = ("replicate", "dp") if "replicate" in (mesh.mesh_dim_names or ()) else ("dp",)
    if any(True for _ in model.below.parameters()):
        fully_shard(model.below, mesh=mesh[names])
    return fully_shard(model, mesh=mesh[names])


def step_with_random_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Step all but bfloat16, in which pieces may be rounded in another way, and which so has no state."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        if param.dtype != torch.bfloat16:
            param.grad = torch.zeros_like(param.detach()).copy_(grad)
    optimizer.step()


def twins(case: Case, names: tuple[str, ...], sizes: Sizes, seed: int, kind: str) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model, alone = hold(case, seed, mesh), hold(case, 0)
    make = getattr(torch.optim, kind)
    return model, make(model.parameters(), lr=0.1), alone, make(alone.parameters(), lr=0.1)


def save_case(case: Case, names: tuple[str, ...], sizes: Sizes, folder: str, kind: str, dst: int) -> None:
    model, optimizer, alone, alone_optimizer = twins(case, names, sizes, 0, kind)
    for step in range(2):
        step_with_random_gradients(model, optimizer, step)
        step_with_random_gradients(alone, alone_optimizer, step)
    is_taker = dist.get_rank() == dst % ranks_in(sizes)
    state = full_state_dict(model, dst=dst % ranks_in(sizes))
    close(dict(state), dict(alone.state_dict()) if is_taker else {})
    close(dict(iter_full_params(model)), params_of(alone))
    save_checkpoint(folder, 2, model, optimizer)
    other = hold(case, 1)
    load_full_state_dict(model, other.state_dict() if is_taker else None, src=dst % ranks_in(sizes))
    same(params_of(model), params_of(other))


def load_case(case: Case, names: tuple[str, ...], sizes: Sizes, folder: str, kind: str) -> None:
    model, optimizer, alone, alone_optimizer = twins(case, names, sizes, 1, kind)
    load_checkpoint(folder, model, optimizer)
    for step in range(3):
        step_with_random_gradients(alone, alone_optimizer, step)
    step_with_random_gradients(model, optimizer, 2)
    close(params_of(model), params_of(alone))
    close(state_of(model, optimizer), state_of(alone, alone_optimizer))


@pytest.mark.parametrize("seed", range(3))
def test_random_models_go_from_mesh_to_mesh(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    kind = rng.choice(["AdamW", "SGD", "Adafactor"])
    case = random_case(rng, kind)
    first, second = random_mesh(rng), random_mesh(rng)
    run_threads(save_case, ranks_in(first[1]), case, *first, str(tmp_path), kind, rng.randrange(6))
    check_stored_once(tmp_path / "step-000002", sum(int(torch.Size(shape).numel()) for shape, *_ in case))
    run_threads(load_case, ranks_in(second[1]), case, *second, str(tmp_path), kind)


def test_copies_that_are_cut_differently_are_stored_once(tmp_path: Path) -> None:
    # Blocks of 4 and of 3 elements before a plain parameter move its cut.
    case: Case = [([7, 8], [0, None], torch.float32, False), ([7, 9], None, torch.float32, False)]
    case.append(([9], [None, None], torch.float32, False))
    run_threads(save_case, 4, case, ("dp", "tp"), (2, 2), str(tmp_path), "AdamW", 0)
    check_stored_once(tmp_path / "step-000002", 7 * 8 + 7 * 9 + 9)
    run_threads(load_case, 3, case, ("dp", "tp"), (1, 3), str(tmp_path), "AdamW")
