"""Both tiers together are all tests, and the first has some of every behaviour."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.behaviours import ROWS, Row, is_there
from tests.test_makefile import REPO
from tests.tiers import CASES, FILES, LONG, SLOW, first_tier


def test_what_is_named_exists() -> None:
    assert [test for test in SLOW | LONG if not is_there(test)] == []
    assert [name for name in FILES if not (REPO / "tests" / name).is_file()] == []


def test_each_behaviour_has_a_test_in_the_first_tier() -> None:
    def is_in(row: Row) -> bool:
        return not row.tests or bool(first_tier(row.tests))

    assert [row.name for row in ROWS if not is_in(row)] == []


@pytest.mark.parametrize("count", [1, CASES - 1, CASES, CASES + 1, 10 * CASES + 1])
def test_of_a_test_with_many_cases_some_are_in_the_first_tier(count: int) -> None:
    name = next(test for row in ROWS for test in row.tests if test not in SLOW | LONG)
    cases = [f"{name}[{number}]" for number in range(count)]
    chosen = first_tier([*cases, "test_other.py::test_it"])
    assert len(chosen) == min(count, CASES)
    assert cases[0] in chosen and chosen <= set(cases)


def run(folder: Path, *arguments: str) -> set[str]:
    """Return which tests ran in a folder that has tests of its own."""
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for name in ("test_readme.py", "test_fully_shard.py", "test_new.py"):
        (folder / "tests" / name).write_text(
            "import pytest\n\n"
            f"@pytest.mark.parametrize('case', range({2 * CASES}))\n"
            "def test_policy(case): pass\n\n"
            "def test_another(): pass\n"
        )
    command = [sys.executable, "-m", "pytest", "-p", "tests.tiers", "-v", "-p", "no:cacheprovider", "--rootdir", "."]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env={"PYTHONPATH": str(REPO)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("make test-all" in done.stdout) == (arguments == ("--tier", "first"))
    ran = re.findall(r"^tests/(\S+) PASSED", done.stdout, flags=re.MULTILINE)
    assert len(set(ran)) == len(ran)
    return set(ran)


def test_both_tiers_are_all_tests_and_share_none(tmp_path: Path) -> None:
    first, rest = run(tmp_path, "--tier", "first"), run(tmp_path, "--tier", "rest")
    assert len(first | rest) == len(first) + len(rest) == 3 * (2 * CASES + 1)
    counts = {name: len([test for test in first if test.startswith(name)]) for name in ("test_r", "test_f", "test_n")}
    assert counts == {"test_r": CASES + 1, "test_f": CASES, "test_n": 0}


def test_what_a_command_line_names_runs_in_any_tier(tmp_path: Path) -> None:
    assert len(run(tmp_path, "--tier", "first", "tests/test_new.py")) == 2 * CASES + 1
    assert len(run(tmp_path, "--tier", "first", "-k", "another")) == 3
