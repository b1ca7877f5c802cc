"""Where everything is with offload: on a device that has places and no values; ``tests/offload_programs.py``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.offload_programs import POLICIES, PROGRAMS


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    # The device is registered for the whole process.
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.offload_programs"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    outcomes: dict[str, str] = json.loads(result.stdout)
    return outcomes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_host_and_device_meet_only_in_copies(program: str, policy: str, found: dict[str, str]) -> None:
    assert not found[f"{program}, {policy}"], found[f"{program}, {policy}"]
