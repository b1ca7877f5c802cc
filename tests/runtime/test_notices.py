"""What users should know of their model is logged, each text once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from composable import HandleOptions, fully_shard, plan
from tests.world import on_ranks, run_ranks


class Records(logging.Handler):
    """Keeps what the calling process logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self.texts.append(record.getMessage())


@contextmanager
def recorded() -> Iterator[list[str]]:
    records = Records()
    logging.getLogger("composable").addHandler(records)
    try:
        yield records.texts
    finally:
        logging.getLogger("composable").removeHandler(records)


class Block(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


def run_steps(model: nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


# Texts are logged once in a process, and processes serve many tests: each test has a class of its own.


@on_ranks(2, run=run_ranks)
def test_the_warning_of_a_plan_is_logged_once_on_the_first_rank_and_not_of_parts() -> None:
    class Whole(Block):
        pass

    class Part(Block):
        pass

    text = "the whole model is one handle: nothing can overlap; pass a policy\n  at:  rank 0, module Whole"
    with recorded() as texts:
        model = fully_shard(Whole())
        run_steps(model)
        run_steps(fully_shard(Whole()))
        assert fully_shard.state(model).plan.warnings
        assert texts == ([text] if dist.get_rank() == 0 else []), texts
        texts.clear()
        parts = nn.Sequential(Part(), Part())
        for block in parts:
            fully_shard(block)
        # Of a part alone it would be said, were it the whole.
        assert fully_shard.state(parts[0]).plan.warnings
        run_steps(fully_shard(parts))
        assert plan(Part(), world_size=2).warnings  # A plan that is not applied logs nothing.
    assert not texts


@on_ranks(1, run=run_ranks)
def test_one_rank_alone_is_not_warned() -> None:
    class Alone(Block):
        pass

    with recorded() as texts:
        run_steps(fully_shard(Alone()))
    assert not texts


@on_ranks(2, run=run_ranks)
def test_following_no_module_is_logged_on_the_first_rank() -> None:
    class Follower(nn.Linear):
        pass

    model = nn.Sequential(nn.Sequential(Follower(4, 4)), nn.Linear(4, 4))
    fully_shard(model[0][0], options=HandleOptions(follows_parent=True))  # type: ignore[index]
    fully_shard(model)
    with recorded() as texts:
        run_steps(model)
    assert not texts  # It follows the model.
    model = nn.Sequential(nn.Sequential(Follower(4, 4)), nn.Linear(4, 4))
    fully_shard(model[0][0], options=HandleOptions(follows_parent=True))  # type: ignore[index]
    fully_shard(model[1])
    fully_shard(model)
    with recorded() as texts:
        run_steps(model)
    text = (
        "follows_parent=True has no effect on module '0.0' (Follower): no module around has parameters that it "
        "gathers itself, so it is gathered when it is called, on every rank; annotate the module around it"
    )
    assert texts == ([text] if dist.get_rank() == 0 else []), texts
