"""Hybrid sharding: shards over the ranks of one mesh dim, copies of them over those of another."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import (
    ConfigError,
    DataParallelMeshDims,
    DefaultState,
    DesyncError,
    MixedPrecisionPolicy,
    UsageError,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    iter_full_params,
    joinable,
    load_checkpoint,
    load_full_state_dict,
    no_sync,
    plan,
    reduce_gradients,
    reduce_scatter_hook,
    register_comm_hook,
    save_checkpoint,
    unannotate,
    unshard_params,
)
from tests.counting import CountingTransport
from tests.models import BLOCK_CLASSES, DIM, MLPBlock, random_input, seeded
from tests.parity import full, full_params
from tests.programs import Twins, compare, loss_at, train
from tests.test_reshard_int import mesh_of, net
from tests.world import on_ranks, run_ranks, run_threads

TorchDims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
needs_torch_dims = pytest.mark.skipif(TorchDims is None, reason="this torch has no such class")

SHAPES = [(1, 2), (2, 1), (2, 3), (3, 2)]


def sharded_net(shape: tuple[int, int], **options: Any) -> nn.Sequential:
    return fully_shard(net(), policy={MLPBlock}, mesh=mesh_of(shape), **options)


def twins_on(shape: tuple[int, int]) -> Twins:
    return Twins(net, lambda model: fully_shard(model, policy={MLPBlock}, mesh=mesh_of(shape)))


# Numbers


def on_mesh(shape: tuple[int, int], model: nn.Module) -> None:
    fully_shard(model, policy=BLOCK_CLASSES, mesh=mesh_of(shape), strategy="HYBRID_SHARD")


@pytest.mark.parametrize(("shape", "run"), [*((shape, run_threads) for shape in SHAPES), ((2, 2), run_ranks)])
def test_training_on_any_shape_of_mesh_is_that_of_one_process(shape: tuple[int, int], run: Callable[..., Any]) -> None:
    run(compare, shape[0] * shape[1], "mlp", functools.partial(on_mesh, shape))


@pytest.mark.parametrize(("world_size", "shape"), [(4, (2, 2)), (2, (1, 2))])
@on_ranks()
def test_a_deferred_second_leg_is_one_all_reduce_of_each_shard(shape: tuple[int, int]) -> None:
    """Count the collectives of a step of three micro-batches, of which the last one has the second leg."""
    model = sharded_net(shape)
    model(random_input(0, 4, DIM)).sum().backward()
    counting = counting_both_legs(model)
    for number in range(3):
        counting.reset()
        model.set_requires_all_reduce(number == 2)
        model(random_input(number, 4, DIM)).sum().backward()
        counts = counting.counts()
        is_reduced = number == 2 and shape[0] > 1
        assert counts["reduce_scatter"] > 0
        assert counts.get("all_reduce") == (counts["reduce_scatter"] if is_reduced else None)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("reduce_gradients", ""),
        ("zero_grad", ""),
        ("zero_grad to zero", ""),
        ("step", "with gradients that are not complete"),
        ("clip", "with gradients that are not complete"),
        ("copy", "an annotated model cannot be copied while its gradients wait for other ranks"),
        ("unannotate", "unannotate while gradients wait for the all-reduce"),
    ],
)
@on_ranks(4)
def test_gradients_that_wait_for_their_all_reduce_are_not_used_and_not_lost(then: str, said: str) -> None:
    """Do something while gradients wait for their all-reduce; those of the next step are right in any case."""
    twins = twins_on((2, 2))
    model, optimizer = twins.model, twins.optimizers[0]
    calls: dict[str, Callable[[], object]] = {
        "step": optimizer.step,
        "clip": lambda: clip_grad_norm_(model.parameters(), 1.0),
        "copy": lambda: copy.deepcopy(model),
        "unannotate": lambda: unannotate(model),
    }
    model.set_requires_all_reduce(False)
    twins.backward(0)
    if then in calls:
        with pytest.raises(UsageError, match=said):
            calls[then]()
    elif then != "reduce_gradients":
        twins.drop(set_to_none=then == "zero_grad")
    model.set_requires_all_reduce(True)
    if then == "reduce_gradients":
        reduce_gradients(model)
    else:
        twins.backward(1)
    twins.check_gradients()
    optimizer.step()


class Failing(torch.autograd.Function):
    """A layer whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("no backward")


