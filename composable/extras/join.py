"""Training steps in which some ranks have no inputs.

A *part* of the model communicates on its own: a root of ``fully_shard``, or an annotation of ``replicate``. On a rank
with inputs, a part announces each event that it is about to start, in one small collective; on a rank without inputs,
the part does the same. While all ranks have inputs, there is only one message, at the start of a step. A step begins
with a forward and ends with the backward after it; without gradients, it ends with the forward.
"""

import enum
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from composable.annotation import AnnotationState, FullyShardState, ReplicateState, Root
from composable.comm import Ranks, calling
from composable.engine import FlatBuffer, Handle, Listeners, StepListener
from composable.errors import ComposableError, DesyncError
from composable.ground.frames import in_backward
from composable.ground.names import describe_module
from composable.ground.torch_hooks import at_end_of_backward, next_ending_number

# The owner of a part, which communicates on its own.
Owner: TypeAlias = Root | ReplicateState
# The number of a part of the model, the event that starts there, and its arguments.
_Message: TypeAlias = tuple[int, str, tuple[Any, ...]]
# In place of the number of a part: the step itself.
_STEP = -1
# The event after which every rank goes on to the end of the step, also if it raises.
_FINISH = "finish"


class _Phase(enum.Enum):
    """The phase of a rank inside of ``Join``.

    BETWEEN: it has inputs, and is between two steps. OPEN: it runs a step. FOLLOWING: it has no inputs left, and
    follows the messages of other ranks. OVER: the context has ended.
    """

    BETWEEN = enum.auto()
    OPEN = enum.auto()
    FOLLOWING = enum.auto()
    OVER = enum.auto()


