"""Full parameters one after the other, out of and into a sharded model."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composable import (
    ConfigError,
    DesyncError,
    UsageError,
    full_state_dict,
    fully_shard,
    iter_full_params,
    load_full_params,
    load_full_state_dict,
    load_safetensors,
    replicate,
    save_safetensors,
)
from tests.counting import counting_ranks
from tests.models import make_model, random_tokens
from tests.saving.test_full_state import Odd, assert_like_plain, odd, sharded
from tests.world import on_ranks, run_ranks, run_threads

NAMES = ["gpt_tied", "frozen_mixed", "mixed_dtypes", "empty_params"]


@pytest.mark.parametrize(("world_size", "names"), [(3, NAMES), (1, NAMES[:1])])
@on_ranks()
def test_every_parameter_comes_in_full_under_its_name(names: list[str]) -> None:
    rank = dist.get_rank()
    for name in names:
        model, plain = sharded(name, 1), make_model(name, 1)
        pairs = list(iter_full_params(model))
        assert [fqn for fqn, _ in pairs] == [fqn for fqn, _ in plain.named_parameters()]
        for (fqn, found), want in zip(pairs, plain.parameters(), strict=True):
            assert type(found) is torch.Tensor and not found.requires_grad
            assert found.dtype == want.dtype and torch.equal(found, want), (name, fqn)
            assert found.untyped_storage().nbytes() == found.nbytes
        for (_, found), want in zip(
            iter_full_params(model, rank0_only=True, dtype=torch.bfloat16, device="cpu"),
            plain.parameters(),
            strict=True,
        ):
            assert (found is not None) is (rank == 0)
            assert found is None or torch.equal(found, want.bfloat16())


@on_ranks(2)
def test_all_ranks_may_stop_and_go_on() -> None:
    model, plain = sharded("gpt", 1), make_model("gpt", 1)
    expected = dict(plain.named_parameters())
    tokens = random_tokens(0, 4, 8)
    for fqn, found in iter_full_params(model):
        assert found is not None and torch.equal(found, expected[fqn])
        # The model may run between the steps.
        with torch.no_grad():
            assert torch.equal(model(tokens), plain(tokens))
        if fqn == "blocks.0.mlp.0.weight":
            break
    assert len(list(iter_full_params(model))) == len(expected)
    # What is not trained is not handed out either: a copy.
    found = dict(iter_full_params(odd(1)))
    wanted = dict(Odd(1).named_parameters())
    assert list(found) == list(wanted) and all(torch.equal(found[fqn], wanted[fqn]) for fqn in wanted)  # type: ignore[arg-type]
    copies = replicate(make_model("mlp", 1))
    for (_, value), param in zip(iter_full_params(copies), copies.parameters(), strict=True):
        assert value is not None and value.data_ptr() != param.data_ptr() and torch.equal(value, param)


@on_ranks(2, run=run_ranks)
def test_small_parameters_share_a_message() -> None:
    with counting_ranks() as counts:
        model = sharded("gpt", 1)
        assert len(list(iter_full_params(model))) > 20
        # Many small parameters: one message each way.
        assert counts["messages"] == 2


@on_ranks(world_size=[1, 3])
def test_pairs_go_back_in_any_order() -> None:
    rank = dist.get_rank()
    for name in NAMES:
        model, plain = sharded(name, 1), make_model(name, 2)
        params = list(model.parameters())
        pairs = [(fqn, value.detach().double()) for fqn, value in plain.named_parameters()]
        result = load_full_params(model, iter(pairs[::-1]) if rank == 0 else None)
        assert result == ([], [])
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        found = full_state_dict(model)
        if rank == 0:
            assert_like_plain(found, plain)
    # From a whole state dict, under every name of what is tied, buffers included; from another rank.
    last = dist.get_world_size() - 1
    model = odd(1)
    tensors = {key: value for key, value in Odd(3).state_dict().items() if isinstance(value, torch.Tensor)}
    load_full_params(model, tensors.items() if rank == last else None, src=last)
    found = full_state_dict(model)
    assert all(torch.equal(found[key], value) for key, value in tensors.items() if rank == 0)


def refuse() -> None:
    rank = dist.get_rank()
    model, plain = sharded("mlp", 1), make_model("mlp", 2)
    pairs = [(fqn, value.detach()) for fqn, value in plain.named_parameters()]

    def load(given: Any, **options: Any) -> Any:
        return load_full_params(model, given if rank == 0 else None, **options)

    with pytest.raises(ConfigError, match=r"Unexpected key\(s\) in state_dict: .stranger."):
        load([*pairs, ("stranger", torch.ones(2))])
    with pytest.raises(ConfigError, match=r"inp.weight has shape \[9\], not \[8, 8\]"):
        load([("inp.weight", torch.ones(9))], strict=False)
    with pytest.raises(ConfigError, match="pairs is or holds"):
        load([*pairs, pairs[0]])
    with pytest.raises(
        ConfigError, match=r"what came was loaded\n.*Missing key\(s\) in state_dict: .inp.weight., .inp.bias."
    ):
        load(pairs[2:])
    assert load([*pairs[2:], ("stranger", torch.ones(2))], strict=False) == (["inp.weight", "inp.bias"], ["stranger"])

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield pairs[0]
        raise OSError("disk is gone")

    with pytest.raises(OSError if rank == 0 else DesyncError, match="disk is gone"):
        load(broken())
    with pytest.raises(ConfigError, match="floating-point"):
        iter_full_params(model, dtype=torch.int8)
    with pytest.raises(UsageError, match="not annotated"):
        iter_full_params(nn.Linear(2, 2))
    with pytest.raises(DesyncError, match="different arguments"):
        iter_full_params(model, rank0_only=rank == 0)
    load(pairs)
    found = full_state_dict(model)
    if rank == 0:
        assert_like_plain(found, plain)


def test_a_pair_that_does_not_fit_is_an_error_on_every_rank() -> None:
    run_threads(refuse, 2)


class Tied(nn.Module):
    """Tied across activation checkpointing, with a frozen part and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[0].register_buffer("count", torch.tensor(seed))
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def checkpointed(how: str, seed: int, device: str = "cpu") -> nn.Module:
    """Return a sharded model whose blocks and head are in wrappers, put on before or after the annotation."""
    with torch.device(device):
        model = Tied(seed)
    if how == "after":
        fully_shard(model, policy={nn.Sequential})
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1][1] = checkpoint_wrapper(model.blocks[1][1])
    model.head = checkpoint_wrapper(model.head)
    return model if how == "after" else fully_shard(model, policy={nn.Sequential})


