"""Other process groups for sharded models, between steps of a living process."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable import (
    ConfigError,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    DesyncError,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    unshard_params,
    update_process_group,
)
from composable.errors import ComposableError
from tests.counting import root_of
from tests.models import DIM, MLPBlock, random_input, seeded
from tests.parity import full
from tests.test_reshard_int import mesh_of, net
from tests.world import RankErrors, on_ranks, run_ranks, run_threads

LR = 0.1
BATCH = 4
FP64 = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)

# How a model is annotated on two ranks; with copies of shards on four.
STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"strategy": "FULL_SHARD"},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "kept after backward": {"strategy": "SHARD_GRAD_OP"},
    "secondary shards": {"reshard_after_forward": 2},
    "process_group": {"strategy": "FULL_SHARD"},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "mixed precision": {"mp_policy": FP64},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD_ZERO2": {"strategy": "HYBRID_SHARD_ZERO2"},
    "hybrid, offload": {"strategy": "HYBRID_SHARD", "offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "hybrid, mixed precision": {"strategy": "HYBRID_SHARD", "mp_policy": FP64},
}
HYBRID = [name for name in STRATEGIES if "ybrid" in name.lower()]
PLAIN = [name for name in STRATEGIES if name not in HYBRID]


def batch_of(step: int, rank: int) -> torch.Tensor:
    return random_input(100 * step + rank, BATCH, DIM)


class Training:
    """A model and its optimizer; ``reference`` is one process, which gets the batches of the ranks that are given."""

    def __init__(self, name: str = "", **options: Any) -> None:
        self.model: Any = net()
        options = {**STRATEGIES.get(name, {}), **options}
        if options:
            fully_shard(self.model, policy={MLPBlock}, **options)
            self.model.set_reshard_after_backward(name != "kept after backward")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)

    def step(self, number: int, ranks: Sequence[int], *, clips: bool = False) -> float:
        losses = [self.model(batch_of(number, rank)).float().square().mean() for rank in ranks]
        loss = torch.stack(losses).mean()
        loss.backward()
        if clips:
            clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def params(self) -> list[torch.Tensor]:
        return [full(param).clone() for param in self.model.parameters()]


def assert_as_one_process(training: Training, steps: Sequence[Sequence[int]], *, clips: bool = False) -> None:
    """Compare with one process that in each step had the batches of the ranks given for that step."""
    reference = Training()
    for number, ranks in enumerate(steps):
        reference.step(number, ranks, clips=clips)
    torch.testing.assert_close(training.params(), reference.params(), rtol=1e-6, atol=1e-6)


# Groups of shards


def move_the_shards(name: str) -> None:
    rank, world = dist.get_rank(), [*range(dist.get_world_size())]
    groups = [dist.new_group(world) for _ in range(2)]
    options: dict[str, Any] = {}
    if name == "process_group":
        options["process_group"] = groups[1]
    else:
        options["mesh"] = dist.device_mesh.DeviceMesh.from_group(groups[1], "cpu", mesh_dim_names=("shard",))
    training = Training(name, **options)
    training.step(0, [rank], clips=True)
    for number in (1, 2):
        new, old = (groups[0], groups[1]) if number == 1 else (dist.new_group(world), groups[0])
        update_process_group(training.model, new)
        dist.destroy_process_group(old)
        assert all(param.device_mesh.get_group() is new for param in training.model.parameters())
        training.step(number, [rank], clips=True)
        assert_as_one_process(training, [world] * (number + 1), clips=True)


@pytest.mark.parametrize("name", PLAIN)
def test_training_goes_on_in_another_group_of_the_same_ranks(name: str) -> None:
    run_threads(move_the_shards, 2, name)


@pytest.mark.parametrize("world_size", [1, 3])
def test_so_it_does_in_real_processes(world_size: int) -> None:
    run_ranks(move_the_shards, world_size, "FULL_SHARD")


@on_ranks(2)
def test_a_model_moves_before_its_first_step_too() -> None:
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    training = Training("FULL_SHARD")
    update_process_group(training.model, group)
    training.step(0, [rank])
    assert_as_one_process(training, [[0, 1]])


@on_ranks(4)
def test_another_rank_with_the_same_shards_takes_the_place_of_one() -> None:
    """Let rank 2, which holds the second shard in a group with rank 3, take the place of rank 1."""
    rank = dist.get_rank()
    pairs, mixed = [dist.new_group([0, 1]), dist.new_group([2, 3])], dist.new_group([0, 3])
    training = Training("FULL_SHARD", process_group=pairs[rank // 2])
    training.step(0, [rank % 2])
    if rank in (0, 3):
        update_process_group(training.model, mixed)
        training.step(1, [rank % 2])
        assert_as_one_process(training, [[0, 1], [0, 1]])


# Groups of copies


def lose_and_regain_copies(name: str) -> None:
    """Three copies of two shards; the last one leaves, all but the first leave, all come back."""
    rank = dist.get_rank()
    column = rank % 2
    mesh = mesh_of((3, 2))
    training = Training(name, mesh=mesh)
    shard = mesh["shard"].get_group()
    rows = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [0, 1], [0, 1, 2, 3, 4, 5]]
    history: list[list[int]] = []
    old = None
    for number, row in enumerate(rows):
        copies = [dist.new_group([one for one in row if one % 2 == place]) for place in (0, 1)][column]
        values = {fqn: value.clone() for fqn, value in training.model.state_dict().items()}
        if number == 3:
            # Those that come back get shards and optimizer state from the first copy.
            first = dist.get_process_group_ranks(copies)[0]
            state = training.optimizer.state_dict()["state"]
            tensors = [*values.values(), *(value for entry in state.values() for value in entry.values())]
            for tensor in tensors:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                dist.broadcast(local, first, group=copies)
            with torch.no_grad():
                for param, value in zip(training.model.parameters(), values.values(), strict=True):
                    param.to_local().copy_(value.to_local())
        if rank in row:
            if number:
                update_process_group(training.model, (shard, copies))
                if old is not None:
                    dist.destroy_process_group(old)
                old = copies
            training.step(number, [rank])
            history.append(row)
            if number == 3:
                history = rows
            assert_as_one_process(training, history)


@pytest.mark.parametrize("name", HYBRID)
def test_copies_leave_and_come_back(name: str) -> None:
    run_threads(lose_and_regain_copies, 6, name)


def test_copies_leave_and_come_back_in_real_processes() -> None:
    run_ranks(lose_and_regain_copies, 6, "HYBRID_SHARD")


class LostHereError(Exception):
    pass


def lose_copies_in_a_step(folder: str, how: str) -> None:
    rank = dist.get_rank()
    mesh = mesh_of((2, 2))
    training = Training("HYBRID_SHARD", mesh=mesh)
    training.step(0, [rank])
    if rank >= 2:
        leaf = training.model[1 if how == "backward" else 2]
        if how == "backward":
            leaf.register_full_backward_pre_hook(lambda *_: os._exit(9))
        else:
            leaf.register_forward_pre_hook(lambda *_: os._exit(9))
    with pytest.raises(DesyncError):
        training.step(1, [rank])
    training.optimizer.zero_grad()
    # At first of the ranks that are left alone, then of groups that both make anew.
    for number in (1, 2):
        alone = dist.new_group([rank], use_local_synchronization=True)
        shard = mesh["shard"].get_group() if number == 1 else dist.new_group([0, 1], use_local_synchronization=True)
        update_process_group(training.model, (shard, alone))
        training.step(number, [rank])
    assert_as_one_process(training, [[0, 1, 2, 3], [0, 1], [0, 1]])
    Path(folder, str(rank)).touch()
    os._exit(0)  # The group of all ranks cannot be ended any more.


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_copies_that_die_in_a_step_are_left_behind(how: str, tmp_path: Path) -> None:
    with pytest.raises(RankErrors) as caught:
        run_ranks(lose_copies_in_a_step, 4, str(tmp_path), how)
    assert {one.name for one in tmp_path.iterdir()} == {"0", "1"}, caught.value


@on_ranks(2)
def test_gradients_that_no_sync_kept_are_averaged_in_the_new_group() -> None:
    rank = dist.get_rank()
    training = Training("FULL_SHARD")
    with no_sync(training.model):
        training.model(batch_of(0, rank)).square().mean().backward()
    update_process_group(training.model, dist.new_group([0, 1]))
    training.step(1, [rank])
    reference = Training()
    for one in (0, 1):
        (reference.model(batch_of(0, one)).square().mean() / 2).backward()
    reference.step(1, [0, 1])
    torch.testing.assert_close(training.params(), reference.params(), rtol=1e-6, atol=1e-6)


def split_net(mesh: Any) -> nn.Module:
    model = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)), 0)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shard", replicate="replicate"))


@on_ranks(8)
def test_copies_move_beside_tensor_parallelism_and_shards_do_not() -> None:
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    models = [split_net(mesh), split_net(mesh)]
    copies = [dist.new_group([place, place + 4]) for place in range(4)][rank % 4]
    shards = [dist.new_group([first, first + 2]) for first in (0, 1, 4, 5)][rank % 2 + 2 * (rank // 4)]
    for step in range(3):
        if step == 1:
            update_process_group(models[0], (mesh["shard"].get_group(), copies))
        for model in models:
            model(batch_of(step, rank // 2)).square().mean().backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(full(one.grad), full(other.grad), rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="tensor parallelism has split parameters over a mesh with the present group"):
        update_process_group(models[0], (shards, copies))


def test_ranks_that_come_back_with_other_values_are_an_error_at_the_first_forward() -> None:
    with pytest.raises(RankErrors, match="ranks that hold copies of the same shards hold different values"):
        run_threads(come_back_with_other_values, 2)


def come_back_with_other_values() -> None:
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in (0, 1)][rank]
    training = Training("HYBRID_SHARD", process_group=(alone, alone))
    training.step(0, [rank])
    update_process_group(training.model, (alone, dist.group.WORLD))
    training.step(1, [rank])


# Errors, after which nothing is changed


def in_context(model: Any, groups: Any) -> None:
    with unshard_params(model):
        update_process_group(model, groups)


def in_forward(model: Any, groups: Any) -> None:
    hook = model[2].register_forward_pre_hook(lambda *_: update_process_group(model, groups))
    try:
        model(batch_of(1, 0))
    finally:
        hook.remove()


def in_backward_of(model: Any, groups: Any) -> None:
    out = model(batch_of(1, 0))
    out.register_hook(lambda grad: update_process_group(model, groups))
    out.sum().backward()


def in_other_backward(model: Any, groups: Any) -> None:
    other = torch.ones(1, requires_grad=True)
    other.register_hook(lambda grad: update_process_group(model, groups))
    other.sum().backward()


def deferred(model: Any, groups: Any) -> None:
    model.set_is_last_backward(False)
    model(batch_of(1, 0)).sum().backward()
    update_process_group(model, groups)


def refuse(what: str) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    model: Any
    groups: Any = dist.new_group([*range(world)])
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    others = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
    closed = dist.new_group([0, 1, 2, 3])
    dist.destroy_process_group(closed)
    is_hybrid = what.startswith("hybrid")
    if is_hybrid:
        training = Training("HYBRID_SHARD", mesh=mesh_of((2, 2)))
    else:
        training = Training("FULL_SHARD", process_group=half if what == "other place" else groups)
    model = training.model
    training.step(0, [rank])
    state = fully_shard.state(model)
    before = model[0].weight.device_mesh, root_of(model), state.grid, str(state.plan)
    calls: dict[str, Callable[[], object]] = {
        "no group": lambda: update_process_group(model, None),  # type: ignore[arg-type]
        "closed group": lambda: update_process_group(model, closed),
        "smaller group": lambda: update_process_group(model, half),
        "other place": lambda: update_process_group(model, others),
        "a pair": lambda: update_process_group(model, (half, copies)),
        "hybrid: one group": lambda: update_process_group(model, groups),
        "hybrid: no grid": lambda: update_process_group(model, (half, others)),
        "inner module": lambda: update_process_group(model[1], groups),
        "inner module that was not called": lambda: update_process_group(model[1].up, groups),
        "ways to reduce": lambda: (
            model.set_gradient_divide_factor(3.0 if rank < 2 else 4.0),
            update_process_group(model, groups),
        ),
        "in unshard_params": lambda: in_context(model, groups),
        "in forward": lambda: in_forward(model, groups),
        "in backward": lambda: in_backward_of(model, groups),
        "deferred": lambda: deferred(model, groups),
        "in backward of one rank": lambda: (
            in_other_backward(model, groups) if rank == 2 else update_process_group(model, groups)
        ),
    }
    if what == "other place" and rank in (0, 3):
        return ""
    with pytest.raises(ComposableError) as caught:
        calls[what]()
    if what not in ("ways to reduce", "deferred", "other place"):
        assert (model[0].weight.device_mesh, root_of(model), state.grid, str(state.plan)) == before
        training.optimizer.zero_grad()
        training.step(1, [rank])
        assert_as_one_process(training, [[*range(world)]] * 2)
    return f"{type(caught.value).__name__}: {caught.value}"


NO_GROUP = "ConfigError: process_group is {}, not a ProcessGroup that this rank is in"
REFUSED = {
    "no group": NO_GROUP.format("None"),
    "closed group": NO_GROUP.format(r"a composable\.testing\.process_group\.SimulatedGroup"),
    "smaller group": r"ConfigError: this rank holds shard \d of 4, and is rank [01] of 2 in the group",
    "other place": r"ConfigError: this rank holds shard (0 of 2, and is rank 1|1 of 2, and is rank 0) of 2 in the group",
    "a pair": "ConfigError: 2 process groups for shards without copies",
    "hybrid: one group": "ConfigError: 1 process group for shards with copies",
    "hybrid: no grid": r"ConfigError: shard groups \[\(0, 1\), \(2, 3\)\] and copies on ranks .* form no grid",
    "inner module": "UsageError: update_process_group on a module inside of another sharded one",
    "inner module that was not called": "UsageError: update_process_group found no replicate or fully_shard on this",
    "ways to reduce": r"DesyncError: the ranks of the new process group have different .*\n    rank 0: gradient divide",
    "in unshard_params": "UsageError: a model cannot be moved to another process group while unshard_params shows",
    "in forward": "UsageError: update_process_group inside a forward",
    "in backward": "UsageError: update_process_group inside a backward",
    "deferred": "UsageError: update_process_group while gradients wait for the last backward",
    "in backward of one rank": "UsageError: update_process_group inside a backward",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_an_error_on_every_rank_and_changes_nothing(what: str) -> None:
    for rank, said in enumerate(run_threads(refuse, 4, what)):
        if what != "other place" or rank in (1, 2):
            assert re.match(REFUSED[what], said), said
