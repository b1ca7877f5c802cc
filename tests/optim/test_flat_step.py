"""Accelerated optimizers: to the bit what the optimizer does without, and nothing else to see between steps.

Two oracles: the same optimizer on the same sharded model, not accelerated, must agree to the bit;
and a single process that trains the plain model on the global batch must agree but for rounding.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from composable import (
    ConfigError,
    RaggedDTensor,
    UsageError,
    accelerate_optimizer,
    clip_grad_norm_,
    fully_shard,
    replicate,
)
from tests.parity import full, full_params
from tests.world import on_ranks, run_threads

BATCH = 4
STEPS = 5

CONFIGS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "momentum fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam foreach": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True, "foreach": True}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1}),
    "adagrad fused": (torch.optim.Adagrad, {"lr": 0.01, "fused": True}),
    "adadelta foreach": (torch.optim.Adadelta, {"foreach": True}),
    "adamax foreach": (torch.optim.Adamax, {"foreach": True}),
    "asgd": (torch.optim.ASGD, {"t0": 1}),
    "nadam foreach": (torch.optim.NAdam, {"lr": 0.01, "foreach": True}),
    "radam foreach": (torch.optim.RAdam, {"lr": 0.01, "foreach": True}),
    "rmsprop foreach": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9, "foreach": True}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


class Net(nn.Module):
    """Pieces of whole vectors, of other sizes, of one element and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 13), nn.Linear(13, 16)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + self.scale * block(x).tanh()
        return self.out(x)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded_net(dtype: torch.dtype = torch.float32) -> Net:
    return fully_shard(make_net().to(dtype), policy={nn.Sequential})


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: nn.Module, step: int) -> None:
    model(batch_of(step, dist.get_rank())).square().mean().backward()


def drop_some(model: nn.Module, step: int) -> None:
    """Take the gradients of two parameters, the same on every rank, in the second step."""
    if step == 1:
        for name, param in model.named_parameters():
            if name in ("blocks.0.1.weight", "inp.bias"):
                param.grad = None


def make_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    kind, options = CONFIGS[name]
    return kind(params, **copy.deepcopy(options))


def train_reference(name: str, world_size: int) -> dict[str, torch.Tensor]:
    model = make_net()
    optimizer = make_optimizer(name, model.parameters())
    for step in range(STEPS):
        model(torch.cat([batch_of(step, rank) for rank in range(world_size)])).square().mean().backward()
        drop_some(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: param.detach() for fqn, param in model.named_parameters()}


def local_of(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_same_state(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Compare two state dicts: keys and their order, types, shapes and every bit of this rank's values."""
    assert found["param_groups"] == expected["param_groups"], where
    assert list(found["state"]) == list(expected["state"]), where
    for index, entry in expected["state"].items():
        assert type(found["state"][index]) is dict and list(found["state"][index]) == list(entry), f"{where}, {index}"
        for key, value in entry.items():
            other = found["state"][index][key]
            place = f"{where}, parameter {index}, {key}"
            assert type(other) is type(value) and other.shape == value.shape and other.dtype == value.dtype, place
            assert torch.equal(local_of(other), local_of(value)), place


def twins(
    name: str = "adamw foreach", dtype: torch.dtype = torch.float32
) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Return two models with optimizers, the second one's accelerated."""
    found = []
    for is_accelerated in (False, True):
        model = sharded_net(dtype)
        optimizer = make_optimizer(name, model.parameters())
        if is_accelerated:
            assert accelerate_optimizer(optimizer, model) is optimizer
        found.append((model, optimizer))
    return found


def step_twins(
    pairs: list[tuple[nn.Module, torch.optim.Optimizer]], step: int, where: str, *, drops: bool = False
) -> None:
    for model, optimizer in pairs:
        model(batch_of(step, dist.get_rank()).to(model.out.weight.dtype)).square().mean().backward()
        if drops:
            drop_some(model, step)
        optimizer.step()
        optimizer.zero_grad()
        assert all(type(param) is RaggedDTensor for param in optimizer.param_groups[0]["params"])
    compare_twins(pairs, where)


def compare_twins(pairs: list[tuple[nn.Module, torch.optim.Optimizer]], where: str) -> None:
    (model, optimizer), (other, accelerated) = pairs
    for (fqn, param), twin in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(param.to_local(), twin.to_local()), f"{where}, {fqn}"
    assert_same_state(accelerated.state_dict(), optimizer.state_dict(), where)


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(1, ["adamw fused"]), (2, list(CONFIGS)), (3, ["momentum fused", "adamw foreach", "nadam foreach"])],
)
@on_ranks()
def test_element_wise_optimizers_to_the_bit(names: list[str]) -> None:
    for name in names:
        pairs = twins(name)
        for step in range(STEPS):
            step_twins(pairs, step, f"{name}, step {step}", drops=True)
        trained = full_params(pairs[0][0])
        torch.testing.assert_close(trained, train_reference(name, dist.get_world_size()), rtol=1e-3, atol=1e-4)


