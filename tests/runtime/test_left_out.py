"""Outputs that the losses of some ranks leave out: gradients are those of one process, whatever each rank leaves out."""

import copy
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable import HandleOptions, fully_shard, no_sync
from tests.world import RankErrors, run_threads

DIM = 4


class Part(nn.Module):
    """A block or a head; an outer one has parameters of its own around an inner one, and may call it twice."""

    def __init__(self, pick: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, dtype=torch.double)
        self.inner = Part(pick) if pick.random() < 0.3 else None
        self.calls = pick.choice([1, 1, 2])
        self.linear.bias.requires_grad_(pick.random() < 0.8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        if self.inner is not None:
            for _ in range(self.calls):
                x = x + self.inner(x)
        return x


class Net(nn.Module):
    """Blocks in a row; after each, any number of heads, of which some are called a second time in the end."""

    def __init__(self, pick: random.Random, *, has_own: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Part(pick) for _ in range(pick.randint(1, 3)))
        self.heads = nn.ModuleList(
            nn.ModuleList(Part(pick) for _ in range(pick.choice([0, 1, 2]))) for _ in self.blocks
        )
        self.scale = nn.Parameter(torch.ones(DIM, dtype=torch.double)) if has_own else None
        self.again = [heads[0] for heads in self.heads if len(heads) and pick.random() < 0.3]  # type: ignore[arg-type, index]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for block, heads in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            outputs += [head(x) for head in heads]  # type: ignore[union-attr]  # it is a list
        outputs += [head(x) for head in self.again]
        return [*outputs, x if self.scale is None else x * self.scale]


def draw(seed: int) -> dict[str, Any]:
    pick = random.Random(seed)
    return {
        "has own": pick.random() < 0.5,
        "transport": pick.choice(["auto", "process_group"]),
        "reshard": pick.choice([True, True, None, False]),
        "prefetch": pick.random() < 0.2,
        "way": pick.choice(["one", "one", "two forwards", "two backwards", "no_sync"]),
        "uses": pick.choice([0.3, 0.6]),
        "steps": 4,
    }


def loss_of(outputs: list[torch.Tensor], pick: random.Random, story: dict[str, Any]) -> torch.Tensor:
    """Return the sum of a part of the outputs, at least one."""
    used = [output for output in outputs if pick.random() < story["uses"]] or [pick.choice(outputs)]
    return torch.stack([output.square().sum() for output in used]).sum()


def play(model: nn.Module, story: dict[str, Any], step: int, rank: int, keeping: AbstractContextManager[Any]) -> None:
    """Run one step of a rank; ``keeping``: the context of a micro-batch that synchronises nothing."""
    pick = random.Random(f"{story} {step} {rank}")

    def batch() -> torch.Tensor:
        return torch.tensor([[pick.uniform(-1, 1) for _ in range(DIM)] for _ in range(2)], dtype=torch.double)

    if story["way"] == "no_sync":
        with keeping:
            loss_of(model(batch()), pick, story).backward()
    outputs = model(batch())
    if story["way"] == "two forwards":
        loss_of(outputs, pick, story).backward()
        outputs = model(batch())
    if story["way"] == "two backwards":
        loss_of(outputs, pick, story).backward(retain_graph=True)
    loss_of(outputs, pick, story).backward()


def annotate(model: Net, story: dict[str, Any], seed: int) -> None:
    pick = random.Random(seed)
    options = HandleOptions(transport=story["transport"])
    parts = [module for module in model.modules() if isinstance(module, Part)]
    shared = []
    for part in reversed(parts):  # inner ones first
        if pick.random() < 0.9:
            shared.append(fully_shard(part, reshard_after_forward=story["reshard"], options=options))
    fully_shard(model, options=options)
    if story["prefetch"]:
        for part in shared:
            part.set_modules_to_backward_prefetch(pick.sample(shared, min(2, len(shared))))  # type: ignore[attr-defined]


def train(seed: int) -> None:
    """Compare each step with one process on the batches of all ranks, in which each rank's loss is left as it is."""
    story, world = draw(seed), dist.get_world_size()
    models = [Net(random.Random(seed), has_own=story["has own"]) for _ in range(2)]
    model, twin = models
    annotate(model, story, seed)
    for step in range(story["steps"]):
        play(model, story, step, dist.get_rank(), no_sync(model))
        for rank in range(world):
            play(twin, story, step, rank, nullcontext())
        for (name, param), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            found = None if param.grad is None else param.grad.full_tensor()  # type: ignore[attr-defined]
            expected = None if other.grad is None else other.grad / world
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}\n{story}")
            if param.grad is not None:
                with torch.no_grad():
                    param -= 0.01 * param.grad
                    other -= 0.01 * expected
            param.grad = other.grad = None


def test_outputs_that_some_ranks_leave_out_change_nothing_but_the_loss() -> None:
    for seed in range(8):
        run_threads(train, 2 + seed % 2, seed)


class Checkpointed(nn.Module):
    """A layer, and three more that are run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.again = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        return x, checkpoint(self.again, x, use_reentrant=False)


def train_checkpointed(cure: str) -> None:
    """Leave out on rank 1 what is run again in backward, with three handles in it; one process has the right gradients."""
    torch.manual_seed(0)
    model = Checkpointed()
    twin = copy.deepcopy(model)
    options = HandleOptions(transport="process_group")
    keeps = {"reshard_after_forward": False} if cure == "kept" else {}
    for part in [model.first, *([] if cure == "one handle" else model.again)]:
        fully_shard(part, options=options, **keeps)
    fully_shard(model.again, options=options, **keeps)
    fully_shard(model, options=options)
    for _ in range(3):
        model.zero_grad()
        for rank, run in [(dist.get_rank(), model), (0, twin), (1, twin)]:
            used, again = run(torch.linspace(-1, 1, DIM) + rank)
            loss = used.sum() + again.square().sum() * (1 - rank)
            if rank and cure != "zero":
                loss = used.sum()
            loss.backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad / 6)  # type: ignore[union-attr, attr-defined]


def test_what_is_run_again_on_some_ranks_is_an_error_that_each_advice_mends() -> None:
    with pytest.raises(RankErrors, match="DesyncError: the wait for the all-gather of module 'again"):
        run_threads(train_checkpointed, 2, "")
    for cure in ("zero", "kept", "one handle"):
        run_threads(train_checkpointed, 2, cure)
