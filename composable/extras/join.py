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

from composable.annotation import FullyShardState, Root
from composable.comm import Ranks, calling
from composable.engine import FlatBuffer, Handle, StepEvent
from composable.errors import ComposableError, DesyncError, place_of_rank
from composable.ground.frames import in_backward
from composable.ground.names import describe_module
from composable.ground.torch_hooks import at_end_of_backward, next_ending_number
from composable.replication import ReplicateState
from composable.whole_model import State

# The owner of a part, which communicates on its own.
Owner: TypeAlias = Root | ReplicateState
# The number of a part of the model, the event that starts there, and its arguments.
_Message: TypeAlias = tuple[int, str, tuple[Any, ...]]
# In place of the number of a part: the step itself.
_STEP = -1
_OF_HANDLES = {StepEvent.GATHER, StepEvent.DROP, StepEvent.REDUCE}
# Events after which every rank goes on to the end of the step, also if they raise.
_ENDINGS = {"ASSIGN", "finish"}


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

    @property
    def is_following(self) -> bool:
        """This rank has no inputs left: its parts follow the messages of other ranks."""
        return self._phase is _Phase.FOLLOWING

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

        Args:
            keeps_own: No optimizer steps on this rank: at the end, restore the present gradients of replicated parts.
        """
        with torch.no_grad():
            is_first, self._phase = not self.is_following, _Phase.FOLLOWING
            for part in self._parts:
                part.stand_by(is_first=is_first, keeps_own=keeps_own)
            self._begin(self._meet(None))
            failure: ComposableError | None = None
            while True:
                number, what, args = next(one for one in self._meet(None) if one is not None)
                if number != _STEP:
                    try:
                        self._parts[number].follow(what, args)
                    except ComposableError as error:
                        if what not in _ENDINGS or isinstance(error, DesyncError):
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
        """Announce the event that starts in a part of the model to the ranks without inputs, if any. Collective.

        Raises:
            DesyncError: Ranks with inputs announce different events.
        """
        if self.is_telling():
            self._meet((part, what, args))

    def _meet(self, told: _Message | None) -> list[_Message | None]:
        """Send this rank's message, and return the message of each rank; ``None``: it has no inputs. Collective.

        Raises:
            DesyncError: Ranks with inputs announce different events.
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
                at=place_of_rank(),
                fix="run the same modules, no_sync and backwards on every rank that has inputs",
            )
        return every

    def _text_of(self, told: _Message | None) -> str:
        if told is None:
            return "has no inputs left"
        part, what, args = told
        return f"{what} of {'the step' if part == _STEP else self._parts[part].describe(what, args)}"


@calling("Join")
def _exchanged(ranks: Ranks, told: _Message | None) -> list[_Message | None]:
    return ranks.objects(told)


class _ShardedPart:
    """A root of ``fully_shard``: listens to the events of the root's steps, and announces them.

    A rank without inputs runs no module of the root and takes part in every collective. Its gradients are zeros, and
    its shards get their part of the mean as on other ranks. The same objects work as in a backward of its own, so a
    collective that starts late, such as an all-reduce over copies, has the same place in the order on all ranks.

    Attributes:
        buffers: Flat buffers whose gradients a rank without inputs drops when users drop them on other ranks.
    """

    def __init__(self, number: int, steps: JoinSteps, root: Root) -> None:
        self.buffers: list[FlatBuffer] = [flat for handle in root.handles for flat in handle.buffers]
        self._steps = steps
        self._tell = partial(steps.tell, number)
        self._root = root
        self._scheduler = root.scheduler
        self._indices = {handle: index for index, handle in enumerate(root.handles)}
        # Settings of handles before this rank followed: whether they average, and whether buffers defer that.
        self._chosen: dict[Handle, tuple[bool, list[bool]]] = {}
        root.scheduler.listen(self)
        root.join = steps

    def describe(self, what: str, args: tuple[Any, ...]) -> str:
        """Return the place of an event, for messages."""
        if StepEvent[what] in _OF_HANDLES:
            handle: Handle = self._root.handles[args[0]]
            return handle.described
        return " and ".join(map(describe_module, self._root.modules))

    def begin_step(self, running: Sequence[int], divisor: int | None) -> None:
        """Begin a step of the ranks at the places ``running``; sums are divided by ``divisor``, ``None``: as usual."""
        self._divide_by(divisor)

    def _divide_by(self, divisor: int | None) -> None:
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
                for handle in self._root.handles
            }
        # Between steps this rank's optimizer may have written the shards.
        self._scheduler.step.optimizer_stepped()

    def follow(self, what: str, args: tuple[Any, ...]) -> None:
        """Do what a rank with inputs has announced, see ``on``. Collective but for DROP and BACKWARD.

        Raises:
            UsageError: Any rank raised an error when parameters got their gradients.
        """
        event, step = StepEvent[what], self._scheduler.step
        if event is StepEvent.GATHER:
            step.unsharded.gather_for_others(step.handles[args[0]], takes_secondary=args[1])
        elif event is StepEvent.BACKWARD:
            step.finalizer.open()
        elif event is StepEvent.DROP:
            for flat, own in zip(step.handles[args[0]].buffers, args[1], strict=True):
                flat.gradients.drop_kept(own)
        elif event is StepEvent.REDUCE:
            handle = step.handles[args[0]]
            ledger = step.steps[handle].ledgers[args[1]]
            ledger.flat.routes.kept.defers = args[2]
            step.finalizer.reduce(ledger, handle.settings.gradient_buffers)
        elif event is StepEvent.TELL:
            for handle, is_synced in zip(step.handles, args[0], strict=True):
                handle.requires_gradient_sync = is_synced
            step.finalizer.tell(ends=args[1])
            if not args[1]:
                step.finalizer.postpone()
        elif event is StepEvent.ASSIGN:
            step.finalizer.end(step.streams.end_backward)
        else:
            self._scheduler.backwards.tidy_up()

    def finish_join(self) -> None:
        """Forget gradients that were not averaged."""
        self._scheduler.abandon_step(always=True)
        self._scheduler.let_go(self._scheduler.handles)
        self._forget()

    def close(self) -> None:
        """Send no message from now on."""
        self._scheduler.unlisten(self)
        self._root.join = None
        self._forget()
        self._divide_by(None)

    def _forget(self) -> None:
        """Stop following other ranks, also after an exception: all ranks learn the order of modules anew."""
        self._scheduler.forget_order()
        chosen, self._chosen = self._chosen, {}
        for handle, (syncs, defers) in chosen.items():
            handle.requires_gradient_sync = syncs
            for flat, one in zip(handle.buffers, defers, strict=True):
                flat.routes.kept.defers = one

    # Called by the root

    @property
    def has_idle_ranks(self) -> bool:
        """Some rank has no inputs in this step."""
        return self._steps.is_telling(is_needed=False)

    def on(self, event: StepEvent, subject: Any = None, detail: Any = None) -> None:
        """Announce to ranks without inputs what the root is about to do: they run no module that would show it."""
        steps = self._steps
        if event is StepEvent.FORWARD:
            steps.begin_forward(subject)
        elif event is StepEvent.FORWARD_ENDED:
            steps.end_forward(subject, is_awaited=detail)
        elif event is StepEvent.ASSIGNED:
            if not in_backward():
                steps.finish()
        elif event is StepEvent.FORGET:
            if steps.is_telling(is_needed=detail):
                self._tell(event.name)
        else:
            args: tuple[Any, ...] = ()
            if event is StepEvent.BACKWARD:
                steps.begin_backward()
            elif event is StepEvent.ASSIGN and any(handle.synchronises for handle in self._indices):
                steps.note_averages()
            elif event is StepEvent.TELL:
                args = [handle.requires_gradient_sync for handle in self._indices], detail
            elif event in _OF_HANDLES:
                args = self._indices[subject], detail
            if event is StepEvent.REDUCE:
                args = *args, subject.buffers[detail].routes.kept.defers
            self._tell(event.name, *args)


