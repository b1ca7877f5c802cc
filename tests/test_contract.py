import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable.errors import ConfigError
from composable.ground.contract import (
    contract,
    get_registry,
    managing_state,
    remove_annotation,
    remove_member,
    set_member,
)
from composable.ground.names import describe_module
from tests.models import MLP, TinyGPT


class State:
    def __init__(self) -> None:
        self.value = 0


@contract(State, incompatible=("replicate",))
def fully_shard(module: Any, *, value: int = 0) -> Any:
    """Annotate, and remember ``value``."""
    first = module if isinstance(module, nn.Module) else module[0]
    state = fully_shard.state(first)
    assert state is not None
    state.value = value
    return module


@contract(incompatible=("fully_shard",))
def replicate(module: Any) -> None:
    pass


@contract()
def checkpoint(module: Any) -> None:
    pass


def annotation_that(change: Callable[[Any], object]) -> Any:
    @contract()
    def faulty(module: Any) -> None:
        change(module)

    return faulty


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def test_an_annotation_returns_its_module_and_keeps_name_and_docstring_and_the_function_reads_its_state() -> None:
    module = nn.Linear(2, 2)
    assert fully_shard(module, value=7) is module
    assert checkpoint(module) is module
    state = fully_shard.state(module)
    assert isinstance(state, State) and state.value == 7
    assert (fully_shard.__name__, fully_shard.__doc__) == ("fully_shard", "Annotate, and remember ``value``.")


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Through(nn.Module):
    """Names stay the same: attributes lead to the inner module's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._parameters = inner._parameters
        self._modules = inner._modules


OTHER_RESULTS: dict[str, Callable[[Any], object]] = {
    "another module, module Wrapper": lambda module: Wrapper(module if isinstance(module, nn.Module) else module[0]),
    "another module, module Through": lambda module: Through(module if isinstance(module, nn.Module) else module[0]),
    "another module, module Linear": lambda module: copy.deepcopy(
        module if isinstance(module, nn.Module) else module[0]
    ),
    "[]": lambda module: [],
    "True": lambda module: True,
    "'done'": lambda module: "done",
    "(1, 2)": lambda module: (1, 2),
}


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("text", OTHER_RESULTS)
def test_an_annotation_that_returns_something_else_raises_and_leaves_no_entry(text: str, is_list: bool) -> None:
    @contract()
    def wrap(module: Any) -> object:
        return OTHER_RESULTS[text](module)

    module = nn.Linear(2, 2)
    place = "'inner' (Linear)" if text.endswith("Wrapper") else "Linear"  # It is inside the wrapper by now.
    assert error_of(lambda: wrap([module] if is_list else module)) == (
        f"wrap returned {text}, and callers would go on with the module that they passed\n"
        f"  at:  this process, module {place}\n"
        "  fix: change the module in place in wrap and return it, or nothing; apply a wrapper by a plain function, "
        "without contract"
    )
    assert not get_registry(module)


def test_an_annotation_may_return_its_modules_in_another_list() -> None:
    @contract()
    def mark(modules: Any) -> object:
        return tuple(modules)

    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert mark(modules) is modules and list(get_registry(modules[1])) == ["mark"]


def test_several_apis_are_kept_in_the_order_they_were_applied() -> None:
    module = nn.Linear(2, 2)
    checkpoint(module)
    fully_shard(module)
    assert list(get_registry(module)) == ["checkpoint", "fully_shard"]
    assert get_registry(module)["fully_shard"].state is fully_shard.state(module)
    with pytest.raises(TypeError):
        get_registry(module)["other"] = None  # type: ignore[index]


def test_modules_of_one_list_share_one_state_and_of_two_calls_do_not() -> None:
    first, second, third, *others = [nn.Linear(2, 2) for _ in range(5)]
    modules = [first, second]
    assert fully_shard(modules, value=3) is modules
    fully_shard(third)
    assert fully_shard.state(first) is fully_shard.state(second)
    assert fully_shard.state(third) is not fully_shard.state(first)
    assert fully_shard(module for module in others) == others  # type: ignore[type-var]
    assert fully_shard.state(others[0]) is fully_shard.state(others[1])


def test_double_application_names_the_module() -> None:
    model = MLP()
    fully_shard(model.blocks[1].up)
    assert error_of(lambda: fully_shard(model.blocks[1].up)) == (
        "fully_shard is already on this module\n"
        "  at:  this process, module 'blocks.1.up' (Linear)\n"
        "  fix: call fully_shard once per module"
    )


@pytest.mark.parametrize(("first", "second"), [(fully_shard, replicate), (replicate, fully_shard)])
def test_an_incompatible_pair_raises_in_both_orders(first: Any, second: Any) -> None:
    model = MLP()
    first(model.out)
    assert error_of(lambda: second(model.out)) == (
        f"{second.__name__} and {first.__name__} cannot both be on one module\n"
        "  at:  this process, module 'out' (Linear)\n"
        f"  fix: choose one of them for this module; {first.__name__} is on it already"
    )
    assert list(get_registry(model.out)) == [first.__name__]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("layer", "fully_shard got str"),
        (None, "fully_shard got NoneType"),
        (torch.ones(2), "fully_shard got Tensor"),
        ([], "fully_shard got an empty sequence"),
        ([nn.Identity(), "layer"], "fully_shard got str at index 1 of the sequence"),
    ],
)
def test_what_is_no_module_raises(argument: Any, message: str) -> None:
    assert error_of(lambda: fully_shard(argument)).splitlines()[0] == message


def test_a_list_with_one_module_that_cannot_be_annotated_annotates_none() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert "the same module twice" in error_of(lambda: fully_shard([first, second, first]))
    fully_shard(second)
    assert "already on this module" in error_of(lambda: fully_shard([first, second]))
    assert fully_shard.state(first) is None


@pytest.mark.parametrize("error_type", [ValueError, KeyboardInterrupt])
def test_nothing_stays_annotated_after_an_exception(error_type: type[BaseException]) -> None:
    @contract()
    def failing(module: nn.Module) -> None:
        state = failing.state(module)
        set_member(module.get_submodule("blocks.0"), "failing", state)
        raise error_type("boom")

    model = MLP()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(error_type, match="boom"):
        failing(model)
    assert failing.state(model) is None
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    fully_shard(model)


def test_an_error_of_the_function_itself_is_told_with_the_rank() -> None:
    def refuse(model: nn.Module) -> None:
        raise ConfigError("bad option", at=describe_module(model))

    assert error_of(lambda: annotation_that(refuse)(MLP())) == "bad option\n  at:  this process, module MLP"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            lambda model: model.out._parameters.update(weight=model.out._parameters.pop("weight")),
            "parameter out.weight = inp.weight became parameter out.bias",
        ),
        (
            lambda model: model.inp.register_buffer("scale", torch.ones(1)),
            "module blocks became buffer inp.scale",
        ),
        (
            lambda model: setattr(model, "out", nn.Sequential(model.out)),
            "parameter out.weight = inp.weight became module out.0",
        ),
        (
            lambda model: setattr(model, "second_name", model._modules.pop("alias")),
            "module alias = blocks.0 became module second_name = blocks.0",
        ),
        (
            lambda model: setattr(model.out, "weight", nn.Parameter(model.out.weight.detach().clone())),
            "parameter out.weight = inp.weight became parameter out.weight",
        ),
        (lambda model: delattr(model, "alias"), "module alias = blocks.0 became nothing"),
    ],
)
def test_a_change_of_a_name_is_reported(change: Callable[[MLP], None], difference: str) -> None:
    model = MLP(layers=1)
    model.out.weight = model.inp.weight
    model.alias = model.blocks[0]
    assert error_of(lambda: annotation_that(change)(model)) == (
        f"faulty changed the FQNs of the module it annotates: {difference}"
        "\n  at:  this process, module MLP"
        "\n  fix: change faulty so that every parameter, buffer and module keeps its name and its place"
    )
    assert dict(get_registry(model)) == {}


def test_parameters_may_be_replaced_and_the_class_swapped() -> None:
    def shard(model: MLP) -> None:
        model.out.weight = model.inp.weight = nn.Parameter(model.out.weight.detach().clone())
        model.__class__ = type("ShardedMLP", (MLP,), {})  # type: ignore[assignment]

    model = MLP()
    model.out.weight = model.inp.weight
    faulty = annotation_that(shard)
    faulty(model)
    assert type(model).__name__ == "ShardedMLP" and faulty.state(model) is not None


def test_the_registry_is_no_parameter_module_or_state_dict_entry() -> None:
    plain, annotated = MLP(), fully_shard(MLP())
    set_member(annotated.blocks[0], "fully_shard", fully_shard.state(annotated))
    assert list(annotated.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in annotated.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in annotated.named_modules()] == [name for name, _ in plain.named_modules()]


def test_a_deep_copy_has_a_deep_copy_of_the_state() -> None:
    model = fully_shard(MLP(), value=5)
    state = fully_shard.state(model)
    set_member(model.blocks[0], "fully_shard", state)
    clone = copy.deepcopy(model)
    cloned_state = fully_shard.state(clone)
    assert cloned_state is not None
    assert cloned_state is not state
    assert cloned_state.value == 5
    assert managing_state(clone.blocks[0], "fully_shard") is cloned_state
    remove_annotation(clone, "fully_shard")
    assert fully_shard.state(model) is state
    pickled = fully_shard.state(pickle.loads(pickle.dumps(model)))
    assert pickled is not None and pickled.value == 5


def test_a_member_is_managed_but_not_annotated() -> None:
    model = fully_shard(MLP())
    state, block = fully_shard.state(model), model.blocks[0]
    for _ in range(2):
        set_member(block, "fully_shard", state)
    assert fully_shard.state(block) is None
    assert managing_state(block, "fully_shard") is managing_state(model, "fully_shard") is state
    assert managing_state(block, "replicate") is None
    assert "for another ancestor" in error_of(lambda: set_member(block, "fully_shard", State()))
    remove_member(block, "fully_shard")
    assert managing_state(block, "fully_shard") is None


@pytest.mark.parametrize("annotate", [fully_shard, replicate])
def test_a_member_cannot_be_annotated_with_the_same_or_an_incompatible_api(annotate: Any) -> None:
    model = fully_shard(MLP())
    set_member(model.blocks[0], "fully_shard", fully_shard.state(model))
    message = error_of(lambda: annotate(model.blocks[0]))
    assert "ancestor picked it" in message
    assert "at:  this process, module 'blocks.0' (MLPBlock)" in message
    checkpoint(model.blocks[0])


def test_an_annotated_model_is_freed_with_its_last_reference() -> None:
    model = fully_shard(TinyGPT())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_of_a_module_and_one_inside_it_the_outer_one_gets_the_state() -> None:
    model = MLP()
    seen: list[object] = []

    @contract()
    def api(modules: list[nn.Module]) -> None:
        seen.append([api.state(module) is not None for module in modules])

    assert api([model.blocks[0], model]) == [model.blocks[0], model]
    assert seen == [[False, True]]
    assert not get_registry(model.blocks[0])


def test_an_api_cannot_hide_members_from_the_annotation_that_manages_them() -> None:
    model = MLP()

    @contract()
    def outer(module: nn.Module) -> None:
        set_member(model.blocks[0], "outer", outer.state(module))

    @contract(incompatible=("outer",))
    def hiding(module: nn.Module) -> None: ...

    outer(model)
    with pytest.raises(ConfigError, match="the policy of a outer ancestor picked modules below it"):
        hiding(model.blocks)
    assert not get_registry(model.blocks)
