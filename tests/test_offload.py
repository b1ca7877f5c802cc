"""Shards and gradients that rest on the host: what is asked for, what the plan says, and the copies on the way.

Without a device nothing rests elsewhere. So that the copying paths run all the same, tests let shards rest
in host memory of their own, apart from that of the buffers; which streams wait for which copies is held by
``tests/runtime/test_streams.py``, and what only a device shows by ``tests/test_cuda_offload.py``.
"""

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy

from composable import (
    ConfigError,
    CPUOffloadPolicy,
    DesyncError,
    MixedPrecisionPolicy,
    OffloadPolicy,
    accelerate_optimizer,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    no_sync,
    plan,
    save_checkpoint,
    unannotate,
    unshard_params,
)
from composable.engine import RestingPlace
from composable.engine.paths import CopyGather, PathHome
from tests.models import BLOCK_CLASSES, loss_of, make_model, random_input, seeded
from tests.parity import LR, Run, assert_equal_runs, full, full_params, inputs_of, train_annotated, train_reference
from tests.runtime.test_notices import recorded
from tests.world import run_threads

BF16, FP32 = torch.bfloat16, torch.float32
DIM = 8


@dataclass(frozen=True)
class CountingHome(RestingPlace):
    """Host memory apart from the buffers', which counts what comes to rest in it."""

    results: Any = None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.results.append(numel)
        return super().empty(numel, dtype)


def put_elsewhere(model: nn.Module) -> list[int]:
    """Let the shards of an annotated model that has not run yet rest elsewhere; returns what is copied back there."""
    results: list[int] = []
    home = CountingHome(torch.device("cpu"), is_elsewhere=True, results=results)
    for module in model.modules():
        state = fully_shard.state(module)
        for flat in [flat for handle in state._handles for flat in handle.buffers] if state is not None else ():
            flat.home = flat.routes.home = home
    return results


def paths_of(model: nn.Module) -> list[object]:
    root = fully_shard.state(model).lazy_init()
    flats = [flat for handle in root.handles for flat in handle.buffers if not flat.is_empty]
    return [path for flat in flats for path in (flat.routes.gather_path, flat.routes.gradient_path)]


# On CPUs


