"""The state of a step, and which gradients are complete.

Every collective is decided by events that all ranks share: a fully sharded module starts
or ends its forward, or the gradient of its output arrives. Which *parameters* got a
gradient is never asked, so a parameter that only some ranks use cannot change the order.

When is a handle's gradient complete? Autograd runs ready nodes latest-created first. When
the gradient of a module's output arrives, every node created after that output has run; so
every handle whose first forward call came later is complete and may be reduced, with no
hook on any parameter. The end of backward completes all other handles. Autograd's order says when
to reduce *early*. Where it is wrong, the ranks find out when backward ends, and reduce once more.
See docs/inside/notes.md.

A module on fewer ranks, such as an expert, need not run on each of its ranks in every step. So its handle *follows*
the handle of the module around it, its *leader*: its own calls start no collective. See docs/experts.md.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import nn

from composable.comm import Grid, Ranks
from composable.engine.events import Listeners, StepListener
from composable.engine.finish import Agreement, GradientFinalizer, stepped_already
from composable.engine.gradients import Gradients
from composable.engine.handle import GradientLedger, Handle, HandleStep, is_outdated
from composable.engine.param import ParamView
from composable.engine.riders import Rider
from composable.engine.unsharded import Streams, Unsharded
from composable.errors import UsageError
from composable.ground.torch_private import current_graph_task_id

# Clock for the end of a follower's call, which decides nothing: its leader's calls decide.
NO_CLOCK = math.inf
# How many forwards of a root are looked at before a backward.
_SEEN_FORWARDS = 8


@dataclass
class RootSettings:
    """The settings of users for a root, and not for each handle."""

    is_last_backward: bool = True  # The end of a backward waits for the reductions, and for the other ranks.
    finalizes_by_hand: bool = False  # The end of a backward never waits: ``finalize_backward`` does.
    post_optim_event: Any = None  # Event of a device after which the shards are written; the next forward takes it.
    streams: Streams | None = None  # Streams shared with other roots; ``None``: the root has its own.
    riders: tuple[Rider, ...] = ()  # Numbers that travel with the message that ends a backward.

    @property
    def ends_backward(self) -> bool:
        """The end of a backward ends the step's reductions as well."""
        return self.is_last_backward and not self.finalizes_by_hand


class NestedReplica(StepListener):
    """An annotation that averages by itself and takes part in every step of the root around it, called or not.

    A replicated module on a part of the root's ranks is one: a rank's tokens decide whether they call it.
    """

    grid: Grid

    def begin_to_follow(self) -> None:
        """Let the root decide, from now on, when to communicate. Collective over the annotation's ranks."""


Steps: TypeAlias = dict[Handle, HandleStep]


def steps_of(handles: Iterable[Handle], leaders: Mapping[Handle, Sequence[Handle]]) -> Steps:
    """Return the state of each handle in a step; ``leaders`` has those of each handle that follows."""
    steps = {handle: HandleStep(handle) for handle in handles}
    for handle, ahead in leaders.items():
        steps[handle].leaders = tuple(ahead)
        for leader in ahead:
            steps[leader].followers += (steps[handle],)
    return steps


