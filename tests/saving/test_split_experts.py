"""State in and out of models whose experts differ by rank, and which tensor parallelism has split over another dim."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable import (
    ConfigError,
    full_state_dict,
    fully_shard,
    iter_full_params,
    load_checkpoint,
    load_full_state_dict,
    save_checkpoint,
    unannotate,
)
from tests.models import seeded
from tests.world import run_threads

DIM, EXPERTS = 6, 4
# By ranks that have the same experts, ranks among which experts differ, ranks that have parts of each weight.
Sizes = tuple[int, int, int]
Tensors = dict[str, torch.Tensor]


class Layers(nn.Module):
    """Two layers that are split; the size in between divides by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Split layers and plain parameters on all ranks, beside the experts of some."""

    def __init__(self, experts: list[int]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.layers = Layers()
        self.scale = nn.Parameter(torch.ones(3))
        self.experts = nn.ModuleDict({str(number): seeded(Layers, 10 + number) for number in experts})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layers(self.norm(x))
        return sum((expert(x) for expert in self.experts.values()), x) * self.scale.sum()


def is_expert(fqn: str) -> bool:
    return fqn.startswith("experts.")


def is_other(fqn: str) -> bool:
    return not is_expert(fqn)


def build(sizes: Sizes, seed: int = 0) -> Any:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("edp", "ep", "tp"))
    own = torch.arange(EXPERTS).tensor_split(sizes[1])[mesh.get_local_rank("ep")].tolist()
    net = seeded(lambda: Net(own), seed)
    for module in (net.layers, *net.experts.values()):
        parallelize_module(
            module, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        )
    for expert in net.experts.values():
        fully_shard(expert, mesh=mesh["edp"])
    return fully_shard(net, mesh=data_mesh(mesh))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["edp", "ep"]._flatten("dp")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def values_of(net: nn.Module) -> Tensors:
    return {fqn: whole(param).detach() for fqn, param in net.named_parameters()}


def change(net: nn.Module) -> None:
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(3).add_(1)


def same(found: Tensors, expected: Tensors) -> None:
    torch.testing.assert_close(found, {fqn: expected[fqn] for fqn in found}, rtol=0, atol=0)


def go_in_and_out(sizes: Sizes) -> None:
    net, plain = build(sizes), seeded(lambda: Net(list(range(EXPERTS))), 0)
    expected = dict(plain.state_dict())
    same(values_of(net), expected)
    if sizes[1] > 1:
        with pytest.raises(ConfigError, match="annotated on different ranks"):
            full_state_dict(net)
    states = [full_state_dict(net, names=names) for names in (is_other, is_expert)]
    for state in states:
        same(state, expected)
    change(net)
    for state, names in zip(states, (is_other, is_expert), strict=True):
        load_full_state_dict(net, state, names=names)
    same(values_of(net), expected)
    found = dict(iter_full_params(net, names=is_expert))
    assert set(found) == {fqn for fqn, _ in net.named_parameters() if is_expert(fqn)}
    same(found, expected)
    unannotate(net)
    same(values_of(net), expected)


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1)])
def test_full_values_come_and_go_by_the_ranks_that_have_them(sizes: Sizes) -> None:
    run_threads(go_in_and_out, math.prod(sizes), sizes)


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    state = {
        f"{fqn} {name}": whole(value)
        for fqn, param in net.named_parameters()
        for name, value in optimizer.state[param].items()
    }
    return values_of(net) | state


def save(sizes: Sizes, folder: Path) -> Tensors:
    net = build(sizes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(2, DIM)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(folder, 1, net, optimizer)
    return state_of(net, optimizer)


def load(sizes: Sizes, folder: Path) -> Tensors:
    net = build(sizes, 3)
    change(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.2)
    assert load_checkpoint(folder, net, optimizer).step == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    return state_of(net, optimizer)


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2)])
def test_a_checkpoint_loads_onto_other_numbers_of_ranks_along_each_dim(sizes: Sizes, tmp_path: Path) -> None:
    saved = run_threads(save, math.prod(sizes), sizes, tmp_path)
    expected = {name: value for one in saved for name, value in one.items()}
    for others in ((2, 2, 1), (1, 1, 3)):
        loaded = run_threads(load, math.prod(others), others, tmp_path)
        assert set().union(*loaded) == set(expected)
        for found in loaded:
            same(found, expected)
