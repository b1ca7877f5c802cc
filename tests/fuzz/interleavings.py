"""Random orders of forwards and backwards over models with several handles.

An interleaving is a list of operations that all ranks perform: run a part of the model on inputs or on what another
part gave out, and run backward of some of the losses that are waiting, in any order, under ``no_sync`` or not.
"""

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable import HandleOptions, fully_shard, no_sync, replicate
from tests.fuzz.annotations import draw_freed
from tests.fuzz.nodes import WIDTH
from tests.fuzz.runner import check_gradients

__all__ = ["LAYOUTS", "Operation", "describe", "draw_operations", "in_one_process", "run_interleavings"]

BATCH = 2


class Block(nn.Module):
    """Two layers; each may have a handle of its own."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Parts(nn.Module):
    """A trunk of two blocks, two heads, a judge, and a block that never runs, called through the model."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(Block(), nn.Tanh(), Block())
        self.heads = nn.ModuleList([Block(), Block()])
        self.judge, self.spare = Block(1), Block()

    def forward(self, x: torch.Tensor, part: str) -> torch.Tensor:
        if part == "all":
            return self.judge(self.heads[0](self.trunk(x)))
        return self.get_submodule(part)(x)


class SharedTrunk(nn.Module):
    """Two models that share a trunk."""

    def __init__(self) -> None:
        super().__init__()
        trunk = Block()
        self.one = nn.Sequential(trunk, nn.Tanh(), Block())
        self.two = nn.Sequential(trunk, nn.Tanh(), Block())

    def forward(self, x: torch.Tensor, part: str) -> torch.Tensor:
        return self.one(x) + self.two(x) if part == "all" else self.get_submodule(part)(x)


@dataclass(frozen=True)
class Layout:
    """A model, how it is annotated, and which parts programs may run."""

    make: Callable[[], nn.Module]  # makes the model
    annotate: Callable[[nn.Module, random.Random], None]  # annotates it
    parts: tuple[str, ...]  # what may be run
    is_direct: bool = False  # parts are called as they are, not through the model
    # all that was kept under ``no_sync`` is reduced by the last backward. Where there are several roots, one that takes
    # no part in it keeps its gradients for its own next one.
    has_no_sync: bool = False


def _shard(modules: Iterable[nn.Module], rng: random.Random, *, frees: bool = False, **options: Any) -> None:
    """Shard modules one by one, over one way of transport; with ``frees``, each with its own rule of what is freed."""
    handle = HandleOptions(transport=rng.choice(["process_group", "point_to_point"]))
    for module in modules:
        if frees:
            options["reshard_after_forward"] = draw_freed(rng)
        fully_shard(module, options=handle, **options)


def _by_hand(model: nn.Module, rng: random.Random) -> None:
    linears = [one for one in reversed(list(model.modules())) if isinstance(one, nn.Linear) and rng.random() < 0.5]
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    _shard([*linears, *blocks, model], rng, frees=True)


def _roots(model: Any, rng: random.Random) -> None:
    blocks = [one for one in (*model.trunk, *model.heads, model.judge, model.spare) if isinstance(one, Block)]
    _shard([*(part for block in blocks for part in (block.first, block)), model.trunk], rng)


def _mixed(model: Any, rng: random.Random) -> None:
    for block in (*model.heads, model.judge):
        rng.choice([_replicate, fully_shard])(block)
    fully_shard(model.trunk[0])
    fully_shard(model)


def _replicate(module: nn.Module) -> None:
    replicate(module, find_unused_parameters=True, bucket_cap_mb=1e-4)


_PARTS = ("all", "trunk", "heads.0", "heads.1", "judge")
LAYOUTS = {
    "root": Layout(Parts, lambda model, rng: _shard([model], rng), _PARTS, has_no_sync=True),
    "policy": Layout(Parts, lambda model, rng: _shard([model], rng, policy={nn.Linear}), _PARTS, has_no_sync=True),
    "hand": Layout(Parts, _by_hand, _PARTS, has_no_sync=True),
    "parts called alone": Layout(Parts, _by_hand, ("heads.0", "heads.1", "judge", "trunk.0"), is_direct=True),
    "several roots": Layout(Parts, _roots, ("trunk", "heads.0", "heads.1", "judge"), is_direct=True),
    "shared trunk": Layout(
        SharedTrunk,
        lambda model, rng: _shard([model.one[0], model.one, model.two], rng),  # type: ignore[index, list-item]
        ("one", "two"),
        is_direct=True,
    ),
    "mixed": Layout(Parts, _mixed, _PARTS),
    "replicate": Layout(Parts, lambda model, rng: _replicate(model), _PARTS, has_no_sync=True),
}


@dataclass(frozen=True)
class Operation:
    """One forward, or one backward."""

    name: str  # ``forward`` or ``backward``
    part: str = ""  # what runs forward
    source: int = -1  # the forward whose output is the input; -1: samples
    how: str = "as it is"  # what becomes of that output on its way: ``as it is``, ``detached`` or ``leaf``
    losses: tuple[int, ...] = ()  # of which forwards backward runs, at once
    retains: bool = False  # the graphs stay
    syncs: bool = True  # the backward is synchronised


