"""Ranks with different numbers of inputs: annotated models as what ``torch.distributed.algorithms.join.Join`` takes.

A rank without inputs does not know which modules the others run, so they tell it: each collective before it starts, by
one small message of every rank. While all ranks have inputs, one message at the start of a step says so, and is all.
A step begins with a forward and ends with the backward after it; without gradients, with the forward. How a root of
``fully_shard`` and an annotation of ``replicate`` tell and follow is in ``uneven_parts.py``; see docs/uneven_inputs.md.
"""

import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from composable.annotation import Root
from composable.comm import Ranks, annotating, calling, wait_for_work
from composable.comm_hooks import register_comm_hook as reduce_by_hook
from composable.engine import HookFunction
from composable.errors import ComposableError, ConfigError, DesyncError, UsageError, place_of_rank
from composable.ground.frames import in_backward
from composable.ground.names import check_bool, check_module, describe_module, described
from composable.ground.torch_hooks import at_end_of_backward, next_ending_number
from composable.replication import ReplicateState, check_replicated
from composable.uneven_parts import (
    JoinedPart,
    ReplicatedPart,
    ShardedPart,
    check_shares,
    connect,
    find_states,
    ranks_of,
)

__all__ = ["DDPView", "UnevenInputs", "as_ddp", "joinable"]

# What is told: of which part of the model, what happens there, with what.
_Message: TypeAlias = tuple[int, str, tuple[Any, ...]]
# In place of a part: of the step itself.
_STEP = -1
_STEP_TEXTS = {"begin": "begins a step", "leave": "begins another step", "end": "has ended the step"}
# Bytes of a message, as they travel; what is longer takes another one.
_SHORT = 256
# What all ranks go through to the end of the step, also where it raises.
_ENDINGS = {"ASSIGN", "finish"}


def joinable(module: nn.Module, *, step: Callable[[], object] | None = None) -> "UnevenInputs":
    """Return what ``torch.distributed.algorithms.join.Join`` takes for a model with ``fully_shard`` or ``replicate``.

    Ranks that run out of inputs then follow the others to the end of theirs. No communication; making a ``Join`` of it
    is collective, and decides the root as a first forward does.

    Args:
        module: Has all annotated modules of the model at or below it.
        step: What the loop does between a backward that averages gradients and the next forward, such as clipping,
            ``optimizer.step()``, ``optimizer.zero_grad()``. Called on ranks without inputs after each such backward of
            the others, since each rank alone has its shards. May be left out where nothing sharded is trained,
            or ``step_in_backward`` does it.

    Raises:
        ConfigError: ``module`` is no module, or ``step`` no function.
        UsageError: Nothing is annotated there, or by different ranks of which none are all.
    """
    check_module("module", module)
    if step is not None and not callable(step):
        raise ConfigError(f"step is {described(step)}", fix="pass a function that takes no arguments")
    return UnevenInputs(module, step)


def as_ddp(module: nn.Module) -> "DDPView":
    """Return an object that fits where an algorithm of torch wants its wrapper around ``module``.

    For ``register_ddp_comm_hook``, ``register_ddp`` of overlapped optimizers, ``hook_with_zero_step``, and
    ``Join``. Train with ``module`` as before: the object is not called. No communication.

    Args:
        module: Annotated by ``replicate``, alone.

    Raises:
        ConfigError: ``module`` is no module.
        UsageError: It is not replicated, or shares its buckets with other modules.
    """
    state = check_replicated(module, "as_ddp")
    if len(state.modules) > 1:
        raise UsageError(
            "as_ddp of a module that shares buckets with others",
            at=", ".join([place_of_rank(), *map(describe_module, state.modules)]),
            fix="replicate the module around them",
        )
    if not isinstance(state.view, DDPView):
        # Kept: torch's hooks refer to it weakly.
        state.view = DDPView(module, state)
    return state.view


