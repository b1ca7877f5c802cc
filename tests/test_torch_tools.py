"""Tools of torch on sharded models: what ``docs/torch.md`` says of each is so."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from composable import HandleOptions, UsageError, fully_shard, replicate, unannotate, unshard_params
from tests.world import on_ranks, run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "torch.md"
WIDTH = 64


def make_plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def make_model(**options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = fully_shard(make_plain(), policy={nn.Linear}, **options)
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def count_flops() -> None:
    counted = []
    for model in (make_plain(), make_model()[0]):
        with FlopCounterMode(display=False) as counter:
            step(model)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0 and "FSDPSequential.2" in counter.get_flop_counts()


def profile() -> None:
    model, optimizer = make_model()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        step(model, optimizer)
    assert {"aten::mm", "aten::linear"} <= {event.key for event in profiler.key_averages()}


def count_collectives() -> None:
    for transport, gathers, reductions in (("process_group", 9, 4), ("shared_memory", 0, 0)):
        model, optimizer = make_model(options=HandleOptions(transport=transport))
        step(model, optimizer)
        with CommDebugMode() as counter:
            step(model, optimizer)
        counts = {str(op): count for op, count in counter.get_comm_counts().items()}
        assert counts.get("c10d._allgather_base_", 0) == gathers, counts
        assert counts.get("c10d._reduce_scatter_base_", 0) == reductions, counts


def track_modules(kind: type[Any]) -> None:
    model, optimizer = make_model()
    seen = []
    with kind() as tracker:
        model[2].register_forward_hook(lambda *_: seen.append(set(tracker.parents)))
        step(model, optimizer)
        step(model, optimizer)
    assert seen and all("FSDPSequential" in parents for parents in seen)


def track_memory() -> None:
    # It counts messages in shared memory too, which stay.
    model, optimizer = make_model(options=HandleOptions(transport="process_group"))
    step(model, optimizer)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step(model, optimizer)
    weight_bytes = WIDTH * WIDTH * 4
    shard_bytes = 4 * weight_bytes // dist.get_world_size()
    (now,) = tracker.get_tracker_snapshot("current").values()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    found = {str(kind).rpartition(".")[2]: count for kind, count in now.items()}
    assert found["PARAM"] == shard_bytes
    # Two averages of each element, and a step count for each parameter.
    assert found["OPT"] == 2 * shard_bytes + 4 * 4
    # Beside them the tracker holds the input and its gradient, and a few bytes in which ranks agree.
    assert found["Total"] <= found["PARAM"] + found["OPT"] + 2 * 2 * WIDTH * 4 + 64
    assert peak["Total"] >= now["Total"] + 2 * weight_bytes


def detect_anomaly() -> None:
    model, optimizer = make_model()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        step(model, optimizer)


def save_on_cpu() -> None:
    grads = []
    for context in (torch.autograd.graph.save_on_cpu(), torch.enable_grad()):
        model, _ = make_model()
        with context:
            step(model)
        grads.append([param.grad.full_tensor() for param in model.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *grads))


def flatten_parameters() -> None:
    found = nn.utils.parameters_to_vector(make_model()[0].parameters())
    expected = nn.utils.parameters_to_vector(make_plain().parameters())
    assert torch.equal(found.to_local(), expected)  # type: ignore[attr-defined]


def refuse() -> None:
    with pytest.raises((AssertionError, RuntimeError), match="FSDPMemTracker only supports FSDP modules"):
        FSDPMemTracker(*make_model())


def record(tool: Callable[[nn.Module, torch.Tensor], Callable[..., torch.Tensor]]) -> None:
    """Record a graph of sharded modules, which is refused and changes nothing, of plain ones, and of replicated ones."""
    x = torch.ones(2, WIDTH)
    trained: list[list[torch.Tensor]] = []
    for is_recorded in (True, False):
        model, optimizer = make_model()
        for _ in range(2):  # before the first forward, and after it
            for is_training in (True, False) if is_recorded else ():
                with torch.set_grad_enabled(is_training), pytest.raises(UsageError) as caught:
                    tool(model, x)
                text = "a sharded module is traced or exported, and a graph cannot hold its gathers"
                assert text in str(caught.value)
                assert "fix: do it after unannotate(model), or on a plain model" in str(caught.value)
            step(model, optimizer)
        trained.append([param.full_tensor() for param in model.parameters()])
    assert all(map(torch.equal, *trained))
    assert torch.equal(tool(unannotate(model), x)(x), model(x))
    copies = replicate(make_plain())
    assert torch.equal(tool(copies, x)(x), make_plain()(x))
    step(copies)


def export(model: nn.Module, x: torch.Tensor) -> Callable[..., torch.Tensor]:
    return torch.export.export(model, (x,)).module()


def trace(model: nn.Module, x: torch.Tensor) -> Callable[..., torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        return torch.jit.trace(model, x, check_trace=False)


def trace_unsharded() -> None:
    x, (model, _) = torch.ones(2, WIDTH), make_model()
    with unshard_params(model):
        assert torch.equal(trace(model, x)(x), make_plain()(x))
    record(trace)


def script() -> None:
    x, (model, _) = torch.ones(2, WIDTH), make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        for annotated in (model, replicate(make_plain())):
            with pytest.raises(UsageError, match="cannot be scripted"):
                torch.jit.script(annotated)
        plain = unannotate(model)
        assert torch.equal(torch.jit.script(plain)(x), plain(x))


TOOLS: dict[str, Callable[[], None]] = {
    "torch.utils.flop_counter.FlopCounterMode": count_flops,
    "torch.profiler.profile": profile,
    "torch.distributed.tensor.debug.CommDebugMode": count_collectives,
    "torch.utils.module_tracker.ModuleTracker": lambda: track_modules(ModuleTracker),
    "torch.distributed._tools.mod_tracker.ModTracker": lambda: track_modules(ModTracker),
    "torch.distributed._tools.mem_tracker.MemTracker": track_memory,
    "torch.autograd.detect_anomaly": detect_anomaly,
    "torch.autograd.graph.save_on_cpu": save_on_cpu,
    "torch.nn.utils.parameters_to_vector": flatten_parameters,
    "torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker": refuse,
    "torch.export.export": lambda: record(export),
    "torch.jit.trace": trace_unsharded,
    "torch.jit.script": script,
}


@on_ranks(2, run=run_ranks, tool=TOOLS)
def test_the_tool_does_what_the_page_says(tool: str) -> None:
    TOOLS[tool]()


def test_the_page_lists_every_tool() -> None:
    table = PAGE.read_text().partition("\n## Tools of torch on sharded models\n")[2]
    assert re.findall(r"^\| `([\w.]+)` \|", table, flags=re.MULTILINE) == list(TOOLS)