class Step:
    """The state that forwards and backwards of one root share.

    Args:
        steps: The states of all handles of the root, left to right, depth first; see ``steps_of``.
        streams: Streams of the handles' device.
        everyone: All ranks of the root.
        settings: Settings of the root, read at each use.
        agreements: As of ``GradientFinalizer``.
    """

    def __init__(
        self, steps: Steps, streams: Streams, everyone: Ranks, settings: RootSettings, agreements: list[Agreement]
    ) -> None:
        self.handles = tuple(steps)
        self.steps = steps  # The state of each handle in the step.
        self.everyone = everyone  # All ranks of the root.
        self.settings = settings
        self.streams = streams
        self.listeners = Listeners()  # Hear of each event.
        self.unsharded = Unsharded(streams, self.listeners, weakref.proxy(self))
        self.finalizer = GradientFinalizer(steps, streams, self.listeners, agreements)
        # The managed modules whose forwards have started and not ended, outermost first.
        self.running: list[nn.Module] = []
        # For each running module, the number of autograd's next node at its start; -1: in backward.
        self.first_nodes: list[int] = []
        # forward_id: Number of forwards so far, the running one included.
        # backward_id: Number of backwards so far, the running one included.
        # backwards_before: Number of backwards before the last forward.
        self.forward_id = self.backward_id = self.backwards_before = 0
        self.is_backward = False  # A backward of this root is running.
        self.makes_graph: bool | None = False  # That backward makes a graph for another one; ``None``: not known yet.
        self.latest_clock: float = 0  # Clock of the latest call whose output has got a gradient in that backward.
        # Numbers of autograd's nodes in each of the last forwards: the first, the next after the last, the outputs'.
        self.forwards: deque[tuple[int, int, set[int]]] = deque(maxlen=_SEEN_FORWARDS)
        self.failure = ""  # Text of the error of the last forward; empty: there was none.
        # Identity of the ``finalize`` that ``end_finalize`` has to end; ``None``: there is none.
        self.finalizing: object | None = None
        self.is_closed = False  # Another annotation took the place of this one.
        self.is_threaded = False  # Parts of forward have run in several threads since the last backward.
        # The orders of process groups in which it communicates, on the host: threads must not mix their collectives.
        ways = {way for handle in steps for flat in handle.buffers for way in flat.routes.transports()}
        self.orders = [way.order for way in ways if way.world_size > 1 and not (way.is_direct or way.has_nccl)]
        self.reference = weakref.ref(self)
        # Thread in which the last forward started; ``None``: no forward since the last backward.
        self.thread: int | None = None

    # State

    @property
    def is_idle(self) -> bool:
        """No forward or backward of this root is running."""
        return not self.running and current_graph_task_id() == -1

    @property
    def is_under_way(self) -> bool:
        """A forward has not ended, or a backward; also one that an exception or Ctrl-C cut short."""
        return bool(self.running) or self.is_backward

    def check_waited_for(self) -> None:
        """Raise ``UsageError`` if a ``finalize`` has begun and was not waited for."""
        if self.finalizing is not None:
            raise UsageError(
                "gradients are still being reduced",
                fix="call wait() on the result of finalize_backward(async_op=True) before anything else",
            )

    @property
    def averages(self) -> bool:
        """Some gradients are reduced in a backward with the present settings."""
        return any(handle.requires_gradient_sync for handle in self.handles)

    def is_around(self, handle: Handle) -> bool:
        """Say whether a module of ``handle`` is running."""
        return not set(handle.modules).isdisjoint(self.running)

    def takes_secondary(self, handle: Handle) -> bool:
        """Say whether a gather that starts now may read secondary shards, which have the values of a forward.

        That forward and its backward may read them. Later forwards, and code outside of a step, need present values.
        """
        if handle.secondary is None or handle.secondary.kept_in < 0:
            return False
        if self.running and self.first_nodes[-1] >= 0 and not self.is_backward:
            return handle.secondary.kept_in == self.forward_id and not is_outdated(handle)
        return self.is_backward and current_graph_task_id() != -1

    # Memory

    def begin_unshard(self, own: HandleStep, *, for_backward: bool = False) -> None:
        """Start to gather a handle and its followers, before their calls can differ between ranks."""
        for one in (own, *own.followers):
            if one.handle.held_with is None and (one.handle.settings.unshard_in_backward or not for_backward):
                self.unsharded.begin_unshard(one.handle)

    def prefetch(self, chosen: Iterable[Callable[[], Handle | None]], *, for_backward: bool) -> None:
        """Start to gather the handles that users chose; those of another root it gathers by itself."""
        for find in chosen:
            if (ahead := find()) is not None and ahead in self.steps:
                self.begin_unshard(self.steps[ahead], for_backward=for_backward)

    def is_in_use(self, handle: Handle) -> bool:
        """Say whether a module of ``handle``, or of its leaders, is running."""
        return self.is_around(handle) or any(map(self.is_around, self.steps[handle].leaders))

    def is_led(self, step: HandleStep) -> bool:
        """Say whether the running call is inside a module of a leader, and not from elsewhere."""
        # Activation checkpointing may run a part again, without the modules around it.
        is_again = self.first_nodes[-1] < 0
        return any(
            self.is_around(leader) or (is_again and self.steps[leader].queued_in == self.backward_id)
            for leader in step.leaders
        )

    def drop_secondaries(self) -> None:
        """Forget the secondary shards that a forward has left."""
        for handle in self.handles:
            handle.drop_secondary()

    def optimizer_stepped(self) -> None:
        """Note that the optimizer wrote the shards, on the current stream or before the user's event."""
        written, self.settings.post_optim_event = self.settings.post_optim_event, None
        if written is None:
            self.streams.shards_written()
        else:
            self.streams.shards_written_at(written)


