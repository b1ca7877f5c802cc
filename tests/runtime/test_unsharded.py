"""What outlives a step to serve graphs that do goes with the model."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from composable import fully_shard, unshard_params
from tests.counting import CountingTransport
from tests.world import run_threads


class Leaky(nn.Module):
    """Its forward also puts a tensor into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, beside: list[torch.Tensor] | None = None) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if beside is not None:
            beside.append(y.square().sum())
        return y


def train_and_drop(how: str) -> bool:
    model = fully_shard(Leaky())
    beside: list[torch.Tensor] | None = None if how == "double" else []
    x = torch.ones(2, 4, requires_grad=True)
    loss = model(x, beside).square().sum()
    if how == "double":
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        del slope
    elif how == "backward":
        (loss + sum(beside or ())).backward()
    alive = [weakref.ref(one) for one in (model, model.linear.weight)]
    del model, x, loss, beside
    gc.collect()
    return all(one() is None for one in alive)


@pytest.mark.parametrize("how", ["forward", "backward", "double"])
def test_a_model_whose_leaves_were_watched_is_freed_with_its_last_reference(how: str) -> None:
    assert all(run_threads(train_and_drop, 1, how))


class Adapted(nn.Module):
    """A frozen layer, and an adapter that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, is_adapted: bool) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.base(x))
        return y + self.adapter(x) if is_adapted else y


def slopes(is_sharded: bool, policy: bool) -> tuple[list[torch.Tensor], int]:
    """Return gradients with respect to the inputs of a penalty on them, and the bytes that stay unsharded."""
    torch.manual_seed(0)
    model = Adapted()
    if is_sharded:
        fully_shard(model, policy={nn.Linear} if policy else None)
    found = []
    for is_adapted in (True, False, False, True):
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        (slope,) = torch.autograd.grad(model(x, is_adapted).square().mean(), x, create_graph=True)
        slope.square().sum().backward()
        found.append(x.grad)
        model.zero_grad()
        del slope
    if not is_sharded:
        return found, 0
    model(x.detach(), True).sum().backward()
    flats = [flat for handle in fully_shard.state(model).root.handles for flat in handle.buffers]
    return found, sum(flat._storage.size() for flat in flats)


@pytest.mark.parametrize("policy", [False, True])
def test_a_graph_of_a_backward_through_frozen_parameters_alone_can_be_differentiated(policy: bool) -> None:
    expected, _ = slopes(False, policy)
    for found, left in run_threads(slopes, 2, True, policy):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert left == 0


def forwards_without_gradients(options: dict[str, Any], how: str) -> tuple[list[int], bool]:
    """Return the gathers of each forward, train step and change in turn, and whether outputs are of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    plain = copy.deepcopy(model)
    fully_shard(model, policy={nn.Linear}, **options)
    x = torch.ones(2, 4)
    counted = CountingTransport.install(fully_shard.state(model).lazy_init())
    gathers, is_right = [0], True

    def note() -> None:
        gathers.append(counted.counts().get("all_gather", 0) - sum(gathers))

    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for _ in range(2):
        for _ in range(2):
            with torch.inference_mode() if how == "inference" else torch.no_grad():
                is_right &= torch.equal(model(x), plain(x))
            note()
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            one(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        note()
    with torch.no_grad():
        is_right &= torch.allclose(model(x), plain(x))
        note()
        for one in (model, plain):
            if how == "data":
                one[1].weight.data.mul_(2)
            else:
                one[1].weight.mul_(2)
        is_right &= torch.allclose(model(x), plain(x))
        note()
    return gathers[1:], is_right


@pytest.mark.parametrize(("how", "world_size"), [("no_grad", 1), ("inference", 2), ("data", 3)])
def test_forwards_without_gradients_gather_once_where_parameters_are_to_stay(how: str, world_size: int) -> None:
    options: list[dict[str, Any]] = [{"reshard_after_forward": False}, {"strategy": "SHARD_GRAD_OP"}]
    for one in options:
        for gathers, is_right in run_threads(forwards_without_gradients, world_size, one, how):
            assert is_right
            # Once after each step of training, which uses what is there; and what was changed by hand once more.
            assert gathers == [3, 0, 0, 3, 0, 0, 3, 1]
    for gathers, is_right in run_threads(forwards_without_gradients, world_size, {}, how):
        assert is_right
        assert gathers[:2] == [3, 3]


def train_with_arrays(policy: str, moment: str, *, is_annotated: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    # An array of numpy shares the memory of its tensor for ever, and makes it one that cannot be resized.
    arrays: list[Any] = []
    if moment == "forward":
        model[0].register_forward_pre_hook(lambda module, args: arrays.append(module.weight.detach().numpy()))
    if is_annotated:
        fully_shard(model, policy={nn.Linear} if policy == "each" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_annotated and step == 1 and moment == "unshard":
            (model if policy == "whole" else model[0]).unshard()
            arrays.append(model[0].weight.detach().numpy())
            (model if policy == "whole" else model[0]).reshard()
        if is_annotated and step == 1 and moment == "unshard_params":
            with unshard_params(model):
                arrays.append(model[0].weight.detach().numpy())
    return [param.full_tensor() if is_annotated else param.detach() for param in model.parameters()]


@pytest.mark.parametrize("moment", ["forward", "unshard", "unshard_params"])
@pytest.mark.parametrize("policy", ["each", "whole"])
def test_arrays_of_unsharded_parameters_leave_training_as_it_is(policy: str, moment: str) -> None:
    expected = train_with_arrays(policy, moment, is_annotated=False)
    for found in run_threads(train_with_arrays, 2, policy, moment, is_annotated=True):
        torch.testing.assert_close(found, expected)
