"""submitit: two ranks train until they are preempted, are queued again, and go on from their latest checkpoint."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import find_checkpoint, fully_shard, load_checkpoint, save_checkpoint

submitit = pytest.importorskip("submitit")

_MORE = 3  # steps after the preemption


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    if dist.is_initialized():
        fully_shard(model, policy={nn.Linear})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Run a step on this rank's rows of its batch, and return the loss of all rows."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    loss = model(x[rank::ranks]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(mean)
    return mean.item() / ranks


class Train:
    """What submitit calls on each rank, once or more often.

    Args:
        run: The folder of the run.
        is_again: It was preempted before.
    """

    def __init__(self, run: Path, is_again: bool = False) -> None:
        self.run, self.is_again = run, is_again

    def __call__(self) -> int:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        dist.init_process_group("gloo")
        (self.run / f"process{dist.get_rank()}").write_text(str(os.getpid()))
        model, optimizer = model_and_optimizer()
        done = load_checkpoint(self.run, model, optimizer).step if self.is_again else 0
        last = done + _MORE if self.is_again else 10**9
        while done < last:
            done += 1
            loss = step_of(model, optimizer, done)
            if dist.get_rank() == 0:
                with (self.run / "losses.jsonl").open("a") as file:
                    file.write(json.dumps([done, loss]) + "\n")
            save_checkpoint(self.run, done, model, optimizer)
        dist.destroy_process_group()
        return done

    def checkpoint(self) -> "submitit.helpers.DelayedSubmission":
        return submitit.helpers.DelayedSubmission(Train(self.run, is_again=True))


def test_a_preempted_job_goes_on_from_its_latest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(tasks_per_node=2, timeout_min=30)
    job = executor.submit(Train(run))
    log = run / "losses.jsonl"
    while not (log.exists() and log.read_text().count("\n") > _MORE):
        assert not job.done(), job.stderr()
        time.sleep(0.05)
    # The signal with which Slurm preempts a job of submitit.
    for rank in range(2):
        os.kill(int((run / f"process{rank}").read_text()), signal.SIGUSR2)
    done = job.results()
    assert done[0] == done[1] == find_checkpoint(run).step
    losses = dict(map(json.loads, log.read_text().splitlines()))
    assert list(losses) == [*range(1, done[0] + 1)]
    model, optimizer = model_and_optimizer()
    expected = {number: step_of(model, optimizer, number) for number in range(1, done[0] + 1)}
    assert losses == pytest.approx(expected, abs=1e-9)
