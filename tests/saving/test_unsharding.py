"""`unshard_params`: full, plain parameters inside a block."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    DesyncError,
    RaggedDTensor,
    SizePolicy,
    UsageError,
    fully_shard,
    replicate,
    unshard_params,
)
from composable.errors import ConfigError
from composable.saving.entries import largest_handle_bytes
from tests.live_bytes import LiveBytes
from tests.models import MLP, Block, MLPBlock, loss_of, make_model, seeded
from tests.parity import inputs_of
from tests.world import on_ranks, run_threads

NAMES = ["gpt_tied", "tied_across", "mixed_dtypes", "frozen_mixed", "scalars", "empty_params", "with_buffers"]
KINDS = {
    "on device": {},
    "on host": {"offload_to_cpu": True},
    "on the first rank": {"rank0_only": True},
    "on the first rank's host": {"rank0_only": True, "offload_to_cpu": True},
}


def shard(name: str) -> nn.Module:
    model = make_model(name)
    if name in {"mlp", "gpt", "gpt_tied"}:
        return fully_shard(model, policy={MLPBlock, Block})
    return fully_shard(model, policy=SizePolicy(10))


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: param.full_tensor() for fqn, param in model.named_parameters() if isinstance(param, RaggedDTensor)}


def is_sharded(model: nn.Module) -> bool:
    return all(isinstance(param, RaggedDTensor) for param in model.parameters())


@pytest.mark.parametrize(("world_size", "name"), [(1, "gpt_tied"), *((2, name) for name in NAMES)])
@on_ranks()
def test_full_values_are_shown_and_changes_are_kept(name: str) -> None:
    model, plain = shard(name), make_model(name)
    holders = list(model.parameters())
    for turn, options in enumerate(KINDS.values()):
        shows = dist.get_rank() == 0 or "rank0_only" not in options
        with unshard_params(model, **options):
            assert [fqn for fqn, _ in model.named_parameters()] == [fqn for fqn, _ in plain.named_parameters()]
            assert [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)] == [
                fqn for fqn, _ in plain.named_parameters(remove_duplicate=False)
            ]
            for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert (type(param) is nn.Parameter) is shows
                assert param.requires_grad is expected.requires_grad
                if shows:
                    assert torch.equal(param, expected) and param.dtype is expected.dtype
            if shows:
                state = model.state_dict()
                assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
                with torch.no_grad():
                    for index, param in enumerate(model.parameters()):
                        param.add_(index + turn)
        with torch.no_grad():
            for index, expected in enumerate(plain.parameters()):
                expected.add_(index + turn)
        assert [id(param) for param in model.parameters()] == [id(param) for param in holders]
        values = full_values(model)
        assert all(torch.equal(values[fqn], expected) for fqn, expected in plain.named_parameters())


@on_ranks(2)
def test_without_writeback_or_after_an_exception_values_are_as_before() -> None:
    model, plain, rank = shard("mlp"), make_model("mlp"), dist.get_rank()
    for options in KINDS.values():
        for failing in (None, {0, 1}, {0}, {1}) if "rank0_only" in options else (None, {0, 1}):
            error: Exception | None = None
            try:
                with unshard_params(model, writeback=failing is not None, **options):
                    for param in model.parameters():
                        if not isinstance(param, RaggedDTensor):
                            param.data.fill_(7.0)
                    if failing and rank in failing:
                        raise KeyError("mine")
            except (KeyError, DesyncError) as caught:
                error = caught
            expected = KeyError if rank in (failing or ()) else DesyncError if failing else type(None)
            assert type(error) is expected and is_sharded(model)
            values = full_values(model)
            assert all(torch.equal(values[fqn], expected) for fqn, expected in plain.named_parameters())


@on_ranks(2)
def test_a_plain_state_dict_loads_in_the_block() -> None:
    model, other = shard("mlp"), make_model("mlp", seed=5)
    with unshard_params(model):
        model.load_state_dict(other.state_dict())
        first = next(model.parameters())
        first.data = torch.full_like(first, 3.0)  # off the buffer
        model.out.bias.requires_grad_(False)
    assert [fqn for fqn, param in model.named_parameters() if not param.requires_grad] == ["out.bias"]
    values = full_values(model)
    expected = dict(other.named_parameters())
    assert torch.equal(values.pop("inp.weight"), torch.full((8, 8), 3.0))
    assert all(torch.equal(value, expected[fqn]) for fqn, value in values.items())
    with unshard_params(model):
        assert torch.equal(model.get_parameter("inp.weight"), torch.full((8, 8), 3.0))
    args, kwargs = inputs_of(model, 0, 0)
    with torch.no_grad():
        other.inp.weight.fill_(3.0)
        assert torch.equal(model(*args, **kwargs), other(*args, **kwargs))


@on_ranks(2)
def test_the_model_runs_and_trains_in_the_block() -> None:
    model, plain = shard("gpt"), make_model("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        with unshard_params(model, writeback=step == 1):
            args, kwargs = inputs_of(model, 9, rank)
            with torch.no_grad():
                assert torch.equal(model(*args, **kwargs), plain(*args, **kwargs))
            assert not any(isinstance(param, RaggedDTensor) for param in model.parameters())
            if step == 1:
                args, kwargs = inputs_of(model, step, rank)
                loss_of(model(*args, **kwargs)).backward()
        if step != 1:
            args, kwargs = inputs_of(model, step, rank)
            loss_of(model(*args, **kwargs)).backward()
        for every in range(size):
            args, kwargs = inputs_of(plain, step, every)
            (loss_of(plain(*args, **kwargs)) / size).backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    values = full_values(model)
    for fqn, expected in plain.named_parameters():
        torch.testing.assert_close(values[fqn], expected.detach(), rtol=0, atol=1e-6)


@on_ranks(2)
def test_recursion_nesting_and_modules_without_handles() -> None:
    model = shard("mlp")
    with unshard_params(model, recurse=False):
        assert not isinstance(model.inp.weight, RaggedDTensor)
        assert is_sharded(model.blocks)
    with unshard_params(model.blocks):
        assert not any(isinstance(param, RaggedDTensor) for param in model.blocks.parameters())
        assert isinstance(model.inp.weight, RaggedDTensor)
        with unshard_params(model):
            assert not any(isinstance(param, RaggedDTensor) for param in model.parameters())
            model.blocks[0].up.bias.data.fill_(1.0)
            model.inp.bias.data.fill_(1.0)
        assert isinstance(model.inp.weight, RaggedDTensor)
        assert not isinstance(model.blocks[0].up.bias, RaggedDTensor)
    assert is_sharded(model)
    values = full_values(model)
    assert values["blocks.0.up.bias"].eq(1).all() and values["inp.bias"].eq(1).all()

    nested = replicate(make_model("mlp"))
    with unshard_params(nested):
        assert all(type(param) is nn.Parameter for param in nested.parameters())


@on_ranks(2, options=[{}, {"rank0_only": True}, {"offload_to_cpu": True}])
def test_it_takes_every_module_of_an_annotated_model(options: dict[str, bool]) -> None:
    """Enter with each module inside of the block of the model, and with those that have nothing to show."""
    model = shard("mlp")
    model.beside = nn.ModuleList([nn.ReLU(), nn.Linear(2, 2)])
    replicate(model.beside[1])
    with unshard_params(model, **options):
        for module in model.modules() if "rank0_only" not in options else ():
            with unshard_params(module, **options):
                pass
    for module in (model.beside, *model.beside, nn.Identity()):
        with unshard_params(module, **options):
            pass


def refusal(block: Callable[[nn.Module], None]) -> list[str]:
    """Return the error, after which the model must be whole and of use."""
    model, plain = shard("mlp"), make_model("mlp")
    with pytest.raises((UsageError, ConfigError, DesyncError)) as caught:
        block(model)
    assert is_sharded(model)
    with suppress(AttributeError):
        assert all(handle.held_with is None for handle in fully_shard.state(model)._handles)
    values = full_values(model)
    assert all(torch.equal(values[fqn], expected) for fqn, expected in plain.named_parameters())
    args, kwargs = inputs_of(model, 0, dist.get_rank())
    loss_of(model(*args, **kwargs)).backward()
    return str(caught.value).splitlines()


def enter(model: nn.Module, **options: Any) -> None:
    with unshard_params(model, **options):
        pass


def in_forward(model: nn.Module) -> None:
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: enter(model))
    args, kwargs = inputs_of(model, 0, 0)
    try:
        model(*args, **kwargs)
    finally:
        handle.remove()


def of_a_part(model: nn.Module) -> None:
    enter(model.blocks[0].up)


def of_a_plain_module(_: nn.Module) -> None:
    enter(nn.Sequential(nn.Linear(2, 2)))


def with_other_options(model: nn.Module) -> None:
    with unshard_params(model, writeback=False):
        enter(model.blocks)


def change_shards_on_one_rank(model: nn.Module) -> None:
    held = list(model.parameters())
    with unshard_params(model), torch.no_grad():
        if dist.get_rank() == 1:
            held[-1].add_(0.0)


def fail_on_one_rank(model: nn.Module) -> None:
    with unshard_params(model):
        if dist.get_rank() == 1:
            raise UsageError("the user has failed", at="here", fix="there")


def replace(model: nn.Module, **options: Any) -> None:
    with unshard_params(model, **options):
        if dist.get_rank() == 0 or not options:
            model.out.weight = nn.Parameter(torch.zeros(8, 8))


def reshape(model: nn.Module) -> None:
    with unshard_params(model):
        model.out.weight.data = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("block", "what", "where"),
    [
        (in_forward, "unshard_params was entered in the middle of a forward or backward", "module MLP"),
        (
            of_a_part,
            "parameters belong to a handle of another module: 'weight', 'bias'",
            "module 'blocks.0.up' (Linear)",
        ),
        (of_a_plain_module, "unshard_params found no annotated module", "module Sequential"),
        (with_other_options, "unshard_params is entered again with other options", "module 'blocks.0'"),
        (change_shards_on_one_rank, "sharded parameters were changed while unshard_params showed", "rank 1, module"),
        (fail_on_one_rank, "the user has failed", "here"),
        (replace, "a parameter was replaced while unshard_params showed it", "parameter 'out.weight'"),
        (
            partial(replace, rank0_only=True),
            "a parameter was replaced while unshard_params showed it",
            "parameter 'out.weight'",
        ),
        (reshape, "a parameter was replaced while unshard_params showed it", "parameter 'out.weight'"),
    ],
)
def test_misuse_is_refused_on_every_rank_and_leaves_the_model_whole(
    block: Callable[[nn.Module], None], what: str, where: str
) -> None:
    for lines in run_threads(refusal, 2, block):
        assert lines[0].startswith(what)
        assert where in lines[1]


def show_on_the_first_rank() -> tuple[int, int]:
    """Return the bytes of the largest handle, and the most that this rank held beside its shards."""
    model = fully_shard(seeded(lambda: MLP(dim=64, hidden=64), 0), policy={MLPBlock})
    largest = largest_handle_bytes(model.parameters())
    with LiveBytes() as live, unshard_params(model, rank0_only=True):
        for param in model.parameters() if dist.get_rank() == 0 else ():
            param.data.zero_()
    assert all(value.eq(0).all() for value in full_values(model).values())
    return largest, live.peak


def test_ranks_that_show_nothing_allocate_nothing_large() -> None:
    (_, shown), (largest, held) = run_threads(show_on_the_first_rank, 2)
    assert held <= largest // 2 + 64 < shown
