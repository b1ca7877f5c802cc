"""Kubeflow's trainer: our TrainJob is one, its variables start ranks on two hosts, and its SDK runs a script of ours."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import Host
from tests.test_first_hour import ON_A_CLUSTER, ONE_DEVICE, ROOT, exact, losses_in, run_stage, shown
from tests.world import run_ranks

_WAIT_S = 300


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run_ranks(run_stage, 1, ONE_DEVICE, str(tmp_path_factory.mktemp("one")))[0]


def train_job() -> dict[str, Any]:
    """Return the TrainJob that the page shows."""
    yaml = pytest.importorskip("yaml")
    (text,) = shown(ROOT / "examples" / "launchers" / "README.md", "yaml")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_the_job_of_the_page_is_a_train_job() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = train_job()
    # What the schema does not know it drops.
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


def test_its_variables_start_ranks_on_two_hosts(
    hosts: tuple[Host, Host], one_device: dict[int, float], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(exact(ON_A_CLUSTER))
    trainer = train_job()["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "train.py"]
    command = [sys.executable, "-m", "torch.distributed.run", str(tmp_path / "train.py")]
    # What Kubeflow's plugin for torch sets in each pod.
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": "29400", "RUN": str(tmp_path / "run")}
    jobs = [
        host.launch(command, **variables, PET_NODE_RANK=str(host.number), PET_MASTER_ADDR=hosts[0].address)
        for host in hosts
    ]
    # 30 to 60 s where two cores have five to ten other processes to run.
    codes = [job.wait(_WAIT_S) for job in jobs]
    assert codes == [0, 0], "\n".join(job.said() for job in jobs)
    assert "over 2 ranks x 2 replicas" in jobs[0].said()
    assert losses_in(jobs[0].said()) == pytest.approx(one_device, abs=1e-8)


def test_the_sdk_runs_a_script_on_this_machine(tmp_path: Path) -> None:
    trainer = pytest.importorskip("kubeflow.trainer")
    wheels = [str(ROOT), f"torch=={torch.__version__.partition('+')[0]}", "numpy"]
    # The packages that it installs: those that this machine has.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no wheel of this package can be built here")
    wheels[0] = f"torch-composable @ {next(tmp_path.glob('*.whl')).as_uri()}"
    index = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], check=False, capture_output=True, text=True
    ).stdout.strip()

    def train(arguments: dict[str, str]) -> None:
        import torch
        import torch.distributed as dist

        from composable import fully_shard, save_checkpoint

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        save_checkpoint(arguments["folder"], 1, model, optimizer)
        dist.destroy_process_group()

    client = trainer.TrainerClient(trainer.LocalProcessBackendConfig(cleanup_venv=True))
    name = client.train(
        runtime=client.get_runtime("torch-distributed"),
        trainer=trainer.CustomTrainer(
            func=train,
            func_args={"folder": str(tmp_path / "run")},
            packages_to_install=wheels,
            **({"pip_index_urls": [index]} if index else {}),
        ),
    )
    until = time.monotonic() + _WAIT_S
    while client.get_job(name).status not in ("Complete", "Failed") and time.monotonic() < until:
        time.sleep(0.5)
    said = "".join(client.get_job_logs(name))
    if "No matching distribution" in said:
        pytest.skip(f"pip finds no packages for the SDK's environment: {said[-500:]}")
    assert client.get_job(name).status == "Complete", said
    assert (tmp_path / "run" / "step-000001" / "checkpoint.json").is_file()
