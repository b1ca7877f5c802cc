"""Where the running step of a root is, and who takes part in it.

Forward, backward and their ends have rules of their own, in ``forward_pass.py``, ``backward_pass.py`` and
``finish.py``. What more than one of them asks or does is here.

A module on fewer ranks, such as an expert, need not run on all of these in every step. So its handle *follows*
that of the module around it: nothing that its own calls do starts a collective. See docs/notes/experts.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from composable.comm import Grid
from composable.engine.finish import GradientFinalizer
from composable.engine.handle import Handle
from composable.engine.handle_step import HandleStep
from composable.engine.streams import Streams
from composable.engine.unsharded import Unsharded
from composable.errors import UsageError, place_of_rank
from composable.ground.torch_private import current_graph_task_id

__all__ = ["LED", "Companion", "RootSettings", "Step", "StepListener"]

# In place of the end of a call that decides nothing: of a module that goes with the one around it.
LED = math.inf


@dataclass
class RootSettings:
    """What users set on the root of a tree, and not on each handle.

    Attributes:
        is_last_backward: The end of a backward waits for the reductions, and for the other ranks.
        finalizes_by_hand: It never does: ``finalize_backward`` does.
        post_optim_event: Of a device: the shards are written once it is reached; the next forward takes it.
        streams: Shared with other roots; ``None``: the root has its own.
    """

    is_last_backward: bool = True
    finalizes_by_hand: bool = False
    post_optim_event: Any = None
    streams: Streams | None = None

    @property
    def ends_backward(self) -> bool:
        """The end of a backward ends the step's reductions as well."""
        return self.is_last_backward and not self.finalizes_by_hand

    def copied(self) -> "RootSettings":
        """Return what a deep copy of the root has: events and streams are not copied."""
        return RootSettings(self.is_last_backward, self.finalizes_by_hand)


class StepListener(Protocol):
    """Tells ranks without inputs of each collective of a root before it starts: who runs no module cannot know it.

    What ranks do when they hear of it is in ``features/idle_rank.py``. Each call may raise ``DesyncError``: ranks with
    inputs tell different things.
    """

    @property
    def has_listeners(self) -> bool:
        """Some rank runs no modules in this step: it cannot be asked for what only who ran them knows."""
        ...

    def begin_forward(self, module: nn.Module) -> None:
        """The outermost module that runs starts its forward.

        Raises:
            RuntimeError: All ranks are to stop where one has no inputs.
        """
        ...

    def end_forward(self, module: nn.Module, *, is_awaited: bool) -> None:
        """It ends; ``is_awaited``: a backward may follow."""
        ...

    def begin_backward(self) -> None:
        """A backward begins."""
        ...

    def drop(self, handle: Handle, bits: Sequence[int]) -> None:
        """Users have dropped kept gradients of the handle, those of ``bits`` of each buffer."""
        ...

    def gather(self, handle: Handle, *, takes_secondary: bool) -> None:
        """The handle's parameters are about to be gathered, from secondary shards or not."""
        ...

    def reduce(self, handle: Handle, position: int) -> None:
        """The gradients of the handle's buffer at ``position`` are about to be reduced."""
        ...

    def end_reductions(self, *, ends: bool) -> None:
        """The ranks are about to tell each other what is left; not if ``ends`` is false, but later."""
        ...

    def hand_over(self) -> None:
        """Parameters are about to get their gradients."""
        ...

    def end_by_hand(self) -> None:
        """Parameters got their gradients, outside of a backward."""
        ...

    def abandon(self, *, is_needed: bool) -> None:
        """A step is about to be forgotten; ``is_needed``: it left more than what this step has told of."""
        ...


@runtime_checkable
class Companion(Protocol):
    """An annotation that averages by itself and takes part in every step of the root around it, called or not.

    Replicated modules on a part of the root's ranks are such: which of them a rank calls depends on its tokens.
    """

    grid: Grid

    def begin_to_follow(self) -> None:
        """Leave it to the root, from now on, when ranks meet. Collective over the annotation's ranks."""
        ...

    def end_to_follow(self) -> None:
        """The root is undone."""
        ...

    def follow_forward(self) -> None:
        """A forward of the root begins. Collective over the annotation's ranks."""
        ...

    def follow_backward(self) -> None:
        """A backward of the root begins; collectives that this starts run at its end."""
        ...


