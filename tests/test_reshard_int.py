"""``reshard_after_forward=n``: secondary shards over fewer ranks, from which backward gathers."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable import (
    ConfigError,
    DesyncError,
    HandleOptions,
    MixedPrecisionPolicy,
    fully_shard,
    plan,
    unannotate,
    unshard_params,
)
from tests.counting import Collective, CountingTransport, root_of
from tests.models import BLOCK_CLASSES, DIM, MLPBlock, random_input, seeded
from tests.parity import full
from tests.planning.test_memory import PRECISIONS, peak_and_plan
from tests.programs import compare
from tests.subclasses import int8_model
from tests.world import RankErrors, on_ranks, run_ranks, run_threads

BF16 = torch.bfloat16


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    """Return a mesh of all ranks: those along the second dim share shards, those along the first hold copies."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def net(seed: int = 0) -> nn.Sequential:
    """Return the plain net."""
    return seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), MLPBlock(), MLPBlock(), nn.LayerNorm(DIM)), seed)


def x_of(seed: int = 0) -> torch.Tensor:
    """Return the inputs of this rank."""
    return random_input(100 * seed + dist.get_rank(), 4, DIM)


def loss(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """Return the loss of this rank."""
    return model(x_of(seed)).float().square().mean()


def secondary_bytes(model: nn.Module) -> int:
    """Return what the secondary shards that are there take on this rank."""
    found = [handle.secondary for handle in root_of(model).handles if handle.secondary is not None]
    return sum(shard.nbytes for secondary in found for shard in secondary._shards.values())


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


def assert_grads(model: nn.Module, expected: Sequence[torch.Tensor], *, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(grads(model), list(expected), rtol=tolerance, atol=tolerance)


def shard(model: nn.Module, ranks: int = 2, **options: Any) -> Any:
    return fully_shard(model, policy={MLPBlock}, reshard_after_forward=ranks, **options)


def sharded_net(ranks: int = 2, **options: Any) -> Any:
    return shard(net(), ranks, **options)


def gathers(records: list[Collective]) -> tuple[int, int]:
    ops = [record.op for record in records]
    return ops.count("all_gather"), ops.count("secondary_all_gather")


# Numbers


def by_hand(ranks: int, transport: str, model: nn.Module) -> None:
    for module in [*(module for module in model.modules() if type(module) in BLOCK_CLASSES), model]:
        fully_shard(module, reshard_after_forward=ranks, options=HandleOptions(transport=transport))


@pytest.mark.parametrize(
    ("world_size", "ranks", "transport"),
    [
        *[(4, 2, "process_group"), (6, 2, "process_group"), (6, 3, "process_group")],
        *[(4, 1, "process_group"), (4, 4, "process_group")],
    ],
)
def test_any_number_of_ranks_trains_like_one_process(world_size: int, ranks: int, transport: str) -> None:
    # Processes where gloo itself gathers among a part of the ranks.
    run = run_ranks if (world_size, ranks) == (4, 2) else run_threads
    run(compare, world_size, "mlp", functools.partial(by_hand, ranks, transport))


# The plan


def test_one_rank_is_as_false_and_all_ranks_are_as_true() -> None:
    one, two, four, kept, freed = (
        plan(net(), world_size=4, reshard_after_forward=option) for option in (1, 2, 4, False, True)
    )
    assert one == kept and four == freed
    assert two not in (kept, freed) and two.digest() not in (kept.digest(), freed.digest())


def test_the_plan_says_what_stays_for_backward() -> None:
    made = plan(net(), policy={MLPBlock}, world_size=4, reshard_after_forward=2)
    block = made.handles[1]
    assert block.secondary_bytes == block.buffer_bytes // 2
    assert "kept for backward, a secondary shard over 2 ranks" in str(made)


@pytest.mark.parametrize(
    ("world_size", "ranks", "transport", "policy"),
    [
        (4, 2, "process_group", MixedPrecisionPolicy(param_dtype=BF16)),
        (6, 3, "process_group", MixedPrecisionPolicy()),
    ],
    ids=str,
)
@on_ranks()
def test_collectives_and_bytes_of_a_step_are_those_of_the_plan(
    ranks: int, transport: str, policy: MixedPrecisionPolicy
) -> None:
    model = sharded_net(ranks, options=HandleOptions(transport=transport), mp_policy=policy)
    counting, made, steps = CountingTransport.install(root_of(model)), fully_shard.state(model).plan, 3
    for step in range(steps):
        value = loss(model, step)
        assert secondary_bytes(model) == sum(handle.secondary_bytes for handle in made.handles) > 0
        value.backward()
        assert secondary_bytes(model) == 0
    counting.check(model, steps)


@pytest.mark.parametrize(("precision", "growth"), list(zip(PRECISIONS, [8, -8, 8, -8, 0], strict=True)), ids=str)
def test_a_step_takes_what_the_plan_says(precision: MixedPrecisionPolicy, growth: int) -> None:
    options = {"mp_policy": precision, "reshard_after_forward": 2}
    for found, planned in run_threads(peak_and_plan, 4, growth, options):
        assert found == pytest.approx(planned, rel=0.02), f"{found / planned - 1:+.1%}"


# When secondary shards are kept


@on_ranks(4)
def test_without_a_backward_to_come_nothing_is_kept() -> None:
    model = sharded_net()
    counting = CountingTransport.install(root_of(model))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss(model)
            assert secondary_bytes(model) == 0
    assert gathers(counting.records) == (6, 0)
    # Nor for what backward does not read.
    model.set_unshard_in_backward(False)
    model[1](x_of())
    assert secondary_bytes(model) == fully_shard.state(model).plan.handles[1].secondary_bytes


@on_ranks(4)
def test_of_two_forwards_before_a_backward_each_gathers_over_all_ranks() -> None:
    model = sharded_net()
    loss(model).backward()
    model.zero_grad()
    counting = CountingTransport.install(root_of(model))
    first, second = loss(model, 1), loss(model, 2)
    assert gathers(counting.records) == (6, 0)
    (first + second).backward()
    assert gathers(counting.records) == (6, 3)
    assert secondary_bytes(model) == 0
    expected = [one + other for one, other in zip(reference_grads(1), reference_grads(2), strict=True)]
    torch.testing.assert_close(grads(model), expected, rtol=1e-6, atol=1e-6)


@on_ranks(4)
def test_a_block_that_runs_again_in_the_same_forward_is_gathered_from_secondary_shards() -> None:
    first, block, _, norm = net()
    model = nn.Sequential(first, block, block, norm)
    shard(model)
    counting = CountingTransport.install(root_of(model))
    loss(model)
    assert gathers(counting.records) == (2, 1)


class Checkpointed(nn.Sequential):
    def __init__(self, *layers: nn.Module, use_reentrant: bool) -> None:
        super().__init__(*layers)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize(
    # A reentrant block runs without gradients first, so nobody knows that a backward is to come.
    ("use_reentrant", "expected"),
    [(False, (3, 3)), (True, (5, 1))],
)
@on_ranks(4)
def test_checkpointed_blocks_are_recomputed_from_secondary_shards(
    use_reentrant: bool, expected: tuple[int, int]
) -> None:
    model = Checkpointed(*net(), use_reentrant=use_reentrant)
    fully_shard(model, policy={MLPBlock}, reshard_after_forward=2)
    x = x_of().requires_grad_()
    model(x).square().mean().backward()
    torch.testing.assert_close(grads(model), reference_grads(), rtol=1e-6, atol=1e-6)
    counting = CountingTransport.install(root_of(model))
    model(x).square().mean().backward()
    assert gathers(counting.records) == expected


@on_ranks(4)
def test_what_is_unsharded_by_hand_between_forward_and_backward_leaves_the_rest_as_it_is() -> None:
    model = sharded_net()
    loss(model).backward()
    model.zero_grad()
    counting = CountingTransport.install(root_of(model))
    model[1].unshard()
    value = loss(model)
    assert gathers(counting.records) == (3, 0)
    model[2].unshard(async_op=True)
    model[1].unshard()
    model[1].reshard()
    value.backward()
    # One is there already, the others are as forward has left them.
    assert gathers(counting.records) == (5, 2)
    assert secondary_bytes(model) == 0
    torch.testing.assert_close(grads(model), reference_grads(), rtol=1e-6, atol=1e-6)


@on_ranks(4)
def test_prefetch_in_backward_is_from_secondary_shards() -> None:
    model = sharded_net()
    model.set_modules_to_forward_prefetch([model[1], model[2]])
    model.set_modules_to_backward_prefetch([model[2], model[1]])
    for step in range(2):
        loss(model, step).backward()
        torch.testing.assert_close(grads(model), reference_grads(step), rtol=1e-6, atol=1e-6)
        model.zero_grad()
    counting = CountingTransport.install(root_of(model))
    loss(model).backward()
    assert gathers(counting.records) == (3, 3)
    assert [record.op for record in counting.records][3:6] == ["secondary_all_gather"] * 3


# Values


@on_ranks(4)
def test_backward_goes_through_the_values_of_its_forward() -> None:
    """Write parameters between forward and backward."""
    model = sharded_net()
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


@on_ranks(4)
def test_a_copy_between_forward_and_backward_has_no_secondary_shards() -> None:
    """Copy a model between forward and backward."""
    model = sharded_net()
    value = loss(model, 1)
    twin = copy.deepcopy(model)
    assert secondary_bytes(twin) == 0 < secondary_bytes(model)
    loss(twin, 2).backward()
    value.backward()
    assert_grads(twin, reference_grads(2))
    assert_grads(model, reference_grads(1))


@on_ranks(4)
def test_an_annotation_undone_between_forward_and_backward_leaves_nothing() -> None:
    """Undo an annotation between forward and backward, and annotate anew."""
    model = sharded_net()
    handles = list(root_of(model).handles)
    loss(model)
    assert secondary_bytes(model)
    unannotate(model)
    assert not any(
        (handle.secondary is not None and handle.secondary.kept_in >= 0) or handle.buffers for handle in handles
    )
    for param, right in zip(model.parameters(), net().parameters(), strict=True):
        assert torch.equal(param, right)
    shard(model)
    loss(model, 1).backward()
    assert_grads(model, reference_grads(1))


@on_ranks(4)
def test_a_forward_without_backward_leaves_nothing_that_the_next_one_uses() -> None:
    model = sharded_net()
    loss(model)
    write(model, 2)
    expected = [2 * param.detach() for param in net().parameters()]
    counting = CountingTransport.install(root_of(model))
    loss(model).backward()
    assert gathers(counting.records) == (3, 3)
    torch.testing.assert_close(grads(model), reference_grads(factor=2.0), rtol=1e-5, atol=1e-5)
    model.zero_grad()
    with unshard_params(model):
        for param, right in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param, right)


# What ends early


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("broken")
        return x


@on_ranks(4, in_backward=[False, True])
def test_a_forward_that_raises_leaves_only_what_another_backward_needs(in_backward: bool) -> None:
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
    assert (left > 0) is in_backward


@on_ranks(4)
def test_a_module_that_was_its_own_root_before_leaves_nothing_to_the_next_one() -> None:
    model = net()
    fully_shard(model[1], reshard_after_forward=2)
    model[1](x_of()).sum().backward()
    model.zero_grad()
    model[1](x_of())
    fully_shard(model, reshard_after_forward=2)
    assert secondary_bytes(model) == 0
    loss(model).backward()
    torch.testing.assert_close(grads(model), reference_grads(), rtol=1e-6, atol=1e-6)
    assert secondary_bytes(model) == 0


# Groups


def groups_of(model: nn.Module) -> set[Any]:
    flats = [flat for handle in root_of(model).handles for flat in handle.buffers]
    return {group for flat in flats for group in flat.routes.secondary_path.transport.groups}


@on_ranks(8)
def test_a_part_is_of_neighbours_in_the_shard_group() -> None:
    """Ranks that share parameters are not consecutive numbers; those of the part are neighbours among them."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "other"))
    model = sharded_net(mesh=mesh["shard"])
    group, *_ = groups_of(model)
    rank = dist.get_rank()
    first = rank // 4 * 4 + rank % 2
    assert dist.get_process_group_ranks(group) == [first, first + 2]
    loss(model).backward()
    twin = fully_shard(net(), mesh=mesh["shard"])
    loss(twin).backward()
    torch.testing.assert_close(grads(model), grads(twin), rtol=1e-6, atol=1e-6)


def different() -> None:
    loss(sharded_net(4 if dist.get_rank() == 3 else 2))


def test_ranks_that_ask_for_different_parts_are_told_before_any_group_is_made() -> None:
    with pytest.raises(RankErrors) as caught:
        run_threads(different, 4)
    errors = caught.value.errors
    assert len(errors) == 4 and all(isinstance(error, DesyncError) for error in errors.values())
    assert "rank 3" in str(errors[0])


# Refused


def test_parameters_that_their_class_gathers_are_refused() -> None:
    model = int8_model([(8, 8)])
    with pytest.raises(ConfigError) as caught:
        plan(model, world_size=4, reshard_after_forward=2)
    assert "parameter '0.weight'" in str(caught.value) and "reshard_after_forward=True or False" in str(caught.value)