class Completion:
    """The handles that the next backward completes, or that the running one has still to complete.

    A forward arms handles. A backward goes back through the clock of their forwards: at the end of a handle's last call
    it gathers the handle, at the start of the first call it completes it. All ranks do so in the order of one clock.
    ``armed`` are the handles that ran since the last backward, in the order of their first calls; ``last_armed`` are
    those of the last backward, which may run once more through the same graph.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.armed: list[HandleStep] = []
        self.last_armed: list[HandleStep] = []
        # Clock, handle, and whether to gather it or to complete it; the last ones come first.
        self.queue: list[tuple[int, HandleStep, bool]] = []

    def forget(self) -> None:
        """Forget the handles that wait for a backward, or for completion in the running one."""
        self.queue.clear()
        self.armed = []
        self.last_armed = []

    # In backward

    def begin_backward(self) -> None:
        """Queue handles that ran since the last backward (if none: its handles again), or that have kept gradients."""
        step = self._step
        is_again = not self.armed
        armed = self.last_armed if is_again else self.armed
        known = set(self.last_armed) if is_again else set()
        queue, gathered, left = [], [], []
        for own in armed:
            if not own.leaders:
                gathered.append((own.last_forward, own, True))
        self._drop_zeroed_gradients()
        for handle, own in step.steps.items():
            for flat in handle.buffers:
                if flat.gradients.is_cast:
                    flat.gradients.sum_in_reduce_dtype(sums=not handle.requires_gradient_sync)
                if flat.gradients.is_unsynced and not own.is_armed:
                    own.is_armed, own.first_forward = True, 0
                    if own not in known:
                        left.append(own)
        armed += left
        for own in armed:
            own.queued_in = step.backward_id
            queue.append((own.first_forward, own, False))
        self.queue = sorted(queue + gathered, key=itemgetter(0))
        self.last_armed, self.armed = armed, []

    def expect_late(self, own: HandleStep) -> None:
        """Let the end of backward complete a handle that was not expected or is complete already, and its followers."""
        backward_id = self._step.backward_id
        for one in (*own.followers, own):
            if one.completed_in == backward_id:
                # Forwards and backwards interleave: the handle was reduced already, and more is coming.
                if (0, one, False) not in self.queue:
                    self.queue.insert(0, (0, one, False))
            elif one.queued_in != backward_id:
                # It ran before the previous backward, or its first forward had no grad.
                one.queued_in = backward_id
                one.is_armed, one.first_forward = True, 0
                self.queue.insert(0, (0, one, False))
                self.last_armed.append(one)

    def complete_after(self, clock: float, gather: Callable[[HandleStep], object]) -> None:
        """Complete handles whose first call began after ``clock``: the gradient of an output made then has arrived.

        ``gather`` those first that no gradient has reached here: other ranks have gathered them.
        """
        queue, step = self.queue, self._step
        if step.is_threaded:
            return
        # In a backward that makes no graph, gradients are disabled anyway.
        with torch.no_grad() if step.makes_graph else nullcontext():
            while queue and queue[-1][0] > clock:
                _, own, is_gather = queue.pop()
                if not is_gather:
                    self._complete(own, is_early=True)
                # A later forward than that of the output waits for a backward of its own.
                elif own.met_in != step.backward_id and own.armed_at <= clock:
                    gather(own)

    def complete_the_rest(self, gather: Callable[[HandleStep], object]) -> None:
        """Complete the handles that are left when a backward ends; see ``complete_after``, also for the error."""
        while self.queue:
            _, own, is_gather = self.queue.pop()
            if not is_gather:
                if own.completed_in == self._step.backward_id and own.handle.steppers:
                    raise stepped_already(own.handle)
                self._complete(own, is_early=False)
            elif own.met_in != self._step.backward_id:
                gather(own)

    def complete_kept(self, waiting: Sequence[HandleStep]) -> None:
        """Reduce, outside of any backward, gradients that backwards without synchronisation have left."""
        # For all of them first: reductions that end meanwhile replace the ``grad`` that kept gradients wait beside.
        self._drop_zeroed_gradients()
        for own in reversed(waiting):
            self._complete(own, is_early=False)

    def notice_dropped(self) -> None:
        """Forget, between steps, kept gradients that users have dropped or set to zero; the others are kept on."""
        for gradients in self._drop_zeroed_gradients():
            gradients.keep()

    def _drop_zeroed_gradients(self) -> list[Gradients]:
        """Forget kept gradients that users have dropped by ``zero_grad``; returns where gradients were kept."""
        kept = []
        for handle in self._step.handles:
            dropped = [0] * len(handle.buffers)
            for index, flat in enumerate(handle.buffers):
                if flat.gradients.is_kept:
                    kept.append(flat.gradients)
                    dropped[index] = flat.gradients.drop_zeroed()
            for hear in self._step.listeners.gradients_dropped if any(dropped) else ():
                hear(handle, dropped)
        return kept

    def _complete(self, own: HandleStep, *, is_early: bool) -> None:
        """Reduce the handle's gradients and free its parameters."""
        step, handle = self._step, own.handle
        own.completed_in = step.backward_id
        for hear in step.listeners.handle_completed:
            hear(handle)
        if step.makes_graph:
            # A backward of this backward will read the parameters.
            step.unsharded.retain_until_backward(handle, read_from=own.armed_at)
        step.streams.meet()
        # A forward that uses the parameters runs around this backward.
        is_in_use = bool(step.running) and step.is_in_use(handle)
        trainable: list[GradientLedger] = []
        for ledger in own.ledgers:  # A comprehension would double the cost.
            is_trainable = ledger.flat.params[0].sharded.requires_grad or ledger.flat.is_trainable
            if is_trainable or ledger.flat.gradients.is_unsynced or ledger.is_unfrozen:
                trainable.append(ledger)
                ledger.is_unfrozen &= is_trainable
                ledger.flat.gradients.is_unsynced = not handle.requires_gradient_sync
        if trainable and handle.requires_gradient_sync:
            for ledger in trainable:
                for hear in step.listeners.reduction_begins:
                    hear(handle, own.ledgers.index(ledger))
                gradient = step.finalizer.take(ledger, handle.settings.gradient_buffers)
                if is_early and ledger.grad_mask != ledger.flat.gradients.all_bits:
                    self._retain(handle, ledger.flat.gradients, ledger.grad_mask)
                if ledger is trainable[-1] and handle.settings.reshard_after_backward and not is_in_use:
                    # Freed before the last reduction starts.
                    step.unsharded.reshard(handle)
                if gradient is not None:
                    step.finalizer.begin(ledger, gradient)
        else:
            for ledger in trainable if is_early else ():
                self._retain(handle, ledger.flat.gradients, ledger.flat.gradients.bits())
            if handle.settings.reshard_after_backward and not is_in_use:
                step.unsharded.reshard(handle)
        step.streams.meet()
        if own.leaders and handle.view is ParamView.GATHERING:
            # Parameters that stay unsharded have to be so on all ranks, also where the modules took no part.
            step.unsharded.unshard(handle)

    def _retain(self, handle: Handle, gradients: Gradients, had: int) -> None:
        """Keep the parameters' memory if parts of backward that read them are still to run: gradients are missing."""
        if gradients.expects_more(had):
            self._step.unsharded.retain_until_backward(handle)
