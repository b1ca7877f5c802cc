"""Full parameters one after the other, out of and into a sharded model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    ConfigError,
    DesyncError,
    UsageError,
    full_state_dict,
    fully_shard,
    iter_full_params,
    load_full_params,
    replicate,
)
from tests.counting import counting_ranks
from tests.live_bytes import LiveBytes
from tests.models import Block, TinyGPT, make_model, random_tokens, seeded
from tests.saving.test_full_state import Odd, assert_like_plain, odd, sharded
from tests.world import run_ranks

NAMES = ["gpt_tied", "frozen_mixed", "mixed_dtypes", "scalars", "empty_params", "uneven"]


def iterate(names: list[str]) -> None:
    rank = dist.get_rank()
    for name in names:
        model, plain = sharded(name, 1), make_model(name, 1)
        for max_bytes in (None, 1, 700):
            pairs = list(iter_full_params(model, max_bytes=max_bytes))
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


@pytest.mark.parametrize(("world_size", "names"), [(2, NAMES), (3, NAMES), (1, NAMES[:1]), (4, NAMES[:1])])
def test_every_parameter_comes_in_full_under_its_name(world_size: int, names: list[str]) -> None:
    run_ranks(iterate, world_size, names)


def stop_early() -> None:
    model, plain = sharded("gpt", 1), make_model("gpt", 1)
    expected = dict(plain.named_parameters())
    tokens = random_tokens(0, 4, 8)
    for fqn, found in iter_full_params(model, max_bytes=10_000):
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


def test_all_ranks_may_stop_and_go_on() -> None:
    run_ranks(stop_early, 2)


def count_bytes() -> None:
    model = fully_shard(seeded(lambda: TinyGPT(vocab=64, dim=160, layers=8), 1), policy={Block})
    largest = max(param.numel() * 4 for param in model.parameters())
    for max_bytes, rank0_only in ((300_000, False), (2_000_000, False), (2_000_000, True)):
        with LiveBytes() as live:
            for _, value in iter_full_params(model, max_bytes=max_bytes, rank0_only=rank0_only):
                del value
        assert live.peak <= max_bytes + largest, (live.peak, max_bytes, largest)


def test_bytes_stay_below_the_limit() -> None:
    run_ranks(count_bytes, 2)


def count_messages() -> None:
    with counting_ranks() as counts:
        model = sharded("gpt", 1)
        assert len(list(iter_full_params(model))) > 20
        # Many small parameters: one message each way.
        assert counts["messages"] == 2


def test_small_parameters_share_a_message() -> None:
    run_ranks(count_messages, 2)


def go_back() -> None:
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pairs_go_back_in_any_order(world_size: int) -> None:
    run_ranks(go_back, world_size)


def refuse() -> None:
    rank = dist.get_rank()
    model, plain = sharded("mlp", 1), make_model("mlp", 2)
    pairs = [(fqn, value.detach()) for fqn, value in plain.named_parameters()]

    def load(given: Any, **options: Any) -> Any:
        return load_full_params(model, given if rank == 0 else None, **options)

    with pytest.raises(ConfigError, match="1 unexpected: stranger"):
        load([*pairs, ("stranger", torch.ones(2))])
    with pytest.raises(ConfigError, match=r"inp.weight has shape \[9\], not \[8, 8\]"):
        load([("inp.weight", torch.ones(9))], strict=False)
    with pytest.raises(ConfigError, match=r"'inp\.weight' comes twice"):
        load([*pairs, pairs[0]])
    with pytest.raises(ConfigError, match=r"what came was loaded\n.*2 missing: inp.weight, inp.bias"):
        load(pairs[2:])
    assert load([*pairs[2:], ("stranger", torch.ones(2))], strict=False) == (["inp.weight", "inp.bias"], ["stranger"])

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield pairs[0]
        raise OSError("disk is gone")

    with pytest.raises(OSError if rank == 0 else DesyncError, match="disk is gone"):
        load(broken())
    with pytest.raises(ConfigError, match="max_bytes is 0"):
        iter_full_params(model, max_bytes=0)
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
    run_ranks(refuse, 2)