@on_ranks(4, then=["zero_grad", "reset_iter_state"])
def test_what_waits_is_forgotten_with_a_backward_that_was_cut_short(*, then: str) -> None:
    """Reduce some modules in a backward that fails, among micro-batches without the second leg, and begin anew."""
    twins = twins_on((2, 2))
    model = twins.model
    model.set_requires_all_reduce(False)
    loss_at(model, 0, twins.rank).backward()
    with pytest.raises(RuntimeError, match="no backward"):
        model(Failing.apply(random_input(0, 4, DIM).requires_grad_())).square().mean().backward()
    if then == "reset_iter_state":
        model.reset_iter_state()
        twins.optimizers[0].step()
    model.zero_grad()
    for number in (1, 2):
        model.set_requires_all_reduce(number == 2)
        twins.backward(number)
    twins.check_gradients()


def chosen_apart() -> str:
    """Leave out the second leg on one rank only."""
    model = sharded_net((2, 2))
    model.set_requires_all_reduce(dist.get_rank() != 1)

    def meet() -> None:
        model(random_input(0, 4, DIM)).square().mean().backward()
        dist.barrier()

    with pytest.raises(RuntimeError) as caught:
        meet()
    return str(caught.value)


def test_a_wait_for_the_second_leg_is_named() -> None:
    texts = run_threads(chosen_apart, 4)
    assert any("the wait for the all-reduce over copies of module" in text for text in texts), texts


