"""Losses that leave a forward by another way than its outputs: right as in one process, or an error, never silent."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import UsageError, fully_shard
from tests.world import run_threads

DIM = 6
Losses = list[torch.Tensor]


class Block(nn.Module):
    """A block whose side loss leaves in one of many ways, before its output is made or after it.

    Args:
        keeps: How the loss leaves: ``""``, ``"list"``, ``"closure"``, ``"attribute"`` or ``"hook"``.
        is_late: The loss is made after the output.
        kept: The list that ``"closure"`` and ``"hook"`` fill.
    """

    def __init__(self, keeps: str, *, is_late: bool, is_frozen: bool, kept: Losses) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, DIM), requires_grad=not is_frozen)
        self.inner = nn.Identity()
        self.keeps, self.is_late = keeps, is_late
        self.keep: Callable[[torch.Tensor], None] = kept.append
        if keeps == "hook":
            self.inner.register_forward_hook(lambda module, args, output: kept.append(output))

    def side(self, x: torch.Tensor, losses: Losses) -> None:
        if not self.keeps:
            return
        loss = (x * self.gain).pow(2).mean()
        if self.keeps == "list":
            losses.append(loss)
        elif self.keeps == "closure":
            self.keep(loss)
        elif self.keeps == "attribute":
            self.inner.loss = loss  # type: ignore[assignment]  # no parameter
        else:
            self.inner(loss)

    def forward(self, x: torch.Tensor, losses: Losses) -> torch.Tensor:
        if not self.is_late:
            self.side(x, losses)
        output = torch.tanh(self.linear(x)) * self.gain
        if self.is_late:
            self.side(x, losses)
        return output


class Net(nn.Module):
    """Blocks in a row; the output of each is used, dropped, detached or given away."""

    def __init__(self, story: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kept: Losses = []
        self.uses = story["uses"]
        self.blocks = nn.ModuleList(
            Block(keeps, is_late=late, is_frozen=frozen, kept=self.kept)
            for keeps, late, frozen in zip(story["keeps"], story["late"], story["frozen"], strict=True)
        )
        self.scale = nn.Parameter(torch.ones(DIM)) if story["root has parameters"] else None

    def forward(self, x: torch.Tensor, losses: Losses) -> torch.Tensor:
        for block, use in zip(self.blocks, self.uses, strict=True):
            output = block(x, losses)
            if use == "use":
                x = output
            elif use == "detach":
                x = x + output.detach()
        return x if self.scale is None else x * self.scale


def draw(seed: int) -> dict[str, Any]:
    pick = random.Random(seed)
    count = pick.randint(2, 4)
    ways = ["", "list", "closure", "attribute", "hook"]
    return {
        "keeps": [pick.choice(ways) for _ in range(count - 1)] + [pick.choice(ways[1:])],
        "late": [pick.random() < 0.3 for _ in range(count)],
        "frozen": [pick.random() < 0.2 for _ in range(count)],
        # The first is used, so that the network has a gradient.
        "uses": ["use"] + [pick.choice(["use", "use", "drop", "detach"]) for _ in range(count - 1)],
        "root has parameters": pick.random() < 0.5,
        "reshard": [pick.choice([True, False, None]) for _ in range(count + 1)],
        "is one handle": pick.random() < 0.1,
        "backward": pick.choice(["sum", "sum", "side only", "side first", "main first", "scaled side first"]),
        "forwards": pick.choice(["one", "one", "one", "two", "two reversed"]),
        "steps": 2,
    }


def side_of(model: Net, losses: Losses) -> torch.Tensor:
    found = [*losses, *model.kept]
    for block in model.blocks:
        if block.keeps == "attribute":
            found.append(block.inner.loss)  # type: ignore[union-attr, arg-type]  # no module
    model.kept.clear()
    return torch.stack(found).sum()


def run_backward(how: str, main: torch.Tensor, side: torch.Tensor) -> None:
    if how == "sum":
        (main + side).backward()
    elif how == "side only":
        side.backward()
    elif how == "main first":
        main.backward(retain_graph=True)
        side.backward()
    else:
        (side if how == "side first" else side * 2).backward(retain_graph=True)
        main.backward()


def play(model: Net, story: dict[str, Any], batches: list[torch.Tensor]) -> None:
    """Run one step: a forward and backward for each batch, or all forwards before all backwards."""
    pairs = []
    for x in batches:
        losses: Losses = []
        output = model(x, losses)
        pair = output.square().sum(), side_of(model, losses)
        if story["forwards"] == "one":
            run_backward(story["backward"], *pair)
        else:
            pairs.append(pair)
        del output
    for pair in reversed(pairs) if "reversed" in story["forwards"] else pairs:
        run_backward(story["backward"], *pair)


def batch(step: int, rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))


def batches_of(story: dict[str, Any], step: int, rank: int) -> list[torch.Tensor]:
    return [batch(step, rank, number) for number in range(1 if story["forwards"] == "one" else 2)]


def tell(seed: int) -> str:
    """Return ``"right"`` or the beginning of our error; fail where gradients differ from one process."""
    story, world = draw(seed), dist.get_world_size()
    model, twin = Net(story), Net(story)
    if not story["is one handle"]:
        for block, reshard in zip(model.blocks, story["reshard"], strict=False):
            fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=story["reshard"][-1])
    for step in range(story["steps"]):
        try:
            play(model, story, batches_of(story, step, dist.get_rank()))
        except UsageError as error:
            return error.what[:40]
        for rank in range(world):
            play(twin, story, batches_of(story, step, rank))
        for (name, param), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            found = None if param.grad is None else param.grad.full_tensor()  # type: ignore[attr-defined]
            expected = None if other.grad is None else other.grad / world
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}\n{story}")
            with torch.no_grad():
                if param.grad is not None:
                    param -= 0.05 * param.grad
                    other -= 0.05 * expected
            param.grad = other.grad = None
    return "right"


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_hidden_loss_has_the_gradients_of_one_process_or_an_error(world_size: int) -> None:
    told: Counter[str] = Counter()
    for seed in range(120 // world_size):
        results = run_threads(tell, world_size, seed)
        assert len(set(results)) == 1, seed
        told[results[0]] += 1
    assert told.keys() <= {"right", "backward reads a parameter whose memory "}, told
    assert told["right"] >= 0.9 * told.total(), told


class Force(nn.Module):
    """Returns a derivative: a later backward goes through nodes that are no part of any output's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(DIM, DIM), nn.Parameter(torch.linspace(0.5, 1.5, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x * self.gain
        (slope,) = torch.autograd.grad(torch.tanh(self.linear(at)).square().sum(), at, create_graph=True)
        return x + torch.tanh(slope)


