"""Everything that the README shows runs, and prints what it says."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import composable
from tests.world import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Each example, and the text block that follows it at once: what it prints.
EXAMPLES = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", README, flags=re.DOTALL)


def run_text(source: str) -> str:
    printed = io.StringIO()
    group = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with group, contextlib.redirect_stdout(printed):  # in the group that is there
        exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_the_first_example_runs_under_torchrun_and_prints_its_plan(tmp_path: Path) -> None:
    source, expected = EXAMPLES[0]
    command = re.match(r"# train\.py: torchrun (.*) train\.py\n", source)
    assert command and expected
    (tmp_path / "train.py").write_text(
        source + "import os\nopen('batch-' + os.environ['RANK'], 'w').write(str(text.sum()))\n"
    )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1].split(), "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected
    assert len({path.read_text() for path in tmp_path.glob("batch-*")}) == 2  # each rank has data of its own


@pytest.mark.parametrize(("source", "expected"), EXAMPLES[1:])
def test_every_other_example_runs_on_two_ranks_and_prints_what_follows_it(source: str, expected: str) -> None:
    assert run_ranks(run_text, 2, source) == [expected, expected]


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = re.findall(r"(?:^|[`(])make ([\w-]+)", README, flags=re.MULTILINE)
    assert named
    assert set(named) <= set(targets)


def test_the_names_of_a_training_job_are_public() -> None:
    table = README.partition("\n## Ten names of a training job\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, flags=re.MULTILINE)
    assert len(rows) == 10
    assert sorted({*re.findall(r"`(\w+)`", "".join(rows))} - {*composable.__all__}) == []


def test_the_first_screen_is_short() -> None:
    assert len(README.split()) <= 900