class JoinSteps:
    """The steps of one ``Join`` on one rank, and their messages.

    Args:
        ranks: All ranks that take part.
        owners: The parts, in an order equal on all ranks.
        notify: Notifies ``Join`` that this rank has inputs; returns false if the context is over. Collective.
        lasts: Returns whether the context still runs; false if an exception has ended it.
        divides_by_all: Whether sums are divided by the number of all ranks, or of the ranks with inputs.

    Attributes:
        number: Its place in the order of all objects that end a backward: after all parts.
    """

    def __init__(
        self,
        ranks: Ranks,
        owners: Sequence[Owner],
        notify: Callable[[], bool],
        lasts: Callable[[], bool],
        *,
        divides_by_all: bool,
    ) -> None:
        self.number = next_ending_number()
        self._phase = _Phase.BETWEEN
        self._notify = notify
        self._lasts = lasts
        self._ranks = ranks
        self._divides_by_all = divides_by_all
        self._is_due = self._has_listeners = False
        self._opener: nn.Module | None = None
        self._backward: weakref.ref[Callable[[], None]] | None = None
        self._parts: list[_ShardedPart | _ReplicatedPart] = [
            _ShardedPart(number, self, owner) if isinstance(owner, Root) else _ReplicatedPart(number, self, owner)
            for number, owner in enumerate(owners)
        ]
        self._buffers = [flat for part in self._parts for flat in part.buffers]

    # Begin and end of a step

    def begin_forward(self, opener: nn.Module) -> None:
        """Begin a step with a forward of ``opener`` if none runs; its next forward begins the next step."""
        if self._phase is _Phase.OPEN and self._opener is opener and not in_backward():
            # The last forward had no backward.
            self.tell(_STEP, "leave")
            self._phase = _Phase.BETWEEN
        if self._open():
            self._opener = self._opener or opener

    def end_forward(self, opener: nn.Module, *, is_awaited: bool) -> None:
        """End the step after a forward of its ``opener``, unless a backward may follow: ``is_awaited``."""
        if self._opener is opener and not is_awaited and not in_backward():
            self.finish()

    def begin_backward(self) -> None:
        """Begin a backward, with which the step ends."""
        if not self._open():
            return
        if self._backward is None or self._backward() is None:
            self._backward = weakref.ref(at_end_of_backward(self))
            if self._has_listeners:
                self.tell(_STEP, "drop", [flat.gradients.dropped() for flat in self._buffers])

    def start(self) -> None:
        """Do nothing yet: a backward ends, and its parts have to finish first."""

    def finish(self) -> None:
        """End the step: a backward has ended in all parts, or no backward will follow."""
        if self._phase is _Phase.OPEN:
            self.tell(_STEP, "end", self._is_due)
            self._phase = _Phase.BETWEEN
        self._opener = None

    def note_averages(self) -> None:
        """Note that parameters get averages in this step: the optimizer steps after it."""
        self._is_due = True
        for flat in self._buffers:
            flat.gradients.watch()

    def is_live(self) -> bool:
        """Say whether the context still runs."""
        return self._phase is not _Phase.OVER and self._lasts()

    def end(self) -> None:
        """End the context: send no message from now on."""
        self._phase = _Phase.OVER
        for part in self._parts:
            part.close()

    def _open(self) -> bool:
        """Begin a step if none runs; false: no inputs are left, or the context is over. Collective if a step begins."""
        if self._phase is not _Phase.BETWEEN:
            return self._phase is _Phase.OPEN
        if not self._notify():
            self._phase = _Phase.OVER
            return False
        self._begin(self._meet((_STEP, "begin", ())))
        self._phase, self._opener, self._is_due = _Phase.OPEN, None, False
        return True

    def _begin(self, every: Sequence[_Message | None]) -> None:
        """Note which ranks have inputs: the ranks that sent a message at the start of the step."""
        running = [place for place, one in enumerate(every) if one is not None]
        self._has_listeners = len(running) < self._ranks.size
        for part in self._parts:
            part.begin_step(running, None if self._divides_by_all or not running else len(running))

    # On a rank without inputs

    def follow(self, *, keeps_own: bool) -> bool:
        """Do what ranks with inputs announce, until they end a step; returns whether the optimizer steps after it.

        ``keeps_own``: no optimizer steps on this rank: at the end, restore the present gradients of replicated parts.
        """
        with torch.no_grad():
            is_first, self._phase = self._phase is not _Phase.FOLLOWING, _Phase.FOLLOWING
            for part in self._parts:
                part.stand_by(is_first=is_first, keeps_own=keeps_own)
            self._begin(self._meet(None))
            failure: ComposableError | None = None
            while True:
                number, what, args = next(one for one in self._meet(None) if one is not None)
                if number != _STEP:
                    try:
                        getattr(self._parts[number], f"follow_{what}")(*args)
                    except ComposableError as error:
                        if what != _FINISH or isinstance(error, DesyncError):
                            raise
                        failure = failure or error
                elif what == "drop":
                    # Drop the gradients that users have dropped on ranks with inputs.
                    for flat, bits in zip(self._buffers, args[0], strict=True):
                        flat.gradients.drop_like(*bits)
                elif failure is not None:
                    raise failure
                else:
                    return what == "end" and bool(args[0])

    def finish_join(self) -> None:
        """End all parts: no rank has inputs left. Collective."""
        self._phase = _Phase.FOLLOWING
        with torch.no_grad():
            for part in self._parts:
                part.finish_join()

    # Messages

    def is_telling(self, *, is_needed: bool = True) -> bool:
        """Say whether some rank needs messages, having no inputs; begins a step if none runs and it ``is_needed``."""
        is_open = self._open() if is_needed else self._phase is _Phase.OPEN
        return is_open and self._has_listeners

    def tell(self, part: int, what: str, *args: Any) -> None:
        """Announce the event that starts in a part of the model to the ranks without inputs, if any. Collective."""
        if self.is_telling():
            self._meet((part, what, args))

    def _meet(self, told: _Message | None) -> list[_Message | None]:
        """Send this rank's message, and return the message of each rank; ``None``: it has no inputs. Collective.

        Raises ``DesyncError`` if ranks with inputs announce different events.
        """
        every = _exchanged(self._ranks, told)
        found = [one for one in every if one is not None]
        if any(one != found[0] for one in found):
            self._phase = _Phase.OVER
            texts = [
                f"    rank {number}: {self._text_of(one)}"
                for number, one in zip(self._ranks.numbers, every, strict=True)
            ]
            raise DesyncError(
                "\n".join(["ranks with inputs do different things inside of Join", *texts]),
                fix="run the same modules, no_sync and backwards on every rank that has inputs",
            )
        return every

    def _text_of(self, told: _Message | None) -> str:
        if told is None:
            return "has no inputs left"
        part, what, args = told
        return f"{what} of {'the step' if part == _STEP else self._parts[part].describe(args)}"


@calling("Join")
def _exchanged(ranks: Ranks, told: _Message | None) -> list[_Message | None]:
    return ranks.objects(told)


