"""Rules of a step on a device: the host waits for nothing, memory is as planned, a step can be a CUDA graph.

A row says which ``rule`` was tried in which ``case``, how it ended (``right``, ``wrong``, or ``not here`` on the CPU,
where the programs run but nothing is measured), and the numbers that were measured.
"""

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable import (
    DefaultState,
    MixedPrecisionPolicy,
    accelerate_optimizer,
    allreduce_hook,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reduce_scatter_hook,
    register_comm_hook,
    replicate,
)
from tests.place import on_device
from tests.world import run_threads

__all__ = ["Row", "rules"]

Row: TypeAlias = dict[str, object]
Numbers: TypeAlias = dict[str, object]

BF16 = torch.bfloat16
# How far memory may be from the plan, and how much of it may be unusable.
PLAN_TOLERANCE = 0.02
FRAGMENTATION = 0.05


class Sizes:
    """How large the models are: what is measured has to be large beside what an allocator rounds up."""

    def __init__(self, *, is_toy: bool) -> None:
        self.width = 16 if is_toy else 2048
        self.layers = 3 if is_toy else 8
        self.steps = 3 if is_toy else 200
        self.replays = 2 if is_toy else 1000


class Wrong(Exception):  # noqa: N818  # a rule that does not hold
    pass


def rules(device: torch.device, report: Callable[[Row], None], *, until: float, is_toy: bool) -> None:
    """Try every rule until all are tried or the time is over.

    Args:
        device: The device; on the CPU the programs run, and nothing is measured.
        report: Gets a row for each case.
        until: When to stop, as ``time.monotonic`` has it.
        is_toy: Take small sizes and few steps.
    """
    for rule, case, run in _cases(device, Sizes(is_toy=is_toy)):
        if time.monotonic() > until:
            break
        numbers: Numbers = {}
        result, text = "right" if device.type != "cpu" else "not here", ""
        try:
            numbers = run()
        except Wrong as error:
            result, text = "wrong", str(error)
        except Exception as error:
            result, text = "wrong", "".join(traceback.format_exception(error))[-3000:]
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        report({"rule": rule, "case": case, "result": result, **numbers, "text": text})


def _cases(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, str, Callable[[], Numbers]]]:
    """Yield rule, case and what tries it."""
    for name, make in STEPS.items():
        yield "no wait of the host", f"{name}, one rank", partial(_alone, device, _never_waits, make)
    for name in ("fully_shard", "fully_shard, bf16, clipped", "replicate"):
        yield "no wait of the host", f"{name}, 2 ranks in threads", partial(_in_threads, device, name)
    for world_size in (1, 2, 8):
        for name, options in PLANNED.items():
            run = partial(_faked, device, world_size, _takes_what_is_planned, sizes, options)
            yield "memory as planned", f"{name}, {world_size} ranks", run
    for name in ("fully_shard", "replicate"):
        yield "a CUDA graph", name, partial(_alone, device, _can_be_a_graph, sizes, name)
        yield "fragmentation", name, partial(_alone, device, _fragments_little, sizes, name)


# Groups


def _alone(device: torch.device, run: Callable[..., Numbers], *args: Any) -> Numbers:
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return run(device, *args)


