"""Random programs, rehearsed, make the collectives of real ranks, and need their memory.

More of them: ``FUZZ_WIDTH=64 python -m tools.fuzz.rehearsed --seeds 0-50 --world-size 2,3``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("kinds", "seeds"), [("plain", "0,2,3"), ("hybrid", "0,1,2"), ("replicated", "0,1,2"), ("story", "0,1,2")]
)
def test_random_programs_are_as_on_real_ranks(kinds: str, seeds: str) -> None:
    words = [sys.executable, "-m", "tools.fuzz.rehearsed", "--kinds", kinds, "--seeds", seeds]
    environment = {**os.environ, "FUZZ_WIDTH": "64", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    # A library that refuses everything would pass too.
    assert "'right': 0," not in found.stdout