@on_ranks(4)
def test_a_second_leg_starts_before_the_first_leg_of_the_next_module() -> None:
    model = sharded_net((2, 2))
    model(random_input(0, 4, DIM)).sum().backward()
    counting = counting_both_legs(model)
    model(random_input(0, 4, DIM)).sum().backward()
    found = [record.op for record in counting.records if record.op in ("reduce_scatter", "all_reduce")]
    assert len(found) >= 6 and found == ["reduce_scatter", "all_reduce"] * (len(found) // 2)


def counting_both_legs(model: nn.Module) -> CountingTransport:
    root = fully_shard.state(model).root
    counting = CountingTransport.install(root)
    for replicas in {copies for handle in root.handles for flat in handle.buffers if (copies := flat.routes._copies)}:
        replicas.transport = CountingTransport(replicas.transport, counting.records)
    return counting


@pytest.mark.parametrize(
    ("world_size", "shape", "strategy", "low"),
    [(4, (2, 2), "HYBRID_SHARD", True), (4, (2, 2), "HYBRID_SHARD_ZERO2", False), (2, (1, 2), "HYBRID_SHARD", False)],
)
@on_ranks()
def test_collectives_and_bytes_of_each_leg_are_those_of_the_plan(
    shape: tuple[int, int], strategy: str, low: bool
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low else MixedPrecisionPolicy()
    model, x = sharded_net(shape, strategy=strategy, mp_policy=policy), random_input(0, 4, DIM)
    model(x).float().sum().backward()
    counting = counting_both_legs(model)
    model(x).float().sum().backward()
    assert bool(counting.check(model).get("all_reduce")) == (shape[0] > 1)


@on_ranks(4, hooks=[[False, True], [True, True, False]])
def test_shards_that_wait_are_divided_once_whatever_hooks_come_and_go(hooks: list[bool]) -> None:
    """Register a communication hook, or take it away, while shards wait for their second leg."""
    twins = twins_on((2, 2))
    group = fully_shard.state(twins.model).mesh.get_group()
    for number, is_hooked in enumerate(hooks):
        twins.model.set_requires_all_reduce(number + 1 == len(hooks))
        removable = register_comm_hook(twins.model, DefaultState(group), reduce_scatter_hook) if is_hooked else None
        twins.backward(number)
        if removable is not None:
            removable.remove()
    twins.check_gradients()


def keep_and_halve(shard: torch.Tensor) -> None:
    """Halve what is equal on the ranks with copies only after the second leg: their sum then is twice the same."""
    total = shard.clone()
    dist.all_reduce(total, group=group_of_copies())
    torch.testing.assert_close(total, 2 * shard)
    shard.mul_(0.5)


def group_of_copies() -> dist.ProcessGroup:
    return mesh_of((2, 2)).get_group("replicate")


@on_ranks(4, way=["factor", "hook after both legs"])
def test_a_factor_divides_once_and_a_hook_sees_the_result_of_both_legs(way: str) -> None:
    scaled, plain = sharded_net((2, 2)), sharded_net((2, 2))
    for module in (scaled, scaled[1], scaled[2]):
        if way == "factor":
            module.set_gradient_divide_factor(8.0)
        else:
            module.set_all_reduce_hook(keep_and_halve)
    for model in (scaled, plain):
        model(random_input(dist.get_rank(), 4, DIM)).square().mean().backward()
    for found, expected in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(found.grad), full(expected.grad) / 2)


# State


def trained(shape: tuple[int, int]) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = sharded_net(shape, strategy="HYBRID_SHARD")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(random_input(10 * step + dist.get_rank(), 4, DIM)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@on_ranks(4)
def test_full_state_is_read_and_written_once_and_the_same_everywhere() -> None:
    model, _ = trained((2, 2))
    expected = full_params(model)
    for dst in range(4):
        found = full_state_dict(model, dst=dst)
        assert bool(found) == (dist.get_rank() == dst)
        assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected.keys() & found.keys())
    for src in range(4):
        other = sharded_net((2, 2))
        state = {key: value.clone() for key, value in net().state_dict().items()} | expected
        load_full_state_dict(other, state if dist.get_rank() == src else None, src=src)
        assert all(torch.equal(value, expected[fqn]) for fqn, value in full_params(other).items())
    for rank0_only in (False, True):
        for fqn, value in iter_full_params(model, rank0_only=rank0_only):
            assert (value is not None) == (not rank0_only or dist.get_rank() == 0)
            assert value is None or torch.equal(value, expected[fqn])
    with unshard_params(model, rank0_only=True), torch.no_grad():
        for param in model.parameters() if dist.get_rank() == 0 else ():
            param += 1
    assert all(torch.equal(value, expected[fqn] + 1) for fqn, value in full_params(model).items())


@on_ranks(4)
def test_copies_and_unannotated_models_have_the_same_gradients() -> None:
    model, _ = trained((2, 2))
    twin = copy.deepcopy(model)
    x = random_input(77 + dist.get_rank(), 4, DIM)
    for one in (model, twin):
        with no_sync(one):
            one(x).square().mean().backward()
        one(x).square().mean().backward()
    expected = {fqn: full(param.grad) for fqn, param in model.named_parameters()}
    assert all(torch.equal(full(param.grad), expected[fqn]) for fqn, param in twin.named_parameters())
    with no_sync(model):
        model(x).square().mean().backward()
    unannotate(model)
    for fqn, _ in twin.named_parameters():
        kept = dict(model.named_parameters())[fqn]
        assert not hasattr(kept, "full_tensor")
        torch.testing.assert_close(kept.grad, expected[fqn] * 1.5)


def save(folder: str, shape: tuple[int, int]) -> tuple[dict[str, torch.Tensor], int]:
    model, optimizer = trained(shape)
    save_checkpoint(folder, 1, model, optimizer)
    return full_params(model), sum(path.stat().st_size for path in Path(folder).rglob("*.distcp"))


def load(folder: str, shape: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    model = fully_shard(net(), policy={MLPBlock}) if shape is None else sharded_net(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load_checkpoint(folder, model, optimizer)
    return full_params(model)


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), None), ((1, 3), (2, 1)), ((2, 1), (3, 2))])
def test_a_checkpoint_moves_between_meshes(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int] | None
) -> None:
    expected, _ = run_threads(save, saved[0] * saved[1], str(tmp_path), saved)[0]
    world_size = 3 if loaded is None else loaded[0] * loaded[1]
    for found in run_threads(load, world_size, str(tmp_path), loaded):
        assert all(torch.equal(value, expected[fqn]) for fqn, value in found.items())


