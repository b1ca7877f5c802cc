"""Parameters that tensor parallelism has split below ``replicate``; several process groups in one model."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from composable import ConfigError, replicate, step_in_backward, unannotate
from tests.models import seeded
from tests.parity import full, gradients_of
from tests.programs import Twins, loss_at
from tests.world import on_ranks

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


def split(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, {**plan, "norm": SequenceParallel(sequence_dim=0)})


def split_model(mesh: Any) -> nn.Module:
    return split(seeded(Split, 0), mesh)


@on_ranks(4, options=[{"gradient_as_bucket_view": False}, {"static_graph": True}])
def test_gradients_of_split_parameters_are_averaged_over_the_other_mesh_dim(options: dict[str, Any]) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data_rank = mesh["dp"].get_local_rank()

    def annotate(model: nn.Module) -> None:
        split(model, mesh["tp"])
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.0 + data_rank)  # The first rank's values are to come.
        replicate(model, mesh=mesh["dp"], bucket_cap_mb=TINY_CAP_MB, **options)

    twins = Twins(Split, annotate, size=2, rank=data_rank)
    model, plain = twins
    for step in range(4):
        if step == 2:
            twins.backward(7, keeps=True)
        twins.backward(step)
        twins.check_gradients()
        twins.step(set_to_none=step % 2 == 0)
    assert isinstance(model.up.weight, DTensor)
    saved = model.state_dict()
    torch.testing.assert_close({fqn: full(value) for fqn, value in saved.items()}, dict(plain.state_dict()))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(whole, dict(plain.state_dict()))
    other: Any = replicate(split_model(mesh["tp"]), mesh=mesh["dp"])
    other.load_state_dict(saved)
    torch.testing.assert_close(full(other.up.weight), plain.up.weight.detach())
    twins.drop()
    twins.backward(8, keeps=True)
    unannotate(model)
    twins.check_gradients()


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
    models = [replicate(split_model(mesh["tp"]), mesh=mesh["dp"], bucket_cap_mb=TINY_CAP_MB) for _ in range(2)]
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
        replicate(split_model(mesh), mesh=mesh)
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
