"""Optimizers of whole matrices on sharded ones: to the bit those of one process, and nothing sent that is not planned.

Where all ranks have equal batches and their number is a power of two, means over ranks are exact, so gradients are
those of one process to the bit, and so must be every step: each matrix is orthogonalised in one piece, in its shape.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composable import (
    ConfigError,
    HandleOptions,
    MatrixOptimizer,
    UsageError,
    accelerate_optimizer,
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    no_sync,
    plan,
    rebind_optimizer,
    save_checkpoint,
    step_in_backward,
    strict_mode,
    unannotate,
)
from composable.comm import Ranks
from tests.counting import counting_ranks
from tests.parity import full
from tests.world import on_ranks, run_threads


class Net(nn.Module):
    """Wide and tall matrices, one of them tied, in handles that cut most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24, bias=False)) for _ in range(3)
        )
        self.again = nn.Linear(16, 24, bias=False)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.again(x.flip(1))
        for block in self.blocks:
            x = x + self.scale * block(x)
        return self.out(x)


class Shampoo(MatrixOptimizer):
    """Shampoo without roots, and the options that others have: state of several shapes, also replaced and counted."""

    def init_state(self, matrix: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        rows, columns = matrix.shape
        left, right = torch.eye(rows, device=matrix.device), torch.eye(columns, device=matrix.device)
        return {"left": left, "right": right, "average": torch.zeros_like(matrix), "step": matrix.new_zeros(())}

    def update(self, matrix: torch.Tensor, grad: torch.Tensor, state: Any, group: dict[str, Any]) -> None:
        state["step"] += 1
        state["left"].addmm_(grad, grad.T)
        state["right"] = state["right"] + grad.T @ grad
        state["average"].lerp_(grad, 0.1)
        matrix.mul_(1 - group["lr"] * 0.1)
        scaled = torch.linalg.solve(state["left"], torch.linalg.solve(state["right"], state["average"].T).T)
        matrix.sub_(group["lr"] * scaled / (1 - 0.9 ** float(state["step"])))


OPTIMIZERS = ["Muon", "Shampoo", "Adafactor"]
# Handles for all and for each module, cuts anywhere, on rows, and between matrices where an order allows it.
ALIGNS = ["row", "element", "matrix"]


def make_optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    if kind == "Adafactor":  # of all parameters, also vectors and a number
        params = list(model.parameters())
        both = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "lr": 0.05, "d": 1.5}]
        return [torch.optim.Adafactor(both, lr=0.1)]
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    groups = [{"params": matrices[:3]}, {"params": matrices[3:], "lr": 0.01}]
    made = torch.optim.Muon(groups, lr=0.02) if kind == "Muon" else Shampoo(groups, {"lr": 0.02})
    return [made, torch.optim.AdamW(others, lr=0.01)]


def build(kind: str, *, shards: bool, align: str = "row", **options: Any) -> tuple[Any, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = Net()
    if shards:
        fully_shard(model, policy={nn.Sequential}, options=HandleOptions(align=align), **options)
    optimizers = make_optimizers(kind, model)
    if shards:
        for one in optimizers[kind == "Shampoo" :]:
            accelerate_optimizer(one, model)
    return model, optimizers


def train(model: Any, optimizers: list[torch.optim.Optimizer], steps: range, *, rank: int | None = None) -> None:
    """Accumulate two batches in each step; all ranks have the same ones, or a part of a rank's own of each."""
    for step in steps:
        for micro in range(2):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + micro))
            if rank is not None:
                batch = batch.tensor_split(dist.get_world_size())[rank]
            if micro == 0 and hasattr(model, "unshard"):
                with no_sync(model):
                    model(batch).square().mean().backward()
            else:
                model(batch).square().mean().backward()
        clip = clip_grad_norm_ if hasattr(model, "unshard") else nn.utils.clip_grad_norm_
        clip(list(model.parameters()), 1e9)  # an exact 1 as the factor: the sum of squares has another order
        for one in optimizers:
            one.step()
            one.zero_grad()