class _Part(StepListener):
    """A part of the model: announces its events, and follows those of other ranks on a rank without inputs.

    Each event of ``listeners`` has a method ``follow_...`` of the name that its message gives. A rank without inputs
    drops the gradients of ``buffers`` when users drop them on other ranks.
    """

    def __init__(
        self, number: int, steps: JoinSteps, owner: Owner, listeners: Listeners, buffers: Sequence[FlatBuffer]
    ) -> None:
        self.buffers = buffers
        self._steps = steps
        self._tell = partial(steps.tell, number)
        self._owner = owner
        self._listeners = listeners
        listeners.add(self)

    def describe(self, args: tuple[Any, ...]) -> str:
        """Return the place of an event, for messages."""
        return " and ".join(map(describe_module, self._owner.modules))

    def close(self) -> None:
        """Send no message from now on."""
        self._listeners.remove(self)

    def holds_annotations(self) -> bool:
        """Ranks without inputs follow the modules as they were when the ``Join`` was made."""
        return self._steps.is_live()

    def forward_begins(self, module: nn.Module, *, broadcasts: bool) -> None:
        self._steps.begin_forward(module)


class _ShardedPart(_Part):
    """A root of ``fully_shard``.

    A rank without inputs runs no module of the root and takes part in every collective. Its gradients are zeros, and
    its shards get their part of the mean as on other ranks. The same objects work as in a backward of its own, so a
    collective that starts late, such as an all-reduce over copies, has the same place in the order on all ranks.
    """

    def __init__(self, number: int, steps: JoinSteps, root: Root) -> None:
        buffers = [flat for handle in root.handles for flat in handle.buffers]
        super().__init__(number, steps, root, root.scheduler.step.listeners, buffers)
        self._scheduler = root.scheduler
        self._step = root.scheduler.step
        self._indices = {handle: index for index, handle in enumerate(root.handles)}
        # Settings of handles before this rank followed: whether they average, and whether buffers defer that.
        self._chosen: dict[Handle, tuple[bool, list[bool]]] = {}

    def describe(self, args: tuple[Any, ...]) -> str:
        """Return the place of an event, for messages; those of a handle begin with its number."""
        return self._step.handles[args[0]].described if args and type(args[0]) is int else super().describe(args)

    def begin_step(self, running: Sequence[int], divisor: int | None) -> None:
        """Begin a step of the ranks at the places ``running``; sums are divided by ``divisor``, ``None``: as usual."""
        for flat in self.buffers:
            flat.routes.divide_by(divisor)

    def stand_by(self, *, is_first: bool, keeps_own: bool) -> None:
        """Prepare a step without inputs on this rank; ``is_first``: it had inputs for the step before."""
        if is_first:
            # Free unsharded parameters, and drop gradients that were not averaged yet.
            self._scheduler.abandon_step()
            self._scheduler.stand_by()
            self._chosen = {
                handle: (handle.requires_gradient_sync, [flat.routes.kept.defers for flat in handle.buffers])
                for handle in self._indices
            }
        # Between steps this rank's optimizer may have written the shards.
        self._step.optimizer_stepped()

    def finish_join(self) -> None:
        """Forget gradients that were not averaged."""
        self._scheduler.abandon_step(always=True)
        self._scheduler.let_go(self._step.handles)
        self._forget()

    def close(self) -> None:
        """Send no message from now on."""
        super().close()
        self._forget()
        self.begin_step([], None)

    def _forget(self) -> None:
        """Stop following other ranks, also after an exception: all ranks learn the order of modules anew."""
        self._scheduler.forget_order()
        chosen, self._chosen = self._chosen, {}
        for handle, (syncs, defers) in chosen.items():
            handle.requires_gradient_sync = syncs
            for flat, one in zip(handle.buffers, defers, strict=True):
                flat.routes.kept.defers = one

    # Events of the root, each with what a rank without inputs does, which runs no module that would show the event

    def has_idle_ranks(self) -> bool:
        return self._steps.is_telling(is_needed=False)

    def forward_ended(self, module: nn.Module, *, is_awaited: bool) -> None:
        self._steps.end_forward(module, is_awaited=is_awaited)

    def gather_begins(self, handle: Handle, *, from_secondary: bool) -> None:
        self._tell("gather", self._indices[handle], from_secondary)

    def follow_gather(self, index: int, from_secondary: bool) -> None:
        self._step.unsharded.gather_for_others(self._step.handles[index], takes_secondary=from_secondary)

    def backward_begins(self, *, averages: bool) -> None:
        self._steps.begin_backward()
        self._tell("backward")

    def follow_backward(self) -> None:
        self._step.finalizer.open()

    def gradients_dropped(self, handle: Handle, bits: Sequence[int]) -> None:
        self._tell("drop", self._indices[handle], bits)

    def follow_drop(self, index: int, bits: Sequence[int]) -> None:
        for flat, own in zip(self._step.handles[index].buffers, bits, strict=True):
            flat.gradients.drop_kept(own)

    def reduction_begins(self, unit: Any, index: int) -> None:
        self._tell("reduce", self._indices[unit], index, unit.buffers[index].routes.kept.defers)

    def follow_reduce(self, index: int, place: int, defers: bool) -> None:
        handle = self._step.handles[index]
        ledger = self._step.steps[handle].ledgers[place]
        ledger.flat.routes.kept.defers = defers
        self._step.finalizer.reduce(ledger, handle.settings.gradient_buffers)

    def backward_ends(self, *, averages: bool, ends: bool) -> None:
        self._tell("message", [handle.requires_gradient_sync for handle in self._indices], ends)

    def follow_message(self, are_synced: Sequence[bool], ends: bool) -> None:
        for handle, is_synced in zip(self._step.handles, are_synced, strict=True):
            handle.requires_gradient_sync = is_synced
        self._step.finalizer.tell(ends=ends)
        if not ends:
            self._step.finalizer.postpone()

    def gradients_come(self) -> None:
        if any(handle.synchronises for handle in self._indices):
            self._steps.note_averages()
        self._tell(_FINISH)

    def follow_finish(self) -> None:
        self._step.finalizer.end(self._step.streams.end_backward)

    def gradients_came(self) -> None:
        if not in_backward():
            self._steps.finish()

    def step_forgotten(self, *, was_unfinished: bool) -> None:
        if self._steps.is_telling(is_needed=was_unfinished):
            self._tell("forget")

    def follow_forget(self) -> None:
        self._scheduler.backwards.tidy_up()


