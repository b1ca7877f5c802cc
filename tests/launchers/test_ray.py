"""Ray Train: two CPU workers, of which one is killed; restarted by ``FailureConfig``, then resumed with one worker."""

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable import full_state_dict, fully_shard, load_full_state_dict
from tests.models import DIM, random_input
from tests.test_reshard_int import net

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[train]'"
)
REPO = Path(__file__).parents[2]
STEPS, LR = 8, 0.1


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
        runtime_env={"env_vars": {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}},
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
