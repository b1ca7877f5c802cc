"""Ranks outside the hot path: an error on one is an error on all, what differs is named by global rank."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import (
    ComposableError,
    fully_shard,
    load_full_state_dict,
    replicate,
)
from composable.comm import COMPARISON, Grid, Ranks, answer_for_absent_ranks
from composable.comm import ranks as ranks_file
from composable.comm.ranks import FLAGS
from composable.errors import ConfigError
from tests.world import on_ranks, run_threads


def fail_on(failing: list[int], error: Exception) -> str:
    """Return what this rank gets; what it was given must have come back whole."""
    ranks = Ranks.of_world()
    with ranks.agreed():
        pass
    caught: Exception | None = None
    try:
        with ranks.agreed():
            if dist.get_rank() in failing:
                raise error
    except (ConfigError, RuntimeError) as raised:
        caught = raised
    assert (caught is error) is (dist.get_rank() in failing)
    return "no error" if caught is None else f"{type(caught).__name__}: {caught}"


HERE = "ConfigError: key is missing\n  at:  parameter 'a'\n  fix: add it"
TOLD = "DesyncError: another rank raised RuntimeError: disk is full\n  at:  rank 0"


@pytest.mark.parametrize(
    ("failing", "error", "said"),
    [
        (
            [1],
            ConfigError("key is missing", at="parameter 'a'", fix="add it"),
            [HERE.replace("at:  ", "at:  rank 1, "), HERE],
        ),
        ([0, 2], RuntimeError("disk is full"), ["RuntimeError: disk is full", TOLD, "RuntimeError: disk is full"]),
        ([0], ConfigError("x"), ["ConfigError: x"]),
        ([], ConfigError("x"), ["no error"] * 2),
    ],
)
def test_every_rank_raises_what_one_rank_raised(failing: list[int], error: Exception, said: list[str]) -> None:
    assert run_threads(fail_on, len(said), failing, error) == said


def test_a_process_without_a_group_is_a_rank_of_its_own() -> None:
    ranks = Ranks.of_world()
    assert (ranks.rank, ranks.size, ranks.numbers, ranks.is_alone) == (0, 1, (0,), True)
    assert ranks.objects("a") == ["a"] and ranks.object_of(0, "b") == "b"
    ranks.compare("text", shown="text", what="", fix="")
    tensor = torch.ones(2)
    ranks.broadcast(tensor, 0)
    assert ranks.reduce(tensor, ReduceOp.SUM) is tensor
    with pytest.raises(ConfigError, match="my own"):
        ranks.compare("text", ConfigError("my own"), shown="text", what="", fix="")


# Messages name global ranks


def in_a_subgroup(call: str) -> str:
    """Return what ranks 2 and 3 of four get who do the same thing differently; ranks 0 and 1 look on."""
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return ""
    mesh = DeviceMesh.from_group(group, "cpu")
    is_last = dist.get_rank() == 3
    try:
        CALLS[call](mesh, group, is_last)
    except ComposableError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("ranks that differ went on")


def other_plans(mesh: DeviceMesh, group: dist.ProcessGroup, is_last: bool) -> None:
    model = nn.Linear(4, 8 if is_last else 4)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4))


def other_modules(mesh: DeviceMesh, group: dist.ProcessGroup, is_last: bool) -> None:
    replicate(nn.Linear(4, 8 if is_last else 4), process_group=group)


def one_state_dict_wrong(mesh: DeviceMesh, group: dist.ProcessGroup, is_last: bool) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    load_full_state_dict(model, {"bias": torch.zeros(4)} if is_last else None, src=1)


CALLS = {
    "fully_shard": other_plans,
    "replicate": other_modules,
    "load_full_state_dict, one wrong": one_state_dict_wrong,
}


@pytest.mark.parametrize("call", CALLS)
def test_messages_in_a_subgroup_name_global_ranks(call: str) -> None:
    _, _, third, fourth = run_threads(in_a_subgroup, 4, call)
    for text in (third, fourth):
        assert "rank 0" not in text and "rank 1" not in text, text
        assert "rank 2" in text or "rank 3" in text, text
    if "wrong" in call:
        assert fourth.partition("\n")[0] == third.partition("\n")[0] and "rank 3" in third
    else:
        assert "    rank 2: " in third and "    rank 3: " in third
        assert third.replace("at:  rank 2", "") == fourth.replace("at:  rank 3", "")


# Values


def others_of(ranks: Ranks) -> list[int]:
    return [peer for peer in range(ranks.size) if peer != ranks.rank]


@on_ranks(world_size=[1, 2, 3])
def test_values_reach_every_rank() -> None:
    """Check every way to exchange values, in the whole world and in a subgroup, whose order is its own."""
    everyone = Ranks.of_world()
    assert everyone.numbers == tuple(range(dist.get_world_size()))
    numbers = list(range(dist.get_world_size()))[::-1]
    group = dist.new_group(numbers)
    for ranks in (everyone, Ranks.of(group, torch.device("cpu"))):
        mine = ranks.numbers[ranks.rank]
        assert mine == dist.get_rank()
        assert ranks.objects({"rank": mine}) == [{"rank": number} for number in ranks.numbers]
        for source in range(ranks.size):
            assert ranks.object_of(source, mine if ranks.rank == source else None) == ranks.numbers[source]
            for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
                tensor = torch.full((2, 3), mine + 1).to(dtype)
                ranks.broadcast(tensor, source)
                assert torch.equal(tensor, torch.full((2, 3), ranks.numbers[source] + 1).to(dtype))
        total = ranks.reduce(torch.tensor([float(mine)]), ReduceOp.SUM)
        assert total.item() == sum(ranks.numbers)
        for cuts in itertools.combinations_with_replacement(range(9), ranks.size - 1):
            bounds = [0, *cuts, 8]
            full = torch.zeros(8, dtype=torch.uint8)
            full[bounds[ranks.rank] : bounds[ranks.rank + 1]] = mine + 1
            ranks.gather_ragged(full, bounds)
            expected = [ranks.numbers[r] + 1 for r in range(ranks.size) for _ in range(bounds[r], bounds[r + 1])]
            assert full.tolist() == expected
        landing = [torch.zeros(2, dtype=torch.uint8) for _ in range(ranks.size)]
        finish = ranks.begin_exchange(
            [(torch.full((2,), 10 * mine + peer, dtype=torch.uint8), peer) for peer in others_of(ranks)],
            [(landing[peer], peer) for peer in others_of(ranks)],
        )
        finish()
        for peer in others_of(ranks):
            assert landing[peer].tolist() == [10 * ranks.numbers[peer] + ranks.rank] * 2


@on_ranks(3)
def test_the_divisor_is_the_number_of_ranks_whose_gradients_count() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded, whole = Grid.of(Ranks.of_mesh(mesh)), Grid.whole(Ranks.of_world())
    assert sharded.shard == sharded.everyone and sharded.replicas is None
    assert whole.replicas == whole.everyone and whole.shard.numbers == (dist.get_rank(),)
    assert (sharded.divisor, whole.divisor, whole.shard.size, sharded.shard.size) == (3, 3, 1, 3)


# The exchange under all of these


def exchanged(kind: str, lengths: list[int], source: int | None, to: int | None) -> list[bytes]:
    content = bytes([65 + dist.get_rank()]) * lengths[dist.get_rank()]
    # The caller's modes are not those of messages.
    with torch.device("meta"), torch.inference_mode():
        return Ranks.of_world().exchange(content, kind, source=source, to=to)


LENGTHS = {
    COMPARISON: lambda size: [8] * size,
    FLAGS: lambda size: [3] * size,
    "uneven": lambda size: [0, 300, 1, 7][:size],
    "empty": lambda size: [0] * size,
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", LENGTHS)
def test_an_exchange_gives_every_rank_the_bytes_of_all(world_size: int, kind: str) -> None:
    lengths = LENGTHS[kind](world_size)
    expected = [bytes([65 + rank]) * length for rank, length in enumerate(lengths)]
    assert run_threads(exchanged, world_size, kind, lengths, None, None) == [expected] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_is_heard_or_hears(world_size: int) -> None:
    lengths = [5, 0, 9][:world_size]
    for one, length in enumerate(lengths):
        heard = run_threads(exchanged, world_size, "values", lengths, one, None)
        assert [told[one] for told in heard] == [bytes([65 + one]) * length] * world_size
        every = [bytes([65 + rank]) * own for rank, own in enumerate(lengths)]
        told = run_threads(exchanged, world_size, "texts", lengths, None, one)
        assert [own if rank == one else every for rank, own in enumerate(told)] == [every] * world_size


def test_what_is_not_heard_is_not_sent() -> None:
    sizes: list[int] = []
    send = dist.broadcast

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return send(tensor, *args, **kwargs)

    with mock.patch.object(dist, "broadcast", noted):
        run_threads(exchanged, 2, "values", [5, 5000], 0, None)
    assert sizes and max(sizes) < 50


def compared(odd: int | None) -> tuple[bool, list[bool]]:
    ranks = Ranks.of_world()
    is_odd = ranks.rank == odd
    return ranks.are_alike("other" if is_odd else "one"), ranks.any_of([False, is_odd, True])


@pytest.mark.parametrize("world_size", range(1, 8))
def test_one_rank_that_differs_is_seen_by_all(world_size: int) -> None:
    assert run_threads(compared, world_size, None) == [(True, [False, False, True])] * world_size
    for odd in range(world_size):
        expected = world_size == 1, [False, True, True]
        assert run_threads(compared, world_size, odd) == [expected] * world_size


def test_ranks_that_are_not_there_say_what_this_one_says_or_what_is_answered_for_them() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=3)
    try:
        ranks = Ranks.of_world()
        assert ranks.are_alike("key") and ranks.objects((1, None)) == [(1, None)] * 3
        assert ranks.object_of(0, "mine") == "mine" and ranks.any_of([True, False]) == [True, False]
        asked: list[tuple[str, int | None]] = []

        def answer(ranks: Ranks, kind: str, content: bytes, source: int | None) -> list[bytes]:
            asked.append((kind, source))
            return [b"\0" * len(content) if kind == FLAGS else b"'theirs'", content, content]

        with mock.patch.object(ranks_file, "_ANSWERS", []):
            answer_for_absent_ranks(answer)
            assert not ranks.are_alike("key") and ranks.objects("mine") == ["theirs", "mine", "mine"]
            assert ranks.object_of(0, "mine") == "theirs" and ranks.any_of([True, False]) == [True, False]
        assert asked == [(COMPARISON, None), ("objects", None), ("object_of", 0), (FLAGS, None)]
    finally:
        dist.destroy_process_group()
