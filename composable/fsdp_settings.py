"""Settings of a sharded module after the annotation.

Names and arguments are those of torch. The handle keeps a setting of one handle, the root's state a setting of a whole
tree; a deep copy has them too, and ``unannotate`` drops them. Every rank must make the same calls.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import nn

from composable.annotated_module import AnnotatedModule, no_longer_annotated
from composable.annotation import FullyShardState, Root, handle_of_module, sharded_state_of
from composable.engine import Handle, Scheduler, streams_for
from composable.errors import ConfigError, UsageError, located
from composable.ground.frames import in_backward, modules_in_call
from composable.ground.names import check_bool, check_int, check_number, describe_module, described
from composable.ground.ownership import CHANGES


class GradientReductionHandle:
    """The result of ``FSDPModule.finalize_backward(async_op=True)``: gradients that are being reduced."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self._scheduler = scheduler
        self._finalizing = None if scheduler is None else scheduler.step.finalizing

    def wait(self) -> None:
        """Wait for the reductions and set every ``grad``; a second call does nothing.

        Raises:
            UsageError: ``reset_iter_state`` has dropped the gradients; or an error that the end of a backward raises.
        """
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None or self._finalizing is None:
            return
        if scheduler.step.finalizing is not self._finalizing:
            what, fix = "the gradients were dropped by reset_iter_state", "start anew with the next forward"
            raise UsageError(what, fix=fix)
        scheduler.end_finalize()


