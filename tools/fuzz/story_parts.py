"""What a story trains: a small model of which every part may be left out, and a step that remembers its losses.

The trunk is a row of blocks around nodes of the random trees. A ``StoryCall`` says what becomes of each block.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from composable import no_sync
from tools.fuzz.annotations import Annotation
from tools.fuzz.nodes import WIDTH, Boom, Call, Model, Node, RaisesInBackward, Spec, build, candidates
from tools.fuzz.programs import Step
from tools.fuzz.runner import added

__all__ = ["INSIDE", "Now", "Side", "StoryCall", "StoryModel", "StoryStep", "annotated_names"]

# Kinds of nodes in blocks: all ranks use the same parameters, and none twice.
INSIDE = "linear mlp embedding tied unused buffers twice linear mlp embedding tied twice lora".split()


@dataclass
class StoryCall(Call):
    """A forward in which blocks may do something else than usual.

    Attributes:
        ways: By the number of a block: "skip": it does not run; "side": it gives a loss too; "drop": only the loss is
            used; "detach": only the loss has a gradient; "raise": the forward
            raises before it; "raise later": the backward does.
        writes: The block whose forward clamps a parameter.
    """

    ways: Mapping[int, str] = field(default_factory=dict)
    writes: int = -1


class _Block(Node):
    """A node with a loss of its own, and a buffer with the number of the last operation that ran it."""

    parts = ("side",)

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec.uid, [build(spec)])
        self.side = nn.Linear(WIDTH, 1)
        self.register_buffer("last", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, call: StoryCall, has_side: bool, writes: bool) -> torch.Tensor:
        if self.training:
            self.last.clamp_(min=call.step)  # not lowered by what a checkpoint runs again
        if writes:
            with torch.no_grad():
                self.side.weight.clamp_(-0.3, 0.3)
        y = self.through(x, call)
        if has_side or writes:
            call.outside.append(self.side(y).pow(2).mean())
        return y


class _Trunk(Node):
    def forward(self, x: torch.Tensor, call: StoryCall) -> torch.Tensor:
        for number, block in enumerate(self.kids):
            way = call.ways.get(number, "")
            if way == "skip":
                continue
            if way == "raise":
                raise Boom
            y = block(x, call, way in ("side", "drop", "detach"), call.writes == number)
            y = RaisesInBackward.apply(y) if way == "raise later" else y
            x = x if way == "drop" else x + y.detach() if way == "detach" else y
        return x


class StoryModel(Model):
    """Blocks between an input layer and two heads; with ``is_alias`` the first block runs again at the end."""

    def __init__(self, blocks: tuple[Spec, ...], *, is_alias: bool) -> None:
        nn.Module.__init__(self)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(blocks[0].uid)
            kids: list[Node] = [_Block(spec) for spec in blocks]
            self.trunk = _Trunk(0, kids + kids[:1] * is_alias)
            self.inp = nn.Linear(WIDTH, WIDTH)
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))


class StoryStep(Step):
    """A step of which the losses are compared too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: list[torch.Tensor] = []

    def call(self, **options: Any) -> StoryCall:
        self._micro += 1
        return StoryCall(self._rank, self._step, self._micro, **options)

    def loss(self, output: torch.Tensor, call: Call | None = None) -> torch.Tensor:
        loss = super().loss(output, call)
        self.losses.append(loss.detach())
        return loss

    def no_sync_of(self, name: str) -> AbstractContextManager[None]:
        """Keep the gradients of one annotated module."""
        return nullcontext() if self.is_plain else no_sync(dict(candidates(self.model))[name])


def annotated_names(model: Model) -> Iterator[str]:
    """Yield the stable names of the parts that are annotated themselves."""
    for name, module in candidates(model):
        if hasattr(module, "_composable_kind"):
            yield name


@dataclass
class Now:
    """What decides which operations are legal, the same on every rank and in the one process.

    Attributes:
        annotation: How the model is annotated.
        annotated: Names of the parts that are annotated themselves.
        trained: Names of the parameters that were trained when the model was annotated.
        is_pending: A ``no_sync`` has kept gradients.
        has_hooks: There are hooks on parameters.
        has_module_hooks: There are hooks on modules.
        is_open: A forward waits for its backward.
        is_low: A policy has rounded numbers.
        has_twin: There is an average of the model.
        saves: The saves so far that can be loaded: their kinds and numbers.
    """

    annotation: Annotation
    annotated: list[str]
    trained: frozenset[str]
    is_pending: bool = False
    has_hooks: bool = False
    has_module_hooks: bool = False
    has_twin: bool = False
    is_open: bool = False
    is_low: bool = False
    saves: dict[int, str] = field(default_factory=dict)


@dataclass
class Side:
    """A model with its optimizer: annotated, on a rank, or plain, in one process.

    Attributes:
        model: What is trained; may be replaced, as may the optimizer.
        is_plain: In one process.
        rank: The rank in whose thread this is.
        world_size: How many ranks there are.
        seed: Of the story.
        folder: Where all ranks may write.
        now: What is legal.
        compare: Compares this rank with one process in the middle of an operation.
        rng: Gives the same numbers on every rank, and in one process; new in each operation.
        number: The number of the operation.
        losses: What the operation has computed on the samples of this rank, or the outputs.
        open: Losses that wait for their backward.
        twin: The average of the model, if there is one.
        hooks: Handles of hooks on parameters and modules.
        kept: What was saved, by number: values of the one process, or the handle of a save.
    """

    model: StoryModel
    optimizer: torch.optim.Optimizer
    is_plain: bool
    rank: int
    world_size: int
    seed: int
    folder: Path
    now: Now
    compare: Callable[[], None]
    rng: Random = field(default_factory=Random)
    number: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    open: list[torch.Tensor] = field(default_factory=list)
    twin: AveragedModel | None = None
    hooks: list[Any] = field(default_factory=list)
    kept: dict[int, Any] = field(default_factory=dict)

    def params(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, in the order of the optimizer; never those that ``unshard`` shows."""
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, self.optimizer.param_groups[0]["params"], strict=True))

    def train(self, run: Callable[[StoryStep], None]) -> None:
        """Run a step: on this rank's samples, or in one process on those of each rank, with gradients added up."""
        options = {"world_size": self.world_size, "seed": self.seed, "is_plain": self.is_plain}
        if not self.is_plain:
            step = StoryStep(self.model, self.number, self.rank, **options)
            run(step)
            self.losses = step.losses
            return
        params = list(self.model.parameters())
        before, totals = [param.grad for param in params], [None] * len(params)
        for rank in range(self.world_size):
            self.model.zero_grad()
            step = StoryStep(self.model, self.number, rank, **options)
            run(step)
            before = [None] * len(params) if step.has_dropped else before
            totals = [added(total, param.grad) for total, param in zip(totals, params, strict=True)]
            self.losses = step.losses if rank == self.rank else self.losses
        for param, old, total in zip(params, before, totals, strict=True):
            param.grad = added(old, total)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a copy of the state of model and optimizer."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
