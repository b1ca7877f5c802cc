"""Options together: strategy, precision, offload, checkpointing and compilation, against one process."""

import pytest

from tests.combinations import Case, all_cases, pairwise, run_case

EAGER = [case for case in all_cases() if case.compilation == "eager"]
COMPILED = [case for case in pairwise(all_cases()) if case.compilation != "eager"]


@pytest.mark.parametrize("case", EAGER, ids=", ".join)
def test_options_together_train_as_one_process(case: Case) -> None:
    run_case(case, 2)


@pytest.mark.parametrize("case", pairwise(EAGER), ids=", ".join)
def test_options_together_train_as_one_process_where_ranks_are_odd(case: Case) -> None:
    run_case(case, 3)


# Each takes a second: those in which any two values meet. `python -m tests.combinations` runs all.
@pytest.mark.parametrize("case", COMPILED, ids=", ".join)
def test_options_together_train_compiled_as_one_process(case: Case) -> None:
    run_case(case, 2)
