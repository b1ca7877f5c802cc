"""A copy that follows by ``apply_changes`` has the bits of the model, and only what has changed travels."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable import (
    ConfigError,
    DataParallelMeshDims,
    StateDictError,
    apply_changes,
    changed_params,
    full_state_dict,
    fully_shard,
    replicate,
)
from tests.models import MODELS
from tests.programs import Twins
from tests.world import on_ranks, run_threads


class Counted(nn.Module):
    """A tied embedding, a buffer that changes, one whole number, and a weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6)
        self.block = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 40, bias=False)
        self.out.weight = self.words.weight
        self.nothing = nn.Parameter(torch.empty(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.block(self.words(x)).relu()) + self.nothing.sum())  # type: ignore[no-any-return]


def loss_of_words(model: Any, number: int, rank: int) -> torch.Tensor:
    words = torch.arange(8).add(13 * number + rank).remainder(40)
    return nn.functional.cross_entropy(model(words), words.roll(1))


def split(model: Counted) -> None:
    """Split the block over tensor parallel ranks, one by rows and one by columns, and shard it over the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    weight, bias = (distribute_tensor(one.detach(), mesh["tp"], [Shard(0)]) for one in model.block.parameters())
    model.block.weight, model.block.bias = nn.Parameter(weight), nn.Parameter(bias)
    fully_shard(model, policy={nn.Linear}, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))


def halves() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))


WAYS: dict[str, Callable[[Any], object]] = {
    "fully_shard": lambda model: fully_shard(model, policy={nn.Linear}),
    "kept whole": lambda model: fully_shard(model, policy={nn.BatchNorm1d}, reshard_after_forward=False),
    "copies of shards": lambda model: fully_shard(model, policy={nn.Linear}, strategy="HYBRID_SHARD", mesh=halves()),
    "replicate": replicate,
    "nested": lambda model: (replicate(model.block), fully_shard(model)),
}


def sent(changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes as another process gets them."""
    file = io.BytesIO()
    torch.save(changes, file)
    file.seek(0)
    received: dict[str, Any] = torch.load(file, weights_only=True)
    return received


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def follow(way: str, dtype: torch.dtype | None, rate: float) -> list[int]:
    """Train; return how many elements have changed, and how many travelled, in each call."""
    twins = Twins(Counted, WAYS[way], make=lambda params: torch.optim.AdamW(params, lr=rate), loss=loss_of_words)
    dst = dist.get_world_size() - 1
    copy, changed = (
        full_state_dict(twins.model, dtype=dtype, dst=dst),
        changed_params(twins.model, dtype=dtype, dst=dst),
    )
    counts = []
    for number in range(12):
        twins.backward(number)
        twins.step()
        if number % 3 == 2:
            changes, before = sent(changed()), {name: value.clone() for name, value in copy.items()}
            expected = full_state_dict(twins.model, dtype=dtype, dst=dst)
            assert bool(changes) == (dist.get_rank() == dst)
            if changes:
                apply_changes(copy, changes)
                assert all(torch.equal(bits(copy[name]), bits(expected[name])) for name in expected)
                names = {name for one in changes.values() for name in one["names"][:1]}
                counts += [
                    sum(int((before[name] != copy[name]).sum()) for name in names),
                    sum(len(one["values"]) + len(one["range_values"]) for one in changes.values()),
                ]
    return counts


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("world_size", "way"),
    [(size, way) for size in (1, 2, 3, 4) for way in WAYS if way != "copies of shards" or size % 2 == 0],
)
def test_a_copy_that_follows_has_the_bits_of_the_model(world_size: int, way: str, dtype: torch.dtype | None) -> None:
    run_threads(follow, world_size, way, dtype, 1e-2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_small_steps_in_bfloat16_travel_as_what_they_change(world_size: int) -> None:
    counts = run_threads(follow, world_size, "fully_shard", torch.bfloat16, 1e-5)[-1]
    changed, travelled = sum(counts[::2]), sum(counts[1::2])
    assert 0 < changed == travelled < 4 * 100  # of 4 times 324 elements


@on_ranks(4)
def test_what_tensor_parallelism_has_split_is_given_by_the_ranks_that_have_it() -> None:
    twins = Twins(Counted, split, loss=loss_of_words)
    copy, changed = full_state_dict(twins.model), changed_params(twins.model)
    for scale in (1.5, 0.0):
        with torch.no_grad():
            for param in twins.model.parameters():
                param.mul_(scale)
        changes, expected = changed(), full_state_dict(twins.model)
        if changes:
            apply_changes(copy, changes)
            assert all(torch.equal(bits(copy[name]), bits(expected[name])) for name in expected)


@on_ranks(2)
def test_a_shard_that_changed_nearly_everywhere_travels_as_a_range() -> None:
    model: Any = fully_shard(nn.Linear(64, 64, bias=False))
    changed = changed_params(model)
    with torch.no_grad():
        model.weight += 1
    one = changed().get("weight")
    if one is not None:
        assert one["ranges"].tolist() == [[0, 2048], [2048, 2048]] and len(one["range_values"]) == 4096
    with torch.no_grad():
        model.weight.to_local().view(-1)[:3] += 1
    one = changed().get("weight")
    if one is not None:
        assert one["positions"].tolist() == [0, 1, 2, 2048, 2049, 2050] and one["positions"].dtype == torch.int32
        assert not len(one["ranges"])
    assert all(not len(one["values"]) and not len(one["range_values"]) for one in changed().values())
    assert changed.nbytes == 2048 * 4


class Images(nn.Module):
    """A layer whose weight lies in memory in another order than its dims."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has it

    def example_inputs(self, seed: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
        return (torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed)),), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


@on_ranks(3, name=[*MODELS, Images])
def test_any_model_is_followed(name: Any) -> None:
    twins = Twins(name, lambda model: fully_shard(model, policy={nn.Linear, nn.Conv2d}))
    copy, changed = full_state_dict(twins.model), changed_params(twins.model)
    twins.backward()
    twins.step()
    changes, expected = changed(), full_state_dict(twins.model)
    if changes:
        apply_changes(copy, changes)
        assert all(torch.equal(bits(copy[name]), bits(expected[name])) for name in expected)


@on_ranks(2)
def test_what_cannot_follow_is_told_with_its_names() -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    copy, changed = full_state_dict(model), changed_params(model)
    with torch.no_grad():
        model[1].bias += 1
    left_out = changed()
    with torch.no_grad():
        model[0].bias += 1
    changes = changed()
    if not changes:
        return
    with pytest.raises(StateDictError, match=r"other values than the model's, after the changes: '1\.bias'"):
        apply_changes(copy, changes)
    apply_changes(copy, left_out | {"0.bias": changes["0.bias"]})
    for wrong in (
        {},
        {name: value.half() for name, value in copy.items()},
        {name: value[:1] for name, value in copy.items()},
    ):
        with pytest.raises(
            StateDictError, match=r"no tensors of the names, shapes and dtypes of the changes: '0\.weight'"
        ):
            apply_changes(wrong, changes)
    with pytest.raises(ConfigError, match="changes is or holds 3"):
        apply_changes(copy, {"0.bias": 3})


@on_ranks(2)
def test_ranks_that_ask_for_other_changes_are_an_error_on_all() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="dst is 2"):
        changed_params(model, dst=2)
    with pytest.raises(ConfigError, match=r"dtype is torch\.int8"):
        changed_params(model, dtype=torch.int8)