def values_of(model: Any, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return parameters and state, all whole."""
    found = {fqn: full(param).clone() for fqn, param in model.named_parameters()}
    for fqn, param in model.named_parameters():
        for one in optimizers:
            for key, value in one.state.get(param, {}).items():
                found[f"{fqn} {key}"] = full(value).clone()
    return found


@functools.cache
def in_one_process(kind: str, steps: int) -> dict[str, torch.Tensor]:
    model, optimizers = build(kind, shards=False)
    train(model, optimizers, range(steps))
    return values_of(model, optimizers)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name} differs by {(found[name] - value).abs().max()}"


def in_shards(kind: str, align: str, steps: int, sizes: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    options = {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))} if sizes else {}
    model, optimizers = build(kind, shards=True, align=align, **options)
    with strict_mode():
        train(model, optimizers, range(steps))
    return values_of(model, optimizers)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("world_size", "align", "steps"), [(1, "row", 20), (2, "row", 100), (4, "element", 20), (4, "matrix", 20)]
)
def test_a_hundred_steps_are_those_of_one_process_to_the_bit(
    kind: str, world_size: int, align: str, steps: int
) -> None:
    expected = in_one_process(kind, steps)
    for found in run_threads(in_shards, world_size, kind, align, steps):
        assert_equal(found, expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_owners_are_ranks_of_the_shards_where_there_are_copies(kind: str) -> None:
    expected = in_one_process(kind, 10)
    for found in run_threads(in_shards, 4, kind, "element", 10, (2, 2)):
        assert_equal(found, expected)


def begin(kind: str, align: str, folder: str) -> None:
    model, optimizers = build(kind, shards=True, align=align)
    train(model, optimizers, range(10))
    save_checkpoint(folder, 10, model, optimizers)


def resume(kind: str, align: str, folder: str, *, has_stepped: bool) -> dict[str, torch.Tensor]:
    model, optimizers = build(kind, shards=True, align=align)
    if has_stepped:
        train(model, optimizers, range(1))
    load_checkpoint(folder, model, optimizers)
    train(model, optimizers, range(10, 20))
    return values_of(model, optimizers)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("saved", "loaded", "has_stepped"), [(2, 4, False), (4, 2, True)])
def test_a_run_goes_on_at_another_number_of_ranks_with_other_owners(
    kind: str, saved: int, loaded: int, *, has_stepped: bool, tmp_path: Path
) -> None:
    run_threads(begin, saved, kind, "row", str(tmp_path))
    expected = in_one_process(kind, 20)
    for found in run_threads(resume, loaded, kind, "matrix", str(tmp_path), has_stepped=has_stepped):
        assert_equal(found, expected)


@on_ranks(world_size=[2, 3], kind=OPTIMIZERS)
def test_equal_gradients_give_equal_bits_at_any_number_of_ranks(kind: str) -> None:
    plain, expected = build(kind, shards=False)
    model, optimizers = build(kind, shards=True)
    draws = torch.Generator().manual_seed(0)
    places: dict[Any, Any] = {}
    for step in range(30):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            # Now and then a parameter has no gradient, on all ranks.
            if (step + one.numel()) % 7:
                one.grad = torch.randn(one.shape, generator=draws)
                other.grad = distribute_tensor(one.grad, other.device_mesh, other.placements, src_data_rank=None)
        for pair in zip(expected, optimizers, strict=True):
            for one in pair:
                one.step()
                one.zero_grad()
        # Owners stay, so that no state travels.
        for param, entry in optimizers[0].state.items():
            for key, value in entry.items():
                where = getattr(value, "placements", None)  # none of a plain number
                assert places.setdefault((param, key), where) == where
    assert_equal(values_of(model, optimizers), values_of(plain, expected))


def on_own_data() -> dict[str, torch.Tensor]:
    model, optimizers = build("Shampoo", shards=True)
    train(model, optimizers, range(10), rank=dist.get_rank())
    return values_of(model, optimizers)


def test_ranks_with_their_own_data_train_as_one_process() -> None:
    # Not Muon: gradients differ in their last bits, and in bfloat16 its iteration makes steps of 0.1 of what small
    # singular values have. On own data it is compared with itself, below.
    expected = in_one_process("Shampoo", 10)
    for found in run_threads(on_own_data, 2):
        for name in (name for name in expected if " " not in name):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


def two_steps(kind: str, align: str) -> int:
    """Train; return how many elements a step sends to owners, by the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), nn.Linear(64, 32))
    made = plan(model, policy={nn.Linear}, world_size=dist.get_world_size(), align=align)
    fully_shard(model, policy={nn.Linear}, options=HandleOptions(align=align))
    matrices = [param for param in model.parameters() if param.ndim == 2]
    if kind == "Shampoo":
        optimizer: torch.optim.Optimizer = Shampoo(matrices, {"lr": 0.1})
    else:
        optimizer = accelerate_optimizer(getattr(torch.optim, kind)(matrices), model)
    for _ in range(2):
        model(torch.ones(4, 64)).square().mean().backward()
        with strict_mode():
            optimizer.step()
    return made.matrices.sent_numel


