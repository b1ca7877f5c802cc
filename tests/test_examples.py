"""The training example: equal curves for every way to train, and checkpoints that survive.

Most tests call its ``main`` on the pool's ranks; one goes through torchrun. Real kills: ``test_crash.py``.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.world import RankErrors, run_ranks

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"
STEPS = 6
# Five sequences: two or three ranks cannot split them evenly.
TINY = f"--layers 2 --width 16 --heads 2 --context 16 --batch 5 --steps {STEPS} --warmup 2 --eval-every 3".split()
# Equal up to the order of additions.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of real text, small enough to read in no time."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes((ROOT / "tests" / "models.py").read_bytes())
    return path


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process, without annotation, to compare with; checkpoints after 3 and 6 steps."""
    run = tmp_path_factory.mktemp("run") / "unbroken"
    run_ranks(run_example, 1, arguments(text, run, "--parallel", "none", "--checkpoint-every", "3"))
    return run


def run_example(arguments: list[str]) -> None:
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        import train_gpt
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    train_gpt.main(arguments)


def arguments(text: Path, run: Path, *more: str) -> list[str]:
    return [*TINY, "--text", str(text), "--out", str(run), "--sample-bytes", "4", *more]


def curve(run: Path, key: str = "loss") -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    return {line["step"]: line[key] for line in lines if key in line}


def assert_equal_curves(run: Path, other: Path) -> None:
    for key in ("loss", "grad_norm", "held_back_loss"):
        assert curve(run, key) == pytest.approx(curve(other, key), abs=TOLERANCE)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def test_the_unbroken_run_has_a_line_for_each_step_and_a_falling_loss(unbroken: Path) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    expected = {"step", "loss", "lr", "grad_norm", "seconds", "tokens_per_s", "memory_mb"}
    assert all(expected <= set(line) <= expected | {"held_back_loss"} for line in lines)
    assert [line["step"] for line in lines if "held_back_loss" in line] == [3, 6]
    assert lines[0]["loss"] == pytest.approx(5.5, abs=0.3)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert checkpoints(unbroken) == ["step-000003", "step-000006"]


@pytest.mark.parametrize(
    ("chosen", "world_size"),
    [
        (["--parallel", "fully_shard"], 3),
        (["--policy", "none"], 2),
        (["--policy", "size:2000"], 2),
        (["--parallel", "replicate"], 3),
        (["--parallel", "none"], 2),
    ],
)
def test_every_way_to_train_gives_the_same_loss_curve(
    chosen: list[str], world_size: int, unbroken: Path, text: Path, tmp_path: Path
) -> None:
    run_ranks(run_example, world_size, arguments(text, tmp_path, *chosen, "--checkpoint-every", "0"))
    assert_equal_curves(tmp_path, unbroken)
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("saved_by", "saved_at", "resumed_by", "resumed_at"),
    [
        ("fully_shard", 2, "fully_shard", 3),
        ("fully_shard", 2, "none", 1),
        ("replicate", 2, "fully_shard", 2),
    ],
)
def test_a_resumed_run_continues_the_loss_curve(
    saved_by: str, saved_at: int, resumed_by: str, resumed_at: int, unbroken: Path, text: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(run_example, saved_at, arguments(text, first, "--parallel", saved_by, "--checkpoint-every", "3"))
    # Settings come from the checkpoint, not from the command line.
    more = ["--text", str(text), "--out", str(second), "--sample-bytes", "0", "--eval-every", "3"]
    resume = [*more, "--parallel", resumed_by, "--resume", str(first / "step-000003")]
    run_ranks(run_example, resumed_at, resume)
    assert_equal_curves(second, unbroken)


def test_a_checkpoint_that_was_being_written_is_ignored(unbroken: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    # As a kill leaves it: half a checkpoint, half a line.
    shutil.copytree(run / "step-000006", run / ".partial-000009-0123abcd")
    (run / ".partial-000009-0123abcd" / "checkpoint.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    run_ranks(run_example, 2, [*arguments(text, run, "--steps", str(STEPS + 2)), "--resume", "--checkpoint-every", "1"])
    assert list(curve(run)) == list(range(1, STEPS + 3))
    assert checkpoints(run) == ["step-000007", "step-000008"]


def test_a_second_run_does_not_overwrite_the_first(unbroken: Path, text: Path) -> None:
    before = (unbroken / "metrics.jsonl").read_bytes()
    with pytest.raises(RankErrors, match="holds a run already: pass --resume"):
        run_ranks(run_example, 1, arguments(text, unbroken))
    assert (unbroken / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("more", "world_size", "text_of"),
    [
        (["--resume", "UNBROKEN", "--width", "32"], 1, "leave the model's size out"),
        (["--batch", "1"], 2, "leaves some of 2 ranks without"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    more: list[str], world_size: int, text_of: str, unbroken: Path, text: Path, tmp_path: Path
) -> None:
    more = [word.replace("UNBROKEN", str(unbroken)) for word in more]
    with pytest.raises(RankErrors, match=text_of) as caught:
        run_ranks(run_example, world_size, arguments(text, tmp_path, *more))
    assert set(caught.value.errors) == set(range(world_size))


def test_torchrun_resumes_a_run(unbroken: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    args = arguments(text, run, "--steps", str(STEPS + 1), "--resume", "--async-checkpoints")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"resumed from {run / 'step-000006'} after step 6" in result.stdout
    assert "GPT: 3 handles over 2 ranks" in result.stdout
    assert "sample:" in result.stdout
    assert list(curve(run)) == list(range(1, STEPS + 2))
    assert checkpoints(run) == ["step-000006", "step-000007"]
