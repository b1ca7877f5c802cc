"""The forwards and backwards of a root.

A step, in order. The hooks of ``annotation/hooks.py`` call this file; autograd calls what it was given.

1. ``Forwards.enter_forward``, for the outermost module: ``_begin`` frees what an earlier step has left, and
   lets the next gathers wait until the optimizer has written the shards.
2. ``Forwards.pre_forward``, before a module with a handle: ``Unsharded.unshard`` waits for the gather, started by an
   earlier module, and puts the unsharded parameters into modules. ``Step.begin_unshard`` starts the next gather.
3. ``Forwards.post_forward``, after it, arms the handle: the next backward completes it. ``_end_call`` frees the
   parameters. The hook of an output gets the clock at the end of the call.
4. ``Forwards.exit_forward``, for the outermost module: modules hold sharded parameters until backward.
5. ``Backwards.pre_backward``, when the gradient of an output arrives; the first one begins the backward (``_begin``,
   ``Completion.begin_backward``). ``Completion.complete_after`` goes back to the clock of the output: each handle whose
   first call began later is complete. Then ``Unsharded.unshard`` as in 2, and ``_prefetch_after`` for the next one.
6. ``Completion._complete``: ``GradientFinalizer.take`` moves gradients from leaves to a buffer, ``Unsharded.reshard``
   frees the parameters, and ``GradientFinalizer.begin`` starts the reduction. Earlier ones end meanwhile.
7. ``Backwards.start``, when autograd has ended: ``Completion.complete_the_rest`` completes all other handles, and
   ``GradientFinalizer.tell`` sends the other ranks a message: which parameters had a gradient.
8. ``Backwards.finish``: ``GradientFinalizer.end`` waits for reductions and messages, reduces what was left on any rank
   (``_reduce_the_rest``), frees what has stayed (``Backwards.end_backward``), and gives the gradients (``_settle``).

An exception may end this at any line: what comes next calls ``Backwards.tidy_up``. ``step.py`` has ``Completion``.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import getpid
from threading import get_ident

import torch
from torch import nn

from composable.comm import described, two_threads
from composable.engine.edited import check_lent, checksum_of, lost_write, refuse_split_backward
from composable.engine.handle import Handle, HandleStep, is_outdated, written_after_gather
from composable.engine.param import ParamView
from composable.engine.side_losses import SideLosses
from composable.engine.step import NO_CLOCK, Completion, Step
from composable.engine.stepping import refuse_graph_of_backward
from composable.errors import UsageError
from composable.ground.frames import in_split_backward, is_called_again
from composable.ground.torch_hooks import Ending, backwards_here, next_ending_number
from composable.ground.torch_private import (
    current_graph_task_id,
    next_node_number,
    running_transform,
    split_backward_code,
)


class Backwards:
    """Runs the backwards of one root, and forgets those that were cut short, with the forwards before them.

    Args:
        step: The state of the root's step.
        completion: The handles to complete.
        at_end: Lets this object run at the end of the running backward; returns an object that autograd frees then.
    """

    def __init__(self, step: Step, completion: Completion, at_end: Callable[[Ending], Callable[[], None]]) -> None:
        self.number = next_ending_number()
        self._step = step
        self._completion = completion
        self._at_end = at_end
        # The thread that shows unsharded parameters to itself, between two steps.
        self._shown_in: int | None = None
        self.side_losses = SideLosses(step, completion, weakref.proxy(self))
        # Returns an object that autograd holds during the running backward; ``None``: it was freed.
        self._end: Callable[[], object] = lambda: None
        # Whether the running backward ends the reductions; ``None``: it has not started to end.
        self._ends_reductions: bool | None = None
        # The handle whose gradient arrived last in the running backward.
        self._last: HandleStep | None = None

    # Threads

    @property
    def is_elsewhere(self) -> bool:
        """Another thread runs the steps, and frees unsharded parameters at any time: this one only reads."""
        return get_ident() not in (self.side_losses.thread, self._shown_in) and current_graph_task_id() == -1

    @contextmanager
    def shown_here(self) -> Iterator[None]:
        """Show unsharded parameters to this thread too, which has asked for them."""
        before, self._shown_in = self._shown_in, get_ident()
        try:
            yield
        finally:
            self._shown_in = before

    # Begin

    def begin_backward(self, *, runs_again: bool = False) -> None:
        """Begin the work of the running backward, unless it was begun.

        Args:
            runs_again: Activation checkpointing runs a forward, with gradients enabled even if backward makes no graph.
        """
        step = self._step
        if not step.is_backward:
            self._begin()
        elif self._end() is None:
            # An earlier backward was begun, which an exception has stopped.
            self.tidy_up()
            self._begin()
        if step.makes_graph is None and not runs_again:
            step.makes_graph = torch.is_grad_enabled()
            if step.makes_graph:
                self._check_steppers()

    def _begin(self) -> None:
        step = self._step
        if step.is_closed:
            raise UsageError(
                "this backward belongs to a forward that ran before the model's annotation was changed",
                fix="run backward before unannotate, or run forward again after it",
            )
        if step.finalizing is not None:
            step.check_waited_for()
        if split_backward_code() is not None and in_split_backward():
            refuse_split_backward(step.handles)
        # Set first: the next forward then undoes a backward that was cut short, also from here on.
        step.is_backward = True
        self._end = weakref.ref(self._at_end(self), self._note_end)
        step.backward_id += 1
        self.side_losses.is_looking = bool(step.unsharded.shown)
        step.makes_graph = None
        step.latest_clock = 0
        if not step.settings.ends_backward:
            self._check_steppers()
        for hear in step.listeners.backward_begins:
            hear(averages=step.averages)
        step.finalizer.open()
        self._completion.begin_backward()

    def _note_end(self, _: object) -> None:
        """Hide parameters when autograd has ended a backward, also by an exception: users may drop gradients now."""
        if self._step.is_backward:
            self._step.unsharded.hide()

    def _check_steppers(self) -> None:
        for handle in self._step.handles:
            if handle.steppers:
                if self._step.makes_graph:
                    raise refuse_graph_of_backward(handle.fqn)
                raise UsageError(
                    "an optimizer steps inside this backward, but its gradients have to wait for a later backward",
                    at=f"module {handle.fqn!r}",
                    fix="accumulate in no_sync instead, or call remove() on the result of step_in_backward",
                )

    # Gradients of outputs

    def pre_backward(self, handle: Handle, clock: float, *, gathers: bool = True) -> int:
        """Prepare ``handle`` for backward: the gradient of an output arrived. Returns the number of the backward.

        Args:
            handle: The handle.
            clock: End of the call that made the output, as ``post_forward`` gave it.
            gathers: Backward of that call may read the parameters.
        """
        step, completion = self._step, self._completion
        if not step.is_backward or step.makes_graph is None or self._end() is None:
            self.begin_backward()
        if step.latest_clock < clock < NO_CLOCK:
            step.latest_clock = clock
        if completion.queue and completion.queue[-1][0] > clock:
            completion.complete_after(clock, self._gather)
        backward_id, own = step.backward_id, step.steps[handle]
        if clock == NO_CLOCK and own.leaders:
            if gathers:
                step.unsharded.unshard(handle)
            return backward_id
        if own.queued_in != backward_id or own.completed_in == backward_id:
            completion.expect_late(own)
        if gathers:
            step.unsharded.unshard(handle)
        if own.followers:
            step.begin_unshard(own, for_backward=True)
        if own.met_in != backward_id:
            own.met_in = backward_id
            self._prefetch_after(own)
        return backward_id

    def _gather(self, own: HandleStep) -> None:
        """Gather a handle that this rank's loss may leave out, and its followers, in the order of all ranks."""
        own.met_in = self._step.backward_id
        self.unshard_group(own)
        self._prefetch_after(own)

    def unshard_group(self, own: HandleStep) -> None:
        """Gather a handle and its followers in backward."""
        if own.handle.settings.unshard_in_backward:
            self._step.unsharded.unshard(own.handle)
        self._step.begin_unshard(own, for_backward=True)

    def _prefetch_after(self, own: HandleStep) -> None:
        """Start to gather the handle that is likely next after the first gradient of ``own``, or the users' choice."""
        last, self._last = self._last, own
        if last is not None:
            last.next_backward = own.handle
        steps, prefetch = self._step.steps, own.handle.settings.backward_prefetch
        if prefetch is not None:
            self._step.prefetch(prefetch, for_backward=True)
            return
        hint = own.next_backward or own.previous_forward
        following = None if hint is None else steps[hint]
        # A handle that is not armed takes no part in this backward.
        if following is not None and following.is_armed and following.completed_in != self._step.backward_id:
            if following.followers:
                self._step.begin_unshard(following, for_backward=True)
            elif following.handle.settings.unshard_in_backward:
                self._step.unsharded.begin_unshard(following.handle)

    # End

    def start(self) -> None:
        """Start to end a backward: complete the handles that are left, and start messages to the other ranks.

        No message is sent if the user ends the backward later.
        """
        step = self._step
        if not step.is_backward:
            return
        with torch.no_grad():
            self._completion.complete_the_rest(self._gather)
        ends = step.settings.ends_backward
        for hear in step.listeners.backward_ends:
            hear(averages=step.averages, ends=ends)
        step.finalizer.tell(ends=ends)
        self._ends_reductions = ends

    def finish(self) -> None:
        """Reduce the gradients that are left on any rank, and give each to its sharded parameter.

        Raises:
            UsageError: A gradient could not be reduced, on this rank or on one whose message says so.
        """
        ends, self._ends_reductions = self._ends_reductions, None
        step = self._step
        if ends is None:
            return  # `start` raised: the next forward begins by tidying up.
        if not ends:
            with torch.no_grad():
                self.end_backward()
            step.finalizer.postpone()
            return
        for hear in step.listeners.gradients_come:
            hear()
        step.finalizer.end(self.end_backward)

    def end_backward(self) -> None:
        """Free parameters that the running backward has kept, if one is running, and reset its state."""
        step = self._step
        if not step.is_backward:
            return  # The user has ended it.
        unsharded = step.unsharded
        for handle in tuple(unsharded.members):
            if step.makes_graph and handle.view is not ParamView.GATHERING:
                unsharded.retain_until_backward(handle, read_from=step.steps[handle].armed_at)
            if step.running and step.is_in_use(handle):
                continue
            if handle.settings.reshard_after_backward or handle.view is ParamView.GATHERING:
                unsharded.reshard(handle)
            else:
                handle.hide()
        if step.makes_graph:
            unsharded.notice_backward(self.begin_backward)
        else:
            unsharded.read_to = max(unsharded.read_to, step.latest_clock)
        if unsharded.retained:
            unsharded.free_retained(0)
        for own in self._completion.last_armed:
            own.is_armed, own.first_forward = False, 0
            if own.handle.secondary is not None:
                own.handle.secondary.drop()
        while step.first_nodes and step.first_nodes[-1] < 0:
            # Modules that checkpointing ran again, and stopped in the hook after forward: no other hook is called.
            step.first_nodes.pop()
            del step.running[len(step.first_nodes) :]
        step.streams.end_backward()
        self._last = None
        step.is_threaded, step.thread = False, None
        step.is_backward = False

    # Recovery

    def reset(self) -> None:
        """Reset the step from any state that an exception at any line has left, also in an earlier reset."""
        self.tidy_up(keeps_running=False)
        self._step.first_nodes.clear()
        self._step.running.clear()

    def tidy_up(self, *, keeps_running: bool = True) -> None:
        """Forget the forwards and backwards so far; ``keeps_running``: except a forward around the backward."""
        step = self._step
        for hear in step.listeners.step_forgotten:
            is_kept = any(flat.gradients.awaits_copies for handle in step.handles for flat in handle.buffers)
            hear(was_unfinished=step.is_backward or step.finalizer.is_deferred or is_kept)
        for handle in step.handles:
            handle.settle()
        step.finalizer.abandon()
        step.streams.end_backward()
        step.unsharded.free(except_for=step.is_in_use if keeps_running and step.running else None)
        for handle, own in step.steps.items():
            own.end_step()
            for flat in handle.buffers:
                flat.gradients.drop()
            handle.drop_secondary()
        step.finalizer.forget_kept()
        step.finalizer.defer(waits=False)
        step.finalizing = None
        self._completion.forget()
        self._last = None
        step.is_threaded, step.thread = False, None
        self._ends_reductions = None
        step.is_backward = False


