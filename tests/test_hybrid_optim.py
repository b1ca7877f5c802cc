"""``HYBRID_SHARD_OPTIM``: parameters whole on each host between forward and backward, all else over all ranks."""

import copy
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import (
    ConfigError,
    DefaultState,
    MixedPrecisionPolicy,
    RaggedDTensor,
    ShardingStrategy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    load_full_state_dict,
    no_sync,
    plan,
    reduce_scatter_hook,
    register_comm_hook,
    save_checkpoint,
    unannotate,
    unshard_params,
)
from composable.storage import RestingPlace
from tests.counting import Collective, CountingTransport
from tests.models import BLOCK_CLASSES, DIM, MODELS, MLPBlock, random_input, seeded
from tests.parity import LR, Run, assert_equal_runs, full, train_annotated, train_reference
from tests.planning.test_memory import PRECISIONS, WIDTH, StepBytes, Tower
from tests.subclasses import int8_model
from tests.test_reshard_int import Fails, grads, loss, net, reference_grads, root_of, secondary_bytes
from tests.world import run_ranks, run_threads

STRATEGY = "HYBRID_SHARD_OPTIM"
SHAPES = [(2, 2), (1, 2), (2, 1), (3, 2), (2, 3)]
BF16 = torch.bfloat16


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded_net(shape: tuple[int, int] = (2, 2), **options: Any) -> nn.Sequential:
    return fully_shard(net(), policy={MLPBlock}, mesh=mesh_of(shape), strategy=STRATEGY, **options)


def write(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor)


def counting(model: nn.Module) -> list[Collective]:
    """Record collectives: among all ranks, of a host (``host_``) and between hosts (``fill_``, ``second_``)."""
    records: list[Collective] = []
    for flat in [flat for handle in root_of(model).handles for flat in handle.buffers]:
        routes = flat.routes
        for path, kind in ((routes.gather_path, ""), (routes.secondary_path, "host_"), (routes.fill_path, "fill_")):
            path.transport = CountingTransport(path.transport, records, kind)
        routes.gradient_path.transport = CountingTransport(routes.gradient_path.transport, records)
    between = {flat.routes._hosts[1] for handle in root_of(model).handles for flat in handle.buffers}
    for replicas in between:
        replicas.transport = CountingTransport(replicas.transport, records, "second_")
    return records


def counts(records: list[Collective]) -> Counter[str]:
    return Counter(record.op for record in records)


# Numbers