class _ReplicatedPart(_Part):
    """An annotation of ``replicate``: the gradients of a rank without inputs are the last averages alone."""

    def __init__(self, number: int, steps: JoinSteps, state: ReplicateState) -> None:
        super().__init__(number, steps, state, state.reducer.listeners, [])
        self._state = state
        self._reducer = state.reducer
        self._put_back: Callable[[], None] | None = None
        state.reducer.round.count_anew()

    def begin_step(self, running: Sequence[int], divisor: int | None) -> None:
        """Begin a step of the ranks at the places ``running``; sums are divided by ``divisor``, ``None``: as usual."""
        self._reducer.exchange.expect(running, divisor)

    def stand_by(self, *, is_first: bool, keeps_own: bool) -> None:
        """Prepare a step without inputs on this rank; ``is_first``: it had inputs for the step before."""
        if is_first:
            self._reducer.prepare()
            self._put_back = self._reducer.put_aside() if keeps_own else None

    def finish_join(self) -> None:
        """Give all ranks the parameters and buffers of the last rank that had inputs. Collective."""
        self._reducer.prepare()
        self._state.broadcast_all()
        if self._put_back is not None:
            self._put_back()

    def close(self) -> None:
        """Send no message from now on."""
        super().close()
        self._reducer.round.count_anew()
        self._reducer.exchange.expect(None, None)

    # Events of the reducer, each with what a rank without inputs does

    def forward_begins(self, module: nn.Module, *, broadcasts: bool) -> None:
        super().forward_begins(module, broadcasts=broadcasts)
        if broadcasts:
            self._tell("broadcast")

    def follow_broadcast(self) -> None:
        if self._state.buffers is not None:
            self._state.buffers.broadcast(self._reducer.exchange.source)

    def backward_begins(self, *, averages: bool) -> None:
        self._steps.begin_backward()
        if averages:
            self._steps.note_averages()
            self._tell("backward")

    def follow_backward(self) -> None:
        self._reducer.begin_idle()

    def reduction_begins(self, unit: object, index: int) -> None:
        self._tell("reduce")

    def follow_reduce(self) -> None:
        self._reducer.exchange.send_zeros(1)

    def gradients_come(self) -> None:
        self._tell(_FINISH)

    def follow_finish(self) -> None:
        self._reducer.end_round()

    def step_forgotten(self, *, was_unfinished: bool) -> None:
        self._tell("forget")

    def follow_forget(self) -> None:
        self._reducer.complete()


def connect(state: AnnotationState) -> Owner:
    """Connect an annotation as its first forward does; returns the owner of the part. Collective."""
    if isinstance(state, FullyShardState):
        return state.begin()
    assert isinstance(state, ReplicateState), "there are two kinds of states"
    state.transport.connect()
    state.reducer.prepare()
    return state