@pytest.mark.parametrize(("kind", "sent_bytes"), [("Muon", 2 + 2), ("Shampoo", 4 + 4 + 4), ("Adafactor", 4 + 4 + 4)])
@pytest.mark.parametrize(("world_size", "align"), [(2, "row"), (4, "element"), (4, "matrix")])
def test_a_step_sends_what_the_plan_says(kind: str, sent_bytes: int, world_size: int, align: str) -> None:
    # Muon sends bfloat16 there and back; others a matrix and its gradient, and the matrix. Pieces that travel together
    # start at multiples of 16 bytes, as all of these do.
    with counting_ranks() as counts:  # of all ranks, which are threads
        planned = run_threads(two_steps, world_size, kind, align)[0]
    assert planned > 0
    assert counts["bytes"] == 2 * planned * sent_bytes


def whole_steps() -> None:
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))) for _ in range(2)))
    assert plan(model, world_size=2, policy={nn.Sequential}, align="matrix").matrices.cut_numel == 0
    fully_shard(model, policy={nn.Sequential}, options=HandleOptions(align="matrix"))
    matrices = [param for param in model.parameters() if param.ndim == 2]
    of_torch = (accelerate_optimizer(kind(matrices), model) for kind in (torch.optim.Muon, torch.optim.Adafactor))
    for optimizer in (*of_torch, Shampoo(matrices, {"lr": 0.1})):
        model(torch.ones(4, 16)).square().mean().backward()
        with strict_mode():
            optimizer.step()
        # Each rank has the state of what it owns.
        states = [one for param in matrices for one in optimizer.state[param].values() if one.ndim]
        assert sum(one.to_local().numel() for one in states) * 2 == sum(one.numel() for one in states)


def test_whole_matrices_are_stepped_without_a_message() -> None:
    with counting_ranks() as counts:
        run_threads(whole_steps, 2)
    assert counts["messages"] == 0


class Noting(MatrixOptimizer):
    """Writes down which matrices it updates."""

    did: ClassVar[dict[int, list[str]]] = {}

    def update(self, matrix: torch.Tensor, grad: torch.Tensor, state: Any, group: dict[str, Any]) -> None:
        self.did[dist.get_rank()].append(f"update {matrix[0, 0]:g}")


def noted_step() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(9)))
    for index, layer in enumerate(model):
        nn.init.constant_(layer.weight, index)
    fully_shard(model, options=HandleOptions(align="element"))
    optimizer = Noting(list(model.parameters()), {})
    model(torch.ones(1, 16)).sum().backward()
    Noting.did[dist.get_rank()] = []
    optimizer.step()


def test_matrices_that_lie_whole_on_a_rank_are_stepped_while_pieces_of_others_travel() -> None:
    begin = Ranks.begin_exchange

    def begin_exchange(self: Ranks, sends: Any, receives: Any) -> Callable[[], None]:
        did, finish = Noting.did.get(dist.get_rank(), []), begin(self, sends, receives)
        did.append(f"{len(sends)} leave, {len(receives)} come")

        def end() -> None:
            finish()
            did.append("all there")

        return end

    with mock.patch.object(Ranks, "begin_exchange", begin_exchange):
        run_threads(noted_step, 2)
    # Matrix 4 is cut in halves, and rank 0 owns it. Values and gradient of a half are in one message.
    first = ["0 leave, 1 come", "update 0", "update 1", "all there", "update 4"]
    assert Noting.did[0] == [*first, "1 leave, 0 come", "update 2", "update 3", "all there"]
    first = ["1 leave, 0 come", "update 5", "update 6", "all there"]
    assert Noting.did[1] == [*first, "0 leave, 1 come", "update 7", "update 8", "all there"]


class Raising(Shampoo):
    """Raises once for some matrices, in the second step; notes how many steps have raised."""

    failed, swallows = 0, False

    def update(self, matrix: torch.Tensor, grad: torch.Tensor, state: Any, group: dict[str, Any]) -> None:
        if matrix.shape != (40, 24) or float(state["step"]) != 1:
            super().update(matrix, grad, state, group)
            return
        state["step"] += 1
        matrix.mul_(0.5)
        if not self.swallows:
            raise ValueError("in update")

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        try:
            super().step(closure)
        except ValueError:
            self.failed += 1