class Stem(nn.Module):
    """A trunk and a head, each of which may be called alone."""

    def __init__(self, *, is_force: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.trunk = Force() if is_force else nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    def forward(self, x: torch.Tensor, *, is_head: bool) -> torch.Tensor:
        return self.head(x) if is_head else self.trunk(self.inp(x))


def run_again(names: list[str], *, is_force: bool) -> str:
    """Run the graph of one forward with a backward of its own, and again in that of the next forward."""
    model, twin = Stem(is_force=is_force), Stem(is_force=is_force)
    for name in names:
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    for one in (model, twin):
        trunk = one(batch(0, 0, 0), is_head=False)
        trunk.sum().backward(retain_graph=True)
        try:
            one(trunk, is_head=True).sum().backward()
        except UsageError as error:
            return error.what[:40]
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)  # type: ignore[union-attr]
    return "right"


@pytest.mark.parametrize("inner", ["trunk.linear", "trunk.0"])
def test_a_graph_that_runs_again_is_right_or_told(inner: str) -> None:
    parts = [inner, "inp", "trunk", "head"]
    told: Counter[str] = Counter()
    for number in range(2 ** len(parts)):
        names = [name for bit, name in enumerate(parts) if number >> bit & 1]
        results = run_threads(run_again, 2, names, is_force=inner == "trunk.linear")
        assert len(set(results)) == 1, names
        told[results[0]] += 1
    # Nothing gathers the inner part for nodes that lie outside of its forward.
    refused = {"backward reads a parameter whose memory "} if inner == "trunk.linear" else set()
    assert told.keys() == {"right", *refused}, told


@dataclass(slots=True)
class Slots:
    """An object without a dict."""

    value: Any


def one_of(value: Any) -> Iterator[Any]:
    yield value


# How a module returns a tensor so that nothing but its caller finds it, and how the caller takes it out.
BOXES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "closure": (lambda y: lambda: y, lambda box: box()),
    "partial": (lambda y: partial(torch.clone, y), lambda box: box()),
    "iterator": (lambda y: iter([y]), next),
    "generator": (one_of, next),
    "slots": (Slots, lambda box: box.value),
    "nested": (lambda y: Slots([iter((y, None))]), lambda box: next(box.value[0])),
    "none": (lambda y: y, lambda box: box),
}
CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": partial(torch_checkpoint, use_reentrant=True),
    "not reentrant": partial(torch_checkpoint, use_reentrant=False),
    "none": lambda function, x: function(x),
}


class Boxing(nn.Module):
    """Runs its layers in a checkpoint of torch's, hides the output, and may return another one beside it."""

    def __init__(self, story: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, DIM))
        self.checkpoint, self.put = CHECKPOINTS[story["checkpoint"]], BOXES[story["box"]][0]
        self.beside = story["beside"]

    def forward(self, x: torch.Tensor) -> Any:
        before = (x * self.gain).sin()
        y = self.checkpoint(self.layers, x * self.gain)
        box = self.put(y if self.beside == "after" else y * self.gain)
        return box if not self.beside else (box, before if self.beside == "before" else (x * self.gain).cos())


