"""Layouts of ranks with precision, micro-batches, clipping and checkpoints, against one process."""

import pytest

from tests.many_dims import LAYOUTS, Case, all_cases, few_cases, run_case

FEW = few_cases()
ONE_EACH = [next(case for case in FEW if case.layout == layout) for layout in LAYOUTS]


# `python -m tests.many_dims` runs all.
@pytest.mark.parametrize("case", FEW, ids=", ".join)
def test_training_on_any_layout_is_that_of_one_process(case: Case) -> None:
    run_case(case)


@pytest.mark.parametrize("case", ONE_EACH, ids=", ".join)
def test_processes_train_like_one(case: Case) -> None:
    run_case(case, in_processes=True)


def test_a_few_are_few() -> None:
    assert len(FEW) * 3 < len(all_cases())
