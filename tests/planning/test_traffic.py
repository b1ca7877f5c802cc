"""What ranks send each other, by class of link: against messages counted one by one, and bytes that left the process."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import ConfigError, HandleOptions, MixedPrecisionPolicy, UsageError, fully_shard, plan
from composable.planning.estimate import Senders
from tests.models import MLP, Block, MLPBlock, TinyGPT
from tests.world import on_ranks, run_ranks, run_threads


def messages_of(ranks: list[int], *, is_direct: bool, passes: int) -> list[tuple[int, int]]:
    """Return (sender, receiver) of every slice that is sent in one collective."""
    if is_direct:
        return [(one, other) for one in ranks for other in ranks if one != other]
    following = dict(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    return [(one, following[one]) for _ in range(passes * (len(ranks) - 1)) for one in ranks]


@pytest.mark.parametrize("seed", range(60))
def test_bytes_by_class_are_those_of_messages_counted_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    world_size, replicas = rng.randint(1, 9), rng.randint(1, 5)
    ranks = range(world_size * replicas)
    hosts = [rng.randrange(rng.randint(1, 4)) for _ in ranks]
    is_direct = rng.random() < 0.5
    passes = 1 if is_direct else rng.randint(1, 2)
    for members in (
        [list(ranks[row * world_size : (row + 1) * world_size]) for row in range(replicas)],
        [list(ranks[column::world_size]) for column in range(world_size)],
    ):
        slice_bytes = rng.randint(0, 1000)
        sent: Counter[bool] = Counter()
        for group in members:
            for one, other in messages_of(group, is_direct=is_direct, passes=passes):
                sent[hosts[one] != hosts[other]] += slice_bytes
        found = Senders.of([[hosts[rank] for rank in group] for group in members], is_direct=is_direct)
        expected = sent.total() / len(ranks), pytest.approx(sent[True] / len(ranks), abs=0.5)
        assert found.sent_bytes(passes * slice_bytes * len(members[0])) == expected


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8, bias=False))


RING = {"world_size": 4, "ranks_per_host": 2, "transport": "process_group"}


@pytest.mark.parametrize(
    ("options", "inside", "between", "collectives"),
    [
        # A buffer of 256 bytes, in slices of 64; gathered for forward, and reduced. A ring leaves each host once,
        (RING, 2 * 3 * 64 // 2, 2 * 3 * 64 // 2, 2),
        # direct slices go to all peers elsewhere.
        ({**RING, "transport": "shared_memory"}, 2 * 64, 2 * 2 * 64, 2),
        ({**RING, "reshard_after_forward": True}, 3 * 96, 3 * 96, 3),
        # The second gather is between two ranks of one host: half of the buffer inside, none between.
        ({**RING, "reshard_after_forward": 2}, 2 * 96 + 128, 2 * 96, 3),
        # Two gathers and a reduction in two slices, and an all-reduce of one slice between three copies.
        (
            {"world_size": 2, "replicas": 3, "ranks_per_host": 2, "strategy": "HYBRID_SHARD"},
            3 * 128,
            round(2 * 128 * 2 / 3),
            4,
        ),
        # Shards across hosts, copies too.
        ({"world_size": 2, "replicas": 2, "ranks_per_host": 1, "strategy": "HYBRID_SHARD"}, 0, 3 * 128 + 128, 4),
        ({"world_size": 1}, 0, 0, 2),
    ],
)
def test_a_rank_sends_slices_as_the_transport_and_the_strategy_move_them(
    options: dict[str, Any], inside: int, between: int, collectives: int
) -> None:
    found = plan(wide(), **options).expected_traffic()
    assert (found.inside_bytes, found.between_bytes, found.collectives) == (inside, between, collectives)


def test_without_hosts_there_is_an_error_that_says_how_to_name_them() -> None:
    made = plan(wide(), world_size=2)
    with pytest.raises(UsageError, match="which ranks share a host is not known"):
        made.expected_traffic()
    named = made.on_hosts(1)
    assert named.expected_traffic().between_bytes == 2 * 128
    assert named == made and named.digest() == made.digest()


@pytest.mark.parametrize("ranks_per_host", [0, 3, 8, True, "2"])
def test_hosts_that_do_not_fit_the_ranks_are_refused(ranks_per_host: int) -> None:
    with pytest.raises(ConfigError, match=f"ranks_per_host is {ranks_per_host!r}, and there are 4 ranks"):
        plan(wide(), world_size=2, replicas=2, ranks_per_host=ranks_per_host)


def test_what_a_rank_sends_prints_with_equal_siblings_in_one_line() -> None:
    made = plan(TinyGPT(layers=4), policy={Block}, world_size=4, ranks_per_host=2)
    assert_expected_inline(
        str(made.expected_traffic()),
        """\
a rank sends in a step: 61.4 KiB inside its host, 61.4 KiB to others, in 14 collectives
  (root): 2 collectives, 3.5 KiB inside the host, 3.5 KiB to others
  blocks.[0-3] x 4, each: 3 collectives, 14.5 KiB inside the host, 14.5 KiB to others""",
    )


# -- a live annotation


def hosts_of_annotation(shape: tuple[int, ...], name: str | None) -> tuple[int, ...]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = wide()
    fully_shard(model, mesh=mesh[name] if name else mesh)
    return fully_shard.state(model).plan.hosts


@pytest.mark.parametrize(
    ("shape", "name", "count", "hosts"),
    [
        ((4,), None, "2", (0, 0, 1, 1)),
        ((2, 2), None, "2", (0, 0, 1, 1)),
        # Of every second rank.
        ((2, 2), "replicate", "2", (0, 1)),
        ((4,), None, "3", ()),
        ((4,), None, "", ()),
    ],
)
def test_an_annotation_knows_the_hosts_that_torchrun_names(
    shape: tuple[int, ...], name: str | None, count: str, hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", count)
    assert run_threads(hosts_of_annotation, 4, shape, name) == [hosts] * 4


# -- what leaves the process


def written_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what a process writes as Linux tells it")
@pytest.mark.parametrize(
    ("world_size", "transport", "low", "reshard", "trains"),
    [
        # gloo's reduce-scatter is an all-reduce, so these are of all-gathers.
        (2, "process_group", False, True, False),
        (2, "process_group", True, True, False),
        (3, "process_group", False, True, False),
    ],
)
@on_ranks(run=run_ranks)
def test_a_rank_sends_the_bytes_that_the_plan_says(transport: str, low: bool, reshard: bool, trains: bool) -> None:
    model = MLP(dim=64, hidden=4096, layers=2).requires_grad_(requires_grad=trains)
    fully_shard(
        model,
        policy={MLPBlock},
        options=HandleOptions(transport=transport, unused_gradients="zero"),
        reshard_after_forward=reshard,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None),
    )
    x = torch.ones(1, 64, requires_grad=True)
    for _ in range(2):
        dist.barrier()
        before = written_bytes()
        model(x).float().sum().backward()
        sent = written_bytes() - before
    dist.barrier()
    traffic = fully_shard.state(model).plan.on_hosts(dist.get_world_size()).expected_traffic()
    assert sent == pytest.approx(traffic.inside_bytes, rel=0.01)
