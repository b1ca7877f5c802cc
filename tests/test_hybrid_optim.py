"""``HYBRID_SHARD_OPTIM``: parameters whole on each host between forward and backward, all else over all ranks."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    ConfigError,
    DefaultState,
    HandleOptions,
    MixedPrecisionPolicy,
    RaggedDTensor,
    ShardingStrategy,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    plan,
    reduce_scatter_hook,
    register_comm_hook,
    unshard_params,
)
from tests.counting import Collective, CountingTransport
from tests.models import BLOCK_CLASSES, DIM, MLPBlock
from tests.ordered_groups import needs_ordered_groups
from tests.parity import Run, assert_equal_runs, full, train_annotated, train_reference
from tests.planning.test_memory import PRECISIONS, WIDTH, StepBytes, Tower
from tests.secondary import (
    BF16,
    accumulate,
    copy_between,
    fail_in_backward,
    fail_in_forward,
    grads,
    loss,
    mesh_of,
    net,
    reference_grads,
    refusal,
    root_of,
    secondary_bytes,
    step_alike,
    take_off_between,
    train,
    write,
    write_between,
)
from tests.subclasses import int8_model
from tests.world import on_ranks, run_ranks, run_threads

pytestmark = needs_ordered_groups

STRATEGY = "HYBRID_SHARD_OPTIM"


def shard(model: nn.Module, shape: tuple[int, int] = (2, 2), **options: Any) -> Any:
    return fully_shard(model, policy={MLPBlock}, mesh=mesh_of(shape), strategy=STRATEGY, **options)


def sharded_net(shape: tuple[int, int] = (2, 2), **options: Any) -> Any:
    return shard(net(), shape, **options)


def counting(model: nn.Module) -> list[Collective]:
    """Record collectives: among all ranks, of a host (``host_``) and between hosts (``fill_``, ``second_``)."""
    records: list[Collective] = []
    for flat in [flat for handle in root_of(model).handles for flat in handle.buffers]:
        routes = flat.routes
        for path, kind in ((routes.gather_path, ""), (routes.secondary_path, "host_"), (routes.fill_path, "fill_")):
            path.transport = CountingTransport(path.transport, records, kind)
        routes.gradient_path.transport = CountingTransport(routes.gradient_path.transport, records)
    between = {flat.routes._legs.hosts[0] for handle in root_of(model).handles for flat in handle.buffers}
    for replicas in between:
        replicas.transport = CountingTransport(replicas.transport, records, "second_")
    return records


def counts(records: list[Collective]) -> Counter[str]:
    return Counter(record.op for record in records)


# Numbers


def train_on(name: str, shape: tuple[int, int], **options: Any) -> Run:
    return train(name, mesh=mesh_of(shape), strategy=STRATEGY, **options)


@pytest.mark.parametrize(
    ("shape", "transport", "run"),
    [
        *[((1, 2), "process_group", run_threads), ((2, 1), "point_to_point", run_threads)],
        *[((3, 2), "process_group", run_threads), ((2, 3), "point_to_point", run_threads), ((2, 2), "auto", run_ranks)],
    ],
)
def test_training_on_any_shape_of_mesh_is_that_of_one_process(
    shape: tuple[int, int], transport: str, run: Callable[..., Any]
) -> None:
    world_size = math.prod(shape)
    runs = run(train_on, world_size, "mlp", shape, options=HandleOptions(transport=transport))
    assert_equal_runs(runs, train_reference("mlp", world_size))


def train_on_hosts() -> Run:
    def annotate(model: nn.Module) -> None:
        fully_shard(model, strategy=STRATEGY, policy=BLOCK_CLASSES)
        weight = next(model.parameters())
        assert isinstance(weight, RaggedDTensor) and weight.device_mesh.mesh.tolist() == [0, 2, 1, 3]

    return train_annotated("mlp", annotate)


def test_without_a_mesh_hosts_are_those_that_ranks_find() -> None:
    assert_equal_runs(run_threads(train_on_hosts, 4, ranks_per_host=2), train_reference("mlp", 4))


# What travels, and when


@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
@on_ranks(6)
def test_collectives_and_bytes_of_a_step_are_those_of_the_plan(shape: tuple[int, int]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16 if shape == (3, 2) else None)
    model = sharded_net(shape, mp_policy=policy)
    loss(model).backward()
    write(model, 2)
    records = counting(model)
    loss(model).backward()
    found, sent = counts(records), Counter[str]()
    for record in records:
        sent[record.op] += record.bytes
    expected = fully_shard.state(model).plan.expected_collectives()
    names = {
        "host_all_gather": "secondary_all_gather",
        "fill_all_gather": "fill",
        "reduce_scatter": "reduce_scatter",
        "second_reduce_scatter": "second_reduce_scatter",
    }
    assert found == {op: sum(getattr(one, f"{name}s") for one in expected) for op, name in names.items()}
    assert sent == {op: sum(getattr(one, f"{name}_bytes") for one in expected) for op, name in names.items()}
    assert sent["fill_all_gather"] * shape[1] * 2 == sent["host_all_gather"]


@on_ranks(4)
def test_between_hosts_parameters_travel_once_for_all_micro_batches_of_a_step() -> None:
    model = sharded_net()
    records = counting(model)
    accumulate(model)
    assert counts(records)["fill_all_gather"] == 3 and counts(records)["host_all_gather"] == 18
    records.clear()
    with torch.no_grad():
        loss(model)
    assert counts(records) == {"host_all_gather": 3}


@on_ranks(4)
def test_what_any_rank_has_written_is_gathered_again_and_no_more_than_that() -> None:
    model = sharded_net()
    loss(model).backward()
    model.zero_grad()
    records = counting(model)
    if dist.get_rank() == 2:
        # No version counter sees it.
        model[1].up.weight._local_tensor.data.zero_()
    value = loss(model)
    assert counts(records) == {"host_all_gather": 3, "fill_all_gather": 1}
    value.backward()
    whole = full(model[1].up.weight)
    with unshard_params(model):
        assert torch.equal(model[1].up.weight, whole)


@pytest.mark.parametrize("check", [write_between, copy_between, take_off_between, fail_in_backward])
def test_what_happens_between_forward_and_backward_or_ends_it_leaves_nothing_wrong(check: Any) -> None:
    """Parameters are written, the model is copied or its annotation taken off, or backward raises."""
    run_threads(check, 4, shard)


@on_ranks(4)
def test_what_is_unsharded_by_hand_comes_from_all_ranks() -> None:
    model = sharded_net()
    loss(model).backward()
    write(model, 2)
    model.zero_grad()
    records = counting(model)
    model[1].unshard()
    value = loss(model)
    # It is used as it is, and backward gathers among all ranks what was not filled.
    assert counts(records) == {"all_gather": 1, "host_all_gather": 2, "fill_all_gather": 2}
    value.backward()
    assert counts(records)["all_gather"] == 2
    torch.testing.assert_close(grads(model), reference_grads(factor=2.0), rtol=1e-5, atol=1e-5)


def peak_and_plan(shape: tuple[int, int], growth: int, options: dict[str, Any]) -> tuple[int, int]:
    model = Tower(6, growth)
    fully_shard(model, policy={nn.Sequential}, mesh=mesh_of(shape), strategy=STRATEGY, **options)
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        model(x).float().sum().backward()
        model.zero_grad()
    made = fully_shard.state(model).plan
    assert secondary_bytes(model) == made.secondary_bytes
    with StepBytes(model) as live:
        model(x).float().sum().backward()
    return live.most, made.peak_bytes_per_rank(0) - made.bytes_per_rank_at_rest(0)


@pytest.mark.parametrize(("precision", "growth"), list(zip(PRECISIONS, [8, -8, 8, -8, 8], strict=True)), ids=str)
def test_a_step_takes_what_the_plan_says(precision: MixedPrecisionPolicy, growth: int) -> None:
    shape = (2, 2) if growth > 0 else (3, 2)
    for found, planned in run_threads(peak_and_plan, math.prod(shape), shape, growth, {"mp_policy": precision}):
        assert found == pytest.approx(planned, rel=0.02), f"{found / planned - 1:+.1%}"


def test_the_plan_says_what_rests_where() -> None:
    made = plan(net(), policy={MLPBlock}, world_size=2, replicas=3, strategy=STRATEGY)
    one = plan(net(), policy={MLPBlock}, world_size=6)
    assert made.shard_bytes == one.shard_bytes
    whole = sum(handle.buffer_bytes for handle in made.handles)
    assert made.bytes_per_rank_at_rest(2) == one.bytes_per_rank_at_rest(2) + whole // 2
    assert "over 2 ranks x 3 hosts" in str(made) and "of secondary shards at rest" in str(made)
    assert made.digest() != one.digest()
    assert plan(net(), world_size=2, strategy=STRATEGY).host_ranks is None
    assert ShardingStrategy.HYBRID_SHARD_OPTIM.dims[0].optimizer_state


# State


@on_ranks(6)
def test_full_parameters_come_together_from_all_hosts() -> None:
    model = sharded_net((2, 3))
    weight = model[1].up.weight
    # Of each place on a host the ranks with it follow each other.
    assert isinstance(weight, RaggedDTensor) and weight.device_mesh.mesh.tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(weight.full_tensor(), net()[1].up.weight)
    for dst in range(6):
        state = full_state_dict(model, dst=dst)
        assert bool(state) == (dist.get_rank() == dst)
        assert not state or torch.equal(state["1.up.weight"], net()[1].up.weight)
    load_full_state_dict(model, net(5).state_dict() if dist.get_rank() == 0 else {})
    assert torch.equal(full(model[1].up.weight), net(5)[1].up.weight)


@pytest.mark.parametrize("in_backward", [False, True])
def test_after_a_forward_that_raises_the_next_step_is_right(in_backward: bool) -> None:
    run_threads(fail_in_forward, 4, shard, in_backward=in_backward)


# Hooks and refusals


@on_ranks(4)
def test_a_communication_hook_reduces_over_all_ranks_in_one_leg() -> None:
    model = sharded_net()
    with pytest.raises(ConfigError, match="the state of the hook has ranks"):
        register_comm_hook(model, DefaultState(dist.group.WORLD), reduce_scatter_hook)
    group = model[0].weight.device_mesh.get_group()
    register_comm_hook(model, DefaultState(group), reduce_scatter_hook)
    loss(model).backward()
    torch.testing.assert_close(grads(model), reference_grads(), rtol=1e-6, atol=1e-6)


@on_ranks(4)
def test_what_does_not_go_with_it_is_refused_on_every_rank_and_leaves_the_model_as_it_was() -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    for sync in (False, True):
        text = refusal(int8_model([(8, 8)]), mesh, strategy=STRATEGY, sync_module_states=sync)
        assert "HYBRID_SHARD_OPTIM on parameters whose class says what ranks exchange" in text
        assert f"rank {rank}, parameter '0.weight'" in text
        assert "fix: annotate their modules in a call of their own with HYBRID_SHARD" in text


@on_ranks(4)
def test_what_a_class_gathers_trains_beside_it_in_a_call_of_its_own() -> None:
    models = [nn.Sequential(*int8_model([(DIM, DIM)]), *net()) for _ in range(2)]
    for model, strategy in zip(models, ("HYBRID_SHARD", STRATEGY), strict=True):
        fully_shard(model[0], mesh=mesh_of((2, 2)), strategy="HYBRID_SHARD")
        fully_shard(model, mesh=mesh_of((2, 2)), strategy=strategy, policy={MLPBlock})
    step_alike(models)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(full(first), full(second), rtol=1e-6, atol=1e-6)


@on_ranks(4)
def test_there_is_no_all_reduce_to_leave_out_and_none_is_left_out_after_the_error() -> None:
    model = net()
    fully_shard(model[1], mesh=mesh_of((2, 2)), strategy="HYBRID_SHARD")
    shard(model)
    with pytest.raises(ConfigError, match="there is none with HYBRID_SHARD_OPTIM") as caught:
        model.set_requires_all_reduce(False)
    assert "fix: call set_requires_gradient_sync(False)" in str(caught.value)
    loss(model).backward()
    torch.testing.assert_close(grads(model), reference_grads(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("replicas", "ranks_per_host"), [(4, 4), (2, 16)])
def test_the_plan_knows_which_bytes_go_between_hosts(replicas: int, ranks_per_host: int) -> None:
    made = plan(net(), world_size=8, replicas=replicas, strategy=STRATEGY, ranks_per_host=ranks_per_host)
    copies = plan(net(), world_size=8, replicas=replicas, strategy="HYBRID_SHARD", ranks_per_host=ranks_per_host)
    found, other = made.expected_traffic(), copies.expected_traffic()
    # An all-reduce sends what a gather and a reduce-scatter do.
    assert found.between_bytes == pytest.approx(other.between_bytes, rel=0.05)
    assert found.inside_bytes == pytest.approx(other.inside_bytes, rel=0.05)
