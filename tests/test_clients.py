"""What ``examples/clients`` shows and needs nothing but torch: pipelines, and a base of 4-bit weights.

The other clients run by ``examples/clients/compare.py``, where their packages are installed.
"""

import functools
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining._backward import stage_backward_input

from composable import DataParallelMeshDims, fully_shard, load_full_state_dict, replicate
from tests.parity import full, mean_over_ranks
from tests.programs import compare
from tests.world import RankErrors, on_ranks, run_ranks, run_threads

CLIENTS = Path(__file__).parent.parent / "examples" / "clients"
STEPS = 4

T = TypeVar("T")


def client(name: str) -> ModuleType:
    sys.path.insert(0, str(CLIENTS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(CLIENTS))


def losses_of_pipeline(schedule: str, stage: str, annotate: Callable[..., Any] = fully_shard) -> list[float]:
    pipelining = client("pipelining")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return [loss.item() for loss in pipelining.train(annotate, schedule, mesh, getattr(pipelining, stage))]


def losses_of_one_process(ranks: int) -> list[float]:
    pipelining = client("pipelining")
    model = nn.Sequential(*pipelining.make_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=pipelining.LR, momentum=0.9)
    losses = []
    for step in range(pipelining.STEPS):
        x = torch.cat([pipelining.batch(step, rank) for rank in range(ranks)])
        loss = nn.functional.mse_loss(model(x), x.sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sends_between_stages_of_one_rank() -> None:
    pipelining = client("pipelining")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    pipelining.train(lambda *_, **__: None, "ScheduleInterleaved1F1B", mesh, pipelining.PipelineStage)


def pipeline_ranks(fn: Callable[..., T], world_size: int, *args: object) -> list[T]:
    """Do what ``run_ranks`` does; skip if torch, without this library, cannot hand over between stages of one rank."""
    try:
        return run_ranks(fn, world_size, *args)
    except RankErrors:
        try:
            run_ranks(sends_between_stages_of_one_rank, 1)
        except RankErrors as error:
            pytest.skip(f"this torch sends from a rank to itself, which gloo cannot: {str(error)[-200:]}")
        raise


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [
        ("Schedule1F1B", "ShardedStage"),
        ("ScheduleInterleaved1F1B", "PipelineStage"),
        ("ScheduleInterleavedZeroBubble", "ShardedStage"),
        ("ScheduleZBVZeroBubble", "ShardedStage"),
    ],
)
def test_a_pipeline_of_sharded_stages_trains_as_one_process(schedule: str, stage: str) -> None:
    expected = losses_of_one_process(2)
    for losses in pipeline_ranks(losses_of_pipeline, 4, schedule, stage):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


def replicate_stages(module: nn.Module, *, mesh: DeviceMesh, reshard_after_forward: bool) -> None:
    if isinstance(module, nn.Sequential):
        replicate(module, mesh=mesh)


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_pipeline_of_replicated_stages_trains_as_one_process(schedule: str) -> None:
    expected = losses_of_one_process(2)
    for losses in pipeline_ranks(losses_of_pipeline, 4, schedule, "PipelineStage", replicate_stages):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


@on_ranks(2, annotate=[fully_shard, replicate])
def test_a_plain_container_of_annotated_layers_is_told_in_backward(annotate: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(annotate(nn.Linear(4, 4)))  # whose `parameters` are torch's own
    x = torch.ones(2, 4, requires_grad=True)
    out = model(x)
    with pytest.raises(RuntimeError) as error:
        stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
    text = "".join(traceback.format_exception(error.value))
    assert "UsageError: a pipeline's stage computes gradients of parameters in a step of its own" in text


def train_quantized(ranks: range) -> tuple[list[float], dict[str, Any]]:
    """Train on the batches of ``ranks``, sharded where there is a process group; returns losses and full values."""
    quantized = client("quantized_base")
    torch.manual_seed(0)
    model = quantized.make_model()
    is_sharded = dist.is_initialized()
    if is_sharded:
        for block in model[:-1]:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    losses = []
    for _ in range(STEPS):
        x = torch.cat([quantized.batch(rank) for rank in ranks])
        loss = quantized.loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss) if is_sharded else loss.item())
    assert all(param.grad is None for param in model.parameters())
    return losses, {name: full(value) for name, value in model.state_dict().items()}


def train_quantized_on_rank() -> tuple[list[float], dict[str, Any]]:
    return train_quantized(range(dist.get_rank(), dist.get_rank() + 1))


def test_adapters_on_a_base_of_bytes_train_as_in_one_process() -> None:
    expected, values = train_quantized(range(3))
    for losses, found in run_threads(train_quantized_on_rank, 3):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
        for name, value in values.items():
            if value.dtype == torch.uint8:
                assert torch.equal(found[name], value)
            else:
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


