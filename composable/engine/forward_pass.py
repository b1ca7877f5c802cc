"""What each forward of a root does: when it begins, when modules start and end their calls, and when it ends."""

from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from composable.comm import described
from composable.engine.backward_pass import Backwards
from composable.engine.completion import Completion
from composable.engine.handle import Handle
from composable.engine.handle_step import HandleStep
from composable.engine.notices import notice_leak
from composable.engine.step import LED, Step
from composable.errors import UsageError, place_of_rank
from composable.ground.frames import is_called_again
from composable.ground.torch_private import current_graph_task_id, next_node_number, top_saved_tensors_hooks

__all__ = ["Forwards", "SavingForbidden"]


class SavingForbidden:
    """From now until ``end``, saving a parameter of ``handle`` for backward is a ``UsageError``.

    What is saved otherwise goes to the hooks of who is around, such as checkpointing, as if this were not there.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._outer = top_saved_tensors_hooks(False)
        self._context = saved_tensors_hooks(self._pack, self._unpack)
        self._context.__enter__()

    def end(self) -> None:
        """Allow it again."""
        self._context.__exit__()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._handle.lies_in_buffer(tensor):
            raise UsageError(
                "backward needs a parameter that set_unshard_in_backward(False) says it does not need",
                at=f"{place_of_rank()}, {self._handle.described}, tensor {list(tensor.shape)}",
                fix="leave the setting on for this module; it is for embeddings and the like",
            )
        if self._outer is not None:
            return self._outer[0](tensor)
        return tensor, tensor._version

    def _unpack(self, packed: Any) -> torch.Tensor:
        if self._outer is not None:
            unpacked: torch.Tensor = self._outer[1](packed)
            return unpacked
        tensor, version = packed
        if tensor._version != version:
            # As autograd does it where there are no hooks.
            raise RuntimeError(
                "a tensor needed for backward has been changed in place: "
                f"{list(tensor.shape)} is at version {tensor._version}, not {version}"
            )
        return tensor


class Forwards:
    """Runs the forwards of one root, with a clock that counts starts and ends of calls.

    Args:
        step: Of the root.
        completion: Of the same: forwards arm what the next backward completes.
        backwards: Of the same: activation checkpointing runs forwards inside of a backward.
    """

    def __init__(self, step: Step, completion: Completion, backwards: Backwards) -> None:
        self._step = step
        self._completion = completion
        self._backwards = backwards
        self._clock = self._started_at = 0
        # Whose call came last in the running forward.
        self._last: HandleStep | None = None

    # Modules

    def enter_forward(self, module: nn.Module) -> None:
        """A managed module starts its forward; the outermost one starts a forward pass."""
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
                # Numbers of nodes are per thread, and tell nothing of those of others.
                step.is_threaded = step.thread is not None
                step.thread = thread
        step.first_nodes.append(first_node)
        running.append(module)

    def _begin(self, module: nn.Module) -> None:
        step = self._step
        step.forward_id += 1
        step.backwards_before = step.backward_id
        step.failure = ""
        self._started_at = self._clock
        step.first_nodes.clear()
        self._last = None
        if step.finalizing is not None:
            step.check_waited_for()
        if step.teller is not None:
            step.teller.begin_forward(module)
        step.unsharded.begin_forward(step.steps, step.settings.post_optim_event)
        step.optimizer_stepped()

    def exit_forward(self, *, has_failed: bool = False) -> None:
        """The innermost managed module ends its forward, also by an exception."""
        step = self._step
        is_in_backward = step.first_nodes.pop() < 0
        module = step.running.pop()
        if not step.running and not is_in_backward:
            self._end(module, has_failed=has_failed)

    def _end(self, module: nn.Module, *, has_failed: bool) -> None:
        step = self._step
        for handle in tuple(step.unsharded.members):
            own = step.steps[handle]
            if handle.is_gathering or own.modules_left:
                # A prefetch that nothing used, or a group of modules that did not all run.
                own.modules_left.clear()
                if handle.is_gathering or handle.reshard_after_forward or not own.is_armed:
                    self._reshard(own, is_differentiable=own.is_armed)
        if has_failed and self._completion.has_armed_after(self._started_at):
            # Nothing that has ended waits for a backward.
            step.drop_secondaries()
        # Also before backward.
        step.unsharded.hide()
        step.streams.wait_for_copies()
        if step.teller is not None and not step.failure:
            step.teller.end_forward(module, is_awaited=self._completion.has_armed and torch.is_grad_enabled())

    def note_failure(self, error: BaseException, handle: Handle | None) -> None:
        """Let ranks that wait know what the forward has raised, in a module of ``handle``, or in one without."""
        step = self._step
        if not step.failure:
            step.failure = described(error, "" if handle is None else handle.described)

    def is_running(self, module: nn.Module) -> bool:
        """Say whether ``module`` is the innermost managed module whose forward has started."""
        running = self._step.running
        return bool(running) and running[-1] is module

    # Handles

    def pre_forward(self, handle: Handle) -> None:
        """Make the handle's parameters usable and start gathering what comes next.

        Raises:
            UsageError: A context has lent the parameters to the user.
        """
        if handle.is_lent:
            if handle.is_shown_whole and not torch.is_grad_enabled():
                return
            raise _lent(handle)
        step = self._step
        own = step.steps[handle]
        if own.leaders and self._is_led(own):
            # Gathered already: which of them run, and in what order, is this rank's own business.
            step.unsharded.unshard(handle)
            return
        if len(handle.modules) > 1 and not own.modules_left:
            own.modules_left.update(handle.modules)
        if step.first_nodes[-1] < 0:
            # In backward: activation checkpointing runs the forward again, order and clock stay as they are.
            self._backwards.begin_backward(runs_again=True)
            step.begin_unshard(own)
            self._backwards.unshard(handle)
            return
        self._clock += 1
        if own.entered_at < 0:
            own.entered_at = self._clock
        last = self._last
        if last is not own:
            if last is not None:
                last.next_forward = own
            own.previous_forward = last
            self._last = own
        if own.followers:
            step.begin_unshard(own)
        step.unsharded.unshard(handle)
        following = own.next_forward
        if handle.forward_prefetch is not None:
            for ahead in handle.forward_prefetch:
                # Those of another root are gathered by that root, on streams of its own.
                if ahead in step.steps:
                    step.begin_unshard(step.steps[ahead])
        elif following is not None and following is not own:
            step.begin_unshard(following)

    def post_forward(self, handle: Handle, module: nn.Module, *, is_differentiable: bool, leaks: bool = False) -> float:
        """End one call of ``module``; returns its clock, which the output's hook must give to ``pre_backward``.

        Args:
            handle: Of the module.
            module: Whose forward ended.
            is_differentiable: Some output takes part in autograd.
            leaks: Backward may get to nodes of this call before it gets to an output, or without.
        """
        step = self._step
        own = step.steps[handle]
        if handle.is_lent:
            return self._clock
        is_led = bool(own.leaders) and self._is_led(own)
        own.modules_left.discard(module)
        if step.first_nodes[-1] < 0:
            if is_differentiable and not is_led:
                # Reentrant checkpointing: the first forward ran without grad, so only now is it known.
                self._completion.expect_late(own)
            return self._clock
        self._clock += 1
        if is_differentiable and not is_led:
            self._completion.arm(own)
        if leaks:
            if not step.failure:  # An exception holds on to tensors as well.
                notice_leak(handle)
            step.unsharded.retain_until_backward(handle, with_graph=True)
            step.unsharded.notice_backward([handle], self._backwards.begin_backward)
        if is_led:
            return LED
        # The last call of the forward: no other module of the handle is to run, nor this one around itself.
        if not own.modules_left and step.running.count(module) == 1:
            for one in own.followers:
                self._end_call(one, is_differentiable=is_differentiable)
            own.entered_at = -1
            self._end_call(own, is_differentiable=is_differentiable)
        return self._clock

    def _is_led(self, own: HandleStep) -> bool:
        """Say whether the call that runs is inside of what the handle goes with, and not from elsewhere."""
        step = self._step
        # Activation checkpointing may run a part again, without the modules around it.
        is_again = step.first_nodes[-1] < 0
        return any(
            step.is_around(leader.handle) or (is_again and leader.queued_in == step.backward_id)
            for leader in own.leaders
        )

    def _end_call(self, own: HandleStep, *, is_differentiable: bool) -> None:
        """Free a handle after the last call of the forward, or let it stay."""
        handle = own.handle
        # Without gradients they stay only where the user asked for it: for a loop of forwards, say.
        stays = handle.reshard_option is False and not torch.is_grad_enabled()
        frees = handle.reshard_after_forward or not (is_differentiable or stays)
        if handle.is_gathering and (handle.keeps_secondary or not frees):
            # It follows, and its modules did not run here: what stays has to be the same on all ranks.
            self._step.unsharded.unshard(handle)
        if frees:
            self._reshard(own, is_differentiable=is_differentiable)

    def _reshard(self, own: HandleStep, *, is_differentiable: bool) -> None:
        """Free the parameters; where a backward will gather them from fewer ranks, all but the secondary shards."""
        step, handle = self._step, own.handle
        is_read = is_differentiable and handle.unshard_in_backward
        if not (is_read and handle.keeps_secondary and handle.is_unsharded and handle.held_with is None):
            step.unsharded.reshard(handle)
            return
        is_kept = handle.has_secondary and own.kept_in == step.forward_id
        step.unsharded.reshard(handle, keeps_secondary=not is_kept)
        own.kept_in = step.forward_id


def _lent(handle: Handle) -> UsageError:
    fix = "leave the context first, or enter it without rank0_only, offload_to_cpu and with_grads"
    if handle.is_shown_whole:
        fix = "leave the context first, or call the module under torch.no_grad(): it is shown in full precision"
    return UsageError(
        "a forward cannot run while unshard_params shows copies or gradients of the parameters",
        at=f"{place_of_rank()}, {handle.described}",
        fix=fix,
    )
