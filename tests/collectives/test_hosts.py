"""Tests composable/comm/ranks.py, hosts: which ranks share a host, and the mesh that follows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import ConfigError, HandleOptions, fully_shard
from composable.annotation import sharded_state_of
from composable.comm import Ranks
from composable.comm.hosts import hosts_of, rows_of_hosts
from composable.comm.transport import transport_class
from tests.hosts import why_no_hosts
from tests.world import run_ranks, run_threads, told

ROOT = Path(__file__).parent.parent.parent


def test_hosts_with_different_numbers_of_ranks_are_refused_with_the_counts() -> None:
    with pytest.raises(ConfigError) as caught:
        rows_of_hosts((0, 0, 0, 1, 2, 2, 3, 3))
    assert caught.value.what == (
        "a hybrid strategy without a mesh, and hosts have different numbers of ranks: 3 on 1 host, 2 on 2 hosts, 1 on 1 host"
    )
    assert caught.value.fix == "start as many ranks on every host; or pass a mesh of two dims"


def hosts_of_world() -> tuple[int, ...]:
    return hosts_of(Ranks.of_world())


def on_named_hosts(names: list[str]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    os.environ["COMPOSABLE_HOST"] = names[dist.get_rank()]
    try:
        found = hosts_of_world()
        # Asked once: what has been told does not change.
        os.environ["COMPOSABLE_HOST"] = "elsewhere"
        return found, grid_of_hosts()
    finally:
        del os.environ["COMPOSABLE_HOST"]


def test_processes_of_one_machine_share_a_host() -> None:
    assert run_ranks(hosts_of_world, 3) == [(0, 0, 0)] * 3


def test_a_world_that_only_pretends_has_as_many_ranks_on_a_host_as_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=6)
    try:
        assert hosts_of_world() == (0, 0, 1, 1, 2, 2)
    finally:
        dist.destroy_process_group()


def test_a_network_namespace_of_its_own_is_another_host() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(f"no network namespaces: {reason}")
    command = [sys.executable, "-c", "from composable.comm.hosts import _own_host; print(_own_host())"]
    names = [
        subprocess.run([*before, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for before in ([], ["unshare", "--user", "--map-root-user", "--net"])
    ]
    assert names[0] != names[1] and all(len(name.strip()) == 16 for name in names)


def grid_of_hosts() -> tuple[tuple[int, ...], tuple[int, ...]]:
    model = fully_shard(nn.Linear(4, 4), strategy="HYBRID_SHARD")
    state = sharded_state_of(model)
    grid = state.grid
    assert grid.is_hybrid and (grid.divisor == 1 or state.plan.hosts == tuple(sorted(hosts_of_world())))
    return grid.shard.numbers, (dist.get_rank(),) if grid.replicas is None else grid.replicas.numbers


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "expected"),
    [
        (1, None, ((0,), (0,))),
        (4, 2, ((2, 3), (1, 3))),
        (6, 3, ((3, 4, 5), (2, 5))),
        (3, 3, ((0, 1, 2), (2,))),
        (3, 1, ((2,), (0, 1, 2))),
    ],
)
def test_a_hybrid_strategy_without_a_mesh_has_a_copy_on_each_host(
    world_size: int, ranks_per_host: int | None, expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    assert run_threads(grid_of_hosts, world_size, ranks_per_host=ranks_per_host)[-1] == expected


def test_ranks_that_a_launcher_counts_across_hosts_share_with_those_of_their_own() -> None:
    found = run_ranks(on_named_hosts, 4, ["b", "a", "b", "a"])
    assert [hosts for hosts, _ in found] == [(0, 1, 0, 1)] * 4
    grids = [((0, 2), (0, 1)), ((1, 3), (0, 1)), ((0, 2), (2, 3)), ((1, 3), (2, 3))]
    assert [grid for _, grid in found] == grids


def refused() -> list[str]:
    return told(lambda: fully_shard(nn.Linear(4, 4), strategy="HYBRID_SHARD"))


def test_uneven_hosts_are_refused_on_every_rank() -> None:
    for rank, texts in enumerate(run_threads(refused, 3, ranks_per_host=2)):
        text = "\n".join(texts)
        assert "different numbers of ranks: 2 on 1 host, 1 on 1 host" in text
        assert f"at:  rank {rank}" in text


def transports_before_and_after_a_forward(names: list[str], transport: str) -> tuple[str, str]:
    os.environ["COMPOSABLE_HOST"] = names[dist.get_rank()]
    try:
        model = fully_shard(nn.Linear(4, 4), options=HandleOptions(transport=transport))
        state = sharded_state_of(model)
        before = state.plan.transport
        model(torch.ones(2, 4)).sum().backward()
        return before, state.plan.transport
    finally:
        del os.environ["COMPOSABLE_HOST"]


@pytest.mark.skipif(not transport_class("shared_memory").serves("cpu", "gloo"), reason="one transport fits anywhere")
@pytest.mark.parametrize(
    ("names", "transport", "expected"),
    [
        (["a", "a"], "auto", ("shared_memory", "shared_memory")),
        (["a", "b"], "auto", ("shared_memory", "process_group")),
        (["a", "a"], "process_group", ("process_group", "process_group")),
    ],
)
def test_a_plan_has_the_transport_of_the_hosts_from_the_first_forward_on(
    names: list[str], transport: str, expected: tuple[str, str]
) -> None:
    assert run_ranks(transports_before_and_after_a_forward, 2, names, transport) == [expected] * 2
