"""When each handle of a root unshards, reshards and reduces.

Every collective is decided by events that all ranks share: a fully sharded module starts
or ends its forward, or the gradient of its output arrives. Which *parameters* got a
gradient is never asked, so a parameter that only some ranks use cannot change the order.

When is a handle's gradient complete? Autograd runs ready nodes latest-created first. When
the gradient of a module's output arrives, every node created after that output has run; so
every handle whose first forward call came later is complete and may be reduced, with no
hook on any parameter. What no earlier module completes, the end of backward does.
See docs/notes/completion.md. On which stream things run is the business of ``streams.py``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import nn

from composable.errors import UsageError, place_of_rank
from composable.frames import in_backward, is_called_again
from composable.runtime.streams import Streams
from composable.runtime.turn import Turn
from composable.storage import FlatBuffer, GradientBuffer, GradientPool, Handle, Reduction

__all__ = ["Scheduler"]

# Gradient buffers alive at once: one being reduced, one being filled.
MAX_GRADIENT_BUFFERS = 2


class _UnderWay(NamedTuple):
    """A reduction that was started, and what its source and its result belong to."""

    reduction: Reduction
    flat: FlatBuffer
    gradient: GradientBuffer


class Scheduler:
    """Runs the handles of one root.

    Args:
        handles: All handles of the root, left to right, depth first.
        streams: Of the device where they live.
        queue_callback: Asks autograd to call a function at the end of the running backward.

    Attributes:
        is_backward: A backward of this root is running.
        backward_id: How many backwards there were, the running one included.
        is_closed: Another annotation took the place of this one.
    """

    def __init__(
        self, handles: Sequence[Handle], streams: Streams, queue_callback: Callable[[Callable[[], None]], None]
    ) -> None:
        self.handles = tuple(handles)
        self.is_backward = False
        self.backward_id = 0
        self.is_closed = False
        self._clock = 0
        self._turns = {handle: Turn(handle) for handle in handles}
        self._streams = streams
        self._queue_callback = queue_callback
        self._running: list[nn.Module] = []
        self._armed: list[Turn] = []
        self._last_armed: list[Turn] = []
        self._queue: list[Turn] = []
        self._unsharded: dict[Handle, None] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._pool = GradientPool()
        self._last_forward: Turn | None = None
        self._last_backward: Turn | None = None

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
        if not in_backward():
            if self.is_backward or (running and running[0] is module and not is_called_again(module)):
                # The last backward raised before its final callback, or Ctrl-C ended the last forward.
                self._reset()
            if not running:
                self._last_forward = None
                self._streams.shards_written()
        running.append(module)

    def is_running(self, module: nn.Module) -> bool:
        """Say whether ``module`` is the innermost managed module whose forward has started."""
        return bool(self._running) and self._running[-1] is module

    def exit_forward(self) -> None:
        """The innermost managed module ends its forward, also by an exception."""
        self._running.pop()
        if not self._running and not in_backward():
            for handle in list(self._unsharded):
                turn = self._turns[handle]
                if handle.is_gathering or turn.modules_left:
                    # A prefetch that nothing used, or a group of modules that did not all run.
                    turn.modules_left.clear()
                    if handle.is_gathering or handle.reshard_after_forward or turn.first_forward is None:
                        self.reshard(handle)

    def pre_forward(self, handle: Handle) -> None:
        """Make the handle's parameters usable and start gathering what comes next.

        Raises:
            UsageError: A context has lent the parameters to the user.
        """
        if handle.is_lent:
            raise UsageError(
                "a forward cannot run while unshard_params shows copies or gradients of the parameters",
                at=f"{place_of_rank()}, module {handle.fqn!r}",
                fix="leave the context first, or enter it without rank0_only, offload_to_cpu and with_grads",
            )
        turn = self._turns[handle]
        if len(handle.modules) > 1 and not turn.modules_left:
            turn.modules_left.update(handle.modules)
        if in_backward():
            # Activation checkpointing runs the forward again: order and clock stay as they are.
            if not self.is_backward:
                self._begin_backward()
            self.unshard(handle)
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
        self.unshard(handle)
        following = turn.next_forward
        if handle.forward_prefetch is not None:
            self._prefetch(handle.forward_prefetch)
        elif following is not None and following is not turn:
            self.begin_unshard(following.handle)

    def post_forward(self, handle: Handle, module: nn.Module, *, is_differentiable: bool) -> int:
        """End one call of ``module``; returns its clock, which the output's hook must give to ``pre_backward``.

        Args:
            handle: Of the module.
            module: Whose forward ended.
            is_differentiable: Some output takes part in autograd.
        """
        turn = self._turns[handle]
        turn.modules_left.discard(module)
        if in_backward():
            if is_differentiable and turn.met_in != self.backward_id and turn not in self._queue:
                # Reentrant checkpointing: the first forward ran without grad, so only now is it known.
                turn.first_forward = 0
                self._queue.insert(0, turn)
                self._last_armed.append(turn)
            return self._clock
        self._clock += 1
        if is_differentiable and turn.first_forward is None:
            turn.first_forward = turn.entered_at
            self._armed.append(turn)
        # The last call of the forward: no other module of the handle is to run, nor this one around itself.
        if not turn.modules_left and self._running.count(module) == 1:
            turn.entered_at = None
            if handle.reshard_after_forward or not is_differentiable:
                self.reshard(handle)
        return self._clock

    # Backward

    def pre_backward(self, handle: Handle, clock: int) -> None:
        """The gradient of an output of ``handle`` arrived; ``clock`` is that call's end."""
        if not self.is_backward:
            self._begin_backward()
        queue, backward_id = self._queue, self.backward_id
        while queue and _first_forward(queue[-1]) > clock:
            self._complete(queue.pop())
        turn = self._turns[handle]
        if turn.completed_in == backward_id:
            # Forwards and backwards interleave: reduced already, and more is coming.
            turn.is_late = True
        if turn.met_in == backward_id:
            self.unshard(handle)
            return
        turn.met_in = backward_id
        last = self._last_backward
        if last is not None:
            last.next_backward = turn
        self._last_backward = turn
        self.unshard(handle)
        if handle.backward_prefetch is not None:
            self._prefetch(handle.backward_prefetch)
            return
        following = turn.next_backward or turn.previous_forward
        # A handle that is not armed takes no part in this backward.
        if following is not None and following.first_forward is not None and following.completed_in != backward_id:
            self.begin_unshard(following.handle)

    def _begin_backward(self) -> None:
        if self.is_closed:
            raise UsageError(
                "backward of a forward that ran before the model's annotation was changed",
                at=place_of_rank(),
                fix="run backward before unannotate, or forward again after it",
            )
        self._queue_callback(self._end_backward)
        self.is_backward = True
        self.backward_id += 1
        armed = self._armed or self._last_armed
        for handle, turn in self._turns.items():
            if handle.has_unsynced_gradients and turn.first_forward is None:
                turn.first_forward = 0
                armed = [*armed, turn]
        self._queue = sorted(armed, key=_first_forward)
        self._last_armed, self._armed = armed, []

    def _end_backward(self) -> None:
        """Complete what no earlier module completed, and hand over every gradient."""
        if not self.is_backward:
            return
        while self._queue:
            self._complete(self._queue.pop())
        for turn in self._turns.values():
            if turn.is_late:
                turn.is_late = False
                self._complete(turn)
        self._finish_backward()

    def _finish_backward(self) -> None:
        while self._under_way:
            self._finish_reduction()
        armed = [turn.handle for turn in self._last_armed]
        stray = [handle for handle in armed if handle.requires_gradient_sync and handle.has_gradients()]
        for handle in list(self._unsharded):
            self.reshard(handle)
        for turn in self._last_armed:
            turn.first_forward = None
        self._streams.end_backward()
        self._pool.release()
        self._last_backward = None
        self.is_backward = False
        if stray:
            for handle in stray:
                handle.drop_gradients()
            raise UsageError(
                "a gradient arrived after its module was reduced: a parameter was used outside its forward",
                at=f"{place_of_rank()}, module {', '.join(repr(handle.fqn) for handle in stray)}",
                fix="use them in the forward of their own module, or let the module above own them",
            )

    def _complete(self, turn: Turn) -> None:
        """Reduce the handle's gradients and free its parameters."""
        handle = turn.handle
        turn.completed_in = self.backward_id
        self._streams.meet()
        trainable = [flat for flat in handle.buffers if flat.is_trainable]
        if trainable:
            handle.has_unsynced_gradients = not handle.requires_gradient_sync
            if handle.requires_gradient_sync:
                self._reduce(handle, trainable)
        self.reshard(handle)
        self._streams.meet()

    def _reduce(self, handle: Handle, flats: Sequence[FlatBuffer]) -> None:
        for flat in flats:
            if flat.is_empty:
                flat.accumulate_nothing()
                continue
            while len(self._under_way) >= MAX_GRADIENT_BUFFERS:
                self._finish_reduction()
            gradient = self._pool.take(flat.pool_key, flat.make_gradient_buffer)
            flat.take_gradients(gradient)
            if flat is flats[-1]:
                self.reshard(handle)
            assert flat.gradient_path is not None, "connected when the root was decided"
            reduction = self._streams.begin_reduction(flat.gradient_path, gradient)
            self._under_way.append(_UnderWay(reduction, flat, gradient))

    def _finish_reduction(self) -> None:
        reduction, flat, gradient = self._under_way.popleft()
        shard = reduction.finish()
        self._pool.give(flat.pool_key, gradient)
        flat.accumulate(shard)

    # Unshard and reshard

    def unshard(self, handle: Handle) -> None:
        """Make the modules of ``handle`` hold unsharded parameters. Collective unless it is unsharded."""
        if handle.is_unsharded:
            return
        self.begin_unshard(handle)
        self._streams.wait_for_unshard(handle)
        handle.use_unsharded()

    def begin_unshard(self, handle: Handle) -> None:
        """Start gathering ahead of use; ``unshard`` waits for it."""
        if handle.is_unsharded or handle.is_gathering:
            return
        if handle.bring_back():
            self._streams.shards_written()
        self._unsharded[handle] = None
        self._streams.begin_unshard(handle)

    def reshard(self, handle: Handle) -> None:
        """Free the unsharded parameters of ``handle``; no error if there are none, or a context holds them.

        A gather in flight is waited for, since peers take part in it.
        """
        if handle not in self._unsharded or handle.held_with is not None:
            return
        if handle.is_gathering:
            self._streams.wait_for_unshard(handle)
        del self._unsharded[handle]
        handle.reshard()
        self._streams.resharded()

    def shards_written(self) -> None:
        """The current stream wrote the shards outside of forward; gathers that start now must wait for it."""
        self._streams.shards_written()

    def _prefetch(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            # Those of another root are gathered by that root, on streams of its own.
            if handle in self._turns:
                self.begin_unshard(handle)

    # Recovery

    def abandon_step(self) -> None:
        """Forget a step that an exception or Ctrl-C cut short: free buffers, drop its gradients. Nothing is running."""
        if self._running or self.is_backward:
            self._reset()

    def _reset(self) -> None:
        while self._under_way:
            self._under_way.popleft().reduction.finish()
        self._streams.end_backward()
        for handle in list(self._unsharded):
            self.reshard(handle)
        for handle, turn in self._turns.items():
            turn.end_step()
            handle.drop_gradients()
        self._queue.clear()
        self._armed = []
        self._last_armed = []
        self._pool.release()
        self._last_backward = None
        self.is_backward = False
        self._running.clear()

    def let_go(self, handles: Iterable[Handle]) -> None:
        """Leave ``handles`` to another root.

        Raises:
            UsageError: In the middle of a forward or backward.
        """
        if self._running or self.is_backward:
            raise UsageError(
                "a module that ran on its own so far is called by another root in the middle of its step",
                fix="call the outermost annotated module before the modules inside it",
            )
        for handle in handles:
            self.reshard(handle)
            if handle in self._turns:
                self._turns[handle].forget()
        self._armed = []
        self._last_armed = []

    def close(self) -> None:
        """Let go of every handle; a backward of a forward from before is an error. No step is running."""
        self.abandon_step()
        self.let_go(self.handles)
        self.is_closed = True


def _first_forward(turn: Turn) -> int:
    return turn.first_forward or 0
