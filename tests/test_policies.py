import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from composable import ConfigError, CustomPolicy, ModuleWrapPolicy, SizePolicy
from composable.policies import resolve_policy
from tests.models import MLP, Attention, Block, CalledTwice, MLPBlock, TinyGPT


def picked_fqns(policy: Any, root: nn.Module, *excluded: nn.Module) -> dict[str, str]:
    fqns = {module: fqn for fqn, module in root.named_modules()}
    return {fqns[module]: reason for module, reason in resolve_policy(policy).pick(root, set(excluded)).items()}


def error_of(policy: Any, root: nn.Module, *excluded: nn.Module) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_policy(policy).pick(root, set(excluded))
    return str(caught.value)


def is_block(module: nn.Module) -> bool:
    return isinstance(module, MLPBlock)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    "policy",
    [
        {MLPBlock},
        ModuleWrapPolicy([MLPBlock]),
        is_block,
        CustomPolicy(is_block),
        functools.partial(lambda cls, module: isinstance(module, cls), MLPBlock),
    ],
)
def test_every_kind_of_policy_picks_the_blocks(policy: Any) -> None:
    assert list(picked_fqns(policy, MLP())) == BLOCKS


def test_reasons_say_what_picked_a_module() -> None:
    assert picked_fqns({MLPBlock, nn.Linear}, MLP(layers=1)) == {
        "inp": "policy: Linear",
        "blocks.0": "policy: MLPBlock",
        "blocks.0.up": "policy: Linear",
        "blocks.0.down": "policy: Linear",
        "out": "policy: Linear",
    }
    assert picked_fqns(is_block, MLP(layers=1)) == {"blocks.0": "policy: is_block"}


def test_a_class_matches_its_subclasses_and_is_named_as_the_user_gave_it() -> None:
    model = MLP(layers=1)
    model.blocks[0].__class__ = type("Swapped", (MLPBlock,), {})
    assert picked_fqns({MLPBlock}, model) == {"blocks.0": "policy: MLPBlock"}


@pytest.mark.parametrize("policy", [{MLP, MLPBlock}, lambda module: True, SizePolicy(1)])
def test_the_root_is_never_picked(policy: Any) -> None:
    root = MLP() if not callable(policy) else nn.Sequential(nn.Linear(1, 1))
    assert "" not in picked_fqns(policy, root)


def test_a_module_with_two_names_is_picked_once() -> None:
    assert list(picked_fqns({MLPBlock}, CalledTwice())) == ["block"]


def test_nothing_at_or_below_an_excluded_module_is_picked_by_any_path() -> None:
    model = MLP()
    model.another_path = model.blocks[0].up
    assert list(picked_fqns({nn.Linear}, model, model.blocks[0], model.out)) == [
        *("inp", "blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down")
    ]


@pytest.mark.parametrize("min_numel", [1, 100, 200, 280])
def test_size_picks_own_at_least_the_minimum_and_leftovers_less(min_numel: int) -> None:
    model = MLP()
    picked = list(picked_fqns(SizePolicy(min_numel), model))
    modules = dict(model.named_modules())

    def owned(fqn: str) -> int:
        below = [deeper for deeper in picked if deeper.startswith(fqn + ".")]
        return sum(
            param.numel()
            for name, param in modules[fqn].named_parameters(prefix=fqn)
            if not any(name.startswith(deeper + ".") for deeper in below)
        )

    assert all(owned(fqn) >= min_numel for fqn in picked)
    others = [fqn for fqn in modules if fqn not in {"", "blocks", *picked}]
    assert all(owned(fqn) < min_numel for fqn in others)


def test_size_policy_gives_the_reason_and_counts_neither_containers_nor_picks_below() -> None:
    # A block has 8 * 16 + 16 = 144 and 16 * 8 + 8 = 136 elements.
    assert picked_fqns(SizePolicy(280), MLP(layers=2)) == {
        "blocks.0": "policy: 280 elements >= 280",
        "blocks.1": "policy: 280 elements >= 280",
    }
    assert "picks nothing" in error_of(SizePolicy(281), MLP(layers=2))
    assert picked_fqns(SizePolicy(140), MLP(layers=1)) == {"blocks.0.up": "policy: 144 elements >= 140"}


def test_a_tied_parameter_counts_once() -> None:
    model = TinyGPT(tied=True)
    assert "head" in picked_fqns(SizePolicy(500), TinyGPT(tied=False))
    assert "head" not in picked_fqns(SizePolicy(500), model)
    assert "tokens" in picked_fqns(SizePolicy(500), model)