@on_ranks(3)
def test_gradients_of_an_optimizer_are_clipped() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for order in (2.0, 1.0, math.inf):
        plain = make_net()
        plain(torch.cat([batch_of(0, other) for other in range(world_size)])).square().mean().backward()
        extra = nn.Parameter(torch.ones(3))
        extra.grad = torch.full((3,), 0.25)
        expected = nn.utils.clip_grad_norm_([*plain.parameters(), extra], 0.1, order)
        for is_accelerated in (False, True):
            model, outside = sharded_net(), nn.Parameter(torch.ones(3))
            optimizer = torch.optim.AdamW([*model.parameters(), outside], foreach=True)
            if is_accelerated:
                accelerate_optimizer(optimizer, model)
            backward(model, 0)
            outside.grad = torch.full((3,), 0.25)
            first = model.inp.weight.grad
            assert first is not None
            view = first[0]
            norm = clip_grad_norm_(optimizer, 0.1, order)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
            for param, other in zip([*model.parameters(), outside], [*plain.parameters(), extra], strict=True):
                torch.testing.assert_close(full(param.grad), other.grad, rtol=1e-5, atol=1e-7)
            with pytest.raises(UsageError, match="no longer has"):
                view + 1
            if rank == world_size - 1:
                next(param.grad for param in model.parameters() if param.to_local().numel()).to_local()[:] = math.nan
            assert clip_grad_norm_(optimizer, 0.1, order).isnan()
            with pytest.raises(UsageError, match="is nan"):
                clip_grad_norm_(optimizer, 0.1, order, error_if_nonfinite=True)


@on_ranks(2)
def test_the_norm_has_one_dtype_on_all_ranks_also_where_one_owns_nothing_of_it() -> None:
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    fully_shard(model)
    optimizer = accelerate_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert clip_grad_norm_(optimizer, 1.0).dtype == torch.float64


@on_ranks(2)
def test_changes_to_state_and_options_between_steps_count() -> None:
    pairs = twins()
    for step in range(2):
        step_twins(pairs, step, "before")
    held = [optimizer.state[model.out.weight]["exp_avg"] for model, optimizer in pairs]
    entries = [optimizer.state[model.out.bias] for model, optimizer in pairs]
    changes: list[Callable[[nn.Module, torch.optim.Optimizer], Any]] = [
        lambda model, optimizer: optimizer.state[model.out.weight]["exp_avg"].mul_(2.0),
        lambda model, optimizer: optimizer.state[model.blocks[0][0].weight]["step"].add_(3),
        lambda model, optimizer: optimizer.state.pop(model.inp.weight),
        lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5, weight_decay=0.2),
        lambda model, optimizer: optimizer.param_groups[0].update(foreach=False, fused=True),
        lambda model, optimizer: optimizer.state[model.blocks[1][2].weight].update(
            exp_avg=optimizer.state[model.blocks[1][2].weight]["exp_avg"] * 3
        ),
    ]
    for index, change in enumerate(changes):
        for pair in pairs:
            change(*pair)
        compare_twins(pairs, f"change {index}")
        for when in ("after", "long after"):
            step_twins(pairs, index, f"{when} change {index}")
    for (model, optimizer), tensor, entry in zip(pairs, held, entries, strict=True):
        assert torch.equal(optimizer.state[model.out.weight]["exp_avg"].to_local(), tensor.to_local())
        assert optimizer.state[model.out.bias] is entry
        entry["exp_avg"] = entry["exp_avg"] * 0.5
    step_twins(pairs, 7, "after a change to an entry that was held")
    # All of it may go, and a group may come.
    for _, optimizer in pairs:
        optimizer.state.clear()
        last = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [last], "lr": 0.3})
    for step in range(3):
        step_twins(pairs, step, "after a new start")


