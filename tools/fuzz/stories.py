"""Stories: 15 to 40 random operations on one model, each compared with the same on a plain model in one process.

A story is a tuple of small values that all follows from, so it can be printed, run again, and made smaller.
"""

import dataclasses
import gc
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable import ComposableError, DesyncError
from tests.parity import full
from tests.world import RankErrors, run_threads
from tools.fuzz.annotations import Annotation, Wrong, annotate
from tools.fuzz.cases import OPTIMIZERS
from tools.fuzz.nodes import Spec
from tools.fuzz.operations import OPERATIONS, Skipped
from tools.fuzz.operations_between import draw_way
from tools.fuzz.runner import (
    EXACT,
    Outcome,
    check,
    check_gradients,
    check_values,
    line_of,
    make_optimizer,
    outcome_of,
)
from tools.fuzz.story_parts import INSIDE, Now, Side, StoryModel, annotated_names

__all__ = ["Op", "Story", "draw_story", "run_story", "shrink_story", "tell_annotated"]

# Of a story; ranks that wait for each other say so at once.
TIMEOUT_S = 120.0
LENGTHS = 15, 40
# Of numbers that a policy has rounded to float32.
ROUNDED = 3e-5
# Operations that say nothing before one of these.
AFTER = {
    "load": {"save"},
    "average: update": {"average: begin"},
    "hooks go away": {"hooks on parameters", "hooks on modules"},
    "train: backward of that forward": {"train: a forward, for later"},
    "reduce_gradients": {"train: no_sync and no more"},
}


@dataclass(frozen=True)
class Op:
    """One operation: its name in the table, and the number that its choices follow from."""

    number: int
    name: str

    def __str__(self) -> str:
        return f"{self.number:>3} {self.name}"


@dataclass(frozen=True)
class Story:
    """A model, how it is annotated, and what happens to it."""

    seed: int  # whence it comes
    world_size: int  # how many ranks
    blocks: tuple[Spec, ...]  # what is in the blocks of the model
    is_alias: bool  # the first block runs twice
    annotation: Annotation  # at first
    optimizer: str  # one of ``OPTIMIZERS``
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        blocks = ", ".join(map(str, self.blocks)) + ", the first again" * self.is_alias
        return "\n".join(
            [
                f"seed {self.seed}, world size {self.world_size}, {self.optimizer}",
                f"blocks     {blocks}",
                f"annotation {self.annotation}",
                *map(str, self.ops),
                f"again: {self.command}",
            ]
        )

    @property
    def command(self) -> str:
        """The command that runs the story."""
        command = f"python -m tools.fuzz.run --stories --seeds {self.seed} --world-size {self.world_size}"
        numbers = [op.number for op in self.ops]
        is_whole = numbers == [op.number for op in draw_story(self.seed, self.world_size).ops]
        return command if is_whole else f"{command} --only {','.join(map(str, numbers))}"

    def only(self, numbers: Sequence[int]) -> "Story":
        """Return the story without the other operations."""
        return dataclasses.replace(self, ops=tuple(op for op in self.ops if op.number in numbers))


def draw_story(seed: int, world_size: int) -> Story:
    """Return the story of a seed."""
    rng = random.Random(f"{seed}/story")
    blocks = tuple(Spec(rng.choice(INSIDE), rng.getrandbits(32)) for _ in range(rng.randint(2, 4)))
    drawn: list[str] = []
    length = rng.randint(*LENGTHS)
    while len(drawn) < length:
        fits = {name: one.weight for name, one in OPERATIONS.items() if name not in AFTER or AFTER[name] & {*drawn}}
        drawn += rng.choices(list(fits), list(fits.values()))
        # Most of what trains is followed by a step, most of what sets a stage by training.
        if drawn[-1].startswith("train") and rng.random() < 0.5:
            drawn.append("step")
        elif drawn[-1] in ("annotate anew", "freeze or thaw", "load") and rng.random() < 0.7:
            drawn.append(rng.choice(["train: plain", "train: no_sync and no more", "train: parts are left out"]))
    return Story(
        *(seed, world_size, blocks, rng.random() < 0.2, draw_way(rng, world_size), rng.choice(OPTIMIZERS)),
        ops=tuple(Op(number, name) for number, name in enumerate(drawn)),
    )


