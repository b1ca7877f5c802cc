"""A few of the kills that ``tools/crash.py`` does on demand."""

from pathlib import Path

from tools.crash import ROOT, crash_run, unbroken_curve


def test_runs_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_bytes((ROOT / "tests" / "models.py").read_bytes())
    expected = unbroken_curve(tmp_path, text, steps=14)
    folder = tmp_path / "killed"
    folder.mkdir()
    run = crash_run(1, folder, text, expected, every=2, most_kills=2)
    # A kill may come after the last step; not all of them do.
    assert run.is_asynchronous and run.kills