def describe(operations: list[Operation]) -> str:
    lines, number = [], 0
    for one in operations:
        if one.name == "forward":
            source = "samples" if one.source < 0 else f"output {one.source} {one.how}"
            lines.append(f"output {number} = {one.part}({source})")
            number += 1
        else:
            extra = ", retain_graph" * one.retains + ", no_sync" * (not one.syncs)
            lines.append(f"backward of {', '.join(map(str, one.losses))}{extra}")
    return "\n".join(lines)


def draw_operations(rng: random.Random, layout: Layout, most: int = 12) -> list[Operation]:
    """Return operations that plain torch accepts, of which the last backward is synchronised."""
    operations: list[Operation] = []
    graphs: list[frozenset[int]] = []  # which forwards the backward of each goes through
    waiting: list[int] = []
    freed: set[int] = set()
    has_no_sync = layout.has_no_sync and rng.random() < 0.3
    while len(operations) < most or waiting:
        can_grow = len(operations) < most
        if can_grow and (not waiting or rng.random() < 0.55):
            fits = [number for number, graph in enumerate(graphs) if not graph & freed]
            source = rng.choice(fits) if fits and rng.random() < 0.5 else -1
            how = rng.choice(["as it is", "as it is", "detached", "leaf"])
            part = rng.choice(layout.parts)
            below = graphs[source] if source >= 0 and how == "as it is" else frozenset()
            operations.append(Operation("forward", part, source, how))
            graphs.append(below | {len(graphs)})
            if rng.random() < 0.85 or not waiting:
                waiting.append(len(graphs) - 1)
            continue
        losses = tuple(rng.sample(waiting, min(len(waiting), rng.choice([1, 1, 1, 2]))))
        retains = rng.random() < 0.2
        gone = frozenset().union(*(graphs[number] for number in losses))
        left = [number for number in waiting if number not in losses]
        # What others still need must stay; else those can run no more.
        if any(graphs[number] & gone for number in left):
            retains = True
        if not retains:
            freed |= gone
        repeats = retains and rng.random() < 0.2
        syncs = not has_no_sync or rng.random() < 0.6
        operations.append(Operation("backward", losses=losses, retains=retains, syncs=syncs))
        if not repeats:
            waiting = left
    last = max(index for index, one in enumerate(operations) if one.name == "backward")
    operations[last] = Operation("backward", losses=operations[last].losses, retains=operations[last].retains)
    return operations[: last + 1]


def run_interleavings(layout: str, seeds: range, expected: list[dict[str, torch.Tensor | None]]) -> None:
    """Run one interleaving after the other on one model. On every rank.

    Raises:
        Wrong: A gradient is not that of one process.
    """
    torch.set_default_dtype(torch.float64)
    chosen = LAYOUTS[layout]
    model = _make(chosen, seeds)
    chosen.annotate(model, random.Random(seeds[0]))
    # What an optimizer holds: after a forward without a backward the model may show whole parameters.
    params = dict(model.named_parameters())
    for seed, want in zip(seeds, expected, strict=True):
        operations = draw_operations(random.Random(seed), chosen)
        try:
            _perform(model, chosen, operations, seed, dist.get_rank(), scale=1.0, is_plain=False)
            check_gradients(params, want, 1e-8, f"layout {layout}, seed {seed}")
        except Exception as error:
            error.args = (
                f"{error.args[0] if error.args else ''}\nlayout {layout}, seed {seed}\n{describe(operations)}",
            )
            raise
        for param in params.values():
            param.grad = None


def in_one_process(layout: str, seeds: range, world_size: int) -> list[dict[str, torch.Tensor | None]]:
    """Return the gradients of every interleaving, from the samples of all ranks."""
    chosen = LAYOUTS[layout]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = _make(chosen, seeds)
        found = []
        for seed in seeds:
            operations = draw_operations(random.Random(seed), chosen)
            for rank in range(world_size):
                _perform(model, chosen, operations, seed, rank, scale=1 / world_size, is_plain=True)
            found.append(
                {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}
            )
            model.zero_grad()
        return found
    finally:
        torch.set_default_dtype(before)


def _make(layout: Layout, seeds: range) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seeds[0])
        return layout.make()


def _perform(
    model: nn.Module, layout: Layout, operations: list[Operation], seed: int, rank: int, *, scale: float, is_plain: bool
) -> None:
    outputs: list[torch.Tensor] = []
    for number, one in enumerate(operations):
        if one.name == "forward":
            outputs.append(_forward(model, layout, one, outputs, f"{seed}/{number}/{rank}"))
            continue
        with nullcontext() if is_plain or one.syncs else no_sync(model):
            losses = [outputs[index].pow(2).mean() * scale for index in one.losses]
            torch.autograd.backward(losses, retain_graph=one.retains)


def _forward(model: nn.Module, layout: Layout, one: Operation, outputs: list[torch.Tensor], name: str) -> torch.Tensor:
    if one.source < 0 or outputs[one.source].shape[1] != WIDTH:
        number = random.Random(name).getrandbits(32)
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
    else:
        x = outputs[one.source]
    if one.how != "as it is":
        x = x.detach()
    if one.how == "leaf":
        x = x.requires_grad_()
    called: Any = model.get_submodule(one.part) if layout.is_direct else model
    return called(x) if layout.is_direct else called(x, one.part)
