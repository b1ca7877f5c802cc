import subprocess
import sys
from typing import Any

import pytest
from torch import nn

import _traversal_utils
from composable.ground.contract import contract, set_member
from tests.models import MLP, CalledTwice, TinyGPT


class State:
    """A runtime state as the traversal sees one: the outermost state that is initialised is the root."""

    def __init__(self) -> None:
        self._module_to_handle: dict[nn.Module, str] = {}
        self._is_root: bool | None = None
        self.module = nn.Module()
        self.inits: list[nn.Module] = []

    def lazy_init(self) -> None:
        self.inits.append(self.module)
        for state in _traversal_utils._get_fsdp_states(self.module):
            state._is_root = state is self


@contract(State, incompatible=("replicate",))
def fully_shard(module: Any, handle: str = "", *, picks: dict[nn.Module, str] | None = None) -> None:
    first = module if isinstance(module, nn.Module) else module[0]
    state = fully_shard.state(first)
    assert state is not None
    state.module = first
    state._module_to_handle = {first: handle} if handle else {}
    for pick, name in (picks or {}).items():
        set_member(pick, "fully_shard", state)
        state._module_to_handle[pick] = name


@contract(incompatible=("fully_shard",))
def replicate(module: Any) -> None:
    pass


@contract()
def checkpoint(module: Any) -> None:
    pass


def nested(depth: int) -> nn.Module:
    model: nn.Module = nn.Identity()
    for _ in range(depth):
        outer = nn.Module()
        outer.add_module("inner", model)
        model = outer
    return model


def take_apart(model: nn.Module) -> None:
    """Free a deep model from the outside in."""
    while model._modules:
        model = model._modules.popitem()[1]  # type: ignore[assignment]


@pytest.mark.parametrize("model", [MLP(), TinyGPT(tied=True), CalledTwice(), nn.Linear(1, 1), nested(3)])
def test_the_walk_follows_the_order_of_modules(model: nn.Module) -> None:
    assert list(_traversal_utils._get_modules(model)) == list(model.modules())


def test_states_come_depth_first_and_not_breadth_first() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1))
    annotated = [model[0], model[0][1], model[1]]
    for module in reversed(annotated):
        fully_shard(module)
    states, modules = _traversal_utils._get_fsdp_states_with_modules(model)
    assert modules == annotated
    assert states == [fully_shard.state(module) for module in annotated]
    assert _traversal_utils._get_fsdp_states(model) == states


def test_a_state_shared_by_a_list_of_modules_comes_once() -> None:
    model = MLP()
    fully_shard([model.inp, model.out])
    fully_shard(model.blocks[0])
    states, modules = _traversal_utils._get_fsdp_states_with_modules(model)
    assert modules == [model.inp, model.blocks[0]]
    assert states[0] is fully_shard.state(model.out)
    twice = CalledTwice()
    fully_shard(twice.alias)
    assert _traversal_utils._get_fsdp_states_with_modules(twice)[1] == [twice.block]


def test_handles_come_left_to_right_over_all_states() -> None:
    model = MLP()
    fully_shard(model.blocks[1], "blocks.1")
    # A policy picks around what was annotated by hand: the states' handles interleave.
    fully_shard(model, "root", picks={model.blocks[2]: "blocks.2", model.blocks[0]: "blocks.0", model.out: "out"})
    assert _traversal_utils._get_fsdp_handles(model) == ["root", "blocks.0", "blocks.1", "blocks.2", "out"]
    assert _traversal_utils._get_fsdp_handles(model.blocks) == ["blocks.0", "blocks.1", "blocks.2"]


def test_no_walk_enters_an_incompatible_subtree() -> None:
    model = MLP()
    fully_shard(model.blocks[1].up, "hidden")
    fully_shard(model.blocks[2], "seen")
    replicate(model.blocks[1])
    fully_shard(model, "root")
    assert model.blocks[1] not in set(_traversal_utils._get_modules(model))
    assert _traversal_utils._get_fsdp_handles(model) == ["root", "seen"]
    assert model.blocks[1].up not in _traversal_utils._get_fully_sharded_module_to_states(model)
    assert _traversal_utils._get_fsdp_states(model.blocks[1]) == []
    # But one everywhere does.
    assert list(_traversal_utils._get_modules(model, is_everywhere=True)) == list(model.modules())
    assert _traversal_utils._get_fsdp_handles(model, is_everywhere=True) == ["root", "hidden", "seen"]
    found = _traversal_utils._get_fully_sharded_module_to_states(model, is_everywhere=True)
    assert list(found) == [model, model.blocks[1].up, model.blocks[2]]


def test_roots_are_known_after_lazy_init_from_the_outermost_state() -> None:
    model = nn.Sequential(MLP(), MLP())
    for mlp in model:
        fully_shard(mlp.blocks[0])  # type: ignore[union-attr,index]
        fully_shard(mlp)
    states, modules = _traversal_utils._get_root_fsdp_states_with_modules(model)
    assert modules == [model[0], model[1]]
    assert _traversal_utils._get_fsdp_root_states(model) == states  # and nothing is initialised again
    assert [state.inits for state in states] == [[model[0]], [model[1]]]
    inner = fully_shard.state(model[0].blocks[0])  # type: ignore[union-attr,index]
    assert inner is not None
    assert inner.inits == []


def test_get_fully_sharded_module_to_states() -> None:
    model = MLP()
    fully_shard(model.out)
    fully_shard(model)
    state = fully_shard.state(model)
    for block in reversed(model.blocks):
        set_member(block, "fully_shard", state)
    found = _traversal_utils._get_fully_sharded_module_to_states(model)
    assert list(found) == [model, *model.blocks, model.out]
    assert list(found.values()) == [state, state, state, state, fully_shard.state(model.out)]


def test_five_thousand_levels_are_walked() -> None:
    model = nested(5000)
    fully_shard(model)
    innermost = list(_traversal_utils._get_modules(model))[-1]
    assert isinstance(innermost, nn.Identity)
    fully_shard(innermost)
    assert len(_traversal_utils._get_fsdp_states(model)) == 2
    take_apart(model)


@pytest.mark.parametrize("imports", ["import _traversal_utils, composable", "import composable, _traversal_utils"])
def test_either_module_may_be_imported_first(imports: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", imports], check=True)
