"""Parameters whose memory is not in the order of their dims, such as ``channels_last``: they keep it, as do gradients."""

import copy
import itertools
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from composable import (
    DesyncError,
    accelerate_optimizer,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    load_full_state_dict,
    load_safetensors,
    plan,
    save_checkpoint,
    save_safetensors,
    unannotate,
    unshard_params,
)
from composable.dtensor.spec import ragged_spec
from composable.planning.layout import RaggedShard, order_of
from tests.ragged_pairs import from_full
from tests.world import on_ranks, run_ranks, run_threads


def make_model() -> nn.Sequential:
    """Return a model with parameters of three orders: rows, channels last, columns."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 5, 3), nn.Flatten(), nn.Linear(20, 3)
    ).to(memory_format=torch.channels_last)
    model[4].weight = nn.Parameter(model[4].weight.detach().t().contiguous().t())
    return model


def batch(rank: int) -> torch.Tensor:
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(rank))
    return images.to(memory_format=torch.channels_last)


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [param.stride() for param in model.parameters()]


def grads_of(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters()]


@on_ranks(3, mode=["plain", "accelerated"])
def test_training_keeps_the_memory_format_of_values_and_gradients(mode: str) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    plain = make_model()
    model = fully_shard(copy.deepcopy(plain), policy={nn.Conv2d})
    assert strides(model) == strides(plain)
    seen: list[tuple[int, ...]] = []
    conv: Any = model[2]
    inner = conv._conv_forward

    def look(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        seen.append(weight.stride())
        return inner(x, weight, bias)

    conv._conv_forward = look
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (plain, model)]
    if mode != "plain":
        accelerate_optimizer(optimizers[1], model)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(torch.cat([batch(other) for other in range(world_size)])).square().mean().backward()
        model(batch(rank)).square().mean().backward()
        for found, expected in zip(grads_of(model), grads_of(plain), strict=True):
            full = found.full_tensor()
            assert full.stride() == found.stride() == expected.stride()
            torch.testing.assert_close(full, expected)
        for optimizer in optimizers:
            optimizer.step()
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        full = sharded.full_tensor()  # type: ignore[operator]
        assert full.stride() == whole.stride()
        torch.testing.assert_close(full, whole, rtol=1e-3, atol=1e-4)
        # State is of the same elements as its parameter.
        if mode == "plain":
            average = optimizers[1].state[sharded]["exp_avg"].full_tensor()
            torch.testing.assert_close(average, optimizers[0].state[whole]["exp_avg"], rtol=1e-3, atol=1e-6)
    assert set(seen) == {plain[2].weight.stride()}  # type: ignore[union-attr, operator]
    with unshard_params(model):
        assert strides(model) == strides(plain)
    unannotate(model)
    assert strides(model) == strides(plain) and type(model[2].weight) is nn.Parameter


# -- values out of the shards and into them


@on_ranks(3, run=run_ranks)
def test_what_lies_one_way_is_loaded_into_what_lies_another_way(tmp_path: Path) -> None:
    plain = make_model()
    rows = make_model().to(memory_format=torch.contiguous_format)
    rows[4].weight = nn.Parameter(rows[4].weight.detach().contiguous())
    for param in rows.parameters():
        nn.init.zeros_(param)
    path = Path(tmp_path)
    for source, target in ((plain, rows), (rows, plain)):
        # There and back: what lies one way is saved, and loaded into what lies another way.
        for param in source.parameters():
            nn.init.uniform_(param, generator=torch.Generator().manual_seed(3))
        saved = fully_shard(copy.deepcopy(source))
        values = full_state_dict(saved)
        if dist.get_rank() == 0:
            assert values is not None
            assert all(values[key].stride() == value.stride() for key, value in source.state_dict().items())
            assert all(torch.equal(values[key], value) for key, value in source.state_dict().items())
        save_safetensors(saved, path / "weights.safetensors")
        save_checkpoint(path, 1 + (source is rows), saved)
        for load in (
            lambda model, values=values: load_full_state_dict(model, values),
            lambda model: load_safetensors(model, path / "weights.safetensors"),
            lambda model: load_checkpoint(path, model),
            lambda model, source=source: model.load_state_dict(source.state_dict()),
        ):
            model = fully_shard(copy.deepcopy(target))
            load(model)
            assert strides(model) == strides(target)
            for name, param in model.named_parameters():
                assert torch.equal(param.full_tensor(), source.get_parameter(name))  # type: ignore[operator]


@on_ranks(2)
def test_a_model_on_meta_gets_memory_of_its_format() -> None:
    expected = make_model()
    model = fully_shard(make_model().to("meta"))
    model.to_empty(device="cpu")
    load_full_state_dict(model, expected.state_dict())
    assert strides(model) == strides(expected)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected.get_parameter(name))  # type: ignore[operator]
    twin = copy.deepcopy(model)
    assert torch.equal(twin[2].weight.full_tensor(), expected[2].weight) and strides(twin) == strides(model)


def disagree() -> str:
    model = make_model() if dist.get_rank() == 0 else make_model().to(memory_format=torch.contiguous_format)
    with pytest.raises(DesyncError) as caught:
        fully_shard(model)(batch(0))
    return str(caught.value)


def test_ranks_with_other_formats_are_told() -> None:
    assert "the ranks annotated different plans" in run_threads(disagree, 2)[0]


# -- random orders


def draw_tensor(dice: random.Random) -> torch.Tensor:
    shape = [dice.choice([1, 2, 3, 5]) for _ in range(dice.randint(2, 4))]
    order = dice.sample(range(len(shape)), len(shape))
    numel = torch.Size(shape).numel()
    values = torch.randn(numel, generator=torch.Generator().manual_seed(dice.randrange(1000)))
    flat = values.view([shape[dim] for dim in order])
    return flat.permute(sorted(range(len(shape)), key=order.__getitem__))


@on_ranks(3)
def test_tensors_of_any_order_behave_as_plain_ones() -> None:
    dice = random.Random(0)
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    for _ in range(15):
        plain = draw_tensor(dice)
        inner = sorted(dice.choices(range(plain.numel() + 1), k=world_size - 1))
        spec = ragged_spec(mesh, plain.shape, plain.dtype, (0, *inner, plain.numel()), order=order_of(plain))
        ragged = from_full(plain, spec)
        row = torch.randn(plain.shape[-1], generator=torch.Generator().manual_seed(1))
        again = pickle.loads(pickle.dumps(ragged._spec))
        assert again == spec and again.layout.matches(spec.layout)
        cut = distribute_tensor(plain, mesh, ragged.placements)
        assert cut._spec.layout.matches(spec.layout)
        for found, expected in (
            (ragged, plain),
            (cut, plain),
            (ragged * 2 + cut, plain * 3),
            (ragged + row, plain + row),
            (ragged.sum(0), plain.sum(0)),
            (ragged[0], plain[0]),
            (ragged.norm(), plain.norm()),
            (torch.linalg.vector_norm(ragged, dim=-1), torch.linalg.vector_norm(plain, dim=-1)),
            (ragged.clone(memory_format=torch.contiguous_format).view(-1), plain.reshape(-1)),
            (torch.zeros_like(ragged).copy_(plain), plain),
            (ragged.transpose(0, 1).contiguous(), plain.transpose(0, 1)),
        ):
            torch.testing.assert_close(found.full_tensor(), expected, check_stride=False)
        for tensor in (ragged, cut):
            assert tensor.full_tensor().stride() == tensor.stride() == plain.stride() or 1 in plain.shape
        changed, expected = ragged.clone(), plain.clone()
        for one in (changed, expected):
            one[0].fill_(7.0)
            torch.manual_seed(4)
            one[-1:].mul_(2.0)
        assert torch.equal(changed.full_tensor(), expected)
        for one in (changed, expected):
            torch.manual_seed(4)
            one.normal_()
        assert torch.equal(changed.full_tensor(), expected)


def test_a_placement_names_its_order_and_differs_by_it() -> None:
    placement = RaggedShard((0, 8, 16), (0, 2, 3, 1))
    assert repr(placement) == "RaggedShard(bounds=(0, 8, 16), order=(0, 2, 3, 1))"
    assert placement != RaggedShard((0, 8, 16)) and pickle.loads(pickle.dumps(placement)) == placement
    with pytest.raises(ValueError, match="order is"):
        RaggedShard((0, 8, 16), (0, 2))


def test_a_promise_to_cut_between_rows_comes_before_the_memory_format() -> None:
    linear = nn.Linear(6, 4, bias=False)
    linear.weight = nn.Parameter(torch.zeros(6, 4).t())
    for align, order in itertools.product([{}, {"weight": 2}], [(1, 0)]):
        span = plan(linear, world_size=2, align=align).handles[0].buffers[0].layout.spans[0]
        assert span.order == (() if align else order)
