"""How long communication takes: the formula against rounds that are played one by one, and what is refused."""

import random

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from composable import ConfigError, Link, Links, UsageError, plan
from composable.planning.estimate import PlannedExchange, groups_of
from examples.gpt import GPT, GPTSize
from examples.gpt import Block as GPTBlock
from tests.models import Block, TinyGPT


def play(
    world_size: int, ranks_per_host: int, slice_bytes: int, links: Links, *, is_direct: bool, passes: int
) -> dict[bool, float]:
    """Return the seconds of one collective, on links between hosts or not, as the busiest rank spends them."""
    seconds = {False: 0.0, True: 0.0}
    host = [rank // ranks_per_host for rank in range(world_size)]
    if is_direct:
        for peer in range(1, world_size):
            between = host[peer] != host[0]
            link = links.between if between else links.inside
            seconds[between] += link.latency + slice_bytes / link.bandwidth
        return seconds
    for _ in range(passes * (world_size - 1)):
        round_s = {}
        for rank in range(world_size):
            between = host[(rank + 1) % world_size] != host[rank]
            # The only rank of its host that sends to another one has what all of them have together.
            rate = links.between.bandwidth * ranks_per_host if between else links.inside.bandwidth
            link = links.between if between else links.inside
            round_s[between] = link.latency + slice_bytes / rate
        slowest = max(round_s, key=round_s.__getitem__)
        seconds[slowest] += round_s[slowest]
    return seconds


@pytest.mark.parametrize("seed", range(40))
def test_the_estimate_is_what_rounds_take_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    ranks_per_host = rng.randint(1, 4)
    world_size = ranks_per_host * rng.randint(1, 4)
    is_direct = rng.random() < 0.5
    passes, slice_bytes, calls = 1 if is_direct else rng.randint(1, 2), rng.randint(1, 10**6), rng.randint(1, 3)
    links = Links(*(Link(rng.choice([0, 1e-5, 1e-3]), 10 ** rng.uniform(6, 11)) for _ in range(2)))
    groups, _ = groups_of([rank // ranks_per_host for rank in range(world_size)], world_size)
    exchange = PlannedExchange(calls, calls * slice_bytes * world_size, groups, passes, is_direct)
    inside_s, between_s = exchange.seconds(links)
    expected = play(world_size, ranks_per_host, slice_bytes, links, is_direct=is_direct, passes=passes)
    assert inside_s == pytest.approx(calls * expected[False])
    assert between_s == pytest.approx(calls * expected[True])


FAST, SLOW = Link(1e-6, 1e9), Link(1e-5, 1e8)


def test_of_groups_that_differ_the_slowest_counts() -> None:
    # Four ranks a group on hosts of six: the second of three groups is on two hosts.
    made = plan(nn.Linear(4, 4, bias=False), world_size=4, replicas=3, ranks_per_host=6)
    alone = plan(nn.Linear(4, 4, bias=False), world_size=4, ranks_per_host=2)
    assert made.estimate(Links(Link(0, 1e9), Link(1, 1e9))).between_s > 6
    assert alone.estimate(Links(Link(0, 1e9), Link(1, 1e9))).between_s == pytest.approx(6)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1], [0, 1, 1, 1]])
def test_of_ranks_that_send_directly_the_one_with_most_peers_elsewhere_counts(hosts: list[int]) -> None:
    groups, _ = groups_of(hosts, 4)
    found = PlannedExchange(1, 400, groups, is_direct=True).seconds(Links(Link(0, 1e9), Link(1, 1e9)))
    assert found == (0, pytest.approx(3))


def test_a_link_between_hosts_is_needed_where_there_are_several() -> None:
    made = plan(nn.Linear(4, 4, bias=False), world_size=2)
    found = made.on_hosts(2).estimate(Links(FAST))
    assert (found.inside_s, found.between_s) == (pytest.approx(2 * (1e-6 + 32e-9)), 0)
    with pytest.raises(ConfigError, match="several hosts, and no link between them"):
        made.on_hosts(1).estimate(Links(FAST))
    with pytest.raises(UsageError, match="which ranks share a host is not known"):
        made.estimate(Links(FAST, SLOW))


@pytest.mark.parametrize(
    ("latency", "bandwidth", "message"),
    [
        (-1e-9, 1, "latency of the link is -1e-09"),
        (0, 0, "bandwidth of the link is 0"),
        (float("nan"), 1, "latency of the link is nan"),
        (float("inf"), 1, "infinite"),
        (0, "fast", "bandwidth of the link is 'fast'"),
    ],
)
def test_a_link_that_makes_no_sense_is_refused(latency: float, bandwidth: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Link(latency, bandwidth)


def test_an_estimate_prints_with_equal_siblings_in_one_line() -> None:
    made = plan(TinyGPT(layers=3), policy={Block}, world_size=2, replicas=2, ranks_per_host=2)
    assert_expected_inline(
        str(made.estimate(Links(FAST, SLOW))),
        """\
communication of a step: 376.5 us, 75.1 us inside hosts and 301.4 us between hosts; no overlap
  (root): 50.4 us, 6.7 us inside hosts and 43.7 us between hosts
  blocks.[0-2] x 3, each: 108.7 us, 22.8 us inside hosts and 85.9 us between hosts""",
    )


@pytest.mark.parametrize("world_size", [8, 4096])
def test_more_ranks_send_more_between_hosts_and_a_copy_on_each_host_sends_less(world_size: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTSize(layers=24, width=2048, heads=16, context=64))
    links = Links(Link(3e-6, 300e9), Link(10e-6, 50e9))
    flat = plan(model, policy={GPTBlock}, world_size=world_size, ranks_per_host=8)
    hybrid = plan(model, policy={GPTBlock}, world_size=8, replicas=world_size // 8, ranks_per_host=8)
    assert (flat.estimate(links).between_s > 0) == (world_size > 8)
    if world_size > 8:
        assert hybrid.expected_traffic().between_bytes < flat.expected_traffic().between_bytes