# Each operation of a story with how it ended: "done", "skipped", or the error that refused it.
Ended = list[tuple[Op, str]]


def run_story(story: Story, *, timeout_s: float = TIMEOUT_S) -> tuple[Outcome, Ended]:
    """Run ``story``; whatever happens is an outcome."""
    before = torch.get_default_dtype()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Outcome("right"), run_threads(_on_a_rank, story.world_size, story, folder, timeout_s=timeout_s)[0]
    except RankErrors as errors:
        first = next(iter(errors.errors.values()))
        if isinstance(first, _Impossible):
            return Outcome("impossible", line_of(first), str(errors)), []
        return outcome_of(errors, story), []
    except TimeoutError as error:
        return Outcome("hang", line_of(error), str(error)), []
    finally:
        torch.set_default_dtype(before)


def shrink_story(
    story: Story, outcome: Outcome, run: Callable[[Story], Outcome] = lambda story: run_story(story)[0]
) -> Iterator[tuple[Story, Outcome]]:
    """Yield shorter and shorter stories that end in the same way, until no operation can be taken out."""
    alike = _likeness(outcome)
    share = max(len(story.ops) // 2, 1)
    while True:
        start, has_shrunk = 0, False
        while start < len(story.ops):
            shorter = dataclasses.replace(story, ops=story.ops[:start] + story.ops[start + share :])
            ended = run(shorter)
            if _likeness(ended) == alike:
                story, has_shrunk = shorter, True
                yield shorter, ended
            else:
                start += share
        if share == 1 and not has_shrunk:
            return
        share = max(share // 2, 1)


def _likeness(outcome: Outcome) -> tuple[str, str]:
    """Return what of an outcome has to stay: numbers and names may change."""
    text = re.sub(r"'[^']*'|operation \d+|[\d.e+-]+", "", outcome.text)
    return outcome.kind, text[:60]


class _Impossible(Exception):  # noqa: N818  # an outcome
    """Plain torch refuses what a story does."""


def _on_a_rank(story: Story, folder: str) -> Ended:
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    teller = _Teller(story, Path(folder))
    ended = [(op, teller.perform(op)) for op in story.ops]
    for handle in teller.ranks.kept.values():
        if hasattr(handle, "wait"):
            handle.wait()
    return ended


def tell_annotated(story: Story, folder: Path) -> None:
    """Perform what is legal on this rank, and compare nothing; what is refused drops the gradients."""
    model: Any = annotate(lambda: StoryModel(story.blocks, is_alias=story.is_alias), story.annotation, lambda _: None)
    names = frozenset(name for name, param in model.named_parameters() if param.requires_grad)
    now = Now(story.annotation, list(annotated_names(model)), names)
    optimizer = make_optimizer(story.optimizer, model.parameters())
    common = (dist.get_rank(), story.world_size, story.seed, folder, now, lambda *_: None)
    side = Side(model, optimizer, False, *common)
    for op in story.ops:
        operation = OPERATIONS[op.name]
        if operation.is_legal(now):
            side.rng, side.number, side.losses = random.Random(f"{story.seed}/{op.number}"), op.number, []
            try:
                for name, value in (operation.run(side) or {}).items():
                    setattr(now, name, value)
            except Skipped:
                pass
            except ComposableError:
                if operation.trains:
                    side.model.zero_grad()
                    now.is_pending = now.is_open = False
        gc.collect()
    for handle in side.kept.values():
        if hasattr(handle, "wait"):
            handle.wait()


class _Teller:
    """Performs the operations of a story on this rank and in one process, in turn."""

    def __init__(self, story: Story, folder: Path) -> None:
        def make() -> StoryModel:
            return StoryModel(story.blocks, is_alias=story.is_alias)

        annotated: Any = annotate(make, story.annotation, lambda model: None)
        plain = make()
        names = frozenset(name for name, param in plain.named_parameters() if param.requires_grad)
        self.now = Now(story.annotation, list(annotated_names(annotated)), names)
        common = (dist.get_rank(), story.world_size, story.seed, folder, self.now, self.compare)
        self.ranks = Side(annotated, make_optimizer(story.optimizer, annotated.parameters()), False, *common)
        self.plain = Side(plain, make_optimizer(story.optimizer, plain.parameters()), True, *common)
        self.exact = EXACT
        self.place = "at the beginning"
        self.compare(self.ranks.params())

    def perform(self, op: Op) -> str:
        """Perform one operation; return how it ended."""
        operation = OPERATIONS[op.name]
        self.place = f"operation {op.number} ({op.name})"
        if not operation.is_legal(self.now):
            return "skipped"
        self._begin(self.ranks, op)
        try:
            changes = operation.run(self.ranks)
        except Skipped:
            return "skipped"
        except ComposableError as error:
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, DesyncError):
                raise
        except Exception as error:
            error.add_note(self.place)
            raise
        else:
            said = "done"
        everyone: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(everyone, said.partition(":")[0])
        if len(set(everyone)) > 1:
            raise Wrong(f"refused on some ranks only: {everyone}, {self.place}: {said}")
        if said != "done":
            if operation.trains:
                for side in (self.ranks, self.plain):
                    side.model.zero_grad()
                self._follow(op)
                self.now.is_pending = self.now.is_open = False
            self.place += ", which was refused"
            self.compare(self.ranks.params())
            return said
        self._begin(self.plain, op)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                operation.run(self.plain)
        except Exception as error:
            raise _Impossible(f"{self.place}: {line_of(error)}") from error
        for name, value in (changes or {}).items():
            setattr(self.now, name, value)
        self.exact = ROUNDED if self.now.is_low else EXACT
        self._check_losses()
        self.compare(self.ranks.params())
        return said

    def _follow(self, op: Op) -> None:
        """Take over what a forward has written before it was refused."""
        for name, buffer in self.plain.model.named_buffers():
            buffer.copy_(self.ranks.model.get_buffer(name))
        if op.name == "train: a forward writes":  # Maybe to shards, before their module ran.
            with torch.no_grad():
                for param, mine in zip(self.plain.params().values(), self.ranks.params().values(), strict=True):
                    param.copy_(full(mine))

    def compare(self, params: dict[str, nn.Parameter]) -> None:
        """Compare all that training changes."""
        plain = self.plain.params()
        if list(params) != list(plain):
            raise Wrong(f"the names of parameters have changed, {self.place}")
        check_values(params, {name: one.detach() for name, one in plain.items()}, self.place, self.exact)
        for name, param in params.items():
            if param.requires_grad != plain[name].requires_grad:
                raise Wrong(f"requires_grad differs: {name!r}, {self.place}")
        if not self.now.is_pending:
            check_gradients(params, {name: one.grad for name, one in plain.items()}, self.place, self.exact)
        self._check_states()
        if self.ranks.twin is not None and self.plain.twin is not None:
            averages = dict(self.plain.twin.module.named_parameters())
            check_values(
                dict(self.ranks.twin.module.named_parameters()), averages, f"average, {self.place}", self.exact
            )
        for name, buffer in self.plain.model.named_buffers():
            if name.endswith("last") and self.ranks.model.get_buffer(name).item() != buffer.item():
                raise Wrong(f"buffer differs: {name!r}, {self.place}")

    def _check_states(self) -> None:
        pairs = {}
        plain = self.plain.params()
        for name, param in self.ranks.params().items():
            have, want = (
                dict(one.optimizer.state.get(p, {})) for one, p in ((self.ranks, param), (self.plain, plain[name]))
            )
            if have.keys() != want.keys():
                raise Wrong(f"optimizer state of other keys: {name!r}, {sorted(have)} not {sorted(want)}, {self.place}")
            pairs |= {f"{name}.{key}": (have[key], want[key]) for key in want if isinstance(want[key], torch.Tensor)}
        check(pairs, "optimizer state", self.place, self.exact)

    def _check_losses(self) -> None:
        have, want = self.ranks.losses, self.plain.losses
        if len(have) != len(want):
            raise Wrong(f"{len(have)} losses or outputs, not {len(want)}, {self.place}")
        pairs = {str(number): (a.double(), b.double()) for number, (a, b) in enumerate(zip(have, want, strict=True))}
        check(pairs, "output", self.place, self.exact)

    def _begin(self, side: Side, op: Op) -> None:
        side.rng, side.number, side.losses = random.Random(f"{self.ranks.seed}/{op.number}"), op.number, []
