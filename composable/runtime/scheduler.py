"""When each handle of a root unshards, reshards and reduces, and on which stream.

Every collective is decided by events that all ranks share: a fully sharded module starts
or ends its forward, or the gradient of its output arrives. Which *parameters* got a
gradient is never asked, so a parameter that only some ranks use cannot change the order.

When is a handle's gradient complete? Autograd runs ready nodes latest-created first. When
the gradient of a module's output arrives, every node created after that output has run; so
every handle whose first forward call came later is complete and may be reduced, with no
hook on any parameter. What no earlier module completes, the end of backward does.
See docs/notes/completion.md.

Streams (CUDA): all-gathers run on the unshard stream and reduce-scatters on the reduce
stream; each allocates what it writes, so a block's owner stream is always the writer. Memory
freed by the host while kernels still read it is safe because its next writer first waits
for an event recorded after those kernels. ``record_stream`` is not used.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from composable.collectives.base import Pending
from composable.errors import UsageError, place_of_rank
from composable.storage.flat_buffer import FlatBuffer, GradientBuffer, GradientPool
from composable.storage.handle import Handle
from composable.torch_private import current_graph_task_id, module_call_code

__all__ = ["Scheduler", "in_backward", "modules_in_call"]

# Gradient buffers alive at once: one being reduced, one being filled.
MAX_GRADIENT_BUFFERS = 2


class _Reduction:
    """A reduce-scatter that was started."""

    __slots__ = ("done", "flat", "gradient", "pending", "reduced")

    def __init__(
        self,
        flat: FlatBuffer,
        gradient: GradientBuffer,
        pending: Pending,
        reduced: torch.Tensor,
        done: "torch.cuda.Event | None",
    ) -> None:
        self.flat = flat
        self.gradient = gradient
        self.pending = pending
        self.reduced = reduced
        self.done = done


class Scheduler:
    """Runs the handles of one root state.

    Args:
        handles: All handles of the root, left to right, depth first.
        device: Where the handles live.
        queue_callback: Asks autograd to call a function at the end of the running backward.
    """

    def __init__(
        self, handles: Sequence[Handle], device: torch.device, queue_callback: Callable[[Callable[[], None]], None]
    ) -> None:
        self.handles = tuple(handles)
        self.clock = 0
        self.is_backward = False
        self.is_retired = False
        self._running: list[nn.Module] = []
        self._queue_callback = queue_callback
        self.backward_id = 0
        self._armed: list[Handle] = []
        self._last_armed: list[Handle] = []
        self._queue: list[Handle] = []
        self._unsharded: dict[Handle, None] = {}
        self._reductions: deque[_Reduction] = deque()
        self._pool = GradientPool()
        self._last_forward: Handle | None = None
        self._last_backward: Handle | None = None
        self._streams = _Streams() if device.type == "cuda" else None
        self.stream_names: dict[int, str] = {} if self._streams is None else self._streams.names()

    @property
    def is_idle(self) -> bool:
        """No forward or backward of this root is running."""
        return not self._running and not in_backward()

    # Forward

    def enter_forward(self, module: nn.Module) -> None:
        """A managed module starts its forward; the outermost one starts a forward pass."""
        running = self._running
        if not in_backward():
            if self.is_backward or (running and running[0] is module and not _is_recursive(module)):
                # The last backward raised before its final callback, or Ctrl-C ended the last forward.
                self.reset()
            if not running:
                self._last_forward = None
                if self._streams is not None:
                    self._streams.shards_written()
        running.append(module)

    def is_running(self, module: nn.Module) -> bool:
        """Say whether ``module`` is the innermost managed module whose forward has started."""
        return bool(self._running) and self._running[-1] is module

    def is_called_again(self, module: nn.Module) -> bool:
        """Say whether the innermost call of ``module`` is inside another one of it."""
        return self._running.count(module) > 1

    def exit_forward(self) -> None:
        """The innermost managed module ends its forward, also by an exception."""
        self._running.pop()
        if not self._running and not in_backward():
            for handle in [handle for handle in self._unsharded if handle.is_gathering or handle.modules_left]:
                # A prefetch that nothing used, or a group of modules that did not all run.
                handle.modules_left.clear()
                if handle.is_gathering or handle.reshard_after_forward or handle.first_pre < 0:
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
        if in_backward():
            # Activation checkpointing runs the forward again: order and clock stay as they are.
            if not self.is_backward:
                self._begin_backward()
            self.unshard(handle)
            return
        self.clock += 1
        if handle.entered_at < 0:
            handle.entered_at = self.clock
        last = self._last_forward
        if last is not handle:
            if last is not None:
                last.next_forward = handle
            handle.previous_forward = last
            self._last_forward = handle
        self.unshard(handle)
        ahead = handle.forward_prefetch
        if ahead is not None:
            self._prefetch(ahead)
        elif handle.next_forward is not None and handle.next_forward is not handle:
            self.begin_unshard(handle.next_forward)

    def post_forward(self, handle: Handle, *, is_differentiable: bool, is_last: bool = True) -> int:
        """End one call; returns its clock, which the output's hook must give to ``pre_backward``.

        Args:
            handle: Whose module ended.
            is_differentiable: Some output takes part in autograd.
            is_last: No other module of the handle is still to run in this forward.
        """
        if in_backward():
            if is_differentiable and handle.backward_id != self.backward_id and handle not in self._queue:
                # Reentrant checkpointing: the first forward ran without grad, so only now is it known.
                handle.first_pre = 0
                self._queue.insert(0, handle)
                self._last_armed.append(handle)
            return self.clock
        self.clock += 1
        if is_differentiable and handle.first_pre < 0:
            handle.first_pre = handle.entered_at
            self._armed.append(handle)
        if is_last:
            handle.entered_at = -1
            if handle.reshard_after_forward or not is_differentiable:
                self.reshard(handle)
        return self.clock

    # Backward

    def pre_backward(self, handle: Handle, clock: int) -> None:
        """The gradient of an output of ``handle`` arrived; ``clock`` is that call's end."""
        if not self.is_backward:
            self._begin_backward()
        queue = self._queue
        while queue and queue[-1].first_pre > clock:
            self._complete(queue.pop())
        if handle.completed_id == self.backward_id:
            # Forwards and backwards interleave: reduced already, and more is coming.
            handle.is_late = True
        if handle.backward_id != self.backward_id:
            handle.backward_id = self.backward_id
            last = self._last_backward
            if last is not None:
                last.next_backward = handle
            self._last_backward = handle
            self.unshard(handle)
            ahead = handle.backward_prefetch
            if ahead is not None:
                self._prefetch(ahead)
            else:
                following = handle.next_backward or handle.previous_forward
                # A handle that is not armed takes no part in this backward.
                if following is not None and following.first_pre >= 0 and following.completed_id != self.backward_id:
                    self.begin_unshard(following)
        elif not handle.is_unsharded:
            self.unshard(handle)

    def _begin_backward(self) -> None:
        if self.is_retired:
            raise UsageError(
                "backward of a forward that ran before the model's annotation was changed",
                at=place_of_rank(),
                fix="run backward before unannotate, or forward again after it",
            )
        self._queue_callback(self._end_backward)
        self.is_backward = True
        self.backward_id += 1
        armed = self._armed or self._last_armed
        for handle in self.handles:
            if handle.has_unsynced_gradients and handle.first_pre < 0:
                handle.first_pre = 0
                armed = [*armed, handle]
        self._queue = sorted(armed, key=_first_pre)
        self._last_armed, self._armed = armed, []

    def _end_backward(self) -> None:
        """Complete what no earlier module completed, and hand over every gradient."""
        if not self.is_backward:
            return
        while self._queue:
            self._complete(self._queue.pop())
        for handle in self.handles:
            if handle.is_late:
                handle.is_late = False
                self._complete(handle)
        self._finish_backward()

    def _finish_backward(self) -> None:
        while self._reductions:
            self._finish_reduction()
        stray = [handle for handle in self._last_armed if handle.requires_gradient_sync and handle.has_gradients()]
        for handle in list(self._unsharded):
            self.reshard(handle)
        for handle in self._last_armed:
            handle.first_pre = -1
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

    def _complete(self, handle: Handle) -> None:
        """Reduce the handle's gradients and free its parameters."""
        handle.completed_id = self.backward_id
        if not handle.is_trainable:
            self.reshard(handle)
            return
        if not handle.requires_gradient_sync:
            handle.has_unsynced_gradients = True
            self.reshard(handle)
            return
        handle.has_unsynced_gradients = False
        for flat in handle.buffers:
            if flat.is_empty:
                flat.accumulate_nothing()
            elif flat.is_trainable:
                while len(self._reductions) >= MAX_GRADIENT_BUFFERS:
                    self._finish_reduction()
                gradient = self._pool.take(flat)
                flat.take_gradients(gradient)
                if flat is handle.buffers[-1]:
                    self.reshard(handle)
                self._begin_reduction(flat, gradient)
        self.reshard(handle)

    def _begin_reduction(self, flat: FlatBuffer, gradient: GradientBuffer) -> None:
        assert flat.transport is not None
        scale = 1.0 / flat.transport.world_size
        if self._streams is None:
            pending, reduced = flat.begin_reduce(gradient, scale=scale)
            done = None
        else:
            with self._streams.for_reduce():
                pending, reduced = flat.begin_reduce(gradient, scale=scale)
                pending.finish()
                done = self._streams.record()
        self._reductions.append(_Reduction(flat, gradient, pending, reduced, done))

    def _finish_reduction(self) -> None:
        reduction = self._reductions.popleft()
        if reduction.done is None:
            reduction.pending.finish()
        else:
            torch.cuda.current_stream().wait_event(reduction.done)
        self._pool.give(reduction.flat, reduction.gradient)
        reduction.flat.accumulate(reduction.reduced)

    # Unshard and reshard

    def unshard(self, handle: Handle) -> None:
        """Make the modules of ``handle`` hold unsharded parameters. Collective unless it is unsharded."""
        if handle.is_unsharded:
            return
        self.begin_unshard(handle)
        self._wait_for_gathers(handle)
        handle.use_unsharded()

    def begin_unshard(self, handle: Handle) -> None:
        """Start gathering ahead of use; ``unshard`` waits for it."""
        if handle.is_unsharded or handle.is_gathering:
            return
        self._unsharded[handle] = None
        if self._streams is None:
            handle.begin_unshard()
        else:
            with self._streams.for_unshard():
                handle.begin_unshard()
                handle.finish_gathers()
                self._streams.unsharded(handle)

    def reshard(self, handle: Handle) -> None:
        """Free the unsharded parameters of ``handle``; no error if there are none, or a context holds them.

        A gather in flight is waited for, since peers take part in it.
        """
        if handle not in self._unsharded or handle.held_with is not None:
            return
        if handle.is_gathering:
            self._wait_for_gathers(handle)
        del self._unsharded[handle]
        handle.reshard()
        if self._streams is not None:
            self._streams.resharded()

    def shards_written(self) -> None:
        """The current stream wrote the shards outside of forward; gathers that start now must wait for it."""
        if self._streams is not None:
            self._streams.shards_written()

    def _prefetch(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            self.begin_unshard(handle)

    def _wait_for_gathers(self, handle: Handle) -> None:
        if self._streams is None:
            handle.finish_gathers()
        else:
            self._streams.wait_for_unshard(handle)

    # Recovery

    def reset(self) -> None:
        """Forget a step that an exception cut short: free buffers, drop its gradients."""
        while self._reductions:
            reduction = self._reductions.popleft()
            reduction.pending.finish()
        for handle in list(self._unsharded):
            self.reshard(handle)
        for handle in self.handles:
            handle.first_pre = handle.entered_at = -1
            handle.is_late = False
            handle.modules_left.clear()
            handle.drop_gradients()
        self._queue.clear()
        self._armed = []
        self._last_armed = []
        self._pool.release()
        self._last_backward = None
        self.is_backward = False
        self._running.clear()

    def retire(self, handles: Iterable[Handle]) -> None:
        """Let go of ``handles``, which another root takes over.

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
            handle.forget_steps()
        self._armed = []
        self._last_armed = []

    def end_broken_step(self) -> None:
        """Forget a step that an exception or Ctrl-C cut short. Nothing is running."""
        if self._running or self.is_backward:
            self.reset()

    def retire_for_good(self) -> None:
        """Let go of every handle; a backward that comes all the same is an error. No step is running."""
        self.end_broken_step()
        self.retire(self.handles)
        self.is_retired = True


class _Streams:
    """The CUDA streams of one scheduler and the events between them."""

    def __init__(self) -> None:
        self._unshard = torch.cuda.Stream(priority=-1)
        self._reduce = torch.cuda.Stream(priority=-1)
        self._events: dict[Handle, torch.cuda.Event] = {}
        self._before_unshard: torch.cuda.Event | None = None

    def names(self) -> dict[int, str]:
        """Map stream handles to names, for debugging."""
        return {
            torch.cuda.current_stream().cuda_stream: "default",
            self._unshard.cuda_stream: "unshard",
            self._reduce.cuda_stream: "reduce",
        }

    def shards_written(self) -> None:
        """The optimizer, on the current stream, wrote the shards that gathers will read."""
        self._before_unshard = torch.cuda.current_stream().record_event()

    def for_unshard(self) -> torch.cuda.StreamContext:
        """Run on the unshard stream, after the kernels that read the buffers freed so far."""
        if self._before_unshard is not None:
            self._unshard.wait_event(self._before_unshard)
            self._before_unshard = None
        return torch.cuda.stream(self._unshard)

    def unsharded(self, handle: Handle) -> None:
        """Remember when the buffers of ``handle`` are full."""
        self._events[handle] = self._unshard.record_event()

    def wait_for_unshard(self, handle: Handle) -> None:
        """Let the current stream wait until the buffers of ``handle`` are full."""
        torch.cuda.current_stream().wait_event(self._events.pop(handle))

    def resharded(self) -> None:
        """The current stream has queued the last reader of a buffer that the host freed."""
        self._before_unshard = torch.cuda.current_stream().record_event()

    def for_reduce(self) -> torch.cuda.StreamContext:
        """Run on the reduce stream, after the gradients were copied on the current one."""
        self._reduce.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._reduce)

    def record(self) -> torch.cuda.Event:
        """Record an event on the reduce stream."""
        event: torch.cuda.Event = self._reduce.record_event()
        return event


def in_backward() -> bool:
    """Say whether autograd is running a backward on this thread."""
    return current_graph_task_id() != -1


def modules_in_call() -> list[nn.Module]:
    """Return the modules whose calls are under way on this thread, innermost first."""
    modules: list[nn.Module] = []
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is module_call_code:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules


def _is_recursive(module: nn.Module) -> bool:
    """Say whether a call of ``module`` is under way around the one that is starting."""
    return sum(called is module for called in modules_in_call()) > 1


def _first_pre(handle: Handle) -> int:
    return handle.first_pre
