"""What users should know of their model is logged, each text once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard, plan
from tests.world import on_ranks, run_ranks, run_threads


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
    """Two layers; ``way`` says how a tensor beside the output leaves the forward."""

    def __init__(self, way: str = "") -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.way = way
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        self.kept.clear()
        if self.way == "list":
            self.kept.append(y.square().mean())
        elif self.way == "attribute":
            self.loss = y.square().mean()
        elif self.way == "no grad":
            with torch.no_grad():
                self.kept.append(y.square().mean())
        elif self.way == "before":
            self.kept.append(y.square().mean())
            y = y + 1
        return y


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
        assert texts == ([text] if dist.get_rank() == 0 else [])
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


def leak(way: str, *, reshard: bool) -> list[str]:
    class Leaky(Block):
        pass

    with recorded() as texts:
        model = fully_shard(
            nn.Sequential(Leaky(way), Leaky(way), nn.Linear(4, 4)),
            policy={Leaky},
            reshard_after_forward=None if reshard else False,
        )
        run_steps(model)
        run_steps(model)
    return [text for text in texts if "whole model" not in text]


def text_of_leak(rank: int, fqn: str) -> str:
    return (
        "a forward leaves tensors by another way than its output: its parameters stay in memory until backward ends\n"
        f"  at:  rank {rank}, module '{fqn}' (Leaky)\n"
        "  fix: return them, keep them as attributes of this module, or compute them under torch.no_grad()"
    )


def test_a_forward_that_leaks_is_logged_once_for_each_module() -> None:
    assert run_ranks(leak, 2, "list", reshard=True) == [
        [text_of_leak(rank, "0"), text_of_leak(rank, "1")] for rank in range(2)
    ]


# Where parameters stay for backward anyway, a leak is no matter.
@pytest.mark.parametrize("way", ["", "attribute", "no grad", "before", "list"])
def test_a_forward_that_leaks_nothing_is_not_warned_of(way: str) -> None:
    assert run_threads(leak, 2, way, reshard=way != "list") == [[], []]


def fail() -> list[str]:
    with recorded() as texts:
        model = fully_shard(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))), policy={nn.Sequential})
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.randn(2, 4))
    return [text for text in texts if "another way" in text]


def test_a_forward_that_raises_is_not_said_to_leak() -> None:
    assert run_threads(fail, 2) == [[], []]