def returns_dict(module: nn.Module) -> Any:
    return {"reshard": True} if isinstance(module, MLPBlock) else False


@pytest.mark.parametrize(
    ("policy", "excluded", "text"),
    [
        ({Attention}, (), "picks nothing .*most frequent submodules: 8 Linear, 3 MLPBlock, 1 ModuleList"),
        ({MLPBlock}, BLOCKS, r"ModuleWrapPolicy\(\{MLPBlock\}\) picks nothing"),
        ({nn.ModuleList}, (), r"picks a module without forward.*at:  module 'blocks' \(ModuleList\)"),
        (returns_dict, (), r"policy returns_dict returned dict, not bool\n  at:  module 'blocks.0' \(MLPBlock\)"),
        (lambda module, fqn: True, (), r"policy <lambda> raised TypeError.*\n  at:  module 'inp' \(Linear\)"),
        *(
            (wrong, (), f"policy is {text}")
            for wrong, text in (
                *(("Block", "'Block'"), (None, "None"), (Block, "the class Block")),
                *((nn.Identity(), "a torch.nn"), ([Block], "a list")),
                (torch_wrap.CustomPolicy(is_block), "a torch.*for torch's CustomPolicy pass its function"),
            )
        ),
        (torch_wrap.lambda_auto_wrap_policy, (), "policy lambda_auto_wrap_policy raised TypeError: .*missing"),
        (
            functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: 1),
            (),
            "policy lambda_auto_wrap_policy returned int, not bool",
        ),
    ],
)
def test_what_a_policy_cannot_be_or_pick_is_an_error_that_says_what_there_is(
    policy: Any, excluded: Any, text: str
) -> None:
    model = MLP()
    assert re.search(text, error_of(policy, model, *map(model.get_submodule, excluded)), re.DOTALL)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        *[(lambda wrong=wrong: ModuleWrapPolicy(wrong), "module_classes is") for wrong in ({"Block"}, {int}, Block)],
        (lambda: ModuleWrapPolicy(()), "module_classes is empty"),
        *[(lambda wrong=wrong: SizePolicy(wrong), "min_numel is ") for wrong in (0, 1.5, True)],
    ],
)
def test_a_policy_of_wrong_values_raises(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make()


def wrapped_by_torch(policy: Any, model: nn.Module) -> list[str]:
    """Return what ``FullyShardedDataParallel`` would wrap below ``model``; containers need nothing of their own."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module
            found.append(module)

    found: list[nn.Module] = []
    fqns = {module: fqn for fqn, module in model.named_modules()}
    torch_wrap._recursive_wrap(model, policy, Wrapper, set(), set(), only_wrap_children=True)
    wrapped = {module for module in found if type(module).forward is not nn.Module.forward}
    return [fqn for module, fqn in fqns.items() if module in wrapped]


@pytest.mark.parametrize("build", [MLP, TinyGPT, CalledTwice])
@pytest.mark.parametrize(
    "policy",
    [
        torch_wrap.ModuleWrapPolicy({MLPBlock, Block, Attention}),
        torch_wrap.always_wrap_policy,
        functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
        functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={MLPBlock, Block}),
        functools.partial(
            torch_wrap._or_policy,
            policies=[
                functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: False),
                torch_wrap.ModuleWrapPolicy({MLPBlock, nn.Linear}),
            ],
        ),
        *(functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=size) for size in (1, 300)),
        lambda module, recurse, nonwrapped_numel: isinstance(module, Block) if not recurse else True,
    ],
)
def test_torchs_auto_wrap_policies_pick_what_they_wrap_there(policy: Any, build: Any) -> None:
    expected = wrapped_by_torch(policy, build())
    if expected:
        assert list(picked_fqns(policy, build())) == expected
    else:
        assert "picks nothing" in error_of(policy, build())


def test_an_auto_wrap_policy_is_named_in_the_plan() -> None:
    policy = functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={MLPBlock})
    assert picked_fqns(policy, MLP(layers=1)) == {"blocks.0": "policy: transformer_auto_wrap_policy"}
    torch_policy = torch_wrap.ModuleWrapPolicy({MLPBlock})
    assert picked_fqns(torch_policy, MLP(layers=1)) == {"blocks.0": "policy: ModuleWrapPolicy"}