def fail_in_a_step(align: str, *, shards: bool) -> tuple[dict[str, torch.Tensor], int]:
    model, (shampoo, *others) = build("Shampoo", shards=shards, align=align)
    raising = Raising(shampoo.param_groups, {"lr": 0.02})
    raising.swallows = not shards
    train(model, [raising, *others], range(4))
    return values_of(model, [raising, *others]), raising.failed


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_owner_whose_update_raises_leaves_no_rank_waiting(world_size: int, align: str) -> None:
    expected, _ = fail_in_a_step(align, shards=False)
    failed = []
    for found, count in run_threads(fail_in_a_step, world_size, align, shards=True):
        torch.testing.assert_close(found, expected)
        failed.append(count)
    # At owners alone, once.
    assert max(failed) == 1


@on_ranks(world_size=[2, 3])
def test_state_dicts_are_those_of_a_muon_that_is_not_accelerated() -> None:
    found = []
    for is_accelerated in (False, True):
        torch.manual_seed(0)
        model = fully_shard(Net(), policy={nn.Sequential})
        optimizer = torch.optim.Muon([param for param in model.parameters() if param.ndim == 2], lr=0.02)
        if is_accelerated:
            accelerate_optimizer(optimizer, model)
        train(model, [optimizer], range(3), rank=dist.get_rank())
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_optimizer_state_dict(model, optimizer, options=options)
        found.append((optimizer.state_dict(), whole, values_of(model, [optimizer])))
    (plain, whole, values), (own, own_whole, own_values) = found
    assert_equal(own_values, values)
    assert own["param_groups"] == plain["param_groups"] and own["state"].keys() == plain["state"].keys()
    for index, entry in plain["state"].items():
        assert torch.equal(own["state"][index]["momentum_buffer"].to_local(), entry["momentum_buffer"].to_local())
    for fqn, entry in whole.get("state", {}).items():  # on rank 0
        assert torch.equal(own_whole["state"][fqn]["momentum_buffer"], entry["momentum_buffer"])


@on_ranks(world_size=[2, 3])
def test_adafactor_goes_on_where_one_that_is_accelerated_or_not_has_stopped() -> None:
    def make(*, is_accelerated: bool) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net()
        model.out.bias.requires_grad_(False)
        fully_shard(model, policy={nn.Sequential})
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
        return model, accelerate_optimizer(optimizer, model) if is_accelerated else optimizer

    def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

    pairs = [make(is_accelerated=False), make(is_accelerated=True)]
    for model, optimizer in pairs:
        train(model, [optimizer], range(3))
    (plain, expected), (model, optimizer) = pairs
    close(values_of(model, [optimizer]), values_of(plain, [expected]))
    assert all(type(entry["step"]) is torch.Tensor for entry in optimizer.state.values())
    whole = [get_optimizer_state_dict(*pair, options=StateDictOptions(full_state_dict=True)) for pair in pairs]
    torch.testing.assert_close(whole[1]["state"], whole[0]["state"], rtol=0, atol=1e-6)
    saved = [copy.deepcopy(get_optimizer_state_dict(*pair)) for pair in pairs]
    others = [make(is_accelerated=True), make(is_accelerated=False)]
    for (other, other_optimizer), state in zip(others, saved, strict=True):
        other.load_state_dict(plain.state_dict())
        set_optimizer_state_dict(other, other_optimizer, state)
    twins = copy.deepcopy((model, optimizer))  # steps as it is, with state at the owners
    for one, other_optimizer in (*pairs, *others, twins):
        train(one, [other_optimizer], range(3, 6))
    for one, other_optimizer in (pairs[1], *others, twins):
        close(values_of(one, [other_optimizer]), values_of(plain, [expected]))


