"""The files of docs/cluster.md under Slurm, as they stand there: a signal, a requeue, and one node in place of two.

``pytest -s`` prints how many seconds after the signal the run was saved, and the job waited again.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.slurm import Cluster, NoSlurmError, slurm
from tests.test_first_hour import CLUSTER, ON_A_CLUSTER, ONE_DEVICE, ROOT, exact, losses_in, run_stage, shown
from tests.world import run_ranks

STEPS = 60
FILES = [text for text in shown(CLUSTER, "sh") if "#SBATCH" in text]
# What the machine of the tests has in place of that of the page.
SMALLER = {
    "torchrun": ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2"],
    "srun": ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=1", "--ntasks-per-node=2"],
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    try:
        with slurm(tmp_path) as made:
            yield made
    except NoSlurmError as error:
        pytest.skip(f"no Slurm: {error}")


def longer(source: str) -> str:
    assert source.count("STEPS, BATCH, CONTEXT, WIDTH = 20,") == 1
    return source.replace("STEPS, BATCH, CONTEXT, WIDTH = 20,", f"STEPS, BATCH, CONTEXT, WIDTH = {STEPS},")


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run_ranks(run_stage, 1, longer(ONE_DEVICE), str(tmp_path_factory.mktemp("one")))[0]


def programs(folder: Path) -> None:
    """Put into the PATH of jobs what the page calls; the two nodes are hosts of their own."""
    (folder / "bin").mkdir()
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nCOMPOSABLE_HOST=$SLURMD_NODENAME exec {sys.executable} {module} "$@"\n')
        program.chmod(0o755)


@pytest.mark.parametrize("kind", SMALLER)
def test_a_signal_saves_and_the_job_goes_on_with_one_node(
    kind: str, cluster: Cluster, one_device: dict[int, float]
) -> None:
    (file,) = (text for text in FILES if ("torchrun" in text) == (kind == "torchrun"))
    (cluster.folder / "train.py").write_text(exact(longer(ON_A_CLUSTER)))
    (cluster.folder / "job.sh").write_text(file)
    programs(cluster.folder)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    job = cluster.run("sbatch", "--parsable", *SMALLER[kind], "job.sh", **variables)
    cluster.wait_for(job, lambda: "step 10:" in cluster.said(job))

    cluster.run("scancel", "-s", "USR1", job)
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=gone")
    seconds = cluster.wait_for(job, lambda: "had a notice" in cluster.said(job))
    waits = cluster.wait_for(job, lambda: cluster.state_of(job) == "PENDING")
    print(f"{kind}: saved {seconds:.1f} s after the signal, and waiting again {waits:.1f} s later")
    first = cluster.said(job)
    saved = {int(step) for step in re.findall(r"all ranks have saved step (\d+)", first)}
    (step,) = saved
    assert (cluster.folder / "run" / f"step-{step:06}").is_dir()
    assert 10 < step < STEPS
    assert "over 2 ranks x 2 replicas" in first

    # A requeued job waits for two minutes, of which two seconds are needed: when a job ends, its nodes revoke its
    # credentials of that second and before, those of a new start too. Slurm then ends it as non-startable.
    tasks = 1 if kind == "torchrun" else 2
    sizes = ["numnodes=1", f"numtasks={tasks}", "numcpus=2"]
    cluster.run("scontrol", "update", f"jobid={job}", *sizes, "starttime=now+2")
    cluster.wait_for(job, lambda: cluster.state_of(job) == "COMPLETED")
    second = cluster.said(job).removeprefix(first)
    assert "over 2 ranks," in second, second
    assert losses_in(first) | losses_in(second) == pytest.approx(one_device, abs=1e-8)
    assert min(losses_in(second)) > step