class Step:
    """What forwards and backwards of one root share.

    Args:
        handles: All handles of the root, left to right, depth first.
        streams: Of the device where they live.
        settings: Of the root, read whenever they matter.

    Attributes:
        steps: Where each handle is in the step.
        unsharded: Which handles are unsharded.
        finalizer: Reduces gradients and hands them over.
        teller: Tells ranks without inputs of each collective before it starts; ``None``: all have inputs.
        companions: What else takes part in every backward.
        running: The managed modules whose forwards have started and not ended, outermost first.
        first_nodes: Of each of these, the number of autograd's next node when it started; -1: in backward.
        forward_id: How many forwards there were, the running one included.
        backward_id: How many backwards there were, the running one included.
        backwards_before: Of the backwards, those before the last forward.
        is_backward: A backward of this root is running.
        makes_graph: It makes a graph for another one; ``None``: nobody has said yet.
        is_threaded: Parts of forward have run in several threads since the last backward.
        thread: In which the last forward started; ``None``: none has since the last backward.
        failure: What the last forward raised.
        finalizing: Which ``finalize`` has to be ended by ``end_finalize``; ``None``: none.
        is_closed: Another annotation took the place of this one.
    """

    def __init__(self, handles: Sequence[Handle], streams: Streams, settings: RootSettings) -> None:
        self.handles = tuple(handles)
        self.steps = {handle: HandleStep(handle) for handle in handles}
        self.settings = settings
        self.streams = streams
        self.unsharded = Unsharded(self.handles, streams, self.takes_secondary)
        self.finalizer = GradientFinalizer(self.steps, streams)
        self.teller: StepListener | None = None
        self.companions: Sequence[Companion] = ()
        self.running: list[nn.Module] = []
        self.first_nodes: list[int] = []
        self.forward_id = self.backward_id = self.backwards_before = 0
        self.is_backward = False
        self.makes_graph: bool | None = False
        self.failure = ""
        self.finalizing: object | None = None
        self.is_closed = False
        self.is_threaded = False
        self.thread: int | None = None

    # Where it is

    @property
    def is_idle(self) -> bool:
        """No forward or backward of this root is running."""
        return not self.running and current_graph_task_id() == -1

    @property
    def is_under_way(self) -> bool:
        """A forward has not ended, or a backward; also one that an exception or Ctrl-C cut short."""
        return bool(self.running) or self.is_backward

    @property
    def is_deferred(self) -> bool:
        """Backwards have ended whose reductions did not; a later backward or ``finalize`` ends them."""
        return self.finalizer.is_deferred

    def check_waited_for(self) -> None:
        """Raise ``UsageError`` where a ``finalize`` has begun that nobody has waited for."""
        if self.finalizing is not None:
            raise UsageError(
                "gradients are still being reduced",
                at=place_of_rank(),
                fix="call wait() on what finalize_backward(async_op=True) returned, before anything else",
            )

    def is_around(self, handle: Handle) -> bool:
        """Say whether a module of ``handle`` is running."""
        return any(module in handle.modules for module in self.running)

    def takes_secondary(self, handle: Handle) -> bool:
        """Say whether a gather that starts now may be from secondary shards: for what reads the values of a forward.

        What runs outside of a step, and a forward after the one that left them, needs those of now.
        """
        if self.running and self.first_nodes[-1] >= 0 and not self.is_backward:
            return handle.fills_secondary or self.steps[handle].kept_in == self.forward_id
        return handle.has_secondary and self.is_backward and current_graph_task_id() != -1

    # Memory

    def begin_unshard(self, step: HandleStep) -> None:
        """Start to gather a handle, and what goes with it before anything can make ranks differ."""
        unsharded = self.unsharded
        unsharded.begin_unshard(step.handle)
        if step.followers:
            followers = [one.handle for one in step.followers if one.handle.held_with is None]
            for handle in followers:
                unsharded.begin_unshard(handle)
            for handle in followers:
                handle.end_fill()

    def reshard_unless_running(self, handle: Handle) -> None:
        """Free the parameters; a backward inside a forward leaves the modules around it as they are."""
        if not (self.running and self.is_in_use(handle)):
            self.unsharded.reshard(handle)

    def is_in_use(self, handle: Handle) -> bool:
        """Say whether a module of ``handle``, or of those that it goes with, is running."""
        return self.is_around(handle) or any(self.is_around(one.handle) for one in self.steps[handle].leaders)

    def drop_secondaries(self) -> None:
        """Forget the secondary shards that a forward has left."""
        for handle in self.handles:
            handle.end_secondary()

    def optimizer_stepped(self) -> None:
        """The optimizer wrote the shards, on the current stream or where the user said."""
        written, self.settings.post_optim_event = self.settings.post_optim_event, None
        if written is None:
            self.streams.shards_written()
        else:
            self.streams.shards_written_at(written)