class _ReplicatedPart:
    """An annotation of ``replicate``: its forward hooks and its reducer call this part before they start anything.

    Attributes:
        buffers: Empty: the gradients of a rank without inputs are the last averages alone.
    """

    def __init__(self, number: int, steps: JoinSteps, state: ReplicateState) -> None:
        self.buffers: list[FlatBuffer] = []
        self._steps = steps
        self._tell = partial(steps.tell, number)
        self._state = state
        self._source = 0
        self._put_back: Callable[[], None] | None = None
        state.reducer.join = self
        state.reducer.count_anew()

    def describe(self, what: str, args: tuple[Any, ...]) -> str:
        """Return the place of an event, for messages."""
        return " and ".join(map(describe_module, self._state.modules))

    def begin_step(self, running: Sequence[int], divisor: int | None) -> None:
        """Begin a step of the ranks at the places ``running``; sums are divided by ``divisor``, ``None``: as usual."""
        self._state.reducer.expect(running, divisor)
        self._source = running[-1] if running else self._source

    def stand_by(self, *, is_first: bool, keeps_own: bool) -> None:
        """Prepare a step without inputs on this rank; ``is_first``: it had inputs for the step before."""
        if is_first:
            self._state.reducer.prepare()
            self._put_back = self._state.reducer.put_aside() if keeps_own else None

    def follow(self, what: str, args: tuple[Any, ...]) -> None:
        """Do what a rank with inputs has announced. Collective."""
        reducer = self._state.reducer
        {
            "broadcast": self._broadcast,
            "begin_round": reducer.begin_shadow,
            "send": reducer.send_shadow,
            "finish": reducer.end_shadow,
            "recover": reducer.recover_shadow,
        }[what]()

    def finish_join(self) -> None:
        """Give all ranks the parameters and buffers of the last rank that had inputs. Collective."""
        self._state.reducer.prepare()
        self._state.broadcast_all(sorted(self._state.grid.everyone.numbers)[self._source])
        if self._put_back is not None:
            self._put_back()

    def close(self) -> None:
        """Send no message from now on."""
        self._state.reducer.join = None
        self._state.reducer.count_anew()
        self._state.reducer.expect(None, None)

    def _broadcast(self) -> None:
        if self._state.buffers is not None:
            self._state.buffers.broadcast(self._source)

    # Called by hooks and the reducer, see ``JoinListener``

    def is_live(self) -> bool:
        return self._steps.is_live()

    def begin_forward(self, module: nn.Module, *, broadcasts: bool) -> None:
        self._steps.begin_forward(module)
        if broadcasts:
            self._tell("broadcast")
            self._broadcast()

    def begin_round(self, synchronises: bool) -> None:
        self._steps.begin_backward()
        if synchronises:
            self._steps.note_averages()
            self._tell("begin_round")

    def send(self) -> None:
        self._tell("send")

    def finish(self) -> None:
        self._tell("finish")

    def recover(self) -> None:
        self._tell("recover")


def connect(state: State) -> Owner:
    """Connect an annotation as its first forward does; returns the owner of the part. Collective."""
    if isinstance(state, FullyShardState):
        return state.begin()
    state.transport.connect()
    state.reducer.prepare()
    return state