def train_twice(name: str, policy: OffloadPolicy) -> bool:
    runs = []
    for options in ({}, {"offload_policy": policy}):
        model = make_model(name)
        fully_shard(model, policy=BLOCK_CLASSES, **options)
        before = list(map(id, model.parameters()))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        for step in range(2):
            args, kwargs = inputs_of(model, step, dist.get_rank())
            loss_of(model(*args, **kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert list(map(id, model.parameters())) == before
        assert not any(isinstance(path, CopyGather | PathHome) for path in paths_of(model))
        runs.append(full_params(model))
    return all(torch.equal(*values) for values in zip(*(run.values() for run in runs), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)], ids=repr)
def test_on_a_mesh_of_cpus_nothing_changes_in_any_bit(policy: OffloadPolicy, world_size: int) -> None:
    assert all(run_threads(train_twice, world_size, "mlp", policy))


class Told(nn.Linear):
    """A class of its own: each notice is logged once in a process."""


def noticed(policy: OffloadPolicy, make: type[nn.Module]) -> list[str]:
    with recorded() as texts:
        for _ in range(2):
            model = make(4, 4)
            fully_shard(model, offload_policy=policy)
            model(torch.ones(1, 4))
    return texts


def test_a_mesh_of_cpus_is_told_once_that_there_is_nothing_to_offload() -> None:
    # One after the other: as threads, all ranks share what the logger gets.
    assert run_threads(noticed, 1, OffloadPolicy(), Told) == [[]]
    assert run_threads(noticed, 1, CPUOffloadPolicy(), Told) == [
        [
            "nothing is to be offloaded: the mesh is on cpu, where shards, gradients and optimizer state rest already\n"
            "  at:  rank 0, module Told"
        ]
    ]


# What is asked for


def test_policies_of_torch_are_taken() -> None:
    asked = [
        TorchOffloadPolicy(),
        TorchCPUOffloadPolicy(),
        TorchCPUOffloadPolicy(pin_memory=False),
        CPUOffload(),
        CPUOffload(offload_params=True),
    ]
    assert [plan(nn.Linear(2, 2), world_size=2, offload_policy=one).offload_policy for one in asked] == [
        OffloadPolicy(),
        CPUOffloadPolicy(),
        CPUOffloadPolicy(pin_memory=False),
        OffloadPolicy(),
        CPUOffloadPolicy(),
    ]


@dataclass(frozen=True)
class Renamed:
    """Has the name of a policy, and asks for something else."""

    pin_memory: bool = True
    to_disk: bool = False


Renamed.__name__ = "CPUOffloadPolicy"


def refuse(policy: Any, text: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError) as error:
        fully_shard(model, offload_policy=policy)
    assert text in str(error.value) and error.value.fix
    assert all(before[fqn] is param for fqn, param in model.named_parameters())
    assert fully_shard.state(model) is None


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (True, "offload_policy is True"),
        ("cpu", "offload_policy is 'cpu'"),
        (CPUOffloadPolicy, "offload_policy is <class"),
        (TorchCPUOffloadPolicy, "offload_policy is <class"),
        (MixedPrecisionPolicy(), "offload_policy is"),
        (Renamed(), "offload_policy is"),
        (TorchCPUOffloadPolicy(pin_memory="yes"), "pin_memory of the offload policy is 'yes'"),  # type: ignore[arg-type]
        (CPUOffload(offload_params=1), "offload_params of the offload policy is 1"),  # type: ignore[arg-type]
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_policy_leaves_the_model_as_it_was(policy: Any, text: str) -> None:
    run_threads(refuse, 1, policy, text)


@pytest.mark.parametrize("pin_memory", [None, 1, "yes"])
def test_pinning_is_a_bool(pin_memory: Any) -> None:
    with pytest.raises(ConfigError, match="pin_memory of the offload policy is"):
        CPUOffloadPolicy(pin_memory=pin_memory)


def annotate_differently(is_synced: bool) -> str:
    model = nn.Linear(4, 4)
    policy = CPUOffloadPolicy(pin_memory=dist.get_rank() == 0)

    def run() -> None:
        fully_shard(model, offload_policy=policy, sync_module_states=is_synced)
        model(torch.ones(1, 4))

    with pytest.raises(DesyncError) as error:
        run()
    return str(error.value)


@pytest.mark.parametrize("is_synced", [False, True])
def test_ranks_that_differ_are_told(is_synced: bool) -> None:
    for text in run_threads(annotate_differently, 2, is_synced):
        assert "rank 0: offloaded: shards, gradients and optimizer state rest in pinned host memory" in text
        assert "rank 1: offloaded: shards, gradients and optimizer state rest in pageable host memory" in text


# The plan


def test_the_plan_says_what_is_offloaded_and_counts_nothing_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    plain = plan(model, world_size=2, policy={nn.Linear})
    offloaded = plan(model, world_size=2, policy={nn.Linear}, offload_policy=CPUOffloadPolicy())
    assert "offloaded" not in str(plain)
    added = [line for line in str(offloaded).splitlines() if line not in str(plain).splitlines()]
    assert added == ["  offloaded: shards, gradients and optimizer state rest in pinned host memory"]
    assert plain.bytes_per_rank_at_rest() == offloaded.host_bytes_per_rank_at_rest() > 0
    assert offloaded.bytes_per_rank_at_rest() == plain.host_bytes_per_rank_at_rest() == 0
    assert plain.peak_bytes_per_rank(0) - offloaded.peak_bytes_per_rank(0) >= plain.shard_bytes
    assert plain != offloaded and plain.digest() != offloaded.digest()


def unannotate_one() -> tuple[int, int]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(model, policy={nn.Linear}, offload_policy=CPUOffloadPolicy())
    part = unannotate(model[0], recurse=True)
    assert not isinstance(part.weight, torch.distributed.tensor.DTensor)
    left = fully_shard.state(model).plan
    return left.bytes_per_rank_at_rest(), left.host_bytes_per_rank_at_rest(0)


def test_what_is_left_of_a_plan_stays_offloaded() -> None:
    assert run_threads(unannotate_one, 2) == [(0, 4 * (16 * 16 + 16) // 2)] * 2


# Shards that rest elsewhere


def train_elsewhere(name: str) -> Run:
    found: list[list[int]] = []

    def annotate(model: nn.Module) -> None:
        fully_shard(model, policy=None if name in {"empty_params", "uneven"} else BLOCK_CLASSES)
        found.append(put_elsewhere(model))
        assert {CopyGather, PathHome} == set(map(type, paths_of(model)))

    run = train_annotated(name, annotate)
    assert found[0], "no gradient has come home"
    return run


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "name", ["mlp", "gpt_tied", "frozen_mixed", "scalars", "empty_params", "uneven", "called_twice", "unused"]
)
def test_copied_shards_train_like_one_process(name: str, world_size: int) -> None:
    assert_equal_runs(run_threads(train_elsewhere, world_size, name), train_reference(name, world_size))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM + 3)
        self.norm = nn.LayerNorm(DIM + 3)
        self.down = nn.Linear(DIM + 3, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


def make_net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), Block(), Block(), nn.Linear(DIM, 3)), 0)


