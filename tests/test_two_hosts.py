"""The training example on two hosts: equal losses, a cut wire, a killed host, and resuming on the host that is left.

Hosts are network namespaces of two ranks each (tests/hosts.py), started by torchrun. ``pytest -s`` prints how long after
the cut or the kill each rank has said what is wrong.
"""

import json
import re
import time
from pathlib import Path

import pytest

from tests.hosts import Host, Job, cut
from tests.test_examples import EXAMPLE, ROOT, run_example
from tests.world import run_ranks

RANKS_PER_HOST = 2
# How long ranks wait for each other: until the slowest has started, and after the cut.
TIMEOUT_S = 40
# Of ranks that must not need it, as they are told before.
UNUSED_TIMEOUT_S = 240
# The rate rises through all of a run, whatever its length.
SETTINGS = "--layers 2 --width 16 --heads 2 --context 16 --batch 6 --lr 20 --warmup 100000 --eval-every 1000000".split()
OPTIONS = ["--text", str(ROOT / "tests" / "models.py"), "--sample-bytes", "0"]
NAMED = r"^\[rank(\d)\]: composable\.errors\.DesyncError: (?:the save of .* has not ended: )?the wait for (.*) has ended by an error of the process group"


def train_on(hosts: tuple[Host, Host], run: Path, timeout_s: float) -> list[Job]:
    """Start a run without end, and return when it is under way and has saved a checkpoint."""
    more = ["--steps", "1000000", "--out", str(run), "--strategy", "HYBRID_SHARD", "--timeout", str(timeout_s)]
    command = [str(EXAMPLE), *SETTINGS, *OPTIONS, *more, "--checkpoint-every", "4"]
    jobs = [host.start(RANKS_PER_HOST, command) for host in hosts]
    while not list(run.glob("step-*")):
        said = "\n".join(job.said() for job in jobs)
        assert all(job.process.poll() is None for job in jobs), said
        time.sleep(0.05)
    return jobs


def errors_of(jobs: list[Job], ranks: set[int], since: float) -> dict[int, float]:
    """Return after how long each of ``ranks`` has said by name what is wrong."""
    seconds: dict[int, float] = {}
    while set(seconds) != ranks:
        elapsed = time.monotonic() - since
        is_over = all(job.process.poll() is not None for job in jobs)
        said = "\n".join(job.said() for job in jobs)
        for rank, _ in re.findall(NAMED, said, flags=re.MULTILINE):
            seconds.setdefault(int(rank), round(elapsed, 1))
        assert not is_over or set(seconds) == ranks, said
        time.sleep(0.05)
    return seconds


def losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, filter(lambda text: text.endswith("}"), lines))}


def test_two_hosts_train_as_one_until_the_wire_is_cut_and_one_host_goes_on(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    jobs = train_on(hosts, run, TIMEOUT_S)
    started = time.monotonic()
    cut(hosts)
    seconds = errors_of(jobs, {0, 1, 2, 3}, started)
    print(f"after the wire was cut, with a timeout of {TIMEOUT_S} s: {seconds}")
    assert [job.wait(1000) for job in jobs] == [1, 1]
    said = jobs[0].said()
    assert "over 2 ranks x 2 replicas" in said
    # It says who could not be reached.
    assert re.search(r"at: +rank [01], waiting for ranks? [\d, ]*[23]", said), said

    saved = max(int(path.name.removeprefix("step-")) for path in run.glob("step-*"))
    before = {step: loss for step, loss in losses(run).items() if step <= saved}
    # What is left of the machines has another number of ranks.
    resumed = [*OPTIONS, "--out", str(run), "--resume", "--steps", str(saved + 4), "--checkpoint-every", "0"]
    run_ranks(run_example, 3, resumed)
    unbroken = [*SETTINGS, *OPTIONS, "--out", str(tmp_path / "unbroken"), "--steps", str(saved + 4)]
    run_ranks(run_example, 1, [*unbroken, "--parallel", "none", "--checkpoint-every", "0"])
    expected = losses(tmp_path / "unbroken")
    assert before == pytest.approx({step: expected[step] for step in before}, abs=1e-4)
    assert losses(run) == pytest.approx(expected, abs=1e-4)
    assert expected[saved + 4] < expected[1]


def test_when_a_host_is_killed_every_rank_of_the_other_says_so(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    # The timeout plays no part: what is killed closes its connections. With the first host the store is gone too.
    jobs = train_on(hosts, tmp_path / "run", UNUSED_TIMEOUT_S)
    started = time.monotonic()
    hosts[0].kill()
    seconds = errors_of(jobs[1:], {2, 3}, started)
    print(f"after the first host was killed: {seconds}")
    assert max(seconds.values()) < UNUSED_TIMEOUT_S
    assert jobs[1].wait(1000) == 1