class Forwards:
    """Runs the forwards of one root, with a clock that counts starts and ends of calls."""

    def __init__(self, step: Step, completion: Completion, backwards: Backwards) -> None:
        self._step = step
        self._completion = completion
        self._backwards = backwards
        self._side_losses = backwards.side_losses
        self._clock = self._started_at = 0
        # The handle whose call came last in the running forward.
        self._last: HandleStep | None = None
        self._written: UsageError | None = None

    # Modules

    def enter_forward(self, module: nn.Module) -> None:
        """Note that a managed module starts its forward; the outermost one starts a forward pass."""
        step = self._step
        running = step.running
        first_node = -1
        if current_graph_task_id() == -1:
            first_node = next_node_number()
            if step.is_backward or (running and running[0] is module and not is_called_again(module)):
                # The last backward raised before its final callback, or Ctrl-C ended the last forward.
                self._backwards.reset()
            if not running:
                self._begin(module)
            thread = get_ident()
            if thread != step.thread:
                # Numbers of nodes are per thread, and cannot be compared between threads.
                step.is_threaded = step.thread is not None
                step.thread = thread
                if backwards_here.watchers is not self._side_losses.watchers:
                    self._side_losses.watch(thread)
        step.first_nodes.append(first_node)
        running.append(module)

    def _begin(self, module: nn.Module) -> None:
        step = self._step
        if step.handles and (everyone := step.handles[0].grid.everyone).process != getpid():
            everyone.check_process()
        for order in step.orders:
            if order.step is not step.reference and order.is_taken():
                raise two_threads()
            order.step = step.reference
        step.forward_id += 1
        step.backwards_before = step.backward_id
        step.failure = ""
        self._started_at = self._clock
        step.first_nodes.clear()
        self._last = None
        if step.finalizing is not None:
            step.check_waited_for()
        for hear in step.listeners.forward_begins:
            hear(module, broadcasts=False)
        step.unsharded.begin_forward(step.steps, step.settings.post_optim_event)
        step.optimizer_stepped()

    def exit_forward(self, *, has_failed: bool = False) -> None:
        """Note that the innermost managed module ends its forward, also by an exception."""
        step = self._step
        is_in_backward = step.first_nodes.pop() < 0
        module = step.running.pop()
        if not step.running and not is_in_backward:
            self._end(module, has_failed=has_failed)
        if self._written is not None:
            error, self._written = self._written, None
            if not has_failed:
                raise error

    def _end(self, module: nn.Module, *, has_failed: bool) -> None:
        step = self._step
        for handle in tuple(step.unsharded.members):
            own = step.steps[handle]
            if handle.view is ParamView.GATHERING:  # A prefetch that nothing used.
                own.modules_left.clear()
                step.unsharded.reshard(handle)
            elif own.modules_left:  # A group of modules that did not all run.
                own.modules_left.clear()
                self._end_call(own, is_differentiable=own.is_armed)
            elif own.checksum[0] == (step.forward_id, handle.versions.gathered) and handle.view is ParamView.UNSHARDED:
                # What came behind the last call is compared too.
                compares = handle.held_with is None and running_transform() is None
                if compares and own.checksum[1] != checksum_of(handle):
                    self._written = self._written or lost_write(handle)
        armed = self._completion.armed
        if has_failed and armed and armed[0].first_forward > self._started_at:
            # No forward that has ended waits for a backward.
            step.drop_secondaries()
        # Modules hold sharded parameters also between forward and backward.
        for handle in step.unsharded.hide():
            self._written = self._written or lost_write(handle)
        step.streams.wait_for_copies()
        for hear in () if step.failure else step.listeners.forward_ended:
            hear(module, is_awaited=bool(armed) and torch.is_grad_enabled())

    def note_failure(self, error: BaseException, handle: Handle | None) -> None:
        """Note the error of the forward for ranks that wait; ``handle``: of the module that raised, if it has one."""
        step = self._step
        if not step.failure:
            step.failure = described(error, "" if handle is None else handle.described)

    # Handles

    def pre_forward(self, handle: Handle) -> None:
        """Make the handle's parameters usable, and start to gather the handles that come next.

        Raises:
            UsageError: A context has lent the parameters to the user.
        """
        if handle.lent is not None:
            check_lent(handle)
            return
        step = self._step
        own = step.steps[handle]
        if own.leaders and step.is_led(own):
            # Gathered already by the leader: each rank runs followers in an order of its own.
            step.unsharded.unshard(handle)
            return
        if len(handle.module_fqns) > 1 and not own.modules_left:
            own.modules_left.update(map(id, handle.modules))
        if step.first_nodes[-1] < 0:
            # In backward: activation checkpointing runs the forward again, order and clock stay as they are.
            self._backwards.begin_backward(runs_again=True)
            step.begin_unshard(own)
            step.unsharded.unshard(handle)
            return
        self._clock += 1
        if own.entered_at < 0:
            own.entered_at = self._clock
        last = self._last
        if last is not own:
            if last is not None:
                last.next_forward = handle
            own.previous_forward = None if last is None else last.handle
            self._last = own
        if own.followers:
            step.begin_unshard(own)
        if handle.view in (ParamView.HIDDEN, ParamView.UNSHARDED) and is_outdated(handle):
            if own.is_armed or handle.view is ParamView.UNSHARDED:
                raise written_after_gather(handle)  # A graph, or a module that runs, reads them as they were.
            step.unsharded.reshard(handle)
        step.unsharded.unshard(handle)
        # Writes through `.data` leave no trace: values are compared in forwards 1, 3, 7, 15 and so on, and on a device,
        # for which the host would wait, in the first one.
        if (
            not step.forward_id & (step.forward_id + 1)
            and (step.forward_id == 1 or not step.streams.queues)
            and own.checksum[0] != (step.forward_id, handle.versions.gathered)
            and handle.held_with is None
        ):
            own.checksum = (step.forward_id, handle.versions.gathered), checksum_of(handle)
        following = own.next_forward
        if handle.settings.forward_prefetch is not None:
            step.prefetch(handle.settings.forward_prefetch, for_backward=False)
        elif following is not None and following is not handle:
            if step.steps[following].followers:
                step.begin_unshard(step.steps[following])
            elif following.held_with is None:
                step.unsharded.begin_unshard(following)

    def post_forward(self, handle: Handle, module: nn.Module, *, is_differentiable: bool, leaks: bool = False) -> float:
        """End one call of ``module``; returns its clock, which the output's hook must give to ``pre_backward``.

        Args:
            handle: The module's handle.
            module: The module.
            is_differentiable: Some output takes part in autograd.
            leaks: Backward may reach nodes of this call before it reaches an output, or without reaching one.
        """
        step = self._step
        own = step.steps[handle]
        if handle.lent is not None:
            return self._clock
        is_led = bool(own.leaders) and step.is_led(own)
        own.modules_left.discard(id(module))
        if step.first_nodes[-1] < 0:
            if is_differentiable and not is_led:
                # Reentrant checkpointing: the first forward ran without grad, so the call is noted only now.
                self._completion.expect_late(own)
            return self._clock
        self._clock += 1
        if is_differentiable and not is_led:
            for one in (own, *own.followers):  # Armed: the next backward completes them.
                if not one.is_armed:
                    one.is_armed, one.handle.trains = True, bool(module.training)
                    one.first_forward, one.armed_at = own.entered_at, self._started_at
                    self._completion.armed.append(one)
            if own.armed_at == self._started_at:
                own.last_forward = self._clock
        if leaks:
            step.unsharded.retain_until_backward(handle, read_from=self._started_at)
            step.unsharded.notice_backward(self._backwards.begin_backward)
        if is_led:
            return NO_CLOCK
        # The handle's last call in the forward: no other of its modules is left to run, and this one has no outer call.
        if not own.modules_left and step.running.count(module) == 1:
            for one in own.followers:
                self._end_call(one, is_differentiable=is_differentiable)
            own.entered_at = -1
            self._end_call(own, is_differentiable=is_differentiable)
        return self._clock

    def _end_call(self, own: HandleStep, *, is_differentiable: bool) -> None:
        """Free a handle after its last call in the forward, or let it stay unsharded."""
        handle, settings = own.handle, own.handle.settings
        if handle.held_with is None and handle.view is ParamView.UNSHARDED:
            gathered = handle.versions.gathered
            compares = own.checksum[0] == (self._step.forward_id, gathered) and running_transform() is None
            is_written = compares and own.checksum[1] != checksum_of(handle)
            shards = -handle.versions.discount
            for flat in handle.buffers:  # Inline: a call would cost as much for each handle.
                is_written |= bool(flat.versioned) and flat.versioned[0]._version != gathered
                shards += flat.shard._version
            # An optimizer may step in a forward, after a backward there.
            if shards != gathered and self._step.backward_id == self._step.backwards_before:
                self._written = written_after_gather(handle)
            if is_written:
                self._written = lost_write(handle)  # Raised when the modules are in order again.
        # Without gradients, parameters stay only where the user asked for it: for a loop of forwards, say.
        stays = settings.reshard_option is False and not torch.is_grad_enabled()
        frees = settings.reshard_after_forward or not (is_differentiable or stays)
        if frees:
            # For a backward that gathers from fewer ranks.
            keeps = is_differentiable and settings.unshard_in_backward and handle.secondary is not None
            self._step.unsharded.reshard(handle, keeps_secondary=keeps and settings.keeps_secondary)
        elif handle.view is ParamView.GATHERING:
            # A follower whose modules did not run here: parameters that stay unsharded have to stay so on all ranks.
            self._step.unsharded.unshard(handle)
