"""Rehearsals: models of fake tensors train as one rank of many, with the collectives and the memory of real ranks."""

import functools
import gc
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    ConfigError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    UsageError,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reduce_gradients,
    replicate,
    timeline,
)
from composable.comm.transport import ProcessGroupTransport
from composable.rehearsal.rehearsed_function import rehearse, with_values
from tests.live_bytes import LiveBytes
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.world import on_ranks, run_threads

RANKS = 4
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module) in BLOCK_CLASSES]


def shard(model: nn.Module, **options: Any) -> None:
    fully_shard(model, policy=set(BLOCK_CLASSES) if blocks(model) else None, **options)


def shard_hybrid(model: nn.Module) -> None:
    with with_values():  # torch would make a mesh of fake numbers.
        mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    shard(model, mesh=mesh, strategy="HYBRID_SHARD")


def shard_over_hosts(model: nn.Module) -> None:
    shard(model, strategy="HYBRID_SHARD_ZERO2")


def shard_recomputed(model: nn.Module) -> None:
    for block in blocks(model):
        checkpoint(block)
    shard(model)


def nest(model: nn.Module) -> None:
    for block in [one for one in blocks(model) if all(param.requires_grad for param in one.parameters())][:1]:
        replicate(block, find_unused_parameters=True)
    fully_shard(model)


ANNOTATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "full shard": shard,
    "ZeRO 2": lambda model: shard(model, reshard_after_forward=False),
    "by parts": lambda model: shard(model, reshard_after_forward=2),
    "low precision": lambda model: shard(model, mp_policy=LOW),
    "offloaded": lambda model: shard(model, offload_policy=CPUOffloadPolicy()),
    "hybrid": shard_hybrid,
    "over hosts": shard_over_hosts,
    "recomputed": shard_recomputed,
    "replicated": replicate,
    "unused": lambda model: replicate(model, find_unused_parameters=True),
    "views": lambda model: replicate(model, gradient_as_bucket_view=True),
    "nested": nest,
}

# What tensors of one dtype want, and what ties and shared parts want.
NAMES = ["gpt_tied", "frozen_mixed", "mixed_dtypes", "called_twice"]
OF_ONE_DTYPE = ["mlp", "gpt", "gpt_tied", "tied_across"]


def train(name: str, annotation: str) -> Counter[tuple[int, str, str]]:
    """Return how often each row of the timeline gathered and reduced in each of three steps, one without averages."""
    model = make_model(name)
    ANNOTATIONS[annotation](model)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params)
    args, kwargs = model.example_inputs(0)
    with timeline(model) as times:
        for step in range(3):
            if step == 1:
                with no_sync(model):
                    loss_of(model(*args, **kwargs)).backward()
                reduce_gradients(model)
            else:
                loss_of(model(*args, **kwargs)).backward()
            clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.state_dict()
    optimizer.state_dict()
    return Counter((event.step, event.row, event.kind) for event in times.events if event.kind in {"gather", "reduce"})


def note(found: list[Counter[tuple[int, str, str]]], name: str, annotation: str) -> None:
    found.append(train(name, annotation))


@pytest.mark.parametrize("annotation", ANNOTATIONS)
def test_a_rehearsed_rank_gathers_and_reduces_as_a_real_one(annotation: str) -> None:
    for name in OF_ONE_DTYPE if annotation == "low precision" else NAMES:
        fake: list[Counter[tuple[int, str, str]]] = []
        rehearse(RANKS, functools.partial(note, fake, name, annotation), rank=1)
        assert fake == [run_threads(train, RANKS, name, annotation)[1]], name


# -- memory


def train_encoder(annotation: str, width: int = 64) -> None:
    layers = [nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, dropout=0.0) for _ in range(4)]
    model = nn.Sequential(*layers)
    if annotation == "recomputed":
        for layer in layers:
            checkpoint(layer)
    if annotation == "replicated":
        replicate(model)
    elif annotation != "plain":
        stays = annotation == "ZeRO 2"
        fully_shard(model, policy={nn.TransformerEncoderLayer}, reshard_after_forward=not stays)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 32, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def peak_of(annotation: str) -> int:
    with LiveBytes() as live:
        train_encoder(annotation)
    return live.peak


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("annotation", ["plain", "full shard", "ZeRO 2", "recomputed", "replicated"])
def test_the_peak_is_that_of_a_real_rank(annotation: str, ranks: int) -> None:
    fake = rehearse(ranks, lambda: train_encoder(annotation)).peak_bytes
    assert fake == pytest.approx(run_threads(peak_of, ranks, annotation)[0], rel=1e-3)