@on_ranks(3)
def test_checkpoints_load_before_and_after_the_first_step() -> None:
    pairs = twins()
    for step in range(2):
        step_twins(pairs, step, "before")
    options = [StateDictOptions(), StateDictOptions(full_state_dict=True)]
    for is_full, option in enumerate(options):
        found, expected = (get_optimizer_state_dict(other, one, options=option) for other, one in reversed(pairs))
        assert list(found["state"]) == list(expected["state"])
        for fqn, entry in expected["state"].items():
            for key, value in entry.items():
                assert torch.equal(local_of(found["state"][fqn][key]), local_of(value)), (fqn, key)
        fresh = twins()
        for (model, _), (other, optimizer) in zip(pairs, fresh, strict=True):
            other.load_state_dict(copy.deepcopy(model.state_dict()))
            set_optimizer_state_dict(other, optimizer, copy.deepcopy(expected), options=option)
        compare_twins(fresh, f"loaded before the first step, full: {is_full}")
        step_twins(fresh, 2, f"one step after loading, full: {is_full}")
        for model, optimizer in fresh:
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(expected), options=option)
        step_twins(fresh, 3, f"loaded after a step, full: {is_full}")
    saved = copy.deepcopy(pairs[0][1].state_dict())
    # As torch.distributed.checkpoint loads: in place, into a state dict that was just taken.
    for _, optimizer in pairs:
        targets = optimizer.state_dict()["state"]
        for index, entry in saved["state"].items():
            for number, (key, value) in enumerate(entry.items()):
                targets[index][key].copy_(value + (index if key == "step" else number))
    step_twins(pairs, 4, "loaded in place")
    step_twins(pairs, 5, "a step later")
    for _, optimizer in pairs:
        optimizer.load_state_dict(copy.deepcopy(saved))
    step_twins(pairs, 6, "loaded by load_state_dict")
    step_twins(pairs, 7, "a step later")


@on_ranks(2)
def test_closures_see_sharded_parameters_and_a_failed_step_leaves_what_it_did() -> None:
    pairs = twins("adamw fused")
    losses: list[list[float]] = [[], []]
    for step in range(3):
        for (model, optimizer), seen in zip(pairs, losses, strict=True):

            def closure(
                model: nn.Module = model,
                optimizer: torch.optim.Optimizer = optimizer,
                seen: list[float] = seen,
                step: int = step,
            ) -> torch.Tensor:
                optimizer.zero_grad()
                assert all(type(param) is RaggedDTensor for param in optimizer.param_groups[0]["params"])
                loss = model(batch_of(step, dist.get_rank())).square().mean()
                loss.backward()
                seen.append(loss.item())
                return loss

            returned = optimizer.step(closure) if step else optimizer.step(closure=closure)
            assert returned is not None and returned.item() == seen[-1]
        compare_twins(pairs, f"closure, step {step}")
    assert losses[0] == losses[1]

    def failing() -> float:
        raise ZeroDivisionError

    for model, optimizer in pairs:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(failing)
        backward(model, 3)
        # The first group steps, the second one fails.
        optimizer.param_groups[0]["params"], rest = (
            optimizer.param_groups[0]["params"][:4],
            optimizer.param_groups[0]["params"][4:],
        )
        optimizer.add_param_group({"params": rest})
        optimizer.param_groups[1]["betas"] = (0.9, "no number")
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[1]["betas"] = (0.9, 0.999)
        assert all(type(param) is RaggedDTensor for group in optimizer.param_groups for param in group["params"])
    compare_twins(pairs, "after a step that failed half way")
    for step in range(2):
        step_twins(pairs, step, "after errors")


