"""When each handle of a root unshards, reshards and reduces.

Every collective is decided by events that all ranks share: a fully sharded module starts
or ends its forward, or the gradient of its output arrives. Which *parameters* got a
gradient is never asked, so a parameter that only some ranks use cannot change the order.

When is a handle's gradient complete? Autograd runs ready nodes latest-created first. When
the gradient of a module's output arrives, every node created after that output has run; so
every handle whose first forward call came later is complete and may be reduced, with no
hook on any parameter. What no earlier module completes, the end of backward does. That order says
when to reduce *early*. Where it is wrong, the ranks find out when backward ends, and reduce once more.
See docs/notes/completion.md. On which stream things run is the business of ``streams.py``.

A module on fewer ranks, such as an expert, need not run on all of these in every step. So its handle *follows*
that of the module around it: nothing that its own calls do starts a collective. See docs/notes/experts.md.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from composable.errors import UsageError, place_of_rank
from composable.frames import in_backward, in_split_backward, is_called_again
from composable.runtime.account import Account
from composable.runtime.agreement import Agreement, Comparison
from composable.runtime.companions import Companion
from composable.runtime.hand_over import HandOver
from composable.runtime.notices import notice_leak
from composable.runtime.reductions import Reductions
from composable.runtime.settings import RootSettings
from composable.runtime.streams import Streams
from composable.runtime.telling import Teller
from composable.runtime.turn import Turn
from composable.runtime.unsharded import Unsharded
from composable.storage import Handle, refuse_graph_of_backward
from composable.torch_hooks import Ending, in_backward_of_nothing, next_ending_number
from composable.torch_private import next_node_number

__all__ = ["Scheduler"]

# In place of the end of a call that decides nothing: of a module that goes with the one around it.
_LED = math.inf


class Scheduler:
    """Runs the handles of one root.

    Args:
        handles: All handles of the root, left to right, depth first.
        streams: Of the device where they live.
        at_end: Lets this run at the end of the running backward; returns what autograd frees when that ends.
        settings: Of the root, read whenever they matter.

    Attributes:
        number: Its place among all that end a backward.
        is_backward: A backward of this root is running.
        backward_id: How many backwards there were, the running one included.
        forward_id: The same of forwards.
        backwards_before: Of the backwards, those before the last forward.
        failure: What the last forward raised.
        is_closed: Another annotation took the place of this one.
        companions: What else takes part in every backward.
    """

    __slots__ = (
        "__weakref__",
        "_armed",
        "_at_end",
        "_clock",
        "_end",
        "_finalizing",
        "_first_nodes",
        "_hand_over",
        "_is_ending",
        "_is_threaded",
        "_last_armed",
        "_last_backward",
        "_last_forward",
        "_makes_graph",
        "_queue",
        "_reductions",
        "_running",
        "_settings",
        "_started_at",
        "_streams",
        "_teller",
        "_thread",
        "_turns",
        "_unsharded",
        "backward_id",
        "backwards_before",
        "companions",
        "failure",
        "forward_id",
        "handles",
        "is_backward",
        "is_closed",
        "number",
    )

    def __init__(
        self,
        handles: Sequence[Handle],
        streams: Streams,
        at_end: Callable[[Ending], Callable[[], None]],
        settings: RootSettings | None = None,
    ) -> None:
        self.handles = tuple(handles)
        self.number = next_ending_number()
        self.is_backward = False
        self.backward_id = 0
        self.forward_id = 0
        self.backwards_before = 0
        self.failure = ""
        self.is_closed = False
        self.companions: Sequence[Companion] = ()
        self._settings = settings or RootSettings()
        self._finalizing: object | None = None
        self._clock = self._started_at = 0
        self._turns = {handle: Turn(handle) for handle in handles}
        self._streams = streams
        self._at_end = at_end
        self._reductions = Reductions(streams)
        self._hand_over = HandOver(self._turns, self._reductions)
        self._running: list[nn.Module] = []
        self._first_nodes: list[int] = []
        self._armed: list[Turn] = []
        self._last_armed: list[Turn] = []
        self._queue: list[Turn] = []
        self._unsharded = Unsharded(self.handles, streams, self._note_backward, self._takes_secondary)
        self._last_forward: Turn | None = None
        self._last_backward: Turn | None = None
        self._thread: int | None = None
        self._is_threaded = False
        self._makes_graph: bool | None = False  # None: nobody has said yet
        self._is_ending = False
        self._end: Callable[[], object] = lambda: None
        self._teller: Teller | None = None

    def tell_by(self, teller: Teller | None) -> None:
        """Tell ranks without inputs of each collective before it starts; ``None``: all have inputs."""
        self._teller = self._unsharded.teller = teller

    def agree_by(self, make: Callable[[Sequence[Account]], Sequence[Agreement | Comparison]]) -> None:
        """Let the ranks compare at the end of each backward; ``make`` gets the accounts of all handles."""
        self._hand_over.agree_by(make)

    def follow(self, leaders: Mapping[Handle, Sequence[Handle]]) -> None:
        """Let handles go with others, whether their own modules run or not.

        Args:
            leaders: Of each handle that follows; these follow none.
        """
        led: dict[Turn, list[Turn]] = {}
        for handle, ahead in leaders.items():
            turn = self._turns[handle]
            turn.leaders = tuple(self._turns[one] for one in ahead)
            for leader in turn.leaders:
                led.setdefault(leader, []).append(turn)
        for leader, turns in led.items():
            leader.followers = tuple(turns)

    def followers_of(self, handle: Handle) -> tuple[Turn, ...]:
        """Return what goes with ``handle``."""
        return self._turns[handle].followers

    def compare_by(self, find_stale: Callable[[Sequence[Handle]], Iterable[Handle]]) -> None:
        """Let the ranks find out together which unsharded handles are older than their shards."""
        self._unsharded.compare_by(find_stale)

    @property
    def is_deferred(self) -> bool:
        """Backwards have ended whose reductions did not; a later backward or ``finalize`` ends them."""
        return self._hand_over.is_deferred

    @property
    def is_idle(self) -> bool:
        """No forward or backward of this root is running."""
        return not self._running and not in_backward()

    @property
    def _stream_to_name(self) -> dict[int, str]:
        """Name of each stream by its id, for debugging; empty on the CPU."""
        return dict(self._streams.names)

    # Forward

    def enter_forward(self, module: nn.Module) -> None:
        """A managed module starts its forward; the outermost one starts a forward pass."""
        running = self._running
        first_node = -1
        if not in_backward():
            first_node = next_node_number()
            if self.is_backward or (running and running[0] is module and not is_called_again(module)):
                # The last backward raised before its final callback, or Ctrl-C ended the last forward.
                self._reset()
            if not running:
                self.forward_id += 1
                self.backwards_before = self.backward_id
                self.failure = ""
                self._started_at = self._clock
                self._first_nodes.clear()
                self._last_forward = None
                if self._finalizing is not None:
                    raise _not_waited_for()
                if self._teller is not None:
                    self._teller.begin_forward(module)
                self._unsharded.begin_forward(self._turns, self._settings.post_optim_event)
                self.optimizer_stepped()
            thread = threading.get_ident()
            if thread != self._thread:
                # Numbers of nodes are per thread: those of two say nothing about who runs first.
                self._is_threaded = self._thread is not None
                self._thread = thread
        self._first_nodes.append(first_node)
        running.append(module)

    def is_running(self, module: nn.Module) -> bool:
        """Say whether ``module`` is the innermost managed module whose forward has started."""
        return bool(self._running) and self._running[-1] is module

    def is_outermost(self, module: nn.Module) -> bool:
        """Say whether of the calls of ``module`` that are running this is the only one."""
        return self._running.count(module) == 1

    @property
    def first_node(self) -> int:
        """Number of autograd's next node when the innermost managed module started its forward; -1: in backward."""
        return self._first_nodes[-1]

    def exit_forward(self, *, has_failed: bool = False) -> None:
        """The innermost managed module ends its forward, also by an exception."""
        is_in_backward = self._first_nodes.pop() < 0
        module = self._running.pop()
        if not self._running and not is_in_backward:
            for handle in self._unsharded:
                turn = self._turns[handle]
                if handle.is_gathering or turn.modules_left:
                    # A prefetch that nothing used, or a group of modules that did not all run.
                    turn.modules_left.clear()
                    if handle.is_gathering or handle.reshard_after_forward or turn.first_forward is None:
                        self._reshard_after_forward(turn, is_differentiable=turn.first_forward is not None)
            if has_failed and self._armed and _first_forward(self._armed[0]) > self._started_at:
                # Nothing that has ended waits for a backward.
                self._drop_secondaries()
            # Also before backward.
            self._unsharded.hide()
            self._streams.wait_for_copies()
            if self._teller is not None and not self.failure:
                self._teller.end_forward(module, is_awaited=bool(self._armed) and torch.is_grad_enabled())

    def pre_forward(self, handle: Handle) -> None:
        """Make the handle's parameters usable and start gathering what comes next.

        Raises:
            UsageError: A context has lent the parameters to the user.
        """
        if handle.is_lent:
            if handle.is_shown_whole and not torch.is_grad_enabled():
                return
            raise _lent(handle)
        turn = self._turns[handle]
        if self._is_led(turn):
            # Gathered already: which of them run, and in what order, is this rank's own business.
            self._unsharded.unshard(handle)
            return
        if len(handle.modules) > 1 and not turn.modules_left:
            turn.modules_left.update(handle.modules)
        if self._first_nodes[-1] < 0:
            # In backward: activation checkpointing runs the forward again, order and clock stay as they are.
            self._note_backward(runs_again=True)
            self._begin_unshard(turn)
            self._unshard_for_backward(handle)
            return
        self._clock += 1
        if turn.entered_at is None:
            turn.entered_at = self._clock
        last = self._last_forward
        if last is not turn:
            if last is not None:
                last.next_forward = turn
            turn.previous_forward = last
            self._last_forward = turn
        self._unshard(turn)
        following = turn.next_forward
        if handle.forward_prefetch is not None:
            self._prefetch(handle.forward_prefetch)
        elif following is not None and following is not turn:
            self._begin_unshard(following)

    def post_forward(self, handle: Handle, module: nn.Module, *, is_differentiable: bool, leaks: bool = False) -> float:
        """End one call of ``module``; returns its clock, which the output's hook must give to ``pre_backward``.

        Args:
            handle: Of the module.
            module: Whose forward ended.
            is_differentiable: Some output takes part in autograd.
            leaks: Backward may get to nodes of this call before it gets to an output, or without.
        """
        turn = self._turns[handle]
        if handle.is_lent:
            return self._clock
        is_led = self._is_led(turn)
        turn.modules_left.discard(module)
        if self._first_nodes[-1] < 0:
            if is_differentiable and not is_led:
                # Reentrant checkpointing: the first forward ran without grad, so only now is it known.
                self._queue_late(turn)
            return self._clock
        self._clock += 1
        if is_differentiable and not is_led:
            for one in (turn, *turn.followers):
                if one.first_forward is None:
                    one.first_forward = turn.entered_at
                    self._armed.append(one)
        if leaks:
            if not self.failure:  # An exception holds on to tensors as well.
                notice_leak(handle)
            self._unsharded.linger(handle, with_graph=True)
            self._unsharded.watch_leaves(handle)
        if is_led:
            return _LED
        # The last call of the forward: no other module of the handle is to run, nor this one around itself.
        if not turn.modules_left and self._running.count(module) == 1:
            for one in turn.followers:
                self._end_call(one, is_differentiable=is_differentiable)
            turn.entered_at = None
            self._end_call(turn, is_differentiable=is_differentiable)
        return self._clock

    def _is_led(self, turn: Turn) -> bool:
        """Say whether the call that runs is inside of what the handle goes with, and not from elsewhere."""
        if not turn.leaders:
            return False
        # Activation checkpointing may run a part again, without the modules around it.
        is_again = self._first_nodes[-1] < 0
        return any(
            self._is_around(leader.handle) or (is_again and leader.queued_in == self.backward_id)
            for leader in turn.leaders
        )

    def _end_call(self, turn: Turn, *, is_differentiable: bool) -> None:
        """Free a handle after the last call of the forward, or let it stay."""
        handle = turn.handle
        # Without gradients they stay only where the user asked for it: for a loop of forwards, say.
        stays = handle.reshard_option is False and not torch.is_grad_enabled()
        frees = handle.reshard_after_forward or not (is_differentiable or stays)
        if handle.is_gathering and (handle.keeps_secondary or not frees):
            # It follows, and its modules did not run here: what stays has to be the same on all ranks.
            self._unsharded.unshard(handle)
        if frees:
            self._reshard_after_forward(turn, is_differentiable=is_differentiable)

    def _unshard(self, turn: Turn) -> None:
        """Unshard a handle, and start to gather what goes with it before anything can make ranks differ."""
        if turn.followers:
            self._begin_unshard(turn)
        self._unsharded.unshard(turn.handle)

    def _begin_unshard(self, turn: Turn) -> None:
        self._unsharded.begin_unshard(turn.handle)
        followers = [one.handle for one in turn.followers if one.handle.held_with is None]
        for handle in followers:
            self._unsharded.begin_unshard(handle)
        for handle in followers:
            handle.end_fill()

    def _begin_followers(self, turn: Turn) -> None:
        """Do so in backward with those that go with it."""
        for one in turn.followers:
            if one.handle.unshard_in_backward and one.handle.held_with is None:
                self._unsharded.begin_unshard(one.handle)

    def _reshard_after_forward(self, turn: Turn, *, is_differentiable: bool) -> None:
        """Free the parameters; where a backward will gather them from fewer ranks, all but the secondary shards."""
        handle = turn.handle
        is_read = is_differentiable and handle.unshard_in_backward
        if not (is_read and handle.keeps_secondary and handle.is_unsharded and handle.held_with is None):
            self._unsharded.reshard(handle)
            return
        is_kept = handle.has_secondary and turn.kept_in == self.forward_id
        self._unsharded.reshard(handle, keeps_secondary=not is_kept)
        turn.kept_in = self.forward_id

    def _takes_secondary(self, handle: Handle) -> bool:
        """Say whether a gather that starts now may be from secondary shards: for what reads the values of a forward.

        What runs outside of a step, and a forward after the one that left them, needs those of now.
        """
        if self._running and self._first_nodes[-1] >= 0 and not self.is_backward:
            return handle.fills_secondary or self._turns[handle].kept_in == self.forward_id
        return handle.has_secondary and self.is_backward and in_backward()

    def _drop_secondaries(self) -> None:
        for handle in self.handles:
            handle.end_secondary()

    # Backward

    def pre_backward(self, handle: Handle, clock: float, *, gathers: bool = True) -> None:
        """The gradient of an output of ``handle`` arrived.

        Args:
            handle: The handle.
            clock: End of the call that made the output, as ``post_forward`` gave it.
            gathers: Backward of that call may read the parameters.
        """
        self._note_backward()
        queue, backward_id = self._queue, self.backward_id
        if queue and _first_forward(queue[-1]) > clock and not self._is_threaded:
            if self._makes_graph:
                with torch.no_grad():
                    self._complete_after(clock)
            else:
                self._complete_after(clock)
        turn = self._turns[handle]
        if clock == _LED and turn.leaders:
            if gathers:
                self._unsharded.unshard(handle)
            return
        if turn.queued_in != backward_id or turn.completed_in == backward_id:
            self._queue_late(turn)
        if gathers:
            self._unshard_for_backward(handle)
        self._begin_followers(turn)
        if turn.met_in == backward_id:
            return
        turn.met_in = backward_id
        last = self._last_backward
        if last is not None:
            last.next_backward = turn
        self._last_backward = turn
        if handle.backward_prefetch is not None:
            for ahead in handle.backward_prefetch:
                self._prefetch_backward(self._turns.get(ahead))
            return
        following = turn.next_backward or turn.previous_forward
        # A handle that is not armed takes no part in this backward.
        if following is not None and following.first_forward is not None and following.completed_in != backward_id:
            self._prefetch_backward(following)

    def _prefetch_backward(self, turn: Turn | None) -> None:
        # Those of another root are gathered by that root, on streams of its own.
        if turn is not None:
            if turn.handle.unshard_in_backward:
                self._unsharded.begin_unshard(turn.handle)
            self._begin_followers(turn)

    def _unshard_for_backward(self, handle: Handle) -> None:
        self._unsharded.unshard(handle)
        # Until its end the parameters stay.
        handle.end_secondary()

    def _complete_after(self, clock: float) -> None:
        """Complete the handles whose first forward began after ``clock``."""
        queue = self._queue
        while queue and _first_forward(queue[-1]) > clock:
            self._complete(queue.pop(), is_early=True)

    def _note_backward(self, *, runs_again: bool = False) -> None:
        """A backward is running: begin it, unless it was begun.

        Args:
            runs_again: Activation checkpointing tells, which enables gradients whether backward makes a graph or not.
        """
        if not self.is_backward:
            self._begin_backward()
        elif self._end() is None:
            # That was another one, which an exception has stopped.
            self._tidy_up()
            self._begin_backward()
        if self._makes_graph is None and not runs_again:
            self._makes_graph = torch.is_grad_enabled()
            if self._makes_graph:
                self._check_steppers()

    def _note_end(self, _: object) -> None:
        """Autograd has ended a backward: also one that an exception stopped, and whose gradients users drop now."""
        if self.is_backward:
            self._unsharded.hide()

    def _begin_backward(self) -> None:
        if self.is_closed:
            raise UsageError(
                "backward of a forward that ran before the model's annotation was changed",
                at=place_of_rank(),
                fix="run backward before unannotate, or forward again after it",
            )
        if self._finalizing is not None:
            raise _not_waited_for()
        if in_split_backward():
            self.check_split_backward()
        # First: the next forward undoes a backward that was cut short, here as well.
        self.is_backward = True
        self._end = weakref.ref(self._at_end(self), self._note_end)
        self.backward_id += 1
        self._makes_graph = None
        if not self._settings.ends_backward:
            self._check_steppers()
        armed = self._armed or self._last_armed
        # Of a forward that had its backward: only these are armed without a first forward.
        again: set[Turn] = set() if self._armed else set(self._last_armed)
        if self._teller is not None:
            self._teller.begin_backward()
        self._hand_over.open()
        self._drop_zeroed_gradients(self._turns)
        for handle, turn in self._turns.items():
            if handle.casts_gradients:
                handle.sum_in_reduce_dtype()
            if handle.has_unsynced_gradients and turn.first_forward is None:
                turn.first_forward = 0
                if turn not in again:
                    armed = [*armed, turn]
        self._queue = sorted(armed, key=_first_forward)
        for turn in armed:
            turn.queued_in = self.backward_id
        self._last_armed, self._armed = armed, []
        for companion in self.companions:
            companion.follow_backward()

    def _drop_zeroed_gradients(self, handles: Iterable[Handle]) -> None:
        """Forget kept gradients that users have dropped by ``zero_grad``."""
        for handle in handles:
            if handle.keeps_gradients:
                dropped = handle.drop_zeroed_gradients()
                if self._teller is not None and any(dropped):
                    self._teller.drop(handle, dropped)

    def check_split_backward(self) -> None:
        """Raise if a stage of torch's pipelines takes gradients of inputs and of parameters apart.

        It looks for the parameters that modules hold in the graph, and finds none of those that were computed with.

        Raises:
            UsageError: The parameters are not shown by ``unshard_params``.
        """
        if any(handle.held_with is None for handle in self.handles):
            raise UsageError(
                "a pipeline's stage takes gradients of inputs and of parameters apart, and between forward and "
                "backward a sharded module holds no whole parameters",
                at=f"{place_of_rank()}, {self.handles[0].described}",
                fix="enter unshard_params(module, writeback=False) for the step, as ShardedStage in "
                "examples/clients/pipelining.py does, or take a schedule without zero bubble",
            )

    def _check_steppers(self) -> None:
        for handle in self.handles:
            if handle.steppers:
                if self._makes_graph:
                    raise refuse_graph_of_backward(handle.fqn)
                raise UsageError(
                    "gradients are to wait for a later backward, and an optimizer steps inside this one",
                    at=f"{place_of_rank()}, module {handle.fqn!r}",
                    fix="accumulate in no_sync instead, or remove() what step_in_backward returned",
                )

    def _queue_late(self, turn: Turn) -> None:
        """Let the end of backward complete what was not expected in it, or is complete already, and what follows."""
        for one in turn.followers:
            self._queue_late(one)
        if turn.completed_in == self.backward_id:
            # Forwards and backwards interleave: reduced already, and more is coming.
            turn.is_late = True
        elif turn.queued_in != self.backward_id:
            # It ran before the backward before this one, or its first forward had no grad.
            turn.queued_in = self.backward_id
            turn.first_forward = 0
            self._queue.insert(0, turn)
            self._last_armed.append(turn)

    def start(self) -> None:
        """End a backward: complete what no earlier module completed, and tell the other ranks what is left.

        Unless the user ends it later.
        """
        if not self.is_backward:
            return
        with torch.no_grad():
            self._complete_the_rest()
        if self._teller is not None:
            self._teller.end_reductions(ends=self._settings.ends_backward)
        self._hand_over.tell(ends=self._settings.ends_backward)
        self._is_ending = True

    def reduce_kept(self) -> None:
        """Reduce what backwards without synchronisation left, in a backward of nothing. Collective; nothing runs."""
        armed, last_armed = self._armed, self._last_armed
        first_forwards = [(turn, turn.first_forward) for turn in armed]
        # Forwards that wait for their backward take no part in this one.
        self._armed, self._last_armed = [], []
        for turn in armed:
            turn.first_forward = None
        try:
            in_backward_of_nothing(self._note_backward)
        finally:
            self._armed, self._last_armed = armed, last_armed
            for turn, first_forward in first_forwards:
                turn.first_forward = first_forward

    def _complete_the_rest(self) -> None:
        while self._queue:
            self._complete(self._queue.pop(), is_early=False)
        for turn in self._turns.values():
            if turn.is_late:
                turn.is_late = False
                if turn.handle.steppers:
                    raise _stepped_already(turn.handle)
                self._complete(turn, is_early=False)

    def finish(self) -> None:
        """Reduce what is left on any rank, and hand over every gradient.

        Raises:
            UsageError: On this rank, or on one that tells of it in its message, a gradient could not be reduced.
                Or one came too late for a module whose ranks send no message.
        """
        if not self._is_ending:
            return  # `start` raised: the next forward begins by tidying up.
        self._is_ending = False
        if not self._settings.ends_backward:
            with torch.no_grad():
                self._finish_backward()
            self._hand_over.postpone()
            return
        if self._teller is not None:
            self._teller.hand_over()
        self._hand_over.end(self._finish_backward)

    def _finish_backward(self) -> None:
        if not self.is_backward:
            return  # Ended by hand.
        for handle in self._unsharded:
            if self._makes_graph and not handle.is_gathering:
                self._unsharded.linger(handle, with_graph=True)
            if handle.reshard_after_backward or handle.is_gathering:
                self._reshard_unless_running(handle)
            elif not self._is_in_use(handle):
                handle.hide()
        if self._makes_graph:
            self._unsharded.watch_lingering()
        self._unsharded.end_lingering()
        for turn in self._last_armed:
            turn.first_forward = None
            turn.handle.end_secondary()
        while self._first_nodes and self._first_nodes[-1] < 0:
            # Run again by checkpointing, and stopped in the hook after forward: torch tells nobody.
            self._first_nodes.pop()
            del self._running[len(self._first_nodes) :]
        self._streams.end_backward()
        self._last_backward = None
        self._is_threaded, self._thread = False, None
        self.is_backward = False

    def _complete(self, turn: Turn, *, is_early: bool) -> None:
        """Reduce the handle's gradients and free its parameters."""
        handle = turn.handle
        turn.completed_in = self.backward_id
        if self._makes_graph:
            # A backward of this backward will read the parameters.
            self._unsharded.linger(handle, with_graph=True)
        self._streams.meet()
        trainable = [account for account in turn.accounts if account.flat.is_trainable]
        if trainable:
            handle.has_unsynced_gradients = not handle.requires_gradient_sync
        if trainable and handle.requires_gradient_sync:
            self._reduce(turn, trainable, is_early=is_early)
        else:
            if is_early and any(account.flat.expects_more(account.flat.gradient_bits()) for account in trainable):
                self._unsharded.linger(handle)
            if handle.reshard_after_backward:
                self._reshard_unless_running(handle)
        self._streams.meet()
        if turn.leaders:
            # What stays has to be the same on all ranks, also where its modules took no part.
            if handle.is_gathering:
                self._unsharded.unshard(handle)
            handle.end_secondary()

    def _reduce(self, turn: Turn, accounts: Sequence[Account], *, is_early: bool) -> None:
        """Start the reductions; before the last of them the parameters are freed."""
        handle = turn.handle
        for account in accounts:
            if self._teller is not None:
                self._teller.reduce(handle, turn.accounts.index(account))
            gradient = self._reductions.take(account, handle.gradient_buffers)
            if is_early and account.had != account.flat.all_bits and account.flat.expects_more(account.had):
                # Not complete after all: parts of backward that read the parameters are still to run.
                self._unsharded.linger(handle)
            if account is accounts[-1] and handle.reshard_after_backward:
                self._reshard_unless_running(handle)
            if gradient is not None:
                self._reductions.begin(account, gradient)

    def _reshard_unless_running(self, handle: Handle) -> None:
        # A backward inside a forward leaves the modules around it as they are.
        if not self._running or not self._is_in_use(handle):
            self._unsharded.reshard(handle)

    def _is_in_use(self, handle: Handle) -> bool:
        return self._is_around(handle) or any(self._is_around(one.handle) for one in self._turns[handle].leaders)

    def _is_around(self, handle: Handle) -> bool:
        return any(module in handle.modules for module in self._running)

    # Unshard and reshard

    def unshard(self, handle: Handle) -> None:
        """Make the modules of ``handle`` hold unsharded parameters. Collective unless it is unsharded."""
        self._unsharded.unshard(handle)
        self._streams.wait_for_copies()

    def begin_unshard(self, handle: Handle) -> None:
        """Start gathering ahead of use; ``unshard`` waits for it."""
        self._unsharded.begin_unshard(handle)
        if self._turns[handle].leaders:
            handle.end_fill()

    def refresh(self, handles: Iterable[Handle]) -> None:
        """Free what an earlier step left of ``handles``, hidden, where a rank has written its shard since.

        Collective. Within a step nothing happens: its forward has done so.
        """
        if self._running or self.is_backward:
            return
        self._unsharded.refresh(handles)

    def reshard(self, handle: Handle) -> None:
        """Free the unsharded parameters of ``handle``; no error if there are none, or a context holds them."""
        self._unsharded.reshard(handle)
        self._streams.wait_for_copies()

    def optimizer_stepped(self) -> None:
        """The optimizer wrote the shards, on the current stream or where the user said."""
        written, self._settings.post_optim_event = self._settings.post_optim_event, None
        if written is None:
            self._streams.shards_written()
        else:
            self._streams.shards_written_at(written)

    def shards_written(self) -> None:
        """The current stream wrote the shards outside of forward; gathers that start now must wait for it."""
        self._streams.shards_written()

    def reshard_hidden(self) -> None:
        """Free what a backward kept and was no longer to keep; within a step, its end does."""
        if self._running or self.is_backward:
            return
        for handle in self._unsharded:
            if handle.is_hidden and handle.reshard_after_backward:
                self._unsharded.reshard(handle)

    def free_kept(self, handle: Handle) -> None:
        """Free memory that ``handle`` was to keep and no longer is, where nothing is unsharded there."""
        self._unsharded.free_kept(handle)

    def check_between_steps(self) -> None:
        """Raise ``UsageError`` where a step is running, or reductions are under way."""
        if self._running or self.is_backward or self.is_deferred:
            raise UsageError("streams cannot change within a step", at=place_of_rank(), fix="do it between two steps")

    def use_streams(self, streams: Streams) -> None:
        """Run on other streams from now on; frees what is unsharded.

        Raises:
            UsageError: A step is running, or reductions are under way.
        """
        self.check_between_steps()
        for handle in self._unsharded:
            self._unsharded.reshard(handle)
        self._unsharded.end_lingering(always=True)
        self._drop_secondaries()
        # Also what was freed so far: the current stream comes after its last readers.
        self._streams.end_backward()
        self._streams = streams
        self._unsharded.use_streams(streams)
        self._reductions.use_streams(streams)
        streams.shards_written()

    def _prefetch(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            # Those of another root are gathered by that root, on streams of its own.
            if handle in self._turns:
                self._begin_unshard(self._turns[handle])

    # Ending by hand

    def finalize(self) -> None:
        """Begin to end the backwards so far: reduce what waits for it by ``requires_gradient_sync``, tell the ranks.

        Nothing happens if none has ended since the last time. Collective otherwise; ``end_finalize`` has to follow.

        Raises:
            UsageError: The last one has not been waited for.
        """
        if self._finalizing is not None:
            raise _not_waited_for()
        waiting = [
            turn
            for turn in self._turns.values()
            if turn.handle.requires_gradient_sync and turn.handle.has_unsynced_gradients
        ]
        if not waiting and not self.is_deferred:
            return
        self._hand_over.is_deferred = True
        self._makes_graph = False
        try:
            with torch.no_grad():
                # All of them first: reductions that end meanwhile replace what kept gradients wait beside.
                self._drop_zeroed_gradients(turn.handle for turn in waiting)
                for turn in reversed(waiting):
                    self._complete(turn, is_early=False)
                self._streams.end_backward()
            if self._teller is not None:
                self._teller.end_reductions(ends=True)
            self._hand_over.tell(ends=True)
            self._finalizing = object()
        except BaseException:
            # No forward would find out that this was cut short.
            self._reset()
            raise

    @property
    def finalizing(self) -> object | None:
        """Which ``finalize`` has to be ended by ``end_finalize``; ``None``: none."""
        return self._finalizing

    def end_finalize(self) -> None:
        """Hand over every gradient; errors as ``finish``."""
        if self._finalizing is not None:
            self._finalizing = None
            if self._teller is not None:
                self._teller.hand_over()
            try:
                self._hand_over.end(self._finish_backward)
            except BaseException:
                if self.is_deferred:
                    self._reset()
                raise
            finally:
                if self._teller is not None:
                    self._teller.end_by_hand()

    # Recovery

    def abandon_step(self, *, always: bool = False) -> None:
        """Forget a step that an exception or Ctrl-C cut short: free buffers, drop its gradients. Nothing is running.

        Args:
            always: Also one that has ended, and gradients that wait to be reduced.
        """
        if always or self._running or self.is_backward:
            self._reset()

    def _reset(self) -> None:
        """Begin anew, from whatever state an exception at any line has left; it may cut this short too."""
        self._tidy_up()
        self._first_nodes.clear()
        self._running.clear()

    def _tidy_up(self) -> None:
        """Forget the forwards and backwards so far, but for a forward that is running around the backward."""
        if self._teller is not None:
            is_kept = any(handle.waits_for_copies for handle in self.handles)
            self._teller.abandon(is_needed=self.is_backward or self.is_deferred or is_kept)
        for handle in self.handles:
            handle.settle()
        self._hand_over.abandon()
        self._reductions.abandon()
        self._streams.end_backward()
        self._unsharded.end_lingering(always=True)
        for handle in self._unsharded:
            self._reshard_unless_running(handle)
        for handle, turn in self._turns.items():
            turn.end_step()
            handle.drop_gradients()
            handle.drop_secondary()
        self._hand_over.forget_kept()
        self._hand_over.is_deferred, self._finalizing = False, None
        self._queue.clear()
        self._armed = []
        self._last_armed = []
        self._last_backward = None
        self._is_threaded, self._thread = False, None
        self._is_ending = False
        self.is_backward = False

    def stand_by(self) -> None:
        """Free what is unsharded, and drop gradients that wait on this rank for a later backward; nothing is running.

        What was reduced and waits for all ranks stays.
        """
        self._unsharded.end_lingering(always=True)
        for handle in self._unsharded:
            self._unsharded.reshard(handle)
        for handle, turn in self._turns.items():
            handle.drop_gradients()
            turn.first_forward = None
        self._armed = []
        self._last_armed = []

    def forget_order(self) -> None:
        """Prefetch nothing until forwards have shown anew in which order modules run. On every rank alike."""
        for turn in self._turns.values():
            turn.forget_order()

    def let_go(self, handles: Iterable[Handle]) -> None:
        """Leave ``handles`` to another root.

        Raises:
            UsageError: In the middle of a forward or backward.
        """
        if self._running or self.is_backward or self.is_deferred:
            raise UsageError(
                "a module that ran on its own so far is called by another root in the middle of its step",
                fix="call the outermost annotated module before the modules inside it",
            )
        self._unsharded.end_lingering(always=True)
        for handle in handles:
            self._unsharded.reshard(handle)
            handle.drop_secondary()
            if handle in self._turns:
                self._turns[handle].forget()
        self._armed = []
        self._last_armed = []

    def close(self) -> None:
        """Let go of every handle; a backward of a forward from before is an error. No step is running."""
        self.abandon_step()
        self.let_go(self.handles)
        self.is_closed = True
        # A graph of before holds this scheduler, and must not hold the shards with it.
        self._hand_over.close()
        for turn in self._turns.values():
            turn.accounts = []


def _lent(handle: Handle) -> UsageError:
    fix = "leave the context first, or enter it without rank0_only, offload_to_cpu and with_grads"
    if handle.is_shown_whole:
        fix = "leave the context first, or call the module under torch.no_grad(): it is shown in full precision"
    return UsageError(
        "a forward cannot run while unshard_params shows copies or gradients of the parameters",
        at=f"{place_of_rank()}, {handle.described}",
        fix=fix,
    )


def _stepped_already(handle: Handle) -> UsageError:
    return UsageError(
        "more of a gradient arrives in the backward that has stepped on the rest of it",
        at=f"{place_of_rank()}, module {handle.fqn!r}",
        fix="run one backward for each forward, or step after backward",
    )


def _not_waited_for() -> UsageError:
    return UsageError(
        "gradients are still being reduced",
        at=place_of_rank(),
        fix="call wait() on what finalize_backward(async_op=True) returned, before anything else",
    )


def _first_forward(turn: Turn) -> int:
    return turn.first_forward or 0
