"""Random writes to sharded parameters, at each moment of a step: what one process does, or an error on every rank."""

import random

import pytest
import torch

from tests.world import run_threads
from tools.fuzz.writes import BETWEEN, EXCHANGES, Program, draw_program, expected, found


def run(programs: list[Program]) -> "list[list[torch.Tensor] | str]":
    return [found(program) for program in programs]


def is_one_of(own: "list[torch.Tensor] | str", right: "list[list[torch.Tensor] | str]") -> bool:
    return any(
        not isinstance(one, str) and not isinstance(own, str) and all(map(torch.allclose, own, one)) for one in right
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_writes_are_those_of_one_process_or_an_error_on_every_rank(seed: int) -> None:
    rng = random.Random(seed)
    programs = [draw_program(rng) for _ in range(60)]
    for program, *ranks in zip(programs, *run_threads(run, 2, programs), strict=True):
        right = list(expected(program))
        errors = [own for own in ranks if isinstance(own, str)]
        assert len(errors) in (0, len(ranks)), f"only some ranks raised: {program} {errors}"
        assert errors or all(is_one_of(own, right) for own in ranks), f"other values without a word: {program}"
        # Torch's own error only where one process has one, or the library refuses.
        is_raw = any(error != "refused" and "have different slots" not in error for error in errors)
        assert not is_raw or isinstance(right[0], str), f"a raw error: {program} {errors}"
        # Parameters of one handle have cuts of their own: `.data` of one is no `.data` of another.
        if program.grouping == 1 and all(one.moment in BETWEEN and one.way in EXCHANGES for one in program.writes):
            assert not errors, f"refused between two steps: {program}"
