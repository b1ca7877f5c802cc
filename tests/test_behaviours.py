"""The page of behaviours is what its data say, and its data are true of the tests that there are."""

import re

import pytest

from tests.behaviours import GROUPS, PAGE, ROOT, Row, is_there, page

ROWS = [row for rows in GROUPS.values() for row in rows]
# What programs for torch call by name, and its documents and messages mention.
NAMES = (
    "summon_full_params",
    "_RootFSDPState",
    "_stream_to_name",
    "_get_registry",
    "_remove_autograd_hooks",
    "_check_reducer_finalized",
    "_get_ddp_logging_data",
)


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


def test_the_table_of_names_has_those_that_users_look_for() -> None:
    table = (ROOT / "docs" / "design.md").read_text().partition("\n## Names that differ from upstream\n")[2]
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", table, flags=re.MULTILINE))
    for name in NAMES:
        assert [ours for theirs, ours in rows.items() if f"{name}`" in theirs or f".{name}(" in theirs], name
