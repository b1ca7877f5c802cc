"""Tests composable/comm/hang_watchdog.py: what a wait says that the process group has ended. More: tests/test_divergence.py."""

import logging
import pickle
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from composable import ConfigError, DesyncError, explain_waits, set_divergence_timeout
from composable.comm import Ranks
from composable.comm.waits import Diagnosis, RankStatus, Tree, Wait
from composable.ground.torch_private import store_of_default_group
from tests.saving.test_hostile import Bomb
from tests.world import on_ranks, run_ranks


def wait_alone(call: Callable[[dist.ProcessGroup], object]) -> str:
    """Return what the first rank gets that makes ``call`` in a group of ranks 1 and 3 of 4, or 0 and 2: nobody comes."""
    rank = dist.get_rank()
    groups = []
    for members in ([0, 2], [1, 3]):
        # Ranks have so long to connect too, so they come together.
        dist.barrier()
        groups.append(dist.new_group(members, timeout=timedelta(seconds=4)))
    text = ""
    if rank < 2:
        with pytest.raises(DesyncError) as caught:
            call(groups[rank])
        assert isinstance(caught.value.__cause__, RuntimeError)
        text = str(caught.value)
    dist.barrier()
    return text


def reduce_explained(group: dist.ProcessGroup) -> None:
    with explain_waits():
        dist.all_reduce(torch.ones(()), group=group)


def reduce_as_the_package_does(group: dist.ProcessGroup) -> None:
    Ranks.of(group, torch.device("cpu")).reduce(torch.ones(()), dist.ReduceOp.SUM)


@pytest.mark.parametrize(
    ("call", "name"),
    [(reduce_explained, "torch.distributed.all_reduce"), (reduce_as_the_package_does, "reduce")],
)
def test_a_wait_that_the_group_ends_says_who_was_waited_for(
    call: Callable[[dist.ProcessGroup], object], name: str
) -> None:
    for rank, text in enumerate(run_ranks(wait_alone, 4, call)[:2]):
        assert f"the wait for the other ranks in {name} has ended by an error of the process group: " in text
        assert f"\n  at:  rank {rank}, waiting for rank {rank + 2}\n  fix: read the errors of the other ranks" in text


@pytest.mark.parametrize("error", [ConfigError("mine"), RuntimeError("mine"), KeyError("mine")])
def test_what_is_no_wait_passes_through_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_waits():
        raise error
    assert caught.value is error and caught.value.__cause__ is None


# What others write to the store


def make_status(chance: random.Random) -> RankStatus:
    names = ["", "g", "composable:1:0-1", 'with "quotes"\n', "\u00fc \ud800"]
    name, number = (lambda: chance.choice(names)), (lambda: chance.choice([-2, -1, 0, 7, 2**62]))
    wait = Wait(name(), name(), (0, 1), number(), number(), name(), number(), name(), (name(),), is_call=True)
    return RankStatus(
        chance.choice([None, wait]),
        {f"{name()} {number()}": number() for _ in range(3)},
        {name(): (name(), name())},
        {name(): Tree(name(), number(), number(), is_inside=True, failure=name())},
        name(),
        name(),
    )


def change(text: str, chance: random.Random) -> str:
    """Return another text: characters exchanged, cut or doubled, or values of other kinds."""
    kinds = ["null", "true", "[]", "{}", "1e999", "NaN", '"x"', "-1", "[" * 100_000, "9" * 5000]
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(text) + 1)
        stop = min(len(text), start + chance.randrange(20))
        text = (
            text[:start]
            + chance.choice([*kinds, "", text[start:stop] * 2, chr(chance.randrange(1, 255))])
            + text[stop:]
        )
    return text