MESHES: dict[str, tuple[dict[str, int], str | None, str | tuple[str, ...]]] = {
    "copies of shards": ({"dp_replicate_size": 2, "dp_shard_size": 2}, "dp_replicate", "dp_shard"),
    "context parallelism": ({"dp_replicate_size": 1, "dp_shard_size": 2, "cp_size": 2}, None, ("dp_shard", "cp")),
    "all": ({"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2}, "dp_replicate", ("dp_shard", "cp")),
}


def on_accelerates_mesh(kind: str, model: nn.Module) -> None:
    from accelerate.parallelism_config import ParallelismConfig

    sizes, copies, shards = MESHES[kind]
    mesh, dims = ParallelismConfig(**sizes).build_device_mesh("cpu"), DataParallelMeshDims(shards, copies)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


@pytest.mark.parametrize("kind", MESHES)
def test_on_a_mesh_of_accelerate_a_model_trains_as_in_one_process(kind: str) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate, of the extra `clients`")
    ranks = math.prod(MESHES[kind][0].values())
    run_threads(compare, ranks, "tied_across", functools.partial(on_accelerates_mesh, kind))


@on_ranks(world_size=[1, 2, 3])
def test_a_base_of_bytes_is_sharded_and_loads_to_the_bit() -> None:
    quantized = client("quantized_base")
    torch.manual_seed(0)
    values = quantized.make_model().state_dict()
    torch.manual_seed(1 + dist.get_rank())
    model = fully_shard(quantized.make_model(), policy={quantized.Block})
    load_full_state_dict(model, values)
    assert all(torch.equal(full(value), values[name]) for name, value in model.state_dict().items())
    packed = [param for param in model.parameters() if param.dtype == torch.uint8]
    own, whole = sum(one.to_local().numel() for one in packed), sum(one.numel() for one in packed)
    assert own <= whole / dist.get_world_size() + 3 * 64
    dist.all_reduce(total := torch.tensor(own))
    assert total == whole


def launched(program: str, *runs: tuple[int, list[str]]) -> None:
    """Run a program on some ranks with words, once for each of ``runs``; it imports its libraries once for all."""
    words = ["-m", "tests.forks", program, json.dumps(runs)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=CLIENTS.parent.parent, env=environ, capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]


def losses_in(file: Path) -> list[float]:
    return [float(loss) for loss in json.loads(file.read_text())]


def saved_model(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder for a hub, after a look at what else it needs."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert AutoTokenizer.from_pretrained(folder)("word3 word5")["input_ids"] is not None
    return dict(LlamaForCausalLM.from_pretrained(folder).state_dict())


def test_an_annotated_trainer_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "composable.extras.transformers", raising=False)
    with pytest.raises(ImportError, match="pip install transformers accelerate"):
        importlib.import_module("composable.extras.transformers")


@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_an_annotated_trainer_trains_saves_and_resumes_on_more_ranks_as_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as in the program
    try:
        pytest.importorskip("accelerate")
        from transformers import Trainer  # noqa: F401
    except ImportError as error:
        pytest.skip(f"transformers does not run here: {error}")
    annotations = ("fully_shard", "replicate")
    runs = [(1, [str(tmp_path / "plain"), "plain"]), (1, [str(tmp_path / "refused"), "refused"])]
    runs.append((2, [str(tmp_path / "bf16"), "fully_shard", "bf16"]))
    for words in ([str(tmp_path / annotation), annotation] for annotation in annotations):
        runs += [(2, words), (4, [*words, "resume"])]
    launched("tests.trainer_program", *runs)
    expected, weights = losses_in(tmp_path / "plain/final.json"), saved_model(tmp_path / "plain/final")
    assert len(expected) == 4
    low = losses_in(tmp_path / "bf16/final.json")
    assert low != expected and low == pytest.approx(expected, abs=2e-2)
    for annotation, name in itertools.product(annotations, ("final", "resumed")):
        # The second file has the losses before the checkpoint too.
        assert losses_in(tmp_path / annotation / f"{name}.json") == pytest.approx(expected, abs=1e-4)
        torch.testing.assert_close(saved_model(tmp_path / annotation / name), weights, rtol=1e-4, atol=1e-5)


def test_with_lightnings_checkpoints_three_ranks_go_on_where_two_stopped(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning, of the extra `clients`")
    runs = [(1, [str(tmp_path / "plain"), "plain"])]
    for annotation in ("fully_shard", "replicate"):
        checkpoint = str(tmp_path / annotation / "epoch=1.ckpt")
        runs.append((2, [str(tmp_path / annotation), annotation]))
        runs.append((3, [str(tmp_path / f"{annotation} resumed"), annotation, checkpoint]))
    runs.append((1, [str(tmp_path / "plain resumed"), "plain", checkpoint]))
    launched("tests.lightning_program", *runs)
    expected = losses_in(tmp_path / "plain/losses.json")
    assert len(expected) == 8
    for _, (folder, *words) in runs:
        resumed = expected[4:] if words[1:] else expected
        assert losses_in(Path(folder, "losses.json")) == pytest.approx(resumed, abs=1e-6)


@pytest.mark.parametrize("annotation", ["fully_shard", "replicate"])
def test_what_accelerate_saves_on_two_ranks_three_load(annotation: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate, of the extra `clients`")
    from tests.accelerate_program import SAVED_AFTER, STEPS, make_model, rows_of

    model, expected = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, STEPS + 1):
        loss = model(rows_of(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    two, three = tmp_path / "two", tmp_path / "three"
    runs = (2, [str(two), annotation]), (3, [str(three), annotation, f"{two}/saved"])
    launched("tests.accelerate_program", *runs)
    found = losses_in(two / "losses.json") + losses_in(three / "losses.json")
    assert found == pytest.approx(expected + expected[SAVED_AFTER:], abs=1e-6)
