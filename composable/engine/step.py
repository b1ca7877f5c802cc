"""What users set on the root of a tree, and not on each handle."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from composable.engine.finish import HandOver, Reductions
from composable.engine.handle import Handle
from composable.engine.handle_step import Companion
from composable.engine.streams import Streams
from composable.engine.unsharded import Unsharded
from composable.errors import UsageError, place_of_rank
from composable.frames import in_backward

__all__ = [
    "LED",
    "RootSettings",
    "Step",
]

from composable.engine.handle_step import Teller, Turn


@dataclass
class RootSettings:
    """Settings that hold for all handles of a root.

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


# In place of the end of a call that decides nothing: of a module that goes with the one around it.
LED = math.inf


class Step:
    """What forwards and backwards of one root share.

    Args:
        handles: All handles of the root, left to right, depth first.
        streams: Of the device where they live.
        settings: Of the root, read whenever they matter.

    Attributes:
        handles: The handles.
        turns: Where each of them is in the step.
        settings: The settings.
        streams: Where gathers and reductions run.
        unsharded: Which handles are unsharded.
        reductions: What is being reduced.
        hand_over: Ends the reductions.
        teller: Tells ranks without inputs of each collective before it starts; ``None``: all have inputs.
        companions: What else takes part in every backward.
        running: The managed modules whose forwards have started and not ended, outermost first.
        first_nodes: Of each of these, the number of autograd's next node when it started; -1: in backward.
        forward_id: How many forwards there were, the running one included.
        backward_id: The same of backwards.
        backwards_before: Of the backwards, those before the last forward.
        is_backward: A backward of this root is running.
        makes_graph: It makes a graph for another one; ``None``: nobody has said yet.
        is_threaded: Parts of forward have run in several threads since the last backward.
        failure: What the last forward raised.
        finalizing: Which ``finalize`` has to be ended by ``end_finalize``; ``None``: none.
        is_closed: Another annotation took the place of this one.
    """

    __slots__ = (
        "_thread",
        "backward_id",
        "backwards_before",
        "companions",
        "failure",
        "finalizing",
        "first_nodes",
        "forward_id",
        "hand_over",
        "handles",
        "is_backward",
        "is_closed",
        "is_threaded",
        "makes_graph",
        "reductions",
        "running",
        "settings",
        "streams",
        "teller",
        "turns",
        "unsharded",
    )

    def __init__(self, handles: Sequence[Handle], streams: Streams, settings: RootSettings) -> None:
        self.handles = tuple(handles)
        self.turns: Mapping[Handle, Turn] = {handle: Turn(handle) for handle in handles}
        self.settings = settings
        self.streams = streams
        self.unsharded = Unsharded(self.handles, streams, self.takes_secondary)
        self.reductions = Reductions(streams)
        self.hand_over = HandOver(self.turns, self.reductions)
        self.teller: Teller | None = None
        self.companions: Sequence[Companion] = ()
        self.running: list[nn.Module] = []
        self.first_nodes: list[int] = []
        self.forward_id = 0
        self.backward_id = 0
        self.backwards_before = 0
        self.is_backward = False
        self.makes_graph: bool | None = False
        self.failure = ""
        self.finalizing: object | None = None
        self.is_closed = False
        self.is_threaded = False
        self._thread: int | None = None

    # Where it is

    @property
    def is_idle(self) -> bool:
        """No forward or backward of this root is running."""
        return not self.running and not in_backward()

    @property
    def is_under_way(self) -> bool:
        """A forward has not ended, or a backward; also one that an exception or Ctrl-C cut short."""
        return bool(self.running) or self.is_backward

    @property
    def is_deferred(self) -> bool:
        """Backwards have ended whose reductions did not; a later backward or ``finalize`` ends them."""
        return self.hand_over.is_deferred

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

    def is_in_use(self, handle: Handle) -> bool:
        """Say whether a module of ``handle``, or of those that it goes with, is running."""
        return self.is_around(handle) or any(self.is_around(one.handle) for one in self.turns[handle].leaders)

    def takes_secondary(self, handle: Handle) -> bool:
        """Say whether a gather that starts now may be from secondary shards: for what reads the values of a forward.

        What runs outside of a step, and a forward after the one that left them, needs those of now.
        """
        if self.running and self.first_nodes[-1] >= 0 and not self.is_backward:
            return handle.fills_secondary or self.turns[handle].kept_in == self.forward_id
        return handle.has_secondary and self.is_backward and in_backward()

    def note_thread(self) -> None:
        """A forward starts in this thread: numbers of nodes are per thread, and say nothing about those of another."""
        thread = threading.get_ident()
        if thread != self._thread:
            self.is_threaded = self._thread is not None
            self._thread = thread

    def forget_threads(self) -> None:
        """Forget in which threads forwards ran."""
        self.is_threaded, self._thread = False, None

    # Memory

    def begin_unshard(self, turn: Turn) -> None:
        """Start to gather a handle, and what goes with it before anything can make ranks differ."""
        unsharded = self.unsharded
        unsharded.begin_unshard(turn.handle)
        followers = [one.handle for one in turn.followers if one.handle.held_with is None]
        for handle in followers:
            unsharded.begin_unshard(handle)
        for handle in followers:
            handle.end_fill()

    def reshard_unless_running(self, handle: Handle) -> None:
        """Free the parameters; a backward inside a forward leaves the modules around it as they are."""
        if not self.running or not self.is_in_use(handle):
            self.unsharded.reshard(handle)

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