@on_ranks(2)
def test_gradient_scalers_and_schedulers() -> None:
    for name in ("adamw fused", "momentum foreach"):
        pairs = twins(name)
        for index, (model, optimizer) in enumerate(pairs):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            for step in range(5):
                loss = model(batch_of(step, dist.get_rank())).square().mean()
                scaler.scale(loss).backward()
                if step == 2:
                    model.out.weight.grad.to_local().fill_(float("inf"))
                if step % 2:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
            assert scaler.get_scale() == 16.0, (name, index)
        compare_twins(pairs, name)


class Mixed(nn.Module):
    """A sharded part, a replicated one, a plain parameter and one that is a stock DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.copied = nn.Linear(16, 16)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.rows = nn.Parameter(distribute_tensor(torch.ones(16, 16), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.copied(self.sharded(x)) @ self.rows.full_tensor()


def mixed() -> None:
    pairs = []
    for is_accelerated in (False, True):
        torch.manual_seed(0)
        model = Mixed()
        fully_shard(model.sharded)
        replicate(model.copied)
        optimizer = torch.optim.AdamW([*model.sharded.parameters(), model.rows], foreach=True)
        if is_accelerated:
            accelerate_optimizer(optimizer, model.sharded)
        pairs.append((model, optimizer))
    for step in range(5):
        for model, optimizer in pairs:
            if step == 2:
                optimizer.add_param_group({"params": list(model.copied.parameters()), "lr": 0.05})
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (model, optimizer), (other, accelerated) = pairs
    assert_same_state(accelerated.state_dict(), optimizer.state_dict(), "mixed")
    for fqn, param in other.named_parameters():
        assert torch.equal(local_of(param), local_of(model.get_parameter(fqn))), fqn
    assert len(accelerated.state_dict()["state"]) == 7


def test_parameters_that_are_not_sharded_go_along() -> None:
    run_threads(mixed, 2)


@on_ranks(2)
def test_low_precision_is_stepped_parameter_by_parameter_on_the_cpu() -> None:
    pairs = twins("momentum foreach", torch.bfloat16)
    for step in range(3):
        step_twins(pairs, step, f"step {step}")


class OwnAdam(torch.optim.Adam):
    """May do anything."""


@on_ranks(1)
def test_what_cannot_be_accelerated_is_an_error_that_says_what_can() -> None:
    model, other = sharded_net(), sharded_net()
    params = list(model.parameters())
    accelerated = accelerate_optimizer(torch.optim.SGD(params, lr=0.1), model)
    unsharded = make_net()
    stale = torch.optim.SGD(unsharded.parameters(), lr=0.1)
    fully_shard(unsharded)
    cannot = "cannot be accelerated: its step .*AdamW"
    cases: list[tuple[str, torch.optim.Optimizer, nn.Module]] = [
        (cannot, torch.optim.LBFGS(params), model),
        (cannot, torch.optim.SparseAdam(params), model),
        (cannot, OwnAdam(params), model),
        ("is differentiable", torch.optim.Adam(params, differentiable=True), model),
        ("no sharded parameter of this model", torch.optim.SGD(params, lr=0.1), other),
        ("accelerated already", accelerated, model),
        ("fix: rebind_optimizer", stale, unsharded),
    ]
    for text, optimizer, its_model in cases:
        with pytest.raises((ConfigError, UsageError), match=f"(?s){text}.*") as caught:
            accelerate_optimizer(optimizer, its_model)
        assert "fix:" in str(caught.value)
