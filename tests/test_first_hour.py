"""The first hour, as its pages have it: each stage of the script runs, and all print the losses of one device."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import load_checkpoint, plan
from tests.world import run_ranks

ROOT = Path(__file__).parent.parent
TRAIN, RESUME, CLUSTER = (ROOT / "docs" / f"{name}.md" for name in ("train", "resume", "cluster"))
STANDALONE = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def shown(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def patched(source: str, diff: str) -> str:
    """Return ``source`` with each hunk of ``diff`` at the one place where it fits."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines()
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
        assert source.count(before) == 1, hunk
        source = source.replace(before, after)
    return source


ONE_DEVICE, MEMORY = shown(TRAIN, "python")
WITH_REPLICATE = patched(ONE_DEVICE, shown(TRAIN, "diff")[0])
WITH_FULLY_SHARD = patched(WITH_REPLICATE, shown(TRAIN, "diff")[1])
WITH_CHECKPOINTS = patched(WITH_FULLY_SHARD, shown(RESUME, "diff")[0])
WITH_WEIGHTS = patched(WITH_CHECKPOINTS, shown(RESUME, "diff")[1])
ON_A_CLUSTER = patched(WITH_CHECKPOINTS, shown(CLUSTER, "diff")[0])


def exact(source: str) -> str:
    """Return a stage in float64: then the order in which ranks add changes none of the digits."""
    source = source.replace("torch.manual_seed(0)", "torch.manual_seed(0)\ntorch.set_default_dtype(torch.float64)")
    return source.replace(":.4f}", ":.9f}")


def losses_in(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (.*)$", printed, re.MULTILINE)}


def run_stage(source: str, folder: str, ranks_per_host: int = 0) -> dict[int, float]:
    """Run a stage on this rank, whose process group is there already, and return the losses that it prints."""
    host = {"COMPOSABLE_HOST": f"host{dist.get_rank() // ranks_per_host}", "RUN": "run"} if ranks_per_host else {}
    printed, before = io.StringIO(), os.getcwd()
    names: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(folder)
    try:
        with (
            mock.patch.dict(os.environ, host),
            mock.patch.object(dist, "init_process_group"),
            contextlib.redirect_stdout(printed),
        ):
            exec(exact(source), names)
    finally:
        os.chdir(before)
        if "notice" in names:
            names["notice"].close()  # The process lives on.
    return losses_in(printed.getvalue())


def run_by_torchrun(source: str, folder: Path, ranks: int, **environ: str) -> "tuple[int, dict[int, float], str]":
    """Run a stage as its page says; return the exit status, the losses, and all that was said."""
    (folder / "train.py").write_text(exact(source))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, *STANDALONE, str(ranks), "train.py"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, losses_in(done.stdout), done.stdout + done.stderr


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run_ranks(run_stage, 1, ONE_DEVICE, str(tmp_path_factory.mktemp("one")))[0]


def test_one_device_learns_and_the_pages_show_its_losses(one_device: dict[int, float]) -> None:
    losses = list(one_device.values())
    assert list(one_device) == [5, 10, 15, 20]
    assert losses == sorted(losses, reverse=True)
    texts = [text for page in (TRAIN, RESUME, CLUSTER) for text in shown(page, "text")]
    digits = dict(set(re.findall(r"^step (\d+): loss (.*)$", "\n".join(texts), flags=re.MULTILINE)))
    # Each Python has another version of the text.
    assert {int(step): float(loss) for step, loss in digits.items()} == pytest.approx(one_device, abs=0.8)
    assert len(digits) == len({line for text in texts for line in text.splitlines() if line.startswith("step ")})


def test_the_plans_and_the_memory_that_the_pages_show_are_so() -> None:
    names: dict[str, type[nn.Module]] = {}
    exec(ONE_DEVICE.partition("\ndevice = ")[0], names)
    policy, hybrid = {nn.TransformerEncoderLayer}, {"replicas": 2, "strategy": "HYBRID_SHARD"}
    for page, options in (
        (TRAIN, {"world_size": 2}),
        (RESUME, {"world_size": 3}),
        (CLUSTER, {"world_size": 2, **hybrid}),
    ):
        (text,) = (text for text in shown(page, "text") if text.startswith("GPT: "))
        expected = str(plan(names["GPT"](), policy=policy, **options)).replace("auto", "shared_memory")  # type: ignore[arg-type]
        assert text.partition("step ")[0].strip() == expected
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(MEMORY, {})
    assert printed.getvalue() in shown(TRAIN, "text")


def test_resume_shows_the_whole_script() -> None:
    assert shown(RESUME, "python") == [WITH_CHECKPOINTS]


@pytest.mark.parametrize("source", [WITH_REPLICATE, WITH_FULLY_SHARD], ids=["replicate", "fully_shard"])
def test_two_ranks_print_the_losses_of_one_device(source: str, one_device: dict[int, float], tmp_path: Path) -> None:
    assert run_ranks(run_stage, 2, source, str(tmp_path)) == [pytest.approx(one_device, abs=1e-8), {}]


def test_two_ranks_are_killed_and_three_go_on(one_device: dict[int, float], tmp_path: Path) -> None:
    status, killed, said = run_by_torchrun(WITH_CHECKPOINTS, tmp_path, 2, DIE_AT="13")
    assert status, said
    assert list(killed) == [5, 10]
    left = [text for text in shown(RESUME, "text") if text.startswith("step-")]
    assert ["".join(f"{name}\n" for name in sorted(os.listdir(tmp_path / "run")))] == left
    resumed, *_ = run_ranks(run_stage, 3, WITH_WEIGHTS, str(tmp_path))
    assert list(resumed) == [15, 20]
    assert {**killed, **resumed} == pytest.approx(one_device, abs=1e-8)

    names: dict[str, type[nn.Module]] = {}
    exec(ONE_DEVICE.partition("\ndevice = ")[0], names)
    weights = torch.load(tmp_path / "weights.pt")
    model = names["GPT"]().double()
    load_checkpoint(tmp_path / "run", model)
    torch.testing.assert_close(weights, model.state_dict(), rtol=0, atol=0)


def test_four_ranks_train_as_on_two_hosts(one_device: dict[int, float], tmp_path: Path) -> None:
    losses = run_ranks(run_stage, 4, ON_A_CLUSTER, str(tmp_path), ranks_per_host=2)
    assert losses == [pytest.approx(one_device, abs=1e-8), {}, {}, {}]
    assert (tmp_path / "run" / "step-000020").is_dir()


def test_the_script_is_rehearsed_for_more_ranks_than_its_batch_has_rows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITH_FULLY_SHARD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *"-m composable rehearse train.py --ranks 64 --steps 2".split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " of 64, 2 steps" in done.stdout