def train(name: str, shape: tuple[int, int], **options: Any) -> Run:
    def annotate(model: nn.Module) -> None:
        has_blocks = any(type(module) in BLOCK_CLASSES for module in model.modules())
        policy = BLOCK_CLASSES if has_blocks else None
        fully_shard(model, mesh=mesh_of(shape), strategy=STRATEGY, policy=policy, **options)

    return train_annotated(name, annotate)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_training_is_that_of_one_process_on_the_global_batch(name: str) -> None:
    tolerance = 2e-2 if name == "mixed_dtypes" else 1e-6
    assert_equal_runs(run_threads(train, 4, name, (2, 2)), train_reference(name, 4), tolerance=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transport", ["process_group", "point_to_point"])
def test_training_on_any_shape_of_mesh_is_that_of_one_process(shape: tuple[int, int], transport: str) -> None:
    world_size = shape[0] * shape[1]
    runs = run_threads(train, world_size, "mlp", shape, transport=transport)
    assert_equal_runs(runs, train_reference("mlp", world_size))


def test_processes_train_like_one() -> None:
    assert_equal_runs(run_ranks(train, 4, "mlp", (2, 2), timeout_s=200), train_reference("mlp", 4))


def train_on_hosts() -> Run:
    def annotate(model: nn.Module) -> None:
        fully_shard(model, strategy=STRATEGY, policy=BLOCK_CLASSES)
        weight = next(model.parameters())
        assert isinstance(weight, RaggedDTensor) and weight.device_mesh.mesh.tolist() == [0, 2, 1, 3]

    return train_annotated("mlp", annotate)


def test_without_a_mesh_hosts_are_those_that_ranks_find() -> None:
    assert_equal_runs(run_threads(train_on_hosts, 4, ranks_per_host=2), train_reference("mlp", 4))


def near_the_numbers_of_hybrid_shard(policy: MixedPrecisionPolicy) -> None:
    mesh = mesh_of((2, 2))
    is_exact = torch.bfloat16 not in (policy.reduce_dtype or policy.param_dtype,)
    models = [
        fully_shard(net(), policy={MLPBlock}, mesh=mesh, strategy=strategy, mp_policy=policy)
        for strategy in ("HYBRID_SHARD", STRATEGY)
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        # Sums in bfloat16 round otherwise where the second leg cuts them.
        tolerance = 1e-6 if is_exact else 1e-2
        torch.testing.assert_close(full(first), full(second), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("policy", PRECISIONS, ids=str)
def test_in_any_precision_the_numbers_are_those_of_hybrid_shard(policy: MixedPrecisionPolicy) -> None:
    run_threads(near_the_numbers_of_hybrid_shard, 4, policy)


class Part(nn.Sequential):
    def forward(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        for layer in list(self)[:layers]:
            x = layer(x)
        return x


def random_run(seed: int, shape: tuple[int, int]) -> None:
    """Draw annotations, micro-batches, clipping, writes, what runs between; hold parameters against one process."""
    draw, rank, world_size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    made = [seeded(lambda: Part(nn.Linear(DIM, DIM), MLPBlock(), MLPBlock()), seed) for _ in range(2)]
    model, plain = made
    for module in (model[1], model[2]):
        if draw.random() < 0.7:
            fully_shard(module, mesh=mesh_of(shape), strategy=draw.choice([STRATEGY, STRATEGY, "HYBRID_SHARD"]))
    fully_shard(model, mesh=mesh_of(shape), strategy=STRATEGY, unused_gradients=draw.choice(["none", "zero"]))
    model.set_reshard_after_backward(draw.random() < 0.7)
    model.set_separate_reduce_scatter_group(draw.random() < 0.3)
    if draw.random() < 0.3:
        model.set_reshard_after_forward(draw.random() < 0.5)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=LR / 10) for one in made]
    for step in range(4):
        micro_batches = draw.randint(1, 3)
        for number in range(micro_batches):
            is_last = number + 1 == micro_batches
            every = [random_input(1000 * (10 * step + number) + one, 4, DIM) for one in range(world_size)]
            layers = 3 if is_last else draw.choice([1, 2, 3])
            before = draw.choice(["", "", "eval", "unshard", "written"])
            if before == "eval":
                with torch.no_grad():
                    model(every[rank], 3)
            elif before == "unshard":
                model.unshard(async_op=draw.random() < 0.5)
            elif before == "written" and number == 0:
                for one in made:
                    write(one, 0.9)
            losses = [one(x, layers).square().mean() for x, one in ((every[rank], model), (torch.cat(every), plain))]
            between = draw.choice(["", "", "eval", "shown"])
            if between == "eval":
                with torch.no_grad():
                    model(every[rank], 2)
            elif between == "shown":
                with unshard_params(model):
                    pass
            with no_sync(model) if not is_last and draw.random() < 0.5 else torch.enable_grad():
                losses[0].backward()
            losses[1].backward()
        clips = draw.random() < 0.5
        for one, optimizer in zip(made, optimizers, strict=True):
            clip = clip_grad_norm_ if one is model else nn.utils.clip_grad_norm_
            clip(one.parameters(), 0.3 if clips else 9)
            optimizer.step()
            optimizer.zero_grad()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(found), expected.detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("seed", range(6))
def test_random_annotations_train_like_one_process(seed: int) -> None:
    shape = SHAPES[seed % len(SHAPES)]
    run_threads(random_run, shape[0] * shape[1], seed, shape)


# What travels, and when


def step_counted(shape: tuple[int, int], low: bool) -> tuple[Counter[str], Counter[str], Any]:
    model = sharded_net(shape, mp_policy=MixedPrecisionPolicy(param_dtype=BF16) if low else MixedPrecisionPolicy())
    loss(model).backward()
    write(model, 2)
    records = counting(model)
    loss(model).backward()
    sent: Counter[str] = Counter()
    for record in records:
        sent[record.op] += record.bytes
    return counts(records), sent, fully_shard.state(model).plan


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2)])
def test_collectives_and_bytes_of_a_step_are_those_of_the_plan(shape: tuple[int, int], low: bool) -> None:
    names = {
        "host_all_gather": "secondary_all_gather",
        "fill_all_gather": "fill",
        "reduce_scatter": "reduce_scatter",
        "second_reduce_scatter": "second_reduce_scatter",
    }
    for found, sent, made in run_threads(step_counted, shape[0] * shape[1], shape, low):
        expected = made.expected_collectives()
        assert found == {op: sum(getattr(one, f"{name}s") for one in expected) for op, name in names.items()}
        assert sent == {op: sum(getattr(one, f"{name}_bytes") for one in expected) for op, name in names.items()}
        assert sent["fill_all_gather"] * shape[1] * 2 == sent["host_all_gather"]


