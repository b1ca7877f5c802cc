import functools
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
        frozenset({MLPBlock}),
        ModuleWrapPolicy({MLPBlock}),
        ModuleWrapPolicy([MLPBlock]),
        is_block,
        lambda module: isinstance(module, MLPBlock),
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


def test_picks_come_in_the_order_of_named_modules() -> None:
    model = TinyGPT(layers=3)
    expected = [fqn for fqn, module in model.named_modules() if isinstance(module, (Block, Attention, nn.LayerNorm))]
    assert list(picked_fqns({nn.LayerNorm, Attention, Block}, model)) == expected


def test_a_module_with_two_names_is_picked_once() -> None:
    assert list(picked_fqns({MLPBlock}, CalledTwice())) == ["block"]


def test_nothing_at_or_below_an_excluded_module_is_picked() -> None:
    model = MLP()
    assert list(picked_fqns({nn.Linear}, model, model.blocks[0], model.out)) == [
        "inp",
        "blocks.1.up",
        "blocks.1.down",
        "blocks.2.up",
        "blocks.2.down",
    ]


def test_a_module_below_an_excluded_one_is_not_picked_through_another_path() -> None:
    model = MLP()
    model.another_path = model.blocks[0].up
    assert "another_path" not in picked_fqns({nn.Linear}, model, model.blocks[0])


@pytest.mark.parametrize("min_numel", [1, 50, 100, 144, 200, 280])
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


def test_size_policy_gives_the_reason_and_passes_over_containers() -> None:
    # A block has 8 * 16 + 16 = 144 and 16 * 8 + 8 = 136 elements.
    assert picked_fqns(SizePolicy(280), MLP(layers=2)) == {
        "blocks.0": "policy: 280 elements >= 280",
        "blocks.1": "policy: 280 elements >= 280",
    }
    assert "picks nothing" in error_of(SizePolicy(281), MLP(layers=2))


def test_a_pick_does_not_count_towards_the_one_above() -> None:
    assert picked_fqns(SizePolicy(140), MLP(layers=1)) == {"blocks.0.up": "policy: 144 elements >= 140"}


def test_a_tied_parameter_counts_once() -> None:
    model = TinyGPT(tied=True)
    assert "head" in picked_fqns(SizePolicy(500), TinyGPT(tied=False))
    assert "head" not in picked_fqns(SizePolicy(500), model)
    assert "tokens" in picked_fqns(SizePolicy(500), model)


def test_a_policy_that_picks_nothing_says_what_there_is() -> None:
    assert error_of({Attention}, MLP()) == (
        "ModuleWrapPolicy({Attention}) picks nothing\n"
        "  at:  module MLP; most frequent submodules: 8 Linear, 3 MLPBlock, 1 ModuleList\n"
        "  fix: change the policy so that it picks at least one submodule, or leave it out"
    )


def test_the_hint_names_five_classes_at_most() -> None:
    model = nn.Sequential(
        nn.ReLU(), nn.ReLU(), nn.Tanh(), nn.GELU(), nn.SiLU(), nn.ELU(), nn.Sigmoid(), nn.Linear(1, 1)
    )
    assert "most frequent submodules: 2 ReLU, 1 Tanh, 1 GELU, 1 SiLU, 1 ELU\n" in error_of({Block}, model)


def test_a_policy_whose_picks_are_all_excluded_says_so() -> None:
    model = MLP()
    assert error_of({MLPBlock}, model, *model.blocks) == (
        "ModuleWrapPolicy({MLPBlock}) picks nothing: all 3 modules it would pick are ignored or annotated already\n"
        "  at:  module MLP\n"
        "  fix: leave policy out"
    )


def test_a_container_that_is_never_called_cannot_be_picked() -> None:
    assert error_of({nn.ModuleList}, MLP()) == (
        "ModuleWrapPolicy({ModuleList}) picks a module without forward, which is never called as one unit\n"
        "  at:  module 'blocks' (ModuleList)\n"
        "  fix: pick the modules inside it, or the one that calls them"
    )