def _faked(device: torch.device, world_size: int, run: Callable[..., Numbers], *args: Any) -> Numbers:
    """Run among ranks that are not there: what this one does and takes is what counts."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return run(device, *args)


def _in_threads(device: torch.device, name: str) -> Numbers:
    with on_device(device.type):
        run_threads(_never_waits_on_a_rank, 2, device.type, name)
    return {}


def _never_waits_on_a_rank(device_type: str, name: str) -> None:
    _never_waits(torch.device(device_type), STEPS[name])


# The host waits for nothing


Step: TypeAlias = Callable[[], None]


def _tower(width: int = 64, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


def _step_of(
    device: torch.device,
    annotate: Callable[[nn.Module], Any],
    *,
    micros: int = 1,
    clip: Callable[..., Any] | None = None,
    accelerate: bool = False,
    width: int = 64,
) -> Step:
    model = _tower(width).to(device)
    annotate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if accelerate:
        accelerate_optimizer(optimizer, model)
    x = torch.randn(8, width, device=device)

    def step() -> None:
        for _ in range(micros - 1):
            with no_sync(model):
                model(x).float().square().mean().backward()
        model(x).float().square().mean().backward()
        if clip is not None:
            clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sharded(model: nn.Module, **options: Any) -> None:
    fully_shard(model, policy={nn.Sequential}, **options)


def _checkpointed(model: nn.Sequential) -> None:
    for block in model:
        checkpoint(block)
    _sharded(model)


def _hooked(annotate: Callable[[nn.Module], Any], hook: Any, model: nn.Module) -> None:
    annotate(model)
    register_comm_hook(model, DefaultState(dist.group.WORLD), hook)


LOW = MixedPrecisionPolicy(BF16, torch.float32)
STEPS: dict[str, Callable[[torch.device], Step]] = {
    "fully_shard": partial(_step_of, annotate=_sharded),
    "replicate": partial(_step_of, annotate=replicate),
    "fully_shard, bf16, clipped": partial(_step_of, annotate=partial(_sharded, mp_policy=LOW), clip=clip_grad_norm_),
    "fully_shard, clipped by torch": partial(_step_of, annotate=_sharded, clip=nn.utils.clip_grad_norm_),
    "fully_shard, SHARD_GRAD_OP": partial(_step_of, annotate=partial(_sharded, strategy="SHARD_GRAD_OP")),
    "fully_shard, no_sync": partial(_step_of, annotate=_sharded, micros=3),
    "fully_shard, checkpoints": partial(_step_of, annotate=_checkpointed),
    "fully_shard, a hook": partial(_step_of, annotate=partial(_hooked, _sharded, reduce_scatter_hook)),
    "fully_shard, accelerated optimizer": partial(_step_of, annotate=_sharded, accelerate=True),
    "replicate, bf16, clipped": partial(_step_of, annotate=partial(replicate, mp_policy=LOW), clip=clip_grad_norm_),
    "replicate, no_sync": partial(_step_of, annotate=replicate, micros=3),
    "replicate, small buckets": partial(_step_of, annotate=partial(replicate, bucket_cap_mb=0.02)),
    "replicate, a hook": partial(_step_of, annotate=partial(_hooked, replicate, allreduce_hook)),
    "replicate, unused parameters": partial(_step_of, annotate=partial(replicate, find_unused_parameters=True)),
}


def _never_waits(device: torch.device, make: Callable[[torch.device], Step]) -> Numbers:
    step = make(device)
    for _ in range(2):
        step()
    with _waits_are_errors(device):
        step()
        step()
    return {}


@contextmanager
def _waits_are_errors(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Memory


PLANNED: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "bf16, reduced in fp32": {"mp_policy": LOW},
    "bf16": {"mp_policy": MixedPrecisionPolicy(BF16)},
}


def _allocated(device: torch.device) -> int:
    gc.collect()
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _warm_up(device: torch.device, width: int) -> None:
    """Let libraries take the memory that they keep, in each dtype."""
    for dtype in (torch.float32, BF16):
        layer = nn.Linear(width, width, bias=False, device=device, dtype=dtype)
        layer(torch.ones(1, width, device=device, dtype=dtype)).sum().backward()


def _takes_what_is_planned(device: torch.device, sizes: Sizes, options: Mapping[str, Any]) -> Numbers:
    """Compare memory at rest, and the peak of a step, with the plan."""
    _warm_up(device, sizes.width)
    before = _allocated(device)
    model = nn.Sequential(*(nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(sizes.layers))).to(device)
    fully_shard(model, policy={nn.Linear}, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.ones(1, sizes.width, device=device)
    rest = peak = 0
    for number in range(3):
        if number == 2:
            rest = _allocated(device) - before
            if device.type != "cpu":
                torch.cuda.reset_peak_memory_stats()
        model(x).float().sum().backward()
        if number == 2 and device.type != "cpu":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    plan = fully_shard.state(model).plan
    numbers = {
        "rest_bytes": rest,
        "planned_rest_bytes": plan.bytes_per_rank_at_rest(2),
        "peak_bytes": peak,
        "planned_peak_bytes": plan.peak_bytes_per_rank(2),
    }
    if device.type != "cpu":
        for kind in ("rest", "peak"):
            found, planned = numbers[f"{kind}_bytes"], numbers[f"planned_{kind}_bytes"]
            if abs(found - planned) > PLAN_TOLERANCE * planned:
                raise Wrong(f"{kind}: {found:,} bytes, planned {planned:,}: {found / planned - 1:+.1%}")
    return dict(numbers)


def _trained(
    device: torch.device, name: str, model: nn.Module, **options: Any
) -> tuple[nn.Module, Any, Callable[..., Any]]:
    model.to(device)
    (_sharded if name == "fully_shard" else replicate)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type != "cpu", **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def _fragments_little(device: torch.device, sizes: Sizes, name: str) -> Numbers:
    """Train on batches of many sizes: nearly all that was reserved is used at the peak.

    Handles are large: an allocator takes large blocks by 2 MiB.
    """
    width = sizes.width
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4))
    _, _, step = _trained(device, name, nn.Sequential(*blocks))
    for number in range(sizes.steps):
        if number == sizes.steps // 10 and device.type != "cpu":
            # What annotating and the first steps took is no matter of the steps that follow.
            _allocated(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step(torch.randn(64 + 8 * (number * 7 % 33), sizes.width, device=device))
    if device.type == "cpu":
        return {}
    stats = torch.cuda.memory_stats()
    allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    share = 1 - allocated / reserved
    numbers: Numbers = {"allocated_bytes": allocated, "reserved_bytes": reserved, "fragmentation": round(share, 4)}
    if share > FRAGMENTATION or stats["num_alloc_retries"]:
        raise Wrong(f"{share:.1%} of the reserved memory is never used: {numbers}")
    return numbers


# A step as a CUDA graph


def _can_be_a_graph(device: torch.device, sizes: Sizes, name: str) -> Numbers:
    """Record forward, backward and step; replays take no memory and give bit for bit what eager steps give."""
    width = min(sizes.width, 256)
    options = {"capturable": True} if device.type != "cpu" else {}
    x = torch.randn(16, width, device=device)
    model, _, step = _trained(device, name, _tower(width), **options)
    eager, _, step_eagerly = _trained(device, name, _tower(width), **options)
    warm_up = 3
    if device.type == "cpu":
        for _ in range(sizes.replays):
            step(x)
            step_eagerly(x)
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                step(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(x)
        graph.replay()
        addresses = [_local(param).data_ptr() for param in model.parameters()]
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(sizes.replays - 1):
            graph.replay()
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        if after != before:
            raise Wrong(f"allocated and reserved bytes were {before}, and are {after}")
        if addresses != [_local(param).data_ptr() for param in model.parameters()]:
            raise Wrong("parameters have moved")
        for _ in range(warm_up + sizes.replays):
            expected = step_eagerly(x)
        if not torch.equal(loss, expected):
            raise Wrong(f"the loss is {loss.item()!r}, and {expected.item()!r} in eager steps")
    for (fqn, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        if not torch.equal(_local(one), _local(other)):
            raise Wrong(f"{fqn!r} differs from eager steps by up to {(_local(one) - _local(other)).abs().max().item()}")
    return {"replays": sizes.replays}


def _local(param: torch.Tensor) -> torch.Tensor:
    tensor: torch.Tensor = param.detach()
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