def micro_batches() -> None:
    model = sharded_net()
    records = counting(model)
    for number in range(3):
        with no_sync(model) if number < 2 else torch.enable_grad():
            loss(model, number).backward()
    assert counts(records)["fill_all_gather"] == 3 and counts(records)["host_all_gather"] == 18
    expected = [sum(every) for every in zip(*map(reference_grads, range(3)), strict=True)]
    torch.testing.assert_close(grads(model), expected, rtol=1e-6, atol=1e-6)
    records.clear()
    with torch.no_grad():
        loss(model)
    assert counts(records) == {"host_all_gather": 3}


def test_between_hosts_parameters_travel_once_for_all_micro_batches_of_a_step() -> None:
    run_threads(micro_batches, 4)


def written_on_one_rank() -> None:
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


def test_what_any_rank_has_written_is_gathered_again_and_no_more_than_that() -> None:
    run_threads(written_on_one_rank, 4)


def written_between() -> None:
    model = sharded_net()
    value = loss(model)
    write(model, 2)
    with unshard_params(model):
        assert torch.equal(model[0].weight, 2 * net()[0].weight)
    value.backward()
    # Backward goes through the values of its forward.
    torch.testing.assert_close(grads(model), reference_grads(), rtol=1e-6, atol=1e-6)
    model.zero_grad()
    loss(model, 1).backward()
    torch.testing.assert_close(grads(model), reference_grads(1, factor=2.0), rtol=1e-5, atol=1e-5)


def test_what_is_written_between_forward_and_backward_is_for_the_next_forward() -> None:
    run_threads(written_between, 4)


def by_hand() -> None:
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


def test_what_is_unsharded_by_hand_comes_from_all_ranks() -> None:
    run_threads(by_hand, 4)


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


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize(("shape", "growth"), [((2, 2), 8), ((3, 2), -8)])
def test_a_step_takes_what_the_plan_says(precision: MixedPrecisionPolicy, shape: tuple[int, int], growth: int) -> None:
    options = {"mp_policy": precision}
    for found, planned in run_threads(peak_and_plan, shape[0] * shape[1], shape, growth, options):
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


def shards() -> None:
    model, mesh = sharded_net((2, 3)), mesh_of((2, 3))
    weight = model[1].up.weight
    assert isinstance(weight, RaggedDTensor) and weight.device_mesh.size() == 6
    # Of each place on a host the ranks with it follow each other.
    assert weight.device_mesh.mesh.tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(weight.full_tensor(), net()[1].up.weight)
    for dst in range(6):
        state = full_state_dict(model, dst=dst)
        assert bool(state) == (dist.get_rank() == dst)
        assert not state or torch.equal(state["1.up.weight"], net()[1].up.weight)
    load_full_state_dict(model, net(5).state_dict() if dist.get_rank() == 0 else {})
    assert torch.equal(full(model[1].up.weight), net(5)[1].up.weight)
    assert mesh.size() == 6


def test_full_parameters_come_together_from_all_hosts() -> None:
    run_threads(shards, 6)


def saved(folder: Path) -> None:
    models = [sharded_net(), fully_shard(net(1), policy={MLPBlock}), sharded_net()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR) for model in models]
    loss(models[0]).backward()
    optimizers[0].step()
    save_checkpoint(folder, 0, models[0], optimizers[0]).wait()
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        load_checkpoint(folder, model, optimizer)
    for step in (1, 2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
    for params in zip(*(model.parameters() for model in models), strict=True):
        for other in params[1:]:
            torch.testing.assert_close(full(other), full(params[0]), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_loads_at_another_mesh(tmp_path: Path) -> None:
    run_threads(saved, 4, tmp_path)


def first_values() -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Sequential(nn.Linear(DIM, DIM), MLPBlock())
    if dist.get_rank() == 0:
        model = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), MLPBlock()), 3)
    fully_shard(model, mesh=mesh_of((2, 2)), strategy=STRATEGY, sync_module_states=True)
    expected = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), MLPBlock()), 3)
    for param, right in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(full(param), right)


def test_the_first_rank_may_give_the_values() -> None:
    run_threads(first_values, 4)