class Boxed(nn.Module):
    """Takes the outputs of modules in a row out of their boxes."""

    def __init__(self, story: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.boxes = nn.ModuleList(Boxing(story) for _ in range(story["count"]))
        self.take = BOXES[story["box"]][1]
        self.scale = nn.Parameter(torch.ones(DIM)) if story["root has parameters"] else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for box in self.boxes:
            found, beside = output if isinstance(output := box(x), tuple) else (output, 0)
            x = self.take(found) + beside
        return x if self.scale is None else x * self.scale


def draw_boxed(seed: int) -> dict[str, Any]:
    pick = random.Random(seed)
    backward = pick.choice(["once", "once", "twice", "of inputs", "of a gradient", "elsewhere"])
    # Torch refuses `torch.autograd.grad` through a reentrant checkpoint.
    ways = ["none", "not reentrant", *["reentrant"] * (not backward.startswith("of "))]
    return {
        "checkpoint": pick.choice([*ways, "not reentrant"]),
        "box": pick.choice(list(BOXES)),
        "beside": pick.choice(["", "", "before", "after"]),
        "hides on": pick.choice(["all ranks", "all ranks", "rank 0"]),
        "count": pick.randint(1, 3),
        "root has parameters": pick.random() < 0.5,
        "annotated": pick.choice([[""], [""], [".layers.2", ""], [".layers"], []]),
        "reshard": pick.choice([True, False, None]),
        "backward": backward,
        "forwards": pick.choice([1, 1, 2]),
    }


def open_boxes(model: nn.Module, how: str, batches: list[torch.Tensor]) -> torch.Tensor | None:
    """Run all forwards, and then one backward or two; returns a gradient of the first batch, if there is one."""
    inputs = [x.requires_grad_() for x in batches]
    loss = torch.stack([model(x).square().mean() for x in inputs]).sum()
    if how.startswith("of "):
        (gradient,) = torch.autograd.grad(loss, inputs[0], create_graph=how == "of a gradient")
        if how == "of a gradient":
            (loss + gradient.square().sum()).backward()
        return gradient.detach()
    if how == "elsewhere":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
        return None
    for is_last in (False, True)[how == "once" :]:
        loss.backward(retain_graph=not is_last)
    return None


def tell_boxed(seed: int) -> str:
    """As ``tell``, of ``draw_boxed``."""
    story, world = draw_boxed(seed), dist.get_world_size()
    # Elsewhere the root's output, or what a checkpoint gathers, may come first on some ranks only.
    may_differ = story["root has parameters"] and ".layers.2" not in story["annotated"]
    is_open = dist.get_rank() > 0 and story["hides on"] == "rank 0" and may_differ and story["backward"] != "elsewhere"
    model, twin = Boxed(story | {"box": "none"} if is_open else story), Boxed(story)
    for name in story["annotated"]:
        for box in model.boxes:
            fully_shard(box.get_submodule(name.removeprefix(".")), reshard_after_forward=story["reshard"])
    fully_shard(model, reshard_after_forward=story["reshard"])
    for step in range(2):
        numbers = range(story["forwards"])
        try:
            gradient = open_boxes(model, story["backward"], [batch(step, dist.get_rank(), n) for n in numbers])
        except UsageError as error:
            return f"{story['backward']}: {error.what[19:40]}"
        found = [None if param.grad is None else param.grad.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
        expected = [
            open_boxes(twin, story["backward"], [batch(step, rank, n) for n in numbers]) for rank in range(world)
        ]
        whole = [None if param.grad is None else param.grad / world for param in twin.parameters()]
        for one, other in zip([*found, gradient], [*whole, expected[dist.get_rank()]], strict=True):
            torch.testing.assert_close(one, other, msg=lambda text: f"{text}\n{story}")
        with torch.no_grad():
            for param, other in zip(twin.parameters(), whole, strict=True):
                param -= 0 if other is None else 0.05 * other
            for param in model.parameters():
                # Between steps, modules hold sharded parameters.
                param -= 0 if param.grad is None else 0.05 * param.grad  # type: ignore[operator]
        for param in [*model.parameters(), *twin.parameters()]:
            param.grad = None
    return "right"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_module_that_hides_its_output_may_have_checkpoints_inside(world_size: int) -> None:
    told: Counter[str] = Counter()
    for seed in range(40):
        results = run_threads(tell_boxed, world_size, seed)
        assert len(set(results)) == 1, seed
        told[results[0]] += 1
    # The thread of the forward alone looks ahead.
    assert told.keys() <= {"right", "elsewhere: meets a sharded param"}, told
    assert told["right"] >= 0.9 * told.total(), told
