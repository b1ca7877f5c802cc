"""The page of behaviours is what its data say, and its data are true of the tests that there are."""

import re

import pytest

from tests.behaviours import GROUPS, PAGE, Row, is_there, page

ROWS = [row for rows in GROUPS.values() for row in rows]


def test_the_page_is_what_the_data_say() -> None:
    # To write it anew: python -m tests.behaviours
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_proved_by_tests_that_exist_or_says_what_is_missing(row: Row) -> None:
    assert [test for test in row.tests if not is_there(test)] == []
    assert row.tests or row.gap
    assert not row.gap or "not yet" in row.gap or re.match("not here: .", row.gap)


def test_no_row_is_there_twice() -> None:
    names = [row.name for row in ROWS]
    assert sorted(set(names)) == sorted(names)