def elsewhere() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    models = [sharded_net(mp_policy=policy) for _ in range(2)]
    home = RestingPlace(torch.device("cpu"), is_elsewhere=True)
    for flat in [flat for handle in fully_shard.state(models[0])._handles for flat in handle.buffers]:
        flat.home = flat.routes.home = home
    for step in range(2):
        for model in models:
            model.zero_grad()
            loss(model, step).backward()
            write(model, 2)
        for found, expected in zip(*map(grads, models), strict=True):
            assert torch.equal(found, expected)


def test_shards_on_the_host_have_secondary_ones_where_the_buffers_are() -> None:
    run_threads(elsewhere, 4)


def copied() -> None:
    model = sharded_net()
    value = loss(model, 1)
    twin = copy.deepcopy(model)
    assert secondary_bytes(twin) == 0 < secondary_bytes(model)
    loss(twin, 2).backward()
    value.backward()
    torch.testing.assert_close(grads(twin), reference_grads(2), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads(model), reference_grads(1), rtol=1e-6, atol=1e-6)
    unannotate(model)
    for param, right in zip(model.parameters(), net().parameters(), strict=True):
        assert torch.equal(param, right)


def test_copies_have_their_own_and_unannotate_gives_whole_parameters() -> None:
    run_threads(copied, 4)


def fail() -> None:
    model = nn.Sequential(*net(), Fails())
    fully_shard(model, policy={MLPBlock}, mesh=mesh_of((2, 2)), strategy=STRATEGY)
    for where in ("forward", "backward"):
        model[4].fails = where == "forward"
        hook = model[1].register_full_backward_pre_hook(lambda *_: 1 / 0) if where == "backward" else None
        try:
            value = loss(model)
            if where == "backward":
                value.backward()
        except (RuntimeError, ZeroDivisionError):
            pass
        model[4].fails = False
        if hook is not None:
            hook.remove()
        model.zero_grad()
        loss(model, 1).backward()
        torch.testing.assert_close(grads(model), reference_grads(1), rtol=1e-6, atol=1e-6)


def test_after_an_error_the_next_step_is_right() -> None:
    run_threads(fail, 4)


# Hooks and refusals


def hooked() -> None:
    model = sharded_net()
    with pytest.raises(ConfigError, match="the state of the hook has ranks"):
        register_comm_hook(model, DefaultState(dist.group.WORLD), reduce_scatter_hook)
    group = model[0].weight.device_mesh.get_group()
    register_comm_hook(model, DefaultState(group), reduce_scatter_hook)
    loss(model).backward()
    torch.testing.assert_close(grads(model), reference_grads(), rtol=1e-6, atol=1e-6)


def test_a_communication_hook_reduces_over_all_ranks_in_one_leg() -> None:
    run_threads(hooked, 4)


def refused() -> list[str]:
    texts = []
    with pytest.raises(ConfigError) as early:
        sharded_net().set_requires_all_reduce(False)
    texts.append(str(early.value))
    for options in ({"mesh": init_device_mesh("cpu", (4,))}, {"mesh": mesh_of((2, 2)), "reshard_after_forward": 2}):
        with pytest.raises(ConfigError) as caught:
            fully_shard(net(), strategy=STRATEGY, **options)
        texts.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        fully_shard(int8_model([(8, 8)]), strategy=STRATEGY, mesh=mesh_of((2, 2)))
    return [*texts, str(caught.value)]


def test_what_does_not_go_with_it_is_refused() -> None:
    for early, line, both, gathered in run_threads(refused, 4):
        assert "there is none with HYBRID_SHARD_OPTIM" in early and "set_requires_gradient_sync(False)" in early
        assert "a hybrid strategy on a mesh of one dim" in line
        assert "strategy and reshard_after_forward" in both
        assert "HYBRID_SHARD_OPTIM on parameters whose class says what ranks exchange" in gathered
        assert "parameter '0.weight'" in gathered


@pytest.mark.parametrize(("replicas", "ranks_per_host"), [(4, 8), (4, 4), (2, 16)])
def test_the_plan_knows_which_bytes_go_between_hosts(replicas: int, ranks_per_host: int) -> None:
    made = plan(net(), world_size=8, replicas=replicas, strategy=STRATEGY, ranks_per_host=ranks_per_host)
    assert type(made).from_json(made.to_json()) == made
    copies = plan(net(), world_size=8, replicas=replicas, strategy="HYBRID_SHARD", ranks_per_host=ranks_per_host)
    found, other = made.expected_traffic(), copies.expected_traffic()
    # An all-reduce sends what a gather and a reduce-scatter do.
    assert found.between_bytes == pytest.approx(other.between_bytes, rel=0.05)
    assert found.inside_bytes == pytest.approx(other.inside_bytes, rel=0.05)
