"""Processes of pytest that share the test files."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_makefile import REPO

FILE = """
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(5))
def test_it(number):
    with Path({log!r}).open("a") as log:
        log.write(f"{name} {{number}}\\n")
    assert {claim}
"""


def run(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.side_by_side", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO)
    return done.returncode, done.stdout


@pytest.mark.parametrize("broken", [None, 2])
def test_each_test_runs_once_and_a_failure_in_any_process_is_one(tmp_path: Path, broken: int | None) -> None:
    log = tmp_path / "log"
    for number in range(4):
        text = FILE.format(log=str(log), name=number, claim=number != broken)
        # In folders of their own: what is set up for one is torn down before the other.
        (tmp_path / f"folder{number % 2}").mkdir(exist_ok=True)
        (tmp_path / f"folder{number % 2}" / f"test_{number}.py").write_text(text)
    code, output = run(tmp_path)
    assert code == (broken is not None), output
    assert sorted(log.read_text().splitlines()) == [f"{name} {number}" for name in range(4) for number in range(5)]
    assert ("5 failed" in output) is (broken is not None)


DEAD = """
import os, signal

def test_that_dies():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_dies_and_no_tests_at_all_are_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == pytest.ExitCode.NO_TESTS_COLLECTED
    (tmp_path / "test_1.py").write_text(DEAD)
    assert run(tmp_path)[0] > pytest.ExitCode.TESTS_FAILED