@pytest.mark.parametrize("seed", range(20))
def test_the_status_of_a_rank_is_read_strictly(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        status = make_status(chance)
        assert RankStatus.from_text(status.as_text()) == status
        for read in (RankStatus.from_text, Diagnosis.from_text):
            try:
                found = read(change(status.as_text(), chance))
            except (ValueError, RecursionError):
                continue
            hash(found.groups if isinstance(found, Diagnosis) else (found.wait, found.text))
            assert isinstance(found, Diagnosis) or all(type(number) is int for number in found.started.values())


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "watching for ranks" in record.getMessage():
            self.texts.append(f"{record.levelname} {record.getMessage()}")


def watched() -> Records:
    """Start the watch, and return what it will log of the store."""
    set_divergence_timeout(0.3)
    for thread in threading.enumerate():
        if thread.name == "composable watch":
            thread.look_now()  # type: ignore[attr-defined]  # the one thread of this name
    dist.barrier()
    records = Records()
    logging.getLogger("composable").addHandler(records)
    return records


def part_ways() -> None:
    """Wait for each other in two calls that never meet."""
    ranks = Ranks.of_world()
    with pytest.raises(DesyncError, match="the ranks went different ways"):  # noqa: PT012  # each waits elsewhere
        if ranks.rank == 0:
            ranks.reduce(torch.ones(()), dist.ReduceOp.SUM)
        else:
            ranks.broadcast(torch.ones(2), 1)
            ranks.broadcast(torch.ones(2), 0)


def write_to_the_store(folder: str, answer: str) -> list[str]:
    """Diverge while a stranger writes; returns what was logged."""
    records = watched()
    fuse = Path(folder) / "fuse"
    texts: dict[str, Any] = {
        "a pickle": pickle.dumps(Bomb(fuse)),
        "text": "?",
        "bytes": b"\xff\xfe",
        "nesting": "[" * 10**5,
    }
    if dist.get_rank() == 0:
        store = store_of_default_group()
        for question in range(2):
            store.set(f"composable watch/{question}/verdict", texts[answer])
    dist.barrier()
    part_ways()
    assert not fuse.exists()
    return records.texts


@pytest.mark.parametrize("answer", ["a pickle", "text", "bytes", "nesting"])
def test_what_a_stranger_writes_is_no_answer_runs_nothing_and_ends_no_watch(answer: str, tmp_path: Path) -> None:
    for texts in run_ranks(write_to_the_store, 2, str(tmp_path), answer):
        assert len(texts) == 1 and texts[0].startswith(
            "WARNING watching for ranks that wait for ever: an answer in the"
        )
        assert "0/verdict: " in texts[0]


@on_ranks(2, run=run_ranks)
def test_an_answer_in_the_name_of_another_rank_counts_as_none() -> None:
    records = watched()
    store = store_of_default_group()
    if dist.get_rank() == 1:
        set_divergence_timeout(None)  # Does not answer for itself.
        for question in range(20):
            store.set(f"composable watch/{question}/place/1", pickle.dumps(Bomb(Path("fuse"))))
    dist.barrier()
    if dist.get_rank() == 1:
        assert b"rank 1: does not answer" in store.get("composable watch/1/verdict")
    Ranks.of_world().reduce(torch.ones(()), dist.ReduceOp.SUM)
    assert len(records.texts) == (1 if dist.get_rank() == 0 else 0), records.texts
    assert not Path("fuse").exists()


@on_ranks(2, run=run_ranks)
def test_an_error_of_the_store_is_told_once_and_the_watch_goes_on() -> None:
    records = watched()
    check, failed = dist.PrefixStore.check, threading.Event()
    left = 5

    def flaky(self: dist.PrefixStore, keys: list[str]) -> bool:
        nonlocal left
        left -= 1
        if left <= 0:
            failed.set()
            return check(self, keys)
        raise RuntimeError("Connection reset by peer")

    with mock.patch.object(dist.PrefixStore, "check", flaky):
        assert failed.wait(60)
        dist.barrier()
        part_ways()
    (text,) = records.texts
    assert text.startswith("WARNING watching for ranks that wait for ever: the store of the process group has failed\n")
    assert "RuntimeError: Connection reset by peer" in text
