"""Ranks that are threads and share the device: options, random programs and what only a device has, each against one
process on the same device.

A row says which ``case`` ended how: ``right``, ``refused`` by one of the library's errors, or ``wrong`` with a
``text``.
"""

import random
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from composable import clip_grad_norm_, fully_shard, replicate
from tests.models import random_input, seeded
from tests.parity import full
from tests.place import here, on_device
from tests.subclasses import Int8Weight
from tests.world import run_threads
from tools.fuzz.cases import draw, draw_hybrid, draw_replicated
from tools.fuzz.runner import run_case
from tools.options import runs

__all__ = ["Row", "ranks"]

Row: TypeAlias = dict[str, object]
Run: TypeAlias = Callable[[], tuple[str, str]]

WORLD_SIZES = (1, 2, 4)
# Random trees of each kind and number of ranks.
TREES = 12
TOY_CASES = 2
# Values of options that are for the CPU.
HOST_ONLY = ("offload=copied",)


def ranks(
    device: torch.device,
    report: Callable[[Row], None],
    *,
    until: float,
    is_toy: bool,
    adverse: bool,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Run cases in an order that is drawn, until they or the time are over.

    Args:
        device: The device.
        report: Gets a row for each case.
        until: When to stop, as ``time.monotonic`` has it.
        is_toy: Run a few cases only.
        adverse: Collectives are late, and memory is NaN where nothing was written.
        share: This process's number, and how many processes share the cases.
    """
    first, of = share
    cases = list(_cases(device))[first::of]
    if is_toy:
        # Of each kind some; on the CPU an adverse device is none.
        few = {
            kind: [case for case in cases if case[0].startswith(kind)] for kind in ("options", "program", "replicate")
        }
        cases = [case for one in few.values() for case in one[: 1 if adverse else TOY_CASES]]
    for number, (name, run) in enumerate(cases):
        if time.monotonic() > until:
            break
        started = time.monotonic()
        # Most users' groups have NCCL alone, in which nothing travels from host memory.
        backend = "nccl" if number % 2 else ""
        try:
            with on_device(device.type, adverse=adverse and device.type != "cpu", backend=backend):
                result, text = run()
        except Exception as error:
            result, text = "wrong", "".join(traceback.format_exception(error))[-3000:]
        seconds = round(time.monotonic() - started, 2)
        case = f"{name}; {backend or 'gloo and nccl'}"
        report({"case": case, "adverse": adverse, "result": result, "seconds": seconds, "text": text})


def _cases(device: torch.device) -> Iterator[tuple[str, Run]]:
    """Yield all cases, shuffled so that any part of them has some of each kind."""
    found: list[tuple[str, Run]] = [
        (f"options: {api}: {text or 'defaults'}", partial(_run_options, api, text))
        for api in ("fully_shard", "replicate")
        for text in runs.cases_of(api)
        if device.type == "cpu" or not any(value in text for value in HOST_ONLY)
    ]
    for kind, drawn in {"": draw, ", replicate": draw_replicated, ", hybrid": draw_hybrid}.items():
        for size in WORLD_SIZES:
            # Compiled modules in threads are the business of torch.
            without = frozenset({"compiled"})
            found += [
                (f"program{kind}: seed {seed}, {size} ranks", partial(_run_program, drawn, seed, size, without))
                for seed in range(1000, 1000 + TREES)
            ]
    random.Random(0).shuffle(found)
    special = [
        (f"{name}, {size} ranks", partial(_run_special, run, size, *args))
        for name, run, *args in SPECIAL
        for size in WORLD_SIZES
    ]
    yield from special
    yield from found


def _run_options(api: str, text: str) -> tuple[str, str]:
    runs.check(api, text, in_threads=True)
    return "right", ""


def _run_program(drawn: Any, seed: int, size: int, without: frozenset[str]) -> tuple[str, str]:
    outcome = run_case(drawn(seed, size, without))
    if outcome.kind in ("right", "refused", "impossible"):
        return outcome.kind, outcome.text
    return "wrong", f"{outcome.kind}: {outcome.text}\n{outcome.details[-2500:]}"


# What the tables do not have


def _run_special(run: Callable[..., None], size: int, *args: Any) -> tuple[str, str]:
    run_threads(run, size, *args)
    return "right", ""


STEPS, WIDTH, BATCH = 4, 32, 4


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))


def _batches(step: int) -> list[torch.Tensor]:
    """Return the batch of each rank."""
    return [random_input(100 * step + rank, BATCH, WIDTH) for rank in range(dist.get_world_size())]


def _losses(model: nn.Module, step: Callable[[torch.Tensor], None], *, alone: bool) -> list[float]:
    losses = []
    for number in range(STEPS):
        batches = _batches(number)
        loss = model(torch.cat(batches) if alone else batches[dist.get_rank()]).float().square().mean()
        step(loss)
        value = loss.detach().clone()
        if not alone:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        losses.append(value.item())
    return losses


def _compare(train: Callable[[nn.Module, bool], list[float]], reference: nn.Module, model: nn.Module) -> None:
    expected = train(reference, True)
    torch.testing.assert_close(train(model, False), expected, rtol=1e-4, atol=1e-5)
    whole = {fqn: full(param) for fqn, param in model.named_parameters()}
    for fqn, param in reference.named_parameters():
        torch.testing.assert_close(
            whole[fqn], param.detach(), rtol=1e-4, atol=1e-5, msg=lambda text, fqn=fqn: f"{fqn}: {text}"
        )


def scaled(annotation: str) -> None:
    """A gradient scaler meets an overflow on one rank: all ranks skip that step."""

    def train(model: nn.Module, alone: bool) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, fused=True)
        scaler = torch.amp.GradScaler(here().type, init_scale=64.0, growth_interval=2)
        numbers = iter(range(STEPS))

        def step(loss: torch.Tensor) -> None:
            factor = torch.inf if next(numbers) == 1 and (alone or dist.get_rank() == 0) else 1.0
            scaler.scale(loss * factor).backward()
            scaler.unscale_(optimizer)
            (nn.utils.clip_grad_norm_ if alone else clip_grad_norm_)(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return _losses(model, step, alone=alone)

    model = seeded(_net, 0)
    _annotate(annotation, model)
    _compare(train, seeded(_net, 0), model)


def stepped(annotation: str, options: dict[str, Any]) -> None:
    """An optimizer of torch in one of its forms."""
    model = seeded(_net, 0)
    _annotate(annotation, model)
    _compare(partial(_train, partial(torch.optim.AdamW, lr=0.01, eps=1e-3, **options)), seeded(_net, 0), model)


def _train(make: Callable[..., torch.optim.Optimizer], model: nn.Module, alone: bool) -> list[float]:
    optimizer = make(model.parameters())

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return _losses(model, step, alone=alone)


def _annotate(annotation: str, model: nn.Module) -> None:
    if annotation == "replicate":
        replicate(model)
    else:
        fully_shard(model, policy={nn.Linear})


class Float8Weight(Int8Weight):
    """Rows in full precision that ranks gather in float8, scaled by the largest value of all ranks."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        largest = torch.max(torch.abs(self._values))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest.clamp(min=1e-12) / 448
        return ((self._values / scale).to(torch.float8_e4m3fn),), (scale,)


class Float8Linear(nn.Linear):
    """What a linear layer with a ``Float8Weight`` computes, in one process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.detach()
        scale = weight.abs().max() / 448
        rounded = (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


def in_float8(reshard: bool) -> None:
    """Weights that their class gathers in float8."""
    reference, model = seeded(_net, 0), seeded(_net, 0)
    for one, other in zip(reference, model, strict=True):
        if isinstance(one, nn.Linear):
            one.__class__ = Float8Linear
            other.weight = nn.Parameter(Float8Weight(other.weight.detach()))
    fully_shard(model, policy={nn.Linear}, reshard_after_forward=reshard)
    _compare(partial(_train, partial(torch.optim.SGD, lr=0.1)), reference, model)


FORMS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "a loop": {"foreach": False},
}
SPECIAL: list[tuple[Any, ...]] = [
    *((f"{annotation}: gradient scaler", scaled, annotation) for annotation in ("fully_shard", "replicate")),
    *(
        (f"{annotation}: AdamW as {form}", stepped, annotation, options)
        for annotation in ("fully_shard", "replicate")
        for form, options in FORMS.items()
    ),
    *((f"float8 weights, reshard_after_forward={reshard}", in_float8, reshard) for reshard in (True, False)),
]
