"""Parameters in flat buffers of bytes, against the plain model."""

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable import (
    BucketLayout,
    ConfigError,
    full_state_dict,
    fully_shard,
    iter_full_params,
    load_safetensors,
    replicate,
    save_safetensors,
)
from composable.saving.entries import largest_handle_bytes
from composable.saving.full_values import plan_buckets
from tests.live_bytes import LiveBytes
from tests.models import Block, TinyGPT, make_model, random_tokens, seeded
from tests.saving.test_selection import bits
from tests.storage.test_memory_format import make_model as make_model_in_other_orders
from tests.world import run_ranks, run_threads

# -- planning: no tensors


def test_a_layout_makes_views_of_bytes_and_can_be_pickled() -> None:
    shapes = [("a", torch.float32, torch.Size([2])), ("flag", torch.bool, torch.Size([1, 3]))]
    (layout,) = plan_buckets(shapes, 1000)
    assert pickle.loads(pickle.dumps(layout)) == layout
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(buffer)
    views["a"].copy_(torch.tensor([1.5, -2.0]))
    views["flag"][0, 1] = True
    assert bits(layout.views(buffer.clone())["a"]) == bits(torch.tensor([1.5, -2.0]))
    assert views["flag"].tolist() == [[False, True, False]] and buffer[65] == 1
    # A receiver may use one buffer again and again.
    larger = torch.zeros(1000, dtype=torch.uint8)
    larger[16 : 16 + layout.nbytes].copy_(buffer)
    assert bits(layout.views(larger[16 : 16 + layout.nbytes])["a"]) == bits(views["a"])
    for wrong in (
        buffer[:-1],
        buffer.float(),
        buffer.view(1, -1),
        torch.zeros(2 * layout.nbytes, dtype=torch.uint8)[::2],
        larger[1 : 1 + layout.nbytes],
        None,
    ):
        with pytest.raises(ConfigError, match="buffer is not the 67 bytes of the bucket"):
            layout.views(wrong)  # type: ignore[arg-type]


# -- buckets of a sharded model


def pack_other_orders() -> None:
    plain = make_model_in_other_orders()
    model = fully_shard(make_model_in_other_orders())
    (bucket,) = iter_full_params(model, bucket_bytes=10**6)
    assert {fqn: bits(value) for fqn, value in bucket.tensors().items()} == {
        fqn: bits(value) for fqn, value in plain.named_parameters()
    }
    assert all(value.is_contiguous() for value in bucket.tensors().values())


def test_what_is_in_another_memory_order_arrives_in_rows() -> None:
    run_threads(pack_other_orders, 2)


def count_bytes() -> None:
    model = fully_shard(seeded(lambda: TinyGPT(vocab=64, dim=160, layers=3), 1), policy={Block})
    handle = largest_handle_bytes(model.parameters())
    assert handle > 2**20
    total = sum(param.numel() * 4 for param in model.parameters())
    for bucket_bytes in (200_000, 1_000_000):
        for rank0_only in (False, True):
            largest = 0
            with LiveBytes() as live:
                for bucket in iter_full_params(model, bucket_bytes=bucket_bytes, rank0_only=rank0_only):
                    largest = max(largest, bucket.layout.nbytes)
                    del bucket
            assert largest <= max(bucket_bytes, 4 * 160 * 160 * 4) and live.now == 0
            # What this rank sends is a part of the handle too.
            assert live.peak <= largest + handle < total, (live.peak, largest, handle)
            assert live.peak >= largest or rank0_only


def test_no_more_than_a_bucket_and_a_handle_is_allocated() -> None:
    run_threads(count_bytes, 2)


def serve(world_size: int) -> None:
    """Train on all ranks but the last one, which keeps a plain model in step with the others."""
    rank, last = dist.get_rank(), world_size - 1
    mesh = DeviceMesh("cpu", list(range(last)))
    plain = make_model("gpt_tied", 5 if rank == last else 1)
    tokens = random_tokens(0, 4, 8)
    if rank == last:
        while True:
            box: list[BucketLayout | None] = [None]
            dist.broadcast_object_list(box, src=0)
            layout = box[0]
            if layout is None:
                break
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
            dist.broadcast(buffer, src=0)
            for fqn, value in layout.views(buffer).items():
                plain.get_parameter(fqn).data.copy_(value)
        output = plain(tokens).detach()
    else:
        model = fully_shard(plain, mesh=mesh, policy={Block})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens).square().mean().backward()
        optimizer.step()
        for bucket in iter_full_params(model, bucket_bytes=4000):
            dist.broadcast_object_list([bucket.layout], src=0)
            assert bucket.buffer is not None
            dist.broadcast(bucket.buffer, src=0)
        dist.broadcast_object_list([None], src=0)
        output = model(tokens).detach()
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, output)
    assert bits(everyone[0]) == bits(everyone[last])
    assert not torch.equal(everyone[0], make_model("gpt_tied", 1)(tokens))


def test_a_generator_that_trains_nothing_follows_by_buckets() -> None:
    run_ranks(serve, 3, 3)


# -- random models, sizes and filters