class GatherSettings(AnnotatedModule):
    """The part of ``FSDPModule`` that sets when and how parameters are gathered and freed."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether parameters are freed between forward and backward.

        Args:
            reshard_after_forward: Free them, and all-gather again in backward.
            recurse: Also in fully sharded modules below.
        """
        _set(self, recurse, "reshard_option", "reshard_after_forward", reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether parameters are freed after backward, or serve the next forward without a gather.

        In both cases modules hold sharded parameters between steps. With False a forward first checks, with one small
        message of all ranks, whether the unsharded values still equal the shards, and gathers those that do not: after
        a write no call of ``reshard`` is needed. It pays where several backwards share a step.
        """
        _set(self, recurse, "reshard_after_backward", reshard_after_backward=reshard_after_backward)
        if reshard_after_backward:
            for root in roots_of(self, recurse=recurse):
                root.scheduler.reshard_hidden()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether this module's own parameters are gathered for its backward: an embedding does not need them.

        In both cases gradients are reduced. It holds from the next forward on, for the backwards of that forward.
        A backward that needs one of the parameters raises autograd's error for a tensor that was changed in place.
        Not recursive.
        """
        _set(self, False, "unshard_in_backward", unshard_in_backward=unshard_in_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether the unsharded parameters' memory stays allocated, at one address, while they are sharded.

        In both cases values are gathered. After a call with False, the next reshard frees the memory.
        """
        _set(self, recurse, "keeps_storage", keep=keep)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Choose the modules whose parameters are all-gathered while this module's forward runs, in order.

        Replaces the recorded order for this module; an empty list switches prefetch off.
        """
        _set_prefetch(self, "forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Choose the modules whose parameters are all-gathered while this module's backward runs, in order.

        Replaces the recorded order for this module; an empty list switches prefetch off.
        """
        _set_prefetch(self, "backward_prefetch", modules)

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let the next forward's gathers wait for an event, and not for the whole current stream; root only.

        Record one after each optimizer step, and pass it: it is used once. On the CPU nothing waits, since there a
        step has ended when it returns. ``None``: wait for the whole current stream.

        Raises:
            UsageError: The module is not the root.
            ConfigError: ``event`` is no event of torch.
        """
        state = _root_state(self, "set_post_optim_event")
        device = state.grid.shard.device
        if event is not None and not isinstance(event, (torch.Event, torch.get_device_module(device).Event)):
            what = f"set_post_optim_event got {described(event)}"
            raise ConfigError(what, at=describe_module(self), fix="pass a recorded torch.Event")
        if device.type != "cpu":
            state.settings.post_optim_event = event


class ReductionSettings(AnnotatedModule):
    """The part of ``FSDPModule`` that sets how gradients are reduced, or ends a backward by hand."""

    # For each handle

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether the next backwards sum up gradients over the ranks that hold copies of shards.

        While it is off, gradients are reduced over the shard group only. Their shards wait, in ``reduce_dtype``, for a
        backward with it on, or for ``reduce_gradients``: so there is one all-reduce between hosts for all
        micro-batches. Until then ``grad`` stays as it was, and steps and norms are errors.

        Raises:
            ConfigError: False on a mesh of one dim.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        handles = _chosen(self, recurse)
        if not requires_all_reduce and not all(handle.grid.is_hybrid for handle in handles):
            raise ConfigError(
                "set_requires_all_reduce(False) leaves out an all-reduce, and gradients of a 1-D mesh need none",
                at=describe_module(self),
                fix="call set_requires_gradient_sync(False) to accumulate without any reduction",
            )
        for handle in handles:
            for flat in handle.buffers:
                flat.routes.kept.defers = not requires_all_reduce

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Choose the gradient of a parameter that no rank used, in a module that ran: zeros (True), or none (False).

        In both cases ranks may use different parameters: every backward reduces whole handles, with zeros for
        parameters that this rank did not use. So a parameter that some rank used gets the mean, and no rank hangs.
        """
        _set(self, recurse, "fills_unused", reduce_scatter_unused_params=reduce_scatter_unused_params)
        CHANGES.note("choices")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Choose how many gradient buffers of the root may be alive when one of these modules needs another one.

        The default is 2: one that is being reduced, and one that is being filled. With 1 each reduction ends before
        the next one begins.

        Raises:
            ConfigError: ``max_input_buffers`` is no int of at least 1.
        """
        check_int("max_input_buffers", max_input_buffers, 1, at=describe_module(self), fix="pass an int of at least 1")
        for handle in _chosen(self, recurse):
            handle.settings.gradient_buffers = max_input_buffers

    # For the handle of the module itself

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Choose the number that sums of gradients are divided by; ``None``, the default, is the number of ranks.

        Raises:
            ConfigError: ``factor`` is no finite number above zero.
            UsageError: A communication hook divides by itself.
        """
        fix = "pass a finite number above zero, or None for the number of ranks"
        number = None if factor is None else check_number("factor", factor, above=0.0, fix=fix)
        if number == math.inf:
            raise ConfigError("factor is inf", fix=fix)
        _change(self, divide_factor=number)

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """Call ``set_gradient_divide_factor``; this is torch's older name of it."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether collectives only add up, and the division is a step of its own.

        For backends whose collectives cannot average. Gradients in float16 are divided before: their sums may overflow.

        Raises:
            UsageError: A communication hook reduces by itself.
        """
        check_bool("enable", enable)
        _change(self, sums_only=enable)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Let ``hook`` change each reduced shard, [S] and averaged, before it becomes the gradient.

        It is called once for each reduction of each of the handle's dtypes, in the same order on all ranks, so it may
        communicate, say to average over copies of the model.

        Args:
            hook: Called with the shard, in the dtype of the parameters, which it changes in place; it returns ``None``,
                a bool, as the ``wait`` of works does, or the same shard. It must wait for the work that it starts.
                Another result is an error at the end of backward. ``None``: no hook.
            stream: The stream of the device that it runs on; default: the stream of the reductions.

        Raises:
            ConfigError: ``hook`` is no function, or ``stream`` none of the module's device.
        """
        if hook is not None and not callable(hook):
            raise ConfigError(f"hook is {described(hook)}", fix="pass a function of a tensor")
        device_type = state_of(self).grid.shard.device.type
        is_known = isinstance(stream, torch.Stream) and stream.device.type == device_type != "cpu"
        if stream is not None and (hook is None or not is_known):
            fix = f"pass a hook, and a stream of the module's device; that is {device_type}, and the CPU has none"
            raise ConfigError(f"stream is {described(stream)}", fix=fix)
        _change(self, all_reduce_hook=hook, all_reduce_stream=stream)

    # For the whole tree

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the end of a backward also ends the step's reductions, or leaves them under way.

        With False a backward ends without waiting for the last reduce-scatters and for the other ranks' message. A
        later backward with True waits for all of them, once, and only then ``grad`` is complete: until then do not
        read, change or drop it, and hooks on it have not run. Errors of other ranks are raised then, too. It holds
        for the whole tree, whichever of its modules it is called on.
        """
        check_bool("is_last_backward", is_last_backward)
        state_of(self).outermost().settings.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether backwards end their reductions, or ``finalize_backward`` does; root only.

        While it is on, ``set_is_last_backward`` does not matter.

        Raises:
            UsageError: The module is not the root; gradients wait for ``finalize_backward``; or a backward is running.
        """
        check_bool("enabled", enabled)
        state = _root_state(self, "set_manual_backward_finalization")
        if enabled == state.settings.finalizes_by_hand:
            return
        if in_backward() or (state.root is not None and state.root.scheduler.step.finalizer.is_deferred):
            what = "set_manual_backward_finalization between a backward and its end"
            raise UsageError(what, at=describe_module(self), fix="call finalize_backward() first")
        state.settings.finalizes_by_hand = enabled

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards so far: reduce gradients that wait, with the current settings, and set ``grad``; root only.

        For ``set_manual_backward_finalization``. It also ends reductions that ``set_is_last_backward(False)`` left
        under way, and reduces gradients that backwards without gradient sync kept, if the sync is on again. If no
        gradient waits, it does nothing. Collective: every rank calls it, after the same backwards.

        Args:
            async_op: Return at once; gradients are there after ``wait()`` on the result. Before that, the
                next forward or backward is an error.

        Raises:
            UsageError: The module is not the root; a forward or backward is running, or an exception stopped the last
                one; the last call was not waited for; or an error that the end of a backward raises.
        """
        check_bool("async_op", async_op)
        state = _idle_root_state(self, "finalize_backward")
        scheduler = None if state.root is None else state.root.scheduler
        if scheduler is not None:
            if scheduler.step.is_backward:
                what = "finalize_backward after a backward that an exception stopped: its gradients are incomplete"
                fix = "call reset_iter_state() and zero_grad() on every rank, and run the backwards of this step again"
                raise UsageError(what, at=describe_module(self), fix=fix)
            scheduler.finalize()
        handle = GradientReductionHandle(scheduler)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Forget a step that an exception cut short, with gradients that wait to be reduced; root only.

        Frees unsharded parameters, and drops gradients that ``no_sync`` or a backward before the last one kept;
        ``grad`` stays as it is. After an exception the next forward does this by itself, but leaves kept gradients
        of complete backwards. Not collective; afterwards no communication is under way.

        Raises:
            UsageError: The module is not the root, or the call is inside a forward or backward.
        """
        state = _idle_root_state(self, "reset_iter_state")
        if state.root is not None:
            state.root.scheduler.abandon_step(always=True)


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let several roots, such as the stages of a pipeline, gather and reduce on the same streams of their device.

    Memory that one root has freed can then serve another. On the CPU there are no streams to share, and nothing
    changes. Deep copies have streams of their own. Not collective.

    Args:
        modules: The roots: fully sharded modules that are not inside another one.

    Raises:
        ConfigError: ``modules`` is no list of fully sharded modules, or they live on several devices.
        UsageError: A module is not a root, or is in the middle of a step.
    """
    sharded = _fully_sharded(modules, "share_comm_ctx")
    states = list(dict.fromkeys(_root_state(module, "share_comm_ctx") for module in sharded))
    devices = {state.grid.shard.device for state in states}
    if len(devices) > 1:
        what = f"share_comm_ctx got modules on {', '.join(sorted(map(str, devices)))}"
        raise ConfigError(what, fix="call it for the modules of each device")
    for state in states:
        if state.root is not None:
            state.root.scheduler.check_between_steps()
    if not states or states[0].grid.shard.device.type == "cpu":
        return
    streams = states[0].settings.streams or streams_for(states[0].grid.shard.device)
    for state in states:
        state.settings.streams = streams
        if state.root is not None:
            state.root.scheduler.use_streams(streams)


def state_of(module: nn.Module) -> FullyShardState:
    """Return the state that manages a module; raises ``UsageError`` if it is no longer annotated."""
    state = sharded_state_of(module)
    if state is None:
        raise no_longer_annotated(module)
    return state


def handles_of(module: nn.Module, *, recurse: bool) -> list[Handle]:
    """Return the handles of ``module``, with ``recurse`` also those below it, depth first."""
    state_of(module)
    found = map(handle_of_module, module.modules() if recurse else (module,))
    return list(dict.fromkeys(handle for handle in found if handle is not None))


def roots_of(module: nn.Module, *, recurse: bool) -> list[Root]:
    """Return the root of ``module``, and with ``recurse`` of each module below it, as far as lazy init has run."""
    state_of(module)
    states = map(sharded_state_of, module.modules() if recurse else (module,))
    return list(dict.fromkeys(state.root for state in states if state is not None and state.root is not None))


def _chosen(module: nn.Module, recurse: bool) -> list[Handle]:
    check_bool("recurse", recurse)
    return handles_of(module, recurse=recurse)


def _set(module: nn.Module, recurse: bool, *fields: str, **argument: bool) -> None:
    """Set these fields of the handles' settings to the one ``argument``, which must be a bool."""
    ((name, value),) = argument.items()
    check_bool(name, value)
    for handle in _chosen(module, recurse):
        for field in fields:
            setattr(handle.settings, field, value)


def _set_prefetch(module: nn.Module, field: str, modules: object) -> None:
    sharded = _fully_sharded(modules, f"set_modules_to_{field}")
    # Weak references: two handles may be ahead of each other.
    ahead = tuple(weakref.ref(handle) for other in sharded for handle in handles_of(other, recurse=False))
    for handle in handles_of(module, recurse=False):
        setattr(handle.settings, field, ahead)


def _change(module: nn.Module, **changes: Any) -> None:
    """Change the communication settings of the handle of ``module``, if it has parameters of its own."""
    for handle in handles_of(module, recurse=False):
        with located(handle.described):
            handle.communicate_by(replace(handle.comms, **changes))


def _root_state(module: nn.Module, method: str) -> FullyShardState:
    """Return the state of ``module``; raise ``UsageError`` unless it is the root."""
    state = state_of(module)
    outer = state.outermost()
    if state is not outer or module not in state.modules:
        names = ", ".join(map(describe_module, outer.modules))
        what = f"{method} is for the root, where forward starts"
        raise UsageError(what, at=describe_module(module), fix=f"call it on {names}")
    return state


def _idle_root_state(module: nn.Module, method: str) -> FullyShardState:
    """Return the state of ``module``; raise ``UsageError`` unless it is the root, outside of forward and backward."""
    state = _root_state(module, method)
    running = {one for own in state.modules for one in own.modules()} & {*modules_in_call()}
    if running or in_backward():
        what = f"{method} inside a {'forward' if running else 'backward'}"
        raise UsageError(what, at=describe_module(module), fix="call it after backward, outside of any forward")
    return state


def _fully_sharded(modules: object, caller: str) -> list[GatherSettings]:
    """Return ``modules`` as a list; raise ``ConfigError`` unless it is a sequence of fully sharded modules."""
    if not isinstance(modules, Sequence) or isinstance(modules, str | nn.Module):
        raise ConfigError(f"{caller} got {described(modules)}", fix="pass a list of modules")
    for module in modules:
        if not isinstance(module, GatherSettings):
            raise ConfigError(
                f"{caller} got {type(module).__name__}, which is not fully sharded",
                fix="pass modules that fully_shard annotated or its policy picked",
            )
    return list(modules)
