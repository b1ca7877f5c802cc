"""The first hour, as its pages have it: each stage of the script runs, and all print the losses of one device."""

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from composable import load_checkpoint, plan

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


def start(folder: Path, source: str, launcher: list[str], **environ: str) -> "subprocess.Popen[str]":
    """Start a stage in ``folder``, in float64: then the order in which ranks add changes none of the digits."""
    exact = source.replace("torch.manual_seed(0)", "torch.manual_seed(0)\ntorch.set_default_dtype(torch.float64)")
    (folder / "train.py").write_text(exact.replace(":.4f}", ":.9f}"))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, *launcher, "train.py"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=-1, stderr=-1, text=True)


def losses_of(process: "subprocess.Popen[str]", *, ends_well: bool = True) -> dict[int, float]:
    printed, errors = process.communicate()
    assert (process.returncode == 0) == ends_well, printed + errors
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (.*)$", printed, re.MULTILINE)}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses_of(start(tmp_path_factory.mktemp("one"), ONE_DEVICE, []))


def test_one_device_learns_and_the_pages_show_its_losses(one_device: dict[int, float]) -> None:
    losses = list(one_device.values())
    assert list(one_device) == [5, 10, 15, 20]
    assert losses == sorted(losses, reverse=True)
    texts = [text for page in (TRAIN, RESUME, CLUSTER) for text in shown(page, "text")]
    digits = dict(set(re.findall(r"^step (\d+): loss (.*)$", "\n".join(texts), flags=re.MULTILINE)))
    # Each Python has another version of the text.
    assert {int(step): float(loss) for step, loss in digits.items()} == pytest.approx(one_device, abs=0.5)
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
        expected = str(plan(names["GPT"](), policy=policy, **options)).replace("auto", "point_to_point")  # type: ignore[arg-type]
        assert text.partition("step ")[0].strip() == expected
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(MEMORY, {})
    assert printed.getvalue() in shown(TRAIN, "text")


def test_resume_shows_the_whole_script() -> None:
    assert shown(RESUME, "python") == [WITH_CHECKPOINTS]


@pytest.mark.parametrize("source", [WITH_REPLICATE, WITH_FULLY_SHARD], ids=["replicate", "fully_shard"])
def test_two_ranks_print_the_losses_of_one_device(source: str, one_device: dict[int, float], tmp_path: Path) -> None:
    assert losses_of(start(tmp_path, source, [*STANDALONE, "2"])) == pytest.approx(one_device, abs=1e-8)


def test_two_ranks_are_killed_and_three_go_on(one_device: dict[int, float], tmp_path: Path) -> None:
    killed = losses_of(start(tmp_path, WITH_CHECKPOINTS, [*STANDALONE, "2"], DIE_AT="13"), ends_well=False)
    assert list(killed) == [5, 10]
    left = [text for text in shown(RESUME, "text") if text.startswith("step-")]
    assert ["".join(f"{name}\n" for name in sorted(os.listdir(tmp_path / "run")))] == left
    resumed = losses_of(start(tmp_path, WITH_WEIGHTS, [*STANDALONE, "3"]))
    assert list(resumed) == [15, 20]
    assert {**killed, **resumed} == pytest.approx(one_device, abs=1e-8)

    names: dict[str, type[nn.Module]] = {}
    exec(ONE_DEVICE.partition("\ndevice = ")[0], names)
    weights = torch.load(tmp_path / "weights.pt")
    model = names["GPT"]().double()
    load_checkpoint(tmp_path / "run", model)
    torch.testing.assert_close(weights, model.state_dict(), rtol=0, atol=0)


def test_two_launchers_train_as_two_hosts(one_device: dict[int, float], tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    both = [*STANDALONE[:2], "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "localhost", "--master-port"]
    hosts = [
        start(
            tmp_path,
            ON_A_CLUSTER,
            [*both, str(port), "--node-rank", str(host)],
            COMPOSABLE_HOST=f"host{host}",
            RUN="run",
        )
        for host in range(2)
    ]
    losses = [losses_of(host) for host in hosts]
    assert losses == [pytest.approx(one_device, abs=1e-8), {}]
    assert (tmp_path / "run" / "step-000020").is_dir()