def test_parts_of_the_peak_are_told_with_the_module() -> None:
    numel = 4 * (64 * 192 + 192 + 64 * 64 + 64 + 2 * (64 * 128) + 128 + 64 + 4 * 64)
    found = rehearse(64, lambda: train_encoder("full shard"), rank=3, ranks_per_host=8)
    assert (found.rank, found.world_size) == (3, 64)
    assert found.peak_at == "backward of module '3' (TransformerEncoderLayer)"
    assert sum(found.parts.values()) == found.peak_bytes
    # Shard and state of this rank, two layers gathered.
    assert 3 * 4 * numel / 64 < found.parts["outside"] < 3 * 4 * numel / 64 + 2**12
    assert 4 * numel / 4 * 2 <= found.parts["gathered"] <= 4 * numel / 4 * 2 + 2**12
    assert str(found).startswith("rank 3 of 64: peak ") and "gathered" in str(found)
    plain = rehearse(1, lambda: train_encoder("plain"))
    assert plain.parts["outside"] >= 3 * 4 * numel and plain.peak_bytes > found.peak_bytes


def test_a_model_on_the_meta_device_takes_no_memory() -> None:
    def build() -> None:
        with torch.device("meta"):
            nn.Linear(512, 512)
        torch.zeros(16)

    assert rehearse(1, build).peak_bytes == 64


def test_hosts_are_those_that_are_asked_for() -> None:
    def train() -> None:
        model = make_model("gpt")
        fully_shard(model, strategy="HYBRID_SHARD")
        seen.append((os.environ["LOCAL_RANK"], local_numel(model)))

    seen: list[tuple[str, int]] = []
    rehearse(16, train, rank=5, ranks_per_host=4)
    rehearse(16, train, rank=5)
    total = sum(param.numel() for param in make_model("gpt").parameters())
    assert [rank for rank, _ in seen] == ["1", "5"] and "LOCAL_RANK" not in os.environ
    assert [round(total / numel) for _, numel in seen] == [4, 16]


def local_numel(model: nn.Module) -> int:
    local = [param.to_local() for param in model.parameters()]
    assert all(isinstance(one, FakeTensor) for one in local)
    return sum(one.numel() for one in local)


# -- errors


def test_a_value_that_is_wanted_is_named_with_its_line() -> None:
    def train() -> None:
        model = make_model("mlp")
        if loss_of(model(*model.example_inputs(0)[0])).item() > 0:  # this line
            raise AssertionError

    with pytest.raises(ConfigError, match=r"a fake tensor has no values[^\n]*\n.*test_rehearsal.py:\d+: .*# this line"):
        rehearse(2, train)
    assert not dist.is_initialized()


@pytest.mark.parametrize("annotate", [fully_shard, replicate])
def test_what_transports_keep_is_no_fake_tensor(annotate: Callable[[nn.Module], object]) -> None:
    # A random program that copied its model was ended by SIGSEGV when such a tensor was freed.
    kept: list[object] = []

    def train() -> None:
        model = nn.Linear(8, 8)
        annotate(model)
        model(torch.ones(2, 8)).sum().backward()
        # Not isinstance, which would run code of a proxy object.
        transports = [one for one in gc.get_objects() if issubclass(type(one), ProcessGroupTransport)]
        kept.extend(
            type(value) for one in transports for value in vars(one).values() if isinstance(value, torch.Tensor)
        )

    rehearse(2, train)
    assert kept and FakeTensor not in kept


def test_a_tensor_that_grows_is_counted() -> None:
    def run() -> None:
        one = torch.ones(2**10).resize_(2**12)
        one.untyped_storage().resize_(0)
        one.untyped_storage().resize_(4 * 2**13)

    assert rehearse(1, lambda: torch.ones(2**10).resize_(2**12)).peak_bytes == 4 * 2**12
    assert rehearse(1, run).peak_bytes == 4 * 2**13


def test_errors_of_the_function_are_its_own() -> None:
    def train() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rehearse(2, train)
    assert not dist.is_initialized() and "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": True}, "world_size is True"),
        ({"world_size": 2, "rank": 2}, "rank is 2, of 2 ranks"),
        ({"world_size": 2, "rank": -1}, "rank is -1"),
        ({"world_size": 2, "ranks_per_host": 0}, "ranks_per_host is 0"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rehearse(fn=lambda: None, **options)


@on_ranks(1)
def test_a_process_in_a_group_rehearses_nothing() -> None:
    with pytest.raises(UsageError, match="is initialised"):
        rehearse(2, lambda: None)