class Leaf(nn.Module):
    """Parameters and buffers of random shapes and dtypes; is never run."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        for index in range(rng.randint(0, 4)):
            shape = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(rng.randint(0, 3))]
            dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
            param = nn.Parameter(torch.randn(shape).to(dtype), requires_grad=rng.random() < 0.7)
            setattr(self, f"p{index}", param)
        if rng.random() < 0.2:
            whole = torch.randint(-9, 9, (rng.randint(0, 4),), dtype=rng.choice([torch.int64, torch.int8]))
            self.whole = nn.Parameter(whole, requires_grad=False)
        if rng.random() < 0.4:
            self.register_buffer("count", torch.randint(0, 9, (2,)))
        if rng.random() < 0.3:
            self.register_buffer("running", torch.randn(3), persistent=rng.random() < 0.5)


def random_model(seed: int) -> nn.Module:
    """Return a tree of leaves, some of whose parameters are tied."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(*(Leaf(rng) for _ in range(rng.randint(1, 3)))) for _ in range(3)))
    model.append(Leaf(rng))
    model[0][0].kept = nn.Parameter(torch.randn(3, 2))
    leaves = [module for module in model.modules() if isinstance(module, Leaf)]
    for _ in range(rng.randint(0, 3)):
        source, target = rng.choice(leaves), rng.choice(leaves)
        if own := [name for name, _ in source.named_parameters()]:
            setattr(target, rng.choice(["p0", "tied"]), getattr(source, rng.choice(own)))
    return model


def annotate(model: nn.Module, rng: random.Random) -> None:
    """Replicate the model or shard it, with some parameters left alone."""
    way = rng.choice(["policy", "whole", "replicate"])
    if way == "replicate":
        replicate(model)
        return
    share = rng.choice([0, 0.2])
    ignored = [param for param in model.parameters() if rng.random() < share]
    fully_shard(model, policy={nn.Sequential} if way == "policy" else None, ignored_params=ignored)


def compare_with_plain(seed: int, folder: str) -> None:
    rng = random.Random(seed + 1000)
    plain, model, other = random_model(seed), random_model(seed), random_model(seed)
    with torch.no_grad():
        for tensor in [*other.parameters(), *other.buffers()]:
            tensor.add_(1)
    state, other_state = plain.state_dict(), {key: value.clone() for key, value in other.state_dict().items()}
    for one in (model, other):
        annotate(one, rng)
    keys = set(rng.sample(list(state), rng.randint(1, len(state)))) if rng.random() < 0.8 else set(state)
    names: Any = rng.choice([keys, keys.__contains__, sorted(keys)])
    # Each parameter once, by the first of its names that is wanted, in the order of the plain model.
    tensors = plain.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for fqn, value in tensors.items():
        if fqn in keys:
            first.setdefault(id(value), fqn)
    wanted = {first[id(param)]: param for param in plain.parameters() if id(param) in first}
    rank0_only = rng.random() < 0.3
    has_values = dist.get_rank() == 0 or not rank0_only
    options: Any = {"names": names, "rank0_only": rank0_only}
    pairs = list(iter_full_params(model, **options))
    assert [fqn for fqn, _ in pairs] == list(wanted)
    assert not has_values or all(bits(value) == bits(wanted[fqn]) for fqn, value in pairs)
    received: dict[str, torch.Tensor] = {}
    slots = []
    for bucket in iter_full_params(model, bucket_bytes=rng.choice([1, 64, 200, 1000, 10**6]), **options):
        slots += bucket.layout.slots
        assert (bucket.buffer is not None) is has_values
        if bucket.buffer is not None:
            # The same bytes everywhere, those between tensors too.
            everyone: list[Any] = [None] * (dist.get_world_size() if not rank0_only else 0)
            if everyone:
                dist.all_gather_object(everyone, bytes(bucket.buffer.tolist()))
                assert len(set(everyone)) == 1
            received |= pickle.loads(pickle.dumps(bucket.layout)).views(bucket.buffer.clone())
    assert [(slot.fqn, slot.shape, slot.dtype) for slot in slots] == [(f, p.shape, p.dtype) for f, p in wanted.items()]
    assert not has_values or {f: bits(v) for f, v in received.items()} == {f: bits(p) for f, p in wanted.items()}
    part = full_state_dict(model, names=names)
    assert list(part) == ([key for key in state if key in keys] if dist.get_rank() == 0 else [])
    assert all(bits(value) == bits(state[key]) for key, value in part.items())
    path = f"{folder}/part.safetensors"
    save_safetensors(model, path, names=names)
    load_safetensors(other, path, names=names)
    # Whoever shares a tensor with what was loaded has it too.
    loaded = {id(tensors[key]) for key in keys}
    for key, value in full_state_dict(other).items():
        assert bits(value) == bits((state if id(tensors[key]) in loaded else other_state)[key]), key


@pytest.mark.parametrize("seed", range(6))
def test_random_models_names_and_buckets_give_what_the_plain_model_has(seed: int, tmp_path: Path) -> None:
    run_threads(compare_with_plain, seed % 3 + 1, seed, str(tmp_path))