ACCEPTED = (
    "  fix: pass a set of module classes, a function of one module that returns a bool, "
    "ModuleWrapPolicy, CustomPolicy, SizePolicy, or an auto_wrap_policy of torch"
)


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("Block", "'Block'"),
        (3, "3"),
        (None, "None"),
        (Block, "the class Block"),
        (nn.Identity(), "Identity"),
        ([Block], "list"),
        ({Block: True}, "dict"),
    ],
)
def test_what_is_no_policy_raises_with_the_accepted_kinds(policy: Any, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_policy(policy)
    assert str(caught.value) == f"{name} is not a policy\n{ACCEPTED}"


@pytest.mark.parametrize(
    ("classes", "what"),
    [
        ({"Block"}, "'Block' is not a subclass of nn.Module"),
        ({int}, "the class int is not a subclass of nn.Module"),
        ({nn.Identity()}, "Identity is not a subclass of nn.Module"),
        (set(), "the set of module classes is empty"),
    ],
)
def test_a_set_of_anything_but_module_classes_raises(classes: Any, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_policy(classes)
    assert str(caught.value).splitlines()[0] == what


def test_a_single_class_is_not_a_set_of_classes() -> None:
    with pytest.raises(ConfigError, match="module_classes is the class Block, not a set"):
        ModuleWrapPolicy(Block)  # type: ignore[arg-type]


@pytest.mark.parametrize("min_numel", [0, -1, 1.5, True, "many"])
def test_a_minimum_that_is_no_positive_number_raises(min_numel: Any) -> None:
    with pytest.raises(ConfigError, match="min_numel is "):
        SizePolicy(min_numel)


def test_a_predicate_that_returns_no_bool_raises_at_the_module() -> None:
    def returns_dict(module: nn.Module) -> Any:
        return {"reshard": True} if isinstance(module, MLPBlock) else False

    assert error_of(returns_dict, MLP()) == (
        "predicate returns_dict returned dict, not bool\n"
        "  at:  module 'blocks.0' (MLPBlock)\n"
        "  fix: return True to give the module a handle, else False"
    )


def test_a_function_of_other_arguments_raises_before_any_module_is_asked() -> None:
    def wrap(module: nn.Module, fqn: str) -> bool:
        raise AssertionError("not to be called")

    with pytest.raises(ConfigError, match="predicate wrap cannot be called with one module") as caught:
        resolve_policy(wrap)  # type: ignore[arg-type]
    assert str(caught.value).splitlines()[-1] == ACCEPTED


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
        functools.partial(torch_wrap.always_wrap_policy),
        functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
        functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={MLPBlock, Block}),
        functools.partial(
            torch_wrap._or_policy,
            policies=[
                functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: False),
                torch_wrap.ModuleWrapPolicy({MLPBlock, nn.Linear}),
            ],
        ),
        *(functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=size) for size in (1, 72, 300, 900)),
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


@pytest.mark.parametrize(
    ("policy", "what", "fix"),
    [
        (torch_wrap.CustomPolicy(is_block), "torch's CustomPolicy may answer with options", "pass the function"),
        (
            torch_wrap.lambda_auto_wrap_policy,
            "lambda_auto_wrap_policy cannot be called with module, recurse and nonwrapped_numel: missing a required",
            "give its other arguments with functools.partial",
        ),
        (
            functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: 1),
            "policy lambda_auto_wrap_policy returned int, not bool",
            "return True or False",
        ),
    ],
)
def test_what_does_not_fit_of_torchs_policies_is_refused_clearly(policy: Any, what: str, fix: str) -> None:
    message = error_of(policy, MLP())
    assert what in message and fix in message


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (ModuleWrapPolicy({MLPBlock, Block}), "ModuleWrapPolicy({Block, MLPBlock})"),
        (CustomPolicy(is_block), "CustomPolicy(is_block)"),
        (SizePolicy(1000), "SizePolicy(1000)"),
    ],
)
def test_a_policy_prints_as_it_is_written(policy: Any, text: str) -> None:
    assert str(policy) == text


def test_equal_policies_are_equal_values() -> None:
    assert ModuleWrapPolicy({Block}) == ModuleWrapPolicy([Block])
    assert SizePolicy(5) == SizePolicy(5)
    assert SizePolicy(5) != SizePolicy(6)


def test_a_very_deep_model_is_walked() -> None:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(3000):
        model = nn.Sequential(model)
    assert len(SizePolicy(6).pick(model)) == 1
    while model._modules:
        model = model._modules.popitem()[1]  # type: ignore[assignment]
