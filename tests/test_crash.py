"""A few of the kills that ``tests/crash.py`` does on demand."""

from pathlib import Path

import pytest

from tests.crash import ROOT, crash_run


@pytest.mark.parametrize("seed", [0, 1], ids=["foreground", "background"])
def test_a_run_that_is_killed_twice_loses_nothing(seed: int, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_bytes((ROOT / "tests" / "models.py").read_bytes())
    run = crash_run(seed, tmp_path, text, steps=16, every=2, most_kills=2)
    assert run.is_asynchronous is bool(seed)
    # Some kills come after the last step; not all of these.
    assert run.kills