class UnevenInputs(Joinable):
    """The result of ``joinable``; a ``Joinable`` for ``torch.distributed.algorithms.join.Join``.

    Attributes:
        module: The model.
        step_alone: What a rank without inputs does after a backward of the others that averages; ``None``: nothing.
    """

    def __init__(self, module: nn.Module, step: Callable[[], object] | None) -> None:
        super().__init__()
        self.module = module
        self.step_alone = step
        self._ranks = ranks_of(module)
        self._steps: _Steps | None = None
        self._hook: weakref.ref[JoinHook] | None = None

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` counts the ranks that still have inputs."""
        return self._ranks.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that ``Join`` counts: all that share anything of the model."""
        return self._ranks.process_group

    @annotating("Join")
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what stands in for this rank once it has no inputs left; called by ``Join``. Collective.

        Args:
            **kwargs: ``divide_by_initial_world_size``: whether sums of gradients are divided by the number of all
                ranks, the default, or of those that still have inputs; and what is for other joinables.

        Raises:
            ConfigError: ``divide_by_initial_world_size`` is no bool.
            UsageError: Sharded parameters are trained, and nothing steps them on ranks without inputs; or a replicated
                module has ``static_graph=True``; or parts of the model belong to a root around it; or ranks have
                different numbers of annotated modules.
            DesyncError: Ranks chose different things.
        """
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        ranks = self._ranks = ranks_of(self.module)
        with ranks.agreed():
            check_bool("divide_by_initial_world_size", divides_by_all)
            states = find_states(self.module)
        text = f"divide_by_initial_world_size={divides_by_all}, {'a' if self.step_alone else 'no'} step"
        ranks.compare(
            text,
            shown=text,
            what="the ranks prepare for uneven inputs in different ways",
            fix="call joinable and Join with the same arguments on every rank",
        )
        # One that ran on its own so far may belong to the root around it now: roots are decided here.
        owners = list(dict.fromkeys(map(connect, states)))
        check_shares(owners, ranks)
        with ranks.agreed():
            self._check_stepped(owners)
        self.end()
        steps = self._steps = _Steps(self, ranks, owners, divides_by_all=divides_by_all)
        hook = _IdleRank(self, steps)
        # ``Join`` does not say when an exception ends it: its hooks are gone then.
        self._hook = weakref.ref(hook)
        return hook

    def _check_stepped(self, owners: Sequence[Root | ReplicateState]) -> None:
        if self.step_alone is not None or not torch.is_grad_enabled():
            return
        for handle in [handle for owner in owners if isinstance(owner, Root) for handle in owner.handles]:
            if not handle.steppers and any(param.sharded.requires_grad for param in handle.params):
                raise UsageError(
                    "a rank without inputs has shards that it alone can step, and joinable was given no step",
                    at=f"{place_of_rank()}, {handle.described}",
                    fix="pass joinable(model, step=...) a function that does what the loop does after backward: clip, "
                    "optimizer.step(), optimizer.zero_grad()",
                )

    @calling("Join")
    def _notify(self) -> bool:
        """Let ``Join`` know that this rank has inputs; false: the context is over. Collective.

        Raises:
            RuntimeError: A rank has no inputs left, and ``Join`` was told to throw then.
        """
        if not self.lasts():
            self.end()
            return False
        try:
            work = Join.notify_join_context(self)
        except RuntimeError:
            self.end()
            raise
        wait_for_work(work, self._ranks.process_group, "Join")
        return True

    def lasts(self) -> bool:
        """Say whether the context lasts, or an exception has ended it."""
        return self._hook is not None and self._hook() is not None and bool(self._join_config.enable)

    def end(self) -> None:
        """The context is over."""
        steps, self._steps, self._hook = self._steps, None, None
        if steps is not None:
            steps.end()
            for part in steps.parts:
                part.close()


class DDPView(UnevenInputs):
    """The result of ``as_ddp``; a ``Joinable`` for ``torch.distributed.algorithms.Join``.

    Attributes:
        module: The replicated module.
    """

    def __init__(self, module: nn.Module, state: ReplicateState) -> None:
        super().__init__(module, None)
        self._state = state

    @property
    def device(self) -> torch.device:
        """Where its gradients are averaged."""
        return self._state.grid.everyone.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that average."""
        return self._state.grid.everyone.process_group

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Do what ``composable.register_comm_hook`` does, for good. Collective."""
        reduce_by_hook(self.module, state, hook)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return those of the module."""
        return self.module.parameters()

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """The buckets of this backward are those of all later ones; asked by ``hook_with_zero_step``."""
        return self._state.reducer.is_rebuilt


class _IdleRank(JoinHook):
    """What ``Join`` calls on a rank without inputs, and at the end on all."""

    def __init__(self, view: UnevenInputs, steps: "_Steps") -> None:
        self._view = view
        self._steps = steps

    @annotating("Join")
    def main_hook(self) -> None:
        """Do on this rank what a step of the others waits for.

        What goes wrong here is raised here; others that wait for this rank are told by the watch over ranks that wait.
        """
        steps = self._steps
        try:
            with torch.no_grad():
                was_following, steps.is_following = steps.is_following, True
                for part in steps.parts:
                    part.stand_by(is_first=not was_following, keeps_own=self._view.step_alone is None)
                steps.begin(steps.meet(None))
                is_due = self._follow()
            if is_due and self._view.step_alone is not None:
                self._view.step_alone()
        except BaseException:
            # It leaves ``Join``: what goes on is no follower.
            self._view.end()
            raise

    def _follow(self) -> bool:
        """Do what ranks with inputs tell, until they end the step; returns whether to step."""
        failure: ComposableError | None = None
        while True:
            number, what, args = next(one for one in self._steps.meet(None) if one is not None)
            if number == _STEP and what == "drop":
                self._steps.drop(args[0])
                continue
            if number == _STEP:
                if failure is not None:
                    raise failure
                return what == "end" and bool(args[0])
            try:
                self._steps.parts[number].follow(what, args)
            except ComposableError as error:
                if what not in _ENDINGS or isinstance(error, DesyncError):
                    raise
                failure = failure or error

    def post_hook(self, is_last_joiner: bool) -> None:
        """No rank has inputs left: give all what is not sharded of the one that ran longest. Collective."""
        self._steps.is_following = True
        self._steps.finish_join()
        self._view.end()


class _Steps:
    """The steps of one ``Join``, on one rank, and what is told in them.

    Args:
        view: Knows the context.
        ranks: All that take part.
        owners: What communicates on its own, in an order equal on all ranks.
        divides_by_all: Whether sums are divided by the number of all ranks, or of those with inputs.

    Attributes:
        number: Its place among all that end a backward: after all parts.
        parts: Tell of the owners, or follow.
        is_following: This rank has no inputs left: what its parts do is told by others.
    """

    def __init__(
        self, view: UnevenInputs, ranks: Ranks, owners: Sequence[Root | ReplicateState], *, divides_by_all: bool
    ) -> None:
        self.number = next_ending_number()
        self.is_following = False
        self._view = view
        self._ranks = ranks
        self._divides_by_all = divides_by_all
        self._begun = 0
        self._is_over = self._is_open = self._is_due = self._has_listeners = False
        self._opener: nn.Module | None = None
        self._backward: weakref.ref[Callable[[], None]] | None = None
        self.parts: list[JoinedPart] = [
            ShardedPart(number, self, owner) if isinstance(owner, Root) else ReplicatedPart(number, self, owner)
            for number, owner in enumerate(owners)
        ]
        self._buffers = [flat for part in self.parts for flat in part.buffers()]

    # Where a step begins and ends

    def begin_forward(self, opener: nn.Module) -> None:
        """A forward of ``opener`` begins, and with the first one a step; so does the next one of the same module."""
        if self.is_following or self._is_over:
            return
        if self._is_open and self._opener is opener and not in_backward():
            # No backward came.
            self.tell(_STEP, "leave")
            self._is_open = False
        if self._is_open or self._open():
            self._opener = self._opener or opener

    def end_forward(self, opener: nn.Module, *, is_awaited: bool) -> None:
        """A forward of ``opener`` ends; ``is_awaited``: a backward may follow."""
        if self._opener is opener and not is_awaited and not in_backward():
            self.finish()

    def begin_backward(self) -> None:
        """A backward begins; the step ends with it."""
        if self.is_following or self._is_over or not (self._is_open or self._open()):
            return
        if self._backward is None or self._backward() is None:
            self._backward = weakref.ref(at_end_of_backward(self))
            if self._has_listeners:
                self.tell(_STEP, "drop", [flat.gradients.dropped() for flat in self._buffers])

    def end_by_hand(self) -> None:
        """Reductions were ended outside of a backward."""
        if not in_backward():
            self.finish()

    def start(self) -> None:
        """Do nothing yet: a backward ends, and its parts have to finish first."""

    def finish(self) -> None:
        """A backward has ended in all parts, or none will follow."""
        if self._is_open and not self.is_following:
            self.tell(_STEP, "end", self._is_due)
        self._is_open, self._opener = False, None

    def note_averages(self) -> None:
        """Parameters get averages in this step: the optimizer steps after it."""
        self._is_due = True
        for flat in self._buffers:
            flat.gradients.watch()

    def drop(self, dropped: Sequence[tuple[int, int]]) -> None:
        """Drop what users have dropped on ranks with inputs."""
        for flat, bits in zip(self._buffers, dropped, strict=True):
            flat.gradients.drop_like(*bits)

    def end(self) -> None:
        """The context is over: from now on nothing is told."""
        self._is_over, self._is_open = True, False

    def is_live(self) -> bool:
        """Say whether the context lasts."""
        return not self._is_over and self._view.lasts()

    def begin(self, every: Sequence[_Message | None]) -> None:
        """Note who has inputs: whoever tells that a step begins."""
        running = {number for number, one in zip(self._ranks.numbers, every, strict=True) if one is not None}
        self._has_listeners = len(running) < self._ranks.size
        for part in self.parts:
            part.begin_step(running, divides_by_all=self._divides_by_all)

    def finish_join(self) -> None:
        """Let all ranks have what the one that began most steps has. Collective."""
        begun = dict(zip(self._ranks.numbers, self._ranks.objects(self._begun), strict=True))
        with torch.no_grad():
            for part in self.parts:
                part.finish_join(begun)

    def _open(self) -> bool:
        """Begin a step; false: the context is over. Collective."""
        if not self._view._notify():
            self.end()
            return False
        self._begun += 1
        self.begin(self.meet((_STEP, "begin", ())))
        self._is_open, self._opener, self._is_due = True, None, False
        return True

    # What is told

    def is_telling(self, *, is_needed: bool = True) -> bool:
        """Say whether some rank has to be told; begins a step if there is none and it ``is_needed``."""
        if self.is_following or self._is_over or not (self._is_open or (is_needed and self._open())):
            return False
        return self._has_listeners

    def tell(self, part: int, what: str, *args: Any) -> None:
        """Tell ranks without inputs, if there are any, what starts in a part of the model. Collective.

        Raises:
            DesyncError: Ranks with inputs tell different things.
        """
        if self.is_telling():
            self.meet((part, what, args))

    def meet(self, told: _Message | None) -> list[_Message | None]:
        """Return what each rank tells; ``None``: it has no inputs. Collective.

        Raises:
            DesyncError: Ranks with inputs tell different things.
        """
        every = meet_in_join(self._ranks, told)
        found = [one for one in every if one is not None]
        if any(one != found[0] for one in found):
            texts = zip(self._ranks.numbers, map(self._text_of, every), strict=True)
            self.end()
            raise DesyncError(
                "\n".join(
                    ["ranks with inputs do different things inside of Join"]
                    + [f"    rank {number}: {text}" for number, text in texts]
                ),
                at=place_of_rank(),
                fix="run the same modules, no_sync and backwards on every rank that has inputs",
            )
        return every

    def _text_of(self, told: _Message | None) -> str:
        if told is None:
            return "has no inputs left"
        part, what, args = told
        if part != _STEP:
            return self.parts[part].describe(what, args)
        return _STEP_TEXTS.get(what) or f"has dropped gradients {args}"


@calling("Join")
def meet_in_join(ranks: Ranks, told: _Message | None) -> list[_Message | None]:
    """Return what each rank tells: one collective where all of it is short. Collective."""
    if ranks.is_alone:
        return [told] * ranks.size
    data = pickle.dumps(told)
    is_long = len(data) >= _SHORT
    own = bytes([is_long, *(b"" if is_long else data)]).ljust(_SHORT, b"\0")
    with torch.inference_mode(mode=False):
        every = torch.zeros(ranks.size * _SHORT, dtype=torch.uint8, device=ranks.device)
        start = ranks.rank * _SHORT
        every[start : start + _SHORT] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        ranks.gather_ragged(every, range(0, ranks.size * _SHORT + 1, _SHORT))
    received = bytes(every.tolist())
    pieces = [received[start : start + _SHORT] for start in range(0, len(received), _SHORT)]
    if any(piece[0] for piece in pieces):
        return ranks.objects(told)
    return [pickle.loads(piece[1:]) for piece in pieces]  # what these ranks have written just now
