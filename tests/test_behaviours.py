"""The page of behaviours is true of the tests that there are."""

import re
from collections import Counter

from tests.behaviours import ROWS, Row, is_there, rows_of


def untrue(row: Row) -> list[str]:
    """Return what is wrong with a row."""
    gap_is_told = not row.gap or "not yet" in row.gap or re.match("not here: .", row.gap)
    return [
        *(f"{row.name}: there is no {test}" for test in row.tests if not is_there(test)),
        *([] if row.tests or row.gap else [f"{row.name}: neither tests nor what is missing"]),
        *([] if gap_is_told else [f"{row.name}: say 'not yet' or 'not here: why'"]),
    ]


def test_rows_are_proved_by_tests_that_exist_or_say_what_is_missing() -> None:
    assert len(ROWS) > 90
    assert [problem for row in ROWS for problem in untrue(row)] == []


def test_a_row_that_is_untrue_is_seen() -> None:
    page = "| What | Rule | Proof |\n|---|---|---|\n| a | b | [`test_gone`](../tests/test_errors.py) |\n| c | d | maybe |\n"
    assert [len(untrue(row)) for row in rows_of(page)] == [1, 1]


def test_no_row_is_there_twice() -> None:
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []
