"""Two processes of pytest that share the test files."""

import re
import subprocess
import sys
import time
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
def test_each_test_runs_once_and_a_failure_in_either_process_is_one(tmp_path: Path, broken: int | None) -> None:
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


STUCK = """
import pathlib, threading

def test_that_fails():
    assert "reason" == "another"

def test_that_hangs():
    pathlib.Path({log!r}).touch()
    threading.Event().wait()

def test_that_keeps_the_next_file_for_the_other_process():
    pass
"""
OTHER = """
import pathlib, time

def test_that_waits_for_it():
    while not pathlib.Path({log!r}).exists():
        time.sleep(0.01)
    assert "of the other" == "process"
"""
RUN = "import sys; from tests.side_by_side import run; sys.exit(run(sys.argv[1:], {patience}))"


def test_a_run_that_is_stuck_shows_where_and_what_has_failed_until_then(tmp_path: Path) -> None:
    for name, text in (("test_1.py", STUCK), ("test_2.py", OTHER)):
        (tmp_path / name).write_text(text.format(log=str(tmp_path / "log")))
    command = [sys.executable, "-c", RUN.format(patience=5), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    output = done.stdout
    early, _, late = output.partition("no test has ended, and nothing was done, for 5 s")
    # Of both processes, one of which writes nothing here before it ends.
    for name in ("test_1.py::test_that_fails", "test_2.py::test_that_waits_for_it"):
        assert re.search(f"^FAILED .*{name}", early, flags=re.MULTILINE), output
    assert "in test_that_hangs" in late
    assert "assert 'reason' == 'another'" in output and "assert 'of the other' == 'process'" in output


def test_a_run_that_is_terminated_tells_what_has_failed_until_then(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "test_1.py").write_text(STUCK.format(log=str(log)))
    command = [sys.executable, "-m", "tests.side_by_side", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPO) as process:
        while not log.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate()
    assert process.returncode
    assert "assert 'reason' == 'another'" in output and "1 failed" in output


DEAD = """
import os, signal

def test_that_fails():
    assert "reason" == "another"

def test_that_dies():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_has_failed_in_a_process_that_dies_is_shown(tmp_path: Path) -> None:
    (tmp_path / "test_1.py").write_text(DEAD)
    code, output = run(tmp_path)
    assert code > pytest.ExitCode.TESTS_FAILED
    assert "a process has ended by SIGKILL; what had failed in it until then:" in output
    assert "assert 'reason' == 'another'" in output


def test_no_tests_at_all_are_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == pytest.ExitCode.NO_TESTS_COLLECTED