def test_a_checkpoint_holds_each_value_once(tmp_path: Path) -> None:
    _, once = run_threads(save, 2, str(tmp_path / "once"), (1, 2))[0]
    _, copied = run_threads(save, 6, str(tmp_path / "copied"), (3, 2))[0]
    assert once > 0 and copied < 1.5 * once


# Meshes


def chosen(way: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    model = net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    own = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    shard, copies = (group for ranks, group in own.items() if dist.get_rank() in ranks)
    if way == "groups":
        for module in (model[1], model):
            fully_shard(module, process_group=(shard, copies))
        model(random_input(dist.get_rank(), 4, DIM)).sum().backward()
    elif way == "one group":
        fully_shard(model, process_group=shard)
    elif way == "hosts":
        fully_shard(model[1], strategy="HYBRID_SHARD_ZERO2")
        fully_shard(model, strategy="HYBRID_SHARD")
    else:
        dims = {
            "dims": lambda: DataParallelMeshDims(shard="a", replicate="b"),
            "torch's dims": lambda: TorchDims(shard="a", replicate=("b",)),
            "one dim": lambda: DataParallelMeshDims(shard="b"),
        }
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims[way]())
    grid = fully_shard.state(model).grid
    return grid.shard.numbers, () if grid.replicas is None else grid.replicas.numbers, grid.divisor


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("dims", ((0, 2), (0, 1), 4)),
        pytest.param("torch's dims", ((0, 2), (0, 1), 4), marks=needs_torch_dims),
        ("one dim", ((0, 1), (), 2)),
        ("hosts", ((0, 1), (0, 2), 4)),
        ("groups", ((0, 1), (0, 2), 4)),
        ("one group", ((0, 1), (), 2)),
    ],
)
def test_dims_are_chosen_by_name_or_by_host(way: str, expected: tuple[tuple[int, ...], tuple[int, ...], int]) -> None:
    assert run_threads(chosen, 4, way, ranks_per_host=2)[0] == expected


