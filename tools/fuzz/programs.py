"""What one training step does with a model: forwards and backwards in many orders.

A program is a function of a ``Step``. On a rank it runs with that rank's samples; in one process it runs once for the
samples of each rank, and the gradients are added up.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from composable import UsageError, no_sync, reduce_gradients
from composable.annotation import sharded_state_of
from composable.fsdp_module import FSDPModule
from tests.place import placed
from tools.fuzz.annotations import replicated
from tools.fuzz.nodes import WIDTH, Boom, Call, Model

__all__ = ["PROGRAMS", "Program", "Step"]

BATCH = 3


class Step:
    """One step of one rank, or of one rank's samples in one process.

    Attributes:
        model: What is trained.
        rng: Gives the same numbers on every rank, and in one process.
        has_dropped: ``zero_grad`` was called.
        is_plain: In one process.
        rank: Whose samples these are.
        world_size: How many ranks there are.
    """

    def __init__(self, model: Model, step: int, rank: int, world_size: int, seed: int, *, is_plain: bool) -> None:
        self.model = model
        self.rng = random.Random(f"{seed}/{step}")
        self.has_dropped = False
        self.is_plain = is_plain
        self.rank, self.world_size = rank, world_size
        self._step, self._rank, self._seed = step, rank, seed
        self._scale = 1 / world_size if is_plain else 1.0
        self._micro = 0

    def call(self, **options: Any) -> Call:
        self._micro += 1
        return Call(self._rank, self._step, self._micro, **options)

    def x(self, *, requires_grad: bool = False) -> torch.Tensor:
        number = random.Random(f"{self._seed}/{self._step}/{self._micro}/{self._rank}").getrandbits(32)
        x = placed(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number)))
        return x.requires_grad_(requires_grad)

    def forward(self, x: torch.Tensor | None = None, *, call: Call | None = None, **options: Any) -> torch.Tensor:
        """Run the whole model and return its loss."""
        call = call or self.call()
        output = self.model(self.x() if x is None else x, call, **options)
        return self.loss(output, call)

    def loss(self, output: torch.Tensor, call: Call | None = None) -> torch.Tensor:
        loss = output.pow(2).mean()
        while call is not None and call.outside:
            loss = loss + call.outside.pop()
        return loss

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        (loss * self._scale).backward(**options)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_plain else no_sync(self.model)

    def zero_grad(self) -> None:
        """Drop what has been collected, on every rank."""
        self.model.zero_grad()
        self.has_dropped = True

    def replicated(self) -> list[Any]:
        """Return the replicated modules; none in one process."""
        return replicated(self.model)

    def sharded(self) -> list[Any]:
        """Return the fully sharded modules; none in one process."""
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]


@dataclass(frozen=True)
class Program:
    """One kind of step."""

    run: Callable[[Step], None]  # what it does
    excludes: frozenset[str]  # tags of nodes with which plain torch refuses it, or which cannot be told apart in it
    needs: frozenset[str]  # which parts have to be annotated themselves
    is_single: bool = False  # one backward that is synchronised, so that a hook on a parameter runs once
    is_reentrant: bool = False  # everything runs under reentrant checkpointing
    is_of_one_root: bool = False  # a part that does not run has to hear of the backward of the others
    # several backwards go through the same part, and use what the recomputes of a checkpoint left
    shares_features: bool = False
    # what has to be replicated: "all" modules that are annotated; "whole", the model, by one call; or ""
    copies: str = ""


PROGRAMS: dict[str, Program] = {}


def program(
    name: str, *, excludes: str = "", needs: tuple[str, ...] = (), **options: Any
) -> Callable[[Callable[[Step], None]], Callable[[Step], None]]:
    def register(run: Callable[[Step], None]) -> Callable[[Step], None]:
        PROGRAMS[name] = Program(run, frozenset(excludes.split()), frozenset(needs), **options)
        return run

    return register


@program("plain", is_single=True)
def plain(step: Step) -> None:
    step.backward(step.forward())


@program("input with gradient", is_single=True)
def input_with_gradient(step: Step) -> None:
    step.backward(step.forward(step.x(requires_grad=True)))


@program("several forwards, one backward", is_single=True)
def several_forwards(step: Step) -> None:
    step.backward(step.forward() + step.forward() * 2)


@program("micro batches, each synchronised")
def micro_batches(step: Step) -> None:
    for _ in range(3):
        step.backward(step.forward())


@program("no_sync")
def without_sync(step: Step) -> None:
    with step.no_sync():
        step.backward(step.forward())
        if step.rng.random() < 0.5:
            step.backward(step.forward())
    step.backward(step.forward())


@program("no_sync by hand")
def sync_by_hand(step: Step) -> None:
    sharded = step.sharded()
    for module in sharded:
        module.set_requires_gradient_sync(False, recurse=False)
    with step.no_sync():
        step.backward(step.forward())
    for module in sharded:
        module.set_requires_gradient_sync(True, recurse=False)
    step.backward(step.forward())


@program("zero_grad after no_sync")
def zero_after_no_sync(step: Step) -> None:
    with step.no_sync():
        step.backward(step.forward() * 10)
    step.zero_grad()
    without_sync(step)


@program("zero_grad in the middle")
def zero_in_the_middle(step: Step) -> None:
    step.backward(step.forward() * 10)
    step.zero_grad()
    step.backward(step.forward())


@dataclass
class _Ran:
    """A forward: what it gave out, and which forwards a backward from there goes through."""

    output: torch.Tensor
    call: Call
    graph: frozenset[int]
    is_trunk: bool


# A graph of derivatives that runs again is refused: nothing gathers for its nodes.
@program("any order", excludes="force", shares_features=True)
def any_order(step: Step, *, is_direct: bool = False, has_no_sync: bool = False) -> None:
    """Run parts on samples or on what others gave out, and backward of what waits, as the generator has it."""
    rng, ran, waiting, freed, left = step.rng, [], [], frozenset[int](), 9
    waits = False
    while left > 0 or waiting:
        left -= 1
        if left >= 0 and (not waiting or rng.random() < 0.55):
            sources = [one for one in ran if one.is_trunk and not one.graph & freed]
            ran.append(_run_a_part(step, len(ran), rng.choice([None, *sources]), is_direct=is_direct))
            if ran[-1].output.requires_grad and rng.random() < 0.85:
                waiting.append(len(ran) - 1)
            continue
        if not waiting:
            continue
        chosen = rng.sample(waiting, min(len(waiting), rng.choice([1, 1, 1, 2])))
        others = [number for number in waiting if number not in chosen]
        gone = frozenset[int]().union(*(ran[number].graph for number in chosen))
        # What others still need must stay, or those can run no more.
        retains = rng.random() < 0.2 or any(ran[number].graph & gone for number in others)
        is_again = retains and left > 0 and rng.random() < 0.2
        waits = has_no_sync and (left > 0 or bool(others)) and rng.random() < 0.4
        losses = [step.loss(ran[number].output, ran[number].call) * step._scale for number in chosen]
        with step.no_sync() if waits else nullcontext():
            torch.autograd.backward(losses, retain_graph=retains)
        freed |= frozenset() if retains else gone
        waiting = waiting if is_again else others
    if waits and not step.is_plain:  # The last backward was one without synchronisation.
        reduce_gradients(step.model)


def _run_a_part(step: Step, number: int, source: _Ran | None, *, is_direct: bool) -> _Ran:
    part, head = step.rng.choice(["all", "trunk", "head"]), step.rng.randrange(2)
    how = step.rng.choice(["as it is", "as it is", "detached", "leaf"])
    call = step.call()
    x = step.x() if source is None else source.output
    x = x if how == "as it is" else x.detach()
    x = x.requires_grad_() if how == "leaf" else x
    model: Any = step.model
    if not is_direct or part == "all":
        output = model(x, call, part=part, head=head)
    else:
        output = model.trunk(model.inp(x), call) if part == "trunk" else model.heads[head](x)
    graph = source.graph if source is not None and how == "as it is" else frozenset()
    return _Ran(output, call, graph | {number}, part == "trunk")


@program("any order, with no_sync", excludes="force", is_of_one_root=True, shares_features=True)
def any_order_with_no_sync(step: Step) -> None:
    any_order(step, has_no_sync=True)


@program("any order of parts as they are", excludes="force", needs=("trunk", "heads"), shares_features=True)
def any_order_of_parts(step: Step) -> None:
    any_order(step, is_direct=True)


@program("several losses at once", is_single=True)
def losses_at_once(step: Step) -> None:
    losses = [step.forward(), step.forward(head=1)]
    torch.autograd.backward([loss * step._scale for loss in losses])


@program("gradients of inputs", excludes="reentrant")
def gradients_of_inputs(step: Step) -> None:
    x = step.x(requires_grad=True)
    loss = step.forward(x)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    step.backward(loss)
    step.backward(step.forward((x + 0.1 * grad).detach()))


@program("gradient penalty", excludes="reentrant first_order force side")
def gradient_penalty(step: Step) -> None:
    x = step.x(requires_grad=True)
    loss = step.forward(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    step.backward(loss + grad.pow(2).sum())


@program("all in a thread", excludes="compiled", is_single=True)
def all_in_thread(step: Step) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(plain, step).result()


@program("backward in a thread", is_single=True)
def backward_in_thread(step: Step) -> None:
    loss = step.forward()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(step.backward, loss).result()


@program("eval between")
def eval_between(step: Step) -> None:
    loss = step.forward()
    step.model.eval()
    with step.rng.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])():
        step.forward(step.x() * 1)
    step.model.train()
    step.backward(loss)


@program("forward raises")
def forward_raises(step: Step) -> None:
    with pytest.raises(Boom):
        step.forward(call=step.call(fails="forward"))
    step.backward(step.forward())


@program("backward raises")
def backward_raises(step: Step) -> None:
    loss = step.forward(call=step.call(fails="backward"))
    with pytest.raises(Boom):
        step.backward(loss)
    step.zero_grad()
    step.backward(step.forward())


@program("checkpoint around all", excludes="force", is_single=True)
def checkpointed(step: Step) -> None:
    call = step.call()
    output = checkpoint(step.model, step.x(), call, use_reentrant=False)
    step.backward(step.loss(output, call))


@program("reentrant checkpoint around all", excludes="force", is_reentrant=True)
def reentrant(step: Step) -> None:
    call = step.call()
    output = checkpoint(step.model, step.x(requires_grad=True), call, use_reentrant=True)
    step.backward(step.loss(output, call))


@program("saved tensors go away", is_single=True)
def saved_elsewhere(step: Step) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
        loss = step.forward()
    step.backward(loss)


@program("unshard by hand", is_single=True)
def unshard_by_hand(step: Step) -> None:
    sharded = step.sharded()
    for number, module in enumerate(sharded):
        if number % 2:
            module.unshard(async_op=True)
    loss = step.forward()
    for module in sharded:
        module.reshard()
    step.backward(loss)


@program("nothing", is_single=True)
def nothing(step: Step) -> None:
    pass


@program("the second leg waits", needs=("copies of shards",), is_of_one_root=True)
def second_leg_waits(step: Step) -> None:
    hybrid = [module for module in step.sharded() if sharded_state_of(module).grid.is_hybrid]
    ways = [step.rng.choice(["shard", "shard", "none", "all"]) for _ in range(3)]
    for way in ways:
        for module in hybrid:
            module.set_requires_all_reduce(way != "shard", recurse=False)
        with step.no_sync() if way == "none" else nullcontext():
            step.backward(step.forward(head=step.rng.randrange(2)))
    for module in hybrid:
        module.set_requires_all_reduce(True, recurse=False)
    if step.rng.random() < 0.7:
        step.backward(step.forward())
    elif not step.is_plain:
        reduce_gradients(step.model)


# Of replicated modules alone


def switched(step: Step, switch: Callable[[Any, bool], None]) -> None:
    for is_on in (False, True):
        for module in step.replicated():
            switch(module, is_on)
        step.backward(step.forward())


@program("copies: set_requires_gradient_sync", copies="all")
def copies_requires_sync(step: Step) -> None:
    switched(step, lambda module, is_on: module.set_requires_gradient_sync(is_on, recurse=is_on))


@program("copies: set_is_last_backward", copies="all")
def copies_last_backward(step: Step) -> None:
    switched(step, lambda module, is_on: module.set_is_last_backward(is_on))


@program("copies: require_backward_grad_sync", copies="all")
def copies_require_sync(step: Step) -> None:
    switched(step, lambda module, is_on: setattr(module, "require_backward_grad_sync", is_on))


@program("copies: reduce_gradients", copies="all")
def copies_reduce(step: Step) -> None:
    with step.no_sync():
        step.backward(step.forward())
        step.backward(step.forward(head=1))
    if not step.is_plain:
        reduce_gradients(step.model)


@program("copies: one rank's backward raises", copies="whole")
def copies_one_raises(step: Step) -> None:
    failing = step.rng.randrange(step.world_size)
    loss = step.forward(call=step.call(fails="backward" if step.rank == failing else ""))
    try:
        step.backward(loss)
    except Boom:
        assert step.rank == failing
    except UsageError as error:
        if f"rank {failing} did not finish backward" not in str(error):
            raise
    step.zero_grad()
    step.backward(step.forward())