@on_ranks(3)
def test_adafactor_passes_over_what_has_no_elements() -> None:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    model.none, model.no = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(0))
    fully_shard(model)
    optimizer = accelerate_optimizer(torch.optim.Adafactor(model.parameters(), lr=0.5), model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert full(model.weight).tolist() == [[0.5, 0.5], [0.5, 0.5]]


@on_ranks(2)
def test_plain_parameters_closures_and_tensor_learning_rates() -> None:
    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        model, outside = Net(), nn.Parameter(torch.randn(4, 16))
        if shards:
            fully_shard(model, policy={nn.Sequential})
        matrices = [*(param for param in model.parameters() if param.ndim == 2), outside]
        optimizer = torch.optim.Muon(matrices, lr=torch.tensor([0.02]), nesterov=False, adjust_lr_fn="match_rms_adamw")
        if shards:
            accelerate_optimizer(optimizer, model)

        def closure(model: Any = model, outside: Any = outside, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(outside).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(5)]
        found.append((losses, values_of(model, [optimizer]), outside.detach()))
    (losses, values, outside), (own_losses, own_values, own_outside) = found
    assert own_losses == losses and torch.equal(own_outside, outside)
    assert_equal(own_values, values)


@on_ranks(2)
def test_state_is_whole_again_after_an_annotation_is_undone() -> None:
    plain, expected = build("Shampoo", shards=False)
    model, optimizers = build("Shampoo", shards=True)
    train(plain, expected, range(3))
    train(model, optimizers, range(3))
    unannotate(model)
    for one in optimizers:
        rebind_optimizer(one, model)
    train(model, optimizers, range(3, 5))
    train(plain, expected, range(3, 5))
    assert_equal(values_of(model, optimizers), values_of(plain, expected))


@on_ranks(2)
def test_a_step_inside_backward() -> None:
    plain, expected = build("Shampoo", shards=False)
    model, optimizers = build("Shampoo", shards=True)
    step_in_backward(optimizers[0])
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for one in (plain, model):
            one(batch).square().mean().backward()
        expected[0].step()
        plain.zero_grad()
        model.zero_grad()
    assert_equal(values_of(model, optimizers[:1]), values_of(plain, expected[:1]))


class Returning(MatrixOptimizer):
    in_place = True

    def update(self, matrix: torch.Tensor, grad: torch.Tensor, state: Any, group: dict[str, Any]) -> Any:
        return matrix.sub_(grad) if self.in_place else matrix - grad


@on_ranks(1, shards=[False, True])
def test_an_update_that_returns_another_matrix_is_an_error(shards: bool) -> None:
    model = nn.Linear(8, 8, bias=False)
    plain = copy.deepcopy(model)
    if shards:
        fully_shard(model)
    model(torch.ones(1, 8)).sum().backward()
    optimizer = Returning(model.parameters(), {})
    optimizer.step()
    assert torch.equal(full(model.weight), plain.weight - torch.ones(8, 8))
    optimizer.in_place = False
    with pytest.raises(ConfigError, match="update of Returning returned a Tensor, which changes nothing"):
        optimizer.step()


class Resizing(MatrixOptimizer):
    def update(self, matrix: torch.Tensor, grad: torch.Tensor, state: Any, group: dict[str, Any]) -> None:
        matrix.resize_(9, 8)


@on_ranks(1, shards=[False, True])
def test_an_update_that_leaves_a_matrix_of_another_size_is_an_error(shards: bool) -> None:
    model = nn.Linear(8, 8, bias=False)
    if shards:
        fully_shard(model)
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(ConfigError, match=r"update of Resizing left \[9, 8\] of a matrix \[8, 8\]"):
        Resizing(model.parameters(), {}).step()


@on_ranks(2)
def test_what_has_no_whole_matrix_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    matrices = [param for param in model.parameters() if param.ndim == 2]
    with pytest.raises(ConfigError, match="tensor parallelism has split a parameter"):
        accelerate_optimizer(torch.optim.Muon(matrices), model)
    with pytest.raises(ConfigError, match="tensor parallelism has split a parameter"):
        Shampoo(matrices, {})
    split = parallelize_module(nn.Linear(8, 8), mesh["tp"], ColwiseParallel())
    with pytest.raises(ConfigError, match=r"\[8, 8\] is a DTensor placed \(Shard\(dim=0\),\), and fully_shard has not"):
        Shampoo([split.weight], {})
    other = fully_shard(nn.Linear(8, 8))
    optimizer = torch.optim.Muon([other.weight])
    accelerate_optimizer(optimizer, other)
    with pytest.raises(UsageError, match="accelerated already"):
        accelerate_optimizer(optimizer, other)

    class Counted(MatrixOptimizer):
        def init_state(self, matrix: torch.Tensor, group: Any) -> Any:
            return {"step": 0}

    with pytest.raises(ConfigError, match="Counted has no update"):
        Counted([other.weight], {})
    Counted.update = lambda self, *_: None  # type: ignore[assignment,method-assign]
    counted = Counted([other.weight], {})
    other(torch.ones(1, 8)).sum().backward()
    with pytest.raises(ConfigError, match="init_state of Counted returned 0"):
        counted.step()
