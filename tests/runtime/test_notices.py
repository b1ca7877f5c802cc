"""What users should know of their model is logged, each text once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from composable import fully_shard, plan
from tests.world import run_ranks, run_threads


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


def make_one_handle() -> list[str]:
    class Whole(Block):
        pass

    with recorded() as texts:
        model = fully_shard(Whole())
        run_steps(model)
        run_steps(fully_shard(Whole()))
        assert fully_shard.state(model).plan.warnings
    return texts


def test_the_warning_of_a_plan_is_logged_once_on_the_first_rank() -> None:
    text = "the whole model is one handle: nothing can overlap; pass a policy\n  at:  rank 0, module Whole"
    assert run_ranks(make_one_handle, 2) == [[text], []]


def annotate_part_by_part() -> list[str]:
    class Part(Block):
        pass

    with recorded() as texts:
        model = nn.Sequential(Part(), Part())
        for block in model:
            fully_shard(block)
        # Of a part alone it would be said, were it the whole.
        assert fully_shard.state(model[0]).plan.warnings
        run_steps(fully_shard(model))
    return texts


def test_parts_of_a_model_that_are_one_handle_each_are_not_warned_of() -> None:
    assert run_ranks(annotate_part_by_part, 2) == [[], []]


def annotate_alone() -> list[str]:
    class Alone(Block):
        pass

    with recorded() as texts:
        run_steps(fully_shard(Alone()))
        assert plan(Alone(), world_size=2).warnings
    return texts


def test_one_rank_alone_and_a_plan_that_is_not_applied_log_nothing() -> None:
    assert run_ranks(annotate_alone, 1) == [[]]


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


@pytest.mark.parametrize("way", ["", "attribute", "no grad", "before"])
def test_a_forward_that_leaks_nothing_is_not_warned_of(way: str) -> None:
    assert run_threads(leak, 2, way, reshard=True) == [[], []]


def fail() -> list[str]:
    with recorded() as texts:
        model = fully_shard(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))), policy={nn.Sequential})
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.randn(2, 4))
    return [text for text in texts if "another way" in text]


def test_a_forward_that_raises_is_not_said_to_leak() -> None:
    assert run_threads(fail, 2) == [[], []]


def test_a_leak_is_not_warned_of_where_parameters_stay_for_backward_anyway() -> None:
    assert run_threads(leak, 2, "list", reshard=False) == [[], []]