@on_ranks(4)
def test_meshes_that_pair_the_same_ranks_otherwise_are_refused() -> None:
    model, outer = net(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    fully_shard(model[1], mesh=outer, dp_mesh_dims=DataParallelMeshDims(shard="a", replicate="b"))
    with pytest.raises(ConfigError) as caught:
        fully_shard(model, mesh=outer)
    assert fully_shard.state(model) is None
    model(random_input(dist.get_rank(), 4, DIM)).sum().backward()
    text = str(caught.value)
    assert "a module below has copies of shards on ranks [(0, 1), (2, 3)], this one on [(0, 2), (1, 3)]" in text


@on_ranks(4, ranks=[[[0, 3], [1, 2]], [[2, 3], [0, 1]]])
def test_replicas_may_come_in_any_order(ranks: list[list[int]]) -> None:
    """Send first values, load from another rank, train and take values on every rank, in a mesh of these ranks."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    rank, plain = dist.get_rank(), seeded(lambda: nn.Linear(5, 3), 0)
    model = fully_shard(seeded(lambda: nn.Linear(5, 3), rank), mesh=mesh, sync_module_states=True)
    assert torch.equal(full(model.weight), plain.weight)
    model(random_input(rank, 4, 5)).square().mean().backward()
    for one in range(4):
        (plain(random_input(one, 4, 5)).square().mean() / 4).backward()
    torch.testing.assert_close(full(model.weight.grad), plain.weight.grad)
    other = seeded(lambda: nn.Linear(5, 3), 9).state_dict()
    load_full_state_dict(model, other if rank == 1 else None, src=1)
    assert torch.equal(full(model.weight), other["weight"])
    assert all(bool(full_state_dict(model, dst=dst)) == (dst == rank) for dst in range(4))


@pytest.mark.parametrize(
    ("ranks", "world_size", "expected"),
    [
        ([[0, 1], [3, 2]], 4, r"in the order \[3, 2\], process groups have them ascending"),
        ((((0, 1), (0, 1), (2, 3), (2, 3)), ((0, 3), (1, 2), (1, 2), (0, 3))), 4, "form no grid"),
        ((((0, 1), (0, 1)), ((0, 1), (0, 1))), 2, "form no grid"),
    ],
)
@on_ranks()
def test_ranks_whose_copies_are_of_other_shards_are_refused_on_every_rank(ranks: Any, expected: str) -> None:
    model = net()
    where: dict[str, Any] = {}
    if isinstance(ranks, list):
        where["mesh"] = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    else:
        made = {one: dist.new_group(list(one)) for one in dict.fromkeys((*ranks[0], *ranks[1]))}
        where["process_group"] = tuple(made[of[dist.get_rank()]] for of in ranks)
    with pytest.raises(ConfigError, match=expected):
        fully_shard(model, **where)
    assert fully_shard.state(model) is None


def test_a_plan_knows_its_replicas() -> None:
    made = plan(net(), world_size=2, replicas=3, strategy="HYBRID_SHARD", policy={MLPBlock})
    assert "over 2 ranks x 3 replicas" in str(made)
    assert all(one.all_reduces == one.reduce_scatters for one in made.expected_collectives())


# Copies that begin different


def begin_apart(case: str) -> Any:
    """Return a model whose copies of shards differ, by one of the ways that users have."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model: Any
    if case == "meta, reset":
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(DIM, DIM), MLPBlock(), nn.LayerNorm(DIM))
    else:
        model = net(rank if case in ("seeds", "bf16", "frozen", "a load") else 0)
    model.requires_grad_(case != "frozen").to(torch.bfloat16 if case == "bf16" else torch.float32)
    with torch.no_grad():
        if case == "one bit":
            model[1].down.bias[-1] += 0.5 if rank == 3 else 0.0
        elif case == "exchanged":
            model[0].weight[0, :2] = model[0].weight[0, :2].flip(0) if rank == 2 else model[0].weight[0, :2]
    model = fully_shard(model, policy={MLPBlock}, mesh=mesh_of((2, 2)))
    if case.startswith("meta"):
        model.to_empty(device="cpu")
    with torch.no_grad():
        for module in model.modules():
            if case in ("reset", "meta, reset") and hasattr(module, "reset_parameters"):
                torch.manual_seed(rank)
                module.reset_parameters()
        if case == "written":
            model[0].weight.fill_(float(rank))
        elif case == "unshard_params":
            with unshard_params(model):
                model[0].weight.fill_(float(rank >= 2))
        elif case == "a load":
            model.load_state_dict(net(rank).state_dict())
    return model


CASES = [
    "seeds",
    "bf16",
    "frozen",
    "one bit",
    "exchanged",
    "reset",
    "meta, reset",
    "written",
    "unshard_params",
    "a load",
]


@on_ranks(4, case=CASES)
def test_copies_that_begin_different_are_an_error_on_every_rank(*, case: str) -> None:
    model = begin_apart(case)
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    with pytest.raises(DesyncError) as caught:
        model(random_input(0, 4, DIM).to(dtype))
    text = str(caught.value)
    assert "hold different values" in text and "sync_module_states=True" in text
    name = {"one bit": "1.down.bias", "exchanged": "0.weight", "written": "0.weight", "unshard_params": "0.weight"}
    assert f"parameter '{name.get(case, '')}" in text


@on_ranks(4, fix=["sync_module_states", "load_full_state_dict", "load_checkpoint"])
def test_copies_that_a_load_makes_equal_train(tmp_path: Path, fix: str) -> None:
    def annotate(model: nn.Module) -> None:
        first = model.state_dict() if dist.get_rank() == 0 else {}
        model.load_state_dict(net(dist.get_rank()).state_dict())
        is_synced = fix == "sync_module_states"
        fully_shard(model, policy={MLPBlock}, mesh=mesh_of((2, 2)), sync_module_states=is_synced)
        if fix == "load_full_state_dict":
            load_full_state_dict(model, first)
        elif fix == "load_checkpoint":
            save_checkpoint(tmp_path, 1, sharded_net((2, 2)))
            load_checkpoint(tmp_path, model)

    train(Twins(net, annotate), 1)