def batch_of(step: int, rank: int, micro: int) -> torch.Tensor:
    return random_input(100 * step + 10 * rank + micro, 4, DIM)


@dataclass(frozen=True)
class Programme:
    """What a random training run does."""

    steps: int
    micros: int
    precision: MixedPrecisionPolicy
    reshard: bool | None
    max_norm: float | None
    optimizer: type
    is_accelerated: bool
    keeps_gradients: bool  # Micro-batches are reduced one by one.
    saves_at: int

    @staticmethod
    def drawn(seed: int) -> "Programme":
        draw = random.Random(seed)
        return Programme(
            steps=draw.randint(2, 4),
            micros=draw.randint(1, 3),
            precision=MixedPrecisionPolicy(draw.choice([None, BF16]), draw.choice([None, FP32, BF16])),
            reshard=draw.choice([None, True, False]),
            max_norm=draw.choice([None, 0.1]),
            optimizer=draw.choice([torch.optim.SGD, torch.optim.AdamW]),
            is_accelerated=draw.random() < 0.5,
            keeps_gradients=draw.random() < 0.5,
            saves_at=draw.randint(1, 2),
        )

    def sharded(self) -> tuple[nn.Module, torch.optim.Optimizer, list[int]]:
        model = make_net()
        fully_shard(model, policy={Block}, mp_policy=self.precision, reshard_after_forward=self.reshard)
        results = put_elsewhere(model)
        optimizer = self.optimizer(model.parameters(), lr=0.05)
        if self.is_accelerated:
            accelerate_optimizer(optimizer, model)
        return model, optimizer, results

    def run(self, *, is_elsewhere: bool, folder: str | None = None) -> dict[str, torch.Tensor]:
        """Train sharded, with shards elsewhere or not, and through a checkpoint if there is a folder."""
        model, optimizer, results = self.sharded()
        if not is_elsewhere:
            for flat in [flat for handle in fully_shard.state(model)._handles for flat in handle.buffers]:
                flat.home = flat.routes.home = RestingPlace(torch.device("cpu"))
        for step in range(self.steps):
            if step == self.saves_at and folder is not None:
                save_checkpoint(folder, step, model, optimizer).wait()
                model, optimizer, results = self.sharded()
                load_checkpoint(folder, model, optimizer)
            for micro in range(self.micros):
                x = batch_of(step, dist.get_rank(), micro)
                if micro < self.micros - 1 and not self.keeps_gradients:
                    with no_sync(model):
                        model(x).float().square().mean().backward()
                else:
                    model(x).float().square().mean().backward()
            if self.max_norm is not None:
                clip_grad_norm_(model.parameters(), self.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        assert bool(results) is is_elsewhere
        return full_params(model)

    def run_alone(self, world_size: int) -> dict[str, torch.Tensor]:
        model = make_net()
        optimizer = self.optimizer(model.parameters(), lr=0.05)
        for step in range(self.steps):
            for micro, rank in itertools.product(range(self.micros), range(world_size)):
                (model(batch_of(step, rank, micro)).square().mean() / world_size).backward()
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return {fqn: param.detach().clone() for fqn, param in model.named_parameters()}


@pytest.mark.parametrize("seed", range(16))
def test_random_programmes_with_copied_shards_are_those_without_in_every_bit(seed: int, tmp_path: Path) -> None:
    programme, world_size = Programme.drawn(seed), 1 + seed % 3
    found = run_threads(programme.run, world_size, is_elsewhere=True, folder=str(tmp_path / "run"))
    expected = run_threads(programme.run, world_size, is_elsewhere=False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    alone = programme.run_alone(world_size)
    is_low = BF16 in (programme.precision.param_dtype, programme.precision.reduce_dtype)
    tolerance = 0.1 if is_low else 5e-4
    torch.testing.assert_close(found[0], alone, rtol=tolerance, atol=tolerance)


def gradients_at_rest() -> tuple[bool, bool]:
    model = make_net()
    fully_shard(model, policy={Block})
    put_elsewhere(model)
    model(batch_of(0, 0, 0)).square().mean().backward()
    first = {fqn: param.grad.to_local().clone() for fqn, param in model.named_parameters()}
    model(batch_of(0, 0, 0)).square().mean().backward()
    doubled = all(torch.equal(param.grad.to_local(), 2 * first[fqn]) for fqn, param in model.named_parameters())
    model.zero_grad()
    return doubled, all(param.grad is None for param in model.parameters())


def test_gradients_add_up_where_they_rest() -> None:
    assert run_threads(gradients_at_rest, 2) == [(True, True)] * 2


def copy_and_undo() -> dict[str, bool]:
    model = make_net()
    expected = {fqn: param.detach().clone() for fqn, param in model.named_parameters()}
    fully_shard(model, policy={Block})
    results = put_elsewhere(model)
    twin = copy.deepcopy(model)
    twin(batch_of(0, 0, 0)).sum().backward()
    copied = bool(results)
    with unshard_params(model):
        for param in model.parameters():
            param.data.mul_(2)
    doubled = {fqn: 2 * value for fqn, value in expected.items()}
    written = all(torch.equal(full(param), doubled[fqn]) for fqn, param in model.named_parameters())
    whole = full_state_dict(model, dst=0)
    unannotate(model)
    plain = all(torch.equal(param, doubled[fqn]) for fqn, param in model.named_parameters())
    return {
        "a copy rests elsewhere too": copied,
        "values are written back": written,
        "a plain model has them": plain,
        "the state dict has them": not whole or all(torch.equal(whole[fqn], doubled[fqn]) for fqn in doubled),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_copies_values_written_back_and_plain_models_have_the_values_at_rest(world_size: int) -> None:
    for found in run_threads(copy_and_undo, world_size):
        assert all(found.values()), found


def keep_low() -> Sequence[torch.dtype]:
    model = make_net()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, keep_low_precision_grads=True))
    put_elsewhere(model)
    model(batch_of(0, 0, 0)).float().sum().backward()
    return [param.grad.to_local().dtype for param in model.parameters()]


def test_low_precision_gradients_come_home_as_they_are() -> None:
    for found in run_threads(keep_low, 2):
        assert set(found) == {BF16}
