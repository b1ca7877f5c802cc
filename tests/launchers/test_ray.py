"""Ray Train on two CPU workers: one is killed, and restarted; the host of one is taken away, after a notice."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable import full_state_dict, fully_shard, load_checkpoint, load_full_state_dict, save_on_signal
from tests.models import DIM, random_input
from tests.test_reshard_int import net

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[train]'"
)
REPO = Path(__file__).parents[2]
STEPS, LR = 8, 0.1
ENVIRONMENT = {"env_vars": {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}}
_WAIT_S = 120.0


def loss_of(model: nn.Module, step: int, ranks: range) -> torch.Tensor:
    losses = [model(random_input(100 * step + rank, 4, DIM)).square().mean() for rank in ranks]
    return torch.stack(losses).mean()


def train(config: dict[str, Any]) -> None:
    """Train up to step ``config["last"]`` on the batches of two ranks, which one worker takes both."""
    import ray.train

    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    model = fully_shard(net(), policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    start = 0
    checkpoint = ray.train.get_checkpoint() or config.get("checkpoint")
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"))
            load_full_state_dict(model, saved["model"])
            start = saved["step"] + 1
    log = Path(config["log"], f"{workers}.{rank}")
    for step in range(start, config["last"]):
        loss = loss_of(model, step, range(2) if workers == 1 else range(rank, rank + 1))
        loss.backward()
        marker = Path(config["log"], "killed")
        if step == 3 and rank == 1 and not marker.exists():
            marker.touch()
            os._exit(9)
        optimizer.step()
        optimizer.zero_grad()
        state = full_state_dict(model)
        with log.open("a") as lines:
            lines.write(json.dumps([step, loss.item()]) + "\n")
        # Each rank reports a folder of its own; Ray puts them together.
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rank{rank}").write_text(str(step))
            if rank == 0:
                torch.save({"model": state, "step": step}, Path(folder, "state.pt"))
            ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_is_restarted_and_the_run_goes_on_with_one(tmp_path: Path) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=ENVIRONMENT,
    )
    try:

        def fit(name: str, workers: int, **config: Any) -> Any:
            return TorchTrainer(
                train,
                train_loop_config={"log": str(tmp_path), **config},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
                run_config=RunConfig(
                    name=name, storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)
                ),
            ).fit()

        first = fit("two", 2, last=STEPS // 2 + 1)
        assert (tmp_path / "killed").exists()
        with first.checkpoint.as_directory() as folder:
            assert {"rank0", "rank1", "state.pt"} <= {one.name for one in Path(folder).iterdir()}
        fit("one", 1, last=STEPS, checkpoint=first.checkpoint)
    finally:
        ray.shutdown()
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    told = {
        name: dict(json.loads(line) for line in (tmp_path / name).read_text().splitlines())
        for name in ("2.0", "2.1", "1.0")
    }
    for step in range(STEPS):
        losses = [loss_of(plain, step, range(rank, rank + 1)) for rank in range(2)]
        if step <= STEPS // 2:
            assert [told["2.0"][step], told["2.1"][step]] == pytest.approx([one.item() for one in losses], rel=1e-5)
        else:
            assert told["1.0"][step] == pytest.approx(sum(one.item() for one in losses) / 2, rel=1e-5)
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_until_preempted(config: dict[str, Any]) -> None:
    """Train until Ray ends the workers, after a save when it has announced that; the next time, three steps more."""
    import ray.train

    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    model = fully_shard(net(), policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    run = Path(config["log"], "run")
    is_again = any(run.glob("step-*"))
    done = load_checkpoint(run, model, optimizer).step if is_again else 0
    last = done + 3 if is_again else 10**9
    notice = save_on_signal(run, model, optimizer, signals=(), exit_code=None)
    is_saved = False
    while done < last:
        done += 1
        loss = loss_of(model, done, range(2) if workers == 1 else range(rank, rank + 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not is_saved:
            with Path(config["log"], f"{workers}.{rank}").open("a") as lines:
                lines.write(json.dumps([done, loss.item()]) + "\n")
            if ray.train.get_preemption_info():
                notice.request()
            # Ray ends a run whose function returns, and starts one again whose host has gone: so it goes on.
            is_saved = notice.step(done)


@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_a_notice_that_a_host_will_be_preempted_saves_and_the_run_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.2")
    # Ray may count a host that has just gone, and waits so long for a worker there before it starts fewer.
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")
    log, run = tmp_path / "2.1", tmp_path / "run"
    problems: list[object] = []

    def take_away() -> None:
        """Announce that the second host will go, and end it when the workers have saved."""
        try:
            wait_for(lambda: log.exists() and log.read_text().count("\n") > 10)
            drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
            drain += ["--node-id", other.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
            drain += ["--reason-message", "spot", "--deadline-remaining-seconds", "15"]
            subprocess.run(drain, check=True, capture_output=True, text=True, timeout=_WAIT_S)
            wait_for(lambda: any(run.glob("step-*")))
            cluster.remove_node(other, allow_graceful=False)
        except Exception as problem:
            problems.append(problem)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=ENVIRONMENT)
        thread = threading.Thread(target=take_away, daemon=True)
        thread.start()
        TorchTrainer(
            train_until_preempted,
            train_loop_config={"log": str(tmp_path)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=0)),
        ).fit()
        thread.join(_WAIT_S)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert not problems and not thread.is_alive(), problems
    told = told_in(tmp_path)
    saved = max(told["2.0"])
    assert [path.name for path in run.glob("step-*")] == [f"step-{saved:06}"]
    assert list(told["2.0"]) == list(told["2.1"]) == [*range(1, saved + 1)]
    assert list(told["1.0"]) == [*range(saved + 1, saved + 4)]
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    for step in range(1, saved + 4):
        losses = [loss_of(plain, step, range(rank, rank + 1)) for rank in range(2)]
        if step <= saved:
            assert [told["2.0"][step], told["2.1"][step]] == pytest.approx([one.item() for one in losses], rel=1e-5)
        else:
            assert told["1.0"][step] == pytest.approx(sum(one.item() for one in losses) / 2, rel=1e-5)
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def told_in(folder: Path) -> dict[str, dict[int, float]]:
    """Return the loss of each step, by worker."""
    return {
        name: dict(json.loads(line) for line in (folder / name).read_text().splitlines())
        for name in ("2.0", "2.1", "1.0")
    }


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < until, "waited for too long"
        time.sleep(0.05)