@on_ranks(4)
def test_copies_are_compared_once() -> None:
    model = fully_shard(net(), mesh=mesh_of((2, 2)))
    with unshard_params(model):
        model(random_input(0, 4, DIM))
    root: Any = fully_shard.state(model).root  # type: ignore[union-attr]
    assert not root.has_begun
    model(random_input(0, 4, DIM))
    assert root.has_begun


@on_ranks(4)
def test_a_join_compares_copies_for_ranks_without_inputs() -> None:
    model = fully_shard(net(dist.get_rank()), mesh=mesh_of((2, 2)))
    with pytest.raises(DesyncError, match="hold different values"), Join([joinable(model, step=list)]):
        pass


# Several dims of a mesh that count as one


@on_ranks(4, ways=["ours", pytest.param("torch's", marks=needs_torch_dims)])
def test_dims_of_context_parallelism_shard_with_those_of_data_and_the_mean_is_over_both(ways: str) -> None:
    """Let ranks along "cp" have parts of the same sequences; one process has the whole sequences."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    kind = DataParallelMeshDims if ways == "ours" else TorchDims
    model, plain = net(), net()
    fully_shard(model, policy={MLPBlock}, mesh=mesh, dp_mesh_dims=kind(shard=("dp_shard", "cp")))
    grid = fully_shard.state(model).grid
    assert (grid.shard.numbers, grid.divisor) == ((0, 1, 2, 3), 4)
    rows, columns = mesh.get_local_rank("dp_shard"), mesh.get_local_rank("cp")
    sequences = random_input(0, 2, 6, DIM)
    model(sequences[rows].chunk(2)[columns]).square().mean().backward()
    plain(sequences).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(one.grad), other.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ({"shard": ("a", "c"), "replicate": "b"}, ((0, 1, 4, 5), (0, 2), 8)),
        ({"shard": "c", "replicate": ("a", "b")}, ((0, 1), (0, 2, 4, 6), 8)),
        ({"replicate": "b"}, ((0,), (0, 2), 2)),
        ({"replicate": ("a", "b", "c")}, ((0,), tuple(range(8)), 8)),
        ({"shard": ("b",)}, ((0, 2), (), 2)),
    ],
)
@on_ranks(8)
def test_tuples_of_dims_and_replicate_alone_are_values(dims: Any, expected: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

    def annotate(model: nn.Module) -> None:
        for part in (model[1], model[2], model):  # type: ignore[index]
            fully_shard(part, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))

    twins = Twins(net, annotate)
    grid = fully_shard.state(twins.model).grid
    everyone = grid.everyone.numbers
    twins.size, twins.rank = grid.divisor, everyone.index(dist.get_rank())
    twins.backward()
    twins.check_gradients()
    if dist.get_rank() == 0:
        assert (grid.shard.numbers, grid.replicas.numbers if grid.replicas else (), grid.divisor) == expected


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ({}, "no mesh dim is named for shard or for replicate"),
        ({"shard": ()}, "shard of the mesh dims is a tuple"),
        ({"shard": ("a", 1)}, "shard of the mesh dims is a tuple"),
        ({"shard": ("a", "b"), "replicate": "b"}, "mesh dim 'b' is named twice for shard and replicate"),
        ({"shard": ("a", "x")}, r"the mesh has no dim 'x', but \('a', 'b'\)"),
        ({"shard": ("b", "a")}, r"mesh dims \('b', 'a'\) are not in the order of the mesh, \('a', 'b'\)"),
    ],
)
@on_ranks(4)
def test_names_that_are_no_dims_are_refused(dims: Any, said: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(ConfigError, match=said):
        fully_shard(net(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
