"""Parameters that tensor parallelism has split below ``replicate``; several process groups in one model."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from composable import ConfigError, no_sync, replicate, step_in_backward, unannotate
from tests.models import random_input, seeded
from tests.parity import full, gradients_of
from tests.world import on_ranks, run_threads

DIM = 8
TINY_CAP_MB = 200 / 2**20


class Split(nn.Module):
    """Two split layers, a whole one, and a norm whose gradient is a sum that is still to be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(torch.tanh(self.up(self.norm(x)))))


def split(mesh: Any) -> Split:
    model = seeded(Split, 0)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, {**plan, "norm": SequenceParallel(sequence_dim=0)})


def loss_at(model: nn.Module, step: int, data_rank: int) -> torch.Tensor:
    return model(random_input(100 * step + data_rank, 4, DIM)).square().mean()


def train(**options: Any) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data_rank = mesh["dp"].get_local_rank()
    model, plain = split(mesh["tp"]), seeded(Split, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 + data_rank)  # The first rank's values are to come.
    replicate(model, mesh=mesh["dp"], bucket_cap_mb=TINY_CAP_MB, **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(4):
        if step == 2:
            with no_sync(model):
                loss_at(model, 7, data_rank).backward()
            for rank in range(2):
                (loss_at(plain, 7, rank) / 2).backward()
        loss_at(model, step, data_rank).backward()
        for rank in range(2):
            (loss_at(plain, step, rank) / 2).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert isinstance(model.up.weight, DTensor)
    saved = model.state_dict()
    torch.testing.assert_close({fqn: full(value) for fqn, value in saved.items()}, dict(plain.state_dict()))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(whole, dict(plain.state_dict()))
    other = replicate(split(mesh["tp"]), mesh=mesh["dp"])
    other.load_state_dict(saved)
    torch.testing.assert_close(full(other.up.weight), plain.up.weight.detach())
    with no_sync(model):
        loss_at(model, 8, data_rank).backward()
    unannotate(model)
    plain.zero_grad()
    for rank in range(2):
        (loss_at(plain, 8, rank) / 2).backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": False}, {"static_graph": True}])
def test_gradients_of_split_parameters_are_averaged_over_the_other_mesh_dim(options: dict[str, bool]) -> None:
    run_threads(train, 4, **options)


class Normed(torch.optim.Optimizer):
    """Steps by gradients of norm 1, which ranks compute together for a split parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                param.add_(param.grad / full(param.grad.norm()), alpha=-0.1)


@on_ranks(4)
def test_split_parameters_are_stepped_inside_backward_in_one_order_on_all_ranks() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data_rank = mesh["dp"].get_local_rank()
    models = [replicate(split(mesh["tp"]), mesh=mesh["dp"], bucket_cap_mb=TINY_CAP_MB) for _ in range(2)]
    inside, after = (Normed(model.parameters()) for model in models)
    with step_in_backward(inside):
        for step in range(4):
            for model in models:
                loss_at(model, step, data_rank).backward()
            after.step()
            after.zero_grad()
    stepped, expected = ({fqn: full(one) for fqn, one in model.named_parameters()} for model in models)
    torch.testing.assert_close(stepped, expected, rtol=0, atol=0)


@on_ranks(2)
def test_a_parameter_split_over_the_ranks_that_average_is_refused() -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    with pytest.raises(ConfigError) as caught:
        replicate(split(mesh), mesh=mesh)
    assert str(caught.value).startswith("parameter is a DTensor, which is sharded already\n  at:  rank ")
    assert "parameter 'norm.weight' of module Split" in str(caught.value)


@on_ranks(3)
def test_parts_of_one_model_average_over_groups_of_their_own() -> None:
    rank = dist.get_rank()
    pairs = dist.new_group([0, 1]), dist.new_group([2])
    model = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 3)), 0)
    replicate(model[0], process_group=dist.group.WORLD)
    replicate(model[2], process_group=pairs[rank == 2])
    for step in range(3):
        model.zero_grad()
        loss_at(model, step, rank).backward()
        each = []
        for other in range(3):
            plain = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 3)), 0)
            loss_at(plain, step, other).backward()
            each.append(gradients_of(plain))
        members = [2] if rank == 2 else [0, 1]
        wanted = {
            fqn: sum(each[other][fqn] for other in among) / len(among)
            for fqn in each[0]
            for among in [range(3) if fqn.startswith("0") else members]
        }
        torch.testing.assert_close(gradients_of(model), wanted)