def name_what_is_wrapped(how: str, folder: str) -> None:
    rank = dist.get_rank()
    plain = Tied(1)
    model = checkpointed(how, 1)
    assert [fqn for fqn, _ in iter_full_params(model)] == [fqn for fqn, _ in plain.named_parameters()]
    # What comes out goes in, whatever is wrapped there.
    other = checkpointed(how, 2)
    pairs = list(iter_full_params(model))
    assert load_full_params(other, pairs if rank == 0 else None) == ([], [])  # type: ignore[arg-type]  # on every rank
    with pytest.raises(ConfigError, match=r'Missing key\(s\) in state_dict: "blocks.0.0.weight"'):
        load_full_params(other, [pair for pair in pairs if pair[0] != "blocks.0.0.weight"])  # type: ignore[misc]
    save_safetensors(model, folder)
    for device, load in product(("cpu", "meta") if how == "before" else ("cpu",), ("full", "safetensors", "torch")):
        fresh = checkpointed(how, 3, device)
        if load == "full":
            load_full_state_dict(fresh, plain.state_dict() if rank == 0 else None)
        elif load == "torch":
            fresh.load_state_dict(plain.state_dict())
        else:
            load_safetensors(fresh, folder)
        found = full_state_dict(fresh)
        assert list(found) == (list(plain.state_dict()) if rank == 0 else [])
        assert all(torch.equal(value, plain.state_dict()[fqn]) for fqn, value in found.items()), (device, load)
        assert fresh.head.weight is fresh.tokens.weight


@pytest.mark.parametrize("how", ["before", "after"])
def test_names_are_those_of_the_plain_model_whatever_is_wrapped(how: str, tmp_path: Path) -> None:
    run_threads(name_what_is_wrapped, 2, how, str(tmp_path / "weights"))
