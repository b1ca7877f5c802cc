"""What `make` would run: which environment, and which torch in it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PINS = (REPO / "constraints.txt").read_text()

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def planned(*words: str) -> list[str]:
    """Return the commands of `make` for an environment that is not there yet."""
    # Nothing else: where make runs the tests, what it was given is in the environment.
    environ = {"PATH": os.environ["PATH"]}
    command = ["make", "--dry-run", "--no-print-directory", "--always-make", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO, env=environ)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.strip()]


def test_another_torch_gets_an_environment_of_its_own() -> None:
    for venv, words, packages, pins in (
        (".venv", [], "setuptools", "constraints.txt"),
        (".venv-torch-2.15.0", ["TORCH=2.15.0"], "torch 'setuptools>=77'", ".venv-torch-2.15.0/constraints.txt"),
    ):
        commands = planned("test", "ARGS=-k layout", *words)
        assert [command for command in commands if not command.startswith("{ sed")] == [
            f"python3 -m venv {venv}",
            f"python -m pip install --quiet -c {pins} {packages} wheel",
            f"touch {venv}/torch",
            f"python -m pip install --quiet -c {pins} --no-build-isolation -e '.[dev,examples]'",
            f"touch {venv}/tests",
            "python -m tests.side_by_side --tier first -k layout",
        ]
        printed = planned(*words, "--eval=where: ; @echo '$(PATH)'", "where")
        assert printed[0].startswith(f"echo '{REPO}/{venv}/bin:")


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("train", "examples"),
        ("bench", "examples"),
        ("lint", "dev,examples"),
        ("test", "dev,examples"),
        ("test-rest", "dev,examples,clients,storage"),
        ("test-all", "dev,examples,clients,storage"),
        ("docs", "docs"),
    ],
)
def test_each_target_installs_what_it_needs_and_no_more(target: str, extras: str) -> None:
    installs = [command for command in planned(target) if "-e" in command.split()]
    assert installs == [f"python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[{extras}]'"]


def test_what_must_pass_runs_each_test_once() -> None:
    words = re.findall(r"^make (\S+)", (REPO / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert words == ["lint", "test", "docs", "test-rest", "launchers"]
    runs = [planned(word)[-1] for word in ("test", "test-rest", "test-all")]
    assert runs == [f"python -m tests.side_by_side {tier}" for tier in ("--tier first ", "--tier rest ", "")]


def test_some_of_the_launchers_can_be_run() -> None:
    assert planned("launchers", "LAUNCHERS=a b")[-1] == "python -m pytest a b "
    assert planned("launchers")[-1] == "python -m pytest tests/launchers "
    installs = [planned("launchers", f"LAUNCHERS={one}")[-2] for one in ("", "a b", "a test_slurm.py")]
    assert [one == "python -m tests.launchers.slurm" for one in installs] == [True, False, True]


def test_the_launchers_that_must_pass_are_tests() -> None:
    script = (REPO / ".ci" / "run").read_text()
    named = re.findall(r"(tests/launchers/\w+\.py)::(\w+)", script)
    assert len(named) == 3
    for file, test in named:
        assert f"def {test}(" in (REPO / file).read_text()


def test_the_pins_of_another_torch_are_all_but_what_goes_with_torch(tmp_path: Path) -> None:
    line = next(line for line in planned("test", "TORCH=2.11.0") if line.startswith("{"))
    written = tmp_path / "constraints.txt"
    command = re.sub(r"> \S+$", f"> {written}", line)
    subprocess.run(command, shell=True, check=True, cwd=REPO)
    before, after = (set(text.splitlines()) for text in (PINS, written.read_text()))
    assert after - before == {"torch==2.11.0"}
    assert {pin.split("==")[0] for pin in before - after} == {"torch", "torchvision", "setuptools"}


def test_git_ignores_such_an_environment() -> None:
    command = ["git", "check-ignore", "--quiet", ".venv-torch-2.15.0/installed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO)
    assert done.returncode in (0, 128), "ignored, or no repository"
