"""What users set on a fully sharded module once it is annotated.

Names and arguments are torch's. What a device, a backend or this library cannot do is an error that
says so. Settings that hold for each handle are kept on the handle, those of a whole tree on its root's
state; a deep copy has them too, and ``unannotate`` drops them. Every rank sets alike.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import nn

from composable.annotation import FullyShardState, Root, handle_of_module, sharded_state_of
from composable.arguments import described
from composable.engine import Handle, Scheduler, streams_for
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.fqns import describe_module
from composable.frames import in_backward, modules_in_call

__all__ = ["FSDPSettings", "GradientReductionHandle", "handles_of", "managed", "roots_of", "share_comm_ctx"]


class GradientReductionHandle:
    """The result of an asynchronous ``finalize_backward``."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self._scheduler = scheduler
        self._finalizing = None if scheduler is None else scheduler.finalizing

    def wait(self) -> None:
        """Wait for the reductions and hand over every gradient; once is enough.

        Raises:
            UsageError: ``reset_iter_state`` has dropped them; or what a backward raises at its end.
        """
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None or self._finalizing is None:
            return
        if scheduler.finalizing is not self._finalizing:
            raise UsageError(
                "the gradients were dropped by reset_iter_state",
                at=place_of_rank(),
                fix="start anew with the next forward",
            )
        scheduler.end_finalize()


class FSDPSettings:
    """The part of ``FSDPModule`` that sets something, or ends a backward by hand."""

    # For each handle

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether the next backwards reduce gradients, or keep them unsharded for a later one.

        Without it gradients stay in full size on every rank.

        Args:
            requires_gradient_sync: Reduce at the end of each handle's backward.
            recurse: Also in fully sharded modules below.

        Raises:
            ConfigError: ``requires_gradient_sync`` is no bool.
        """
        for handle in _checked(
            self, "set_requires_gradient_sync", recurse=recurse, requires_gradient_sync=requires_gradient_sync
        ):
            handle.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether the next backwards sum up gradients over the ranks that hold copies of shards.

        Without it gradients are reduced over the ranks of a shard only, and their shards wait, in ``reduce_dtype``,
        for a backward with it, or ``reduce_gradients``: between hosts one all-reduce for all micro-batches. Until then
        ``grad`` is what it was, and steps and norms are errors. Every rank chooses the same.

        Args:
            requires_all_reduce: Sum up at the end of each handle's backward.
            recurse: Also in fully sharded modules below.

        Raises:
            ConfigError: ``requires_all_reduce`` is no bool; or False on a mesh of one dim.
        """
        handles = _checked(self, "set_requires_all_reduce", recurse=recurse, requires_all_reduce=requires_all_reduce)
        if not requires_all_reduce and not all(handle.grid.is_hybrid for handle in handles):
            is_spread = any(handle.fills_secondary for handle in handles)
            why = "there is none with HYBRID_SHARD_OPTIM" if is_spread else "gradients of a 1-D mesh need none"
            raise _refused(
                self,
                f"set_requires_all_reduce(False) leaves out an all-reduce, and {why}",
                fix="call set_requires_gradient_sync(False) to accumulate without any reduction",
            )
        for handle in handles:
            for flat in handle.buffers:
                flat.routes.kept.defers = not requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether parameters are freed between forward and backward.

        Args:
            reshard_after_forward: Free them, and all-gather again in backward.
            recurse: Also in fully sharded modules below.
        """
        for handle in _checked(
            self, "set_reshard_after_forward", recurse=recurse, reshard_after_forward=reshard_after_forward
        ):
            handle.reshard_option = handle.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether parameters are freed after backward, or serve the next forward without a gather.

        There modules hold sharded parameters between steps all the same. With False a forward first finds out
        whether the unsharded values are still those of the shards on every rank, and gathers what is not, so an
        optimizer step, a load or any other write in between needs no call of ``reshard``: the ranks send
        each other one small message, and a device is waited for. It pays where several backwards share a step.

        Args:
            reshard_after_backward: Free them.
            recurse: Also in fully sharded modules below.
        """
        for handle in _checked(
            self, "set_reshard_after_backward", recurse=recurse, reshard_after_backward=reshard_after_backward
        ):
            handle.reshard_after_backward = reshard_after_backward
        if reshard_after_backward:
            for root in roots_of(self, recurse=recurse):
                root.scheduler.reshard_hidden()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether this module's own parameters are gathered for its backward: an embedding needs none.

        Gradients are reduced all the same. It holds from the next forward on, for the backwards of that forward.
        A forward that lets autograd save one of the parameters is a ``UsageError`` then: backward would read
        freed memory. Not recursive.
        """
        for handle in _checked(self, "set_unshard_in_backward", recurse=False, unshard_in_backward=unshard_in_backward):
            handle.unshard_in_backward = unshard_in_backward

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Choose what gets a parameter that no rank used, in a module that ran: zeros (True), or no gradient.

        In both cases ranks may use different parameters: every backward reduces whole handles, with zeros for
        what this rank did not use, so a parameter that some rank used gets the mean, and nothing hangs.

        Raises:
            ConfigError: False, and the module was annotated with ``unused_gradients='zero'``: its ranks
                do not tell each other which parameters they used.
        """
        method = "set_reduce_scatter_unused_params"
        handles = _checked(self, method, recurse=recurse, reduce_scatter_unused_params=reduce_scatter_unused_params)
        always = [handle for handle in handles if handle.plan.unused_gradients == "zero"]
        if always and not reduce_scatter_unused_params:
            raise _refused(
                self,
                f"{method}(False) on {always[0].described}, annotated with unused_gradients='zero'",
                fix="annotate it with unused_gradients='none'",
            )
        for handle in handles:
            handle.fill_unused(fills=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Choose how many gradient buffers of the root may be alive when one of these modules needs one.

        Here the default is 2: one that is being reduced, and one that is being filled. With 1 each reduction is waited
        for before the next begins.

        Raises:
            ConfigError: ``max_input_buffers`` is no int of at least 1.
        """
        method = "set_reduce_scatter_max_input_buffers"
        handles = _checked(self, method, recurse=recurse)
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool) or max_input_buffers < 1:
            raise _refused(self, f"{method} got {described(max_input_buffers)}", fix="pass an int of at least 1")
        for handle in handles:
            handle.gradient_buffers = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Choose whether reduce-scatters have a process group of their own, so that no gather waits for one.

        One group for all handles of a root with the same ranks, of the same backend, made when its
        first reduce-scatter starts; False goes back to the group of the gathers. On gloo, where the transport
        ``point_to_point`` serves few ranks, it replaces that for reduce-scatters. Every rank alike.
        """
        for handle in _checked(self, "set_separate_reduce_scatter_group", recurse=recurse, enable=enable):
            handle.scatters_apart = enable
        for root in roots_of(self, recurse=recurse):
            root.connect_scatters()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether the unsharded parameters' memory stays allocated, at one address, while they are sharded.

        The values are gathered as ever. False frees it at once where nothing is unsharded.
        """
        handles = _checked(self, "set_keep_unsharded_storage", recurse=recurse, keep=keep)
        for handle in handles:
            handle.keeps_storage = keep
        if not keep:
            for root in roots_of(self, recurse=recurse):
                for handle in root.handles:
                    if handle in handles:
                        root.scheduler.free_kept(handle)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Choose what to all-gather while this module's forward runs, in order.

        Replaces the recorded order for this module; an empty list switches prefetch off.
        Every rank must choose alike.
        """
        ahead = _prefetched(self, modules, "set_modules_to_forward_prefetch")
        for handle in handles_of(self, recurse=False):
            handle.forward_prefetch = ahead

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Choose what to all-gather while this module's backward runs, in order.

        Replaces the recorded order for this module; an empty list switches prefetch off.
        Every rank must choose alike.
        """
        ahead = _prefetched(self, modules, "set_modules_to_backward_prefetch")
        for handle in handles_of(self, recurse=False):
            handle.backward_prefetch = ahead

    # For the whole tree

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the end of a backward also ends the step's reductions, or leaves them under way.

        With False a backward ends without waiting for the last reduce-scatters and for the other ranks'
        message; a later backward with True does it for all of them, once, and only then ``grad`` is complete:
        between, it is neither to be read nor changed nor dropped, and hooks on it have not run. Errors that ranks
        tell each other come then, too. Of the whole tree, whichever of its modules it is called on.
        """
        _check(self, "set_is_last_backward", is_last_backward=is_last_backward)
        managed(self)[1].outermost().settings.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether backwards end their reductions, or ``finalize_backward`` does; root only.

        While it is on, ``set_is_last_backward`` does not matter.

        Raises:
            UsageError: Not the root; or gradients wait for being finalized, or a backward is running.
        """
        method = "set_manual_backward_finalization"
        _check(self, method, enabled=enabled)
        state = _root_state(self, method)
        if enabled == state.settings.finalizes_by_hand:
            return
        if in_backward() or (state.root is not None and state.root.scheduler.is_deferred):
            raise _untimely(self, f"{method} between a backward and its end", fix="call finalize_backward() first")
        state.settings.finalizes_by_hand = enabled

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards so far: reduce what waits, as settings are now, and hand over gradients; root only.

        For ``set_manual_backward_finalization``; it also ends what ``set_is_last_backward(False)`` left under way,
        and reduces what backwards without gradient sync kept where that is on again. Nothing happens if nothing
        waits. Collective: every rank calls it, after the same backwards.

        Args:
            async_op: Return at once; gradients are there after ``wait()`` on the result. Before that, the
                next forward or backward is an error.

        Raises:
            UsageError: Not the root; a forward or backward is running; the last one was not waited for; or what a
                backward raises at its end.
        """
        _check(self, "finalize_backward", async_op=async_op)
        state = _root_state(self, "finalize_backward")
        _check_idle(self, state, "finalize_backward")
        if state.root is None:
            return GradientReductionHandle(None) if async_op else None
        scheduler = state.root.scheduler
        scheduler.finalize()
        handle = GradientReductionHandle(scheduler)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Forget a step that an exception cut short, with gradients that wait to be reduced; root only.

        Frees what is unsharded and drops gradients that ``no_sync`` or a backward that is not the last one
        kept; ``grad`` stays as it is. The next forward does so by itself after an exception, but
        for kept gradients of complete backwards. Not collective, and nothing that is under way is left.

        Raises:
            UsageError: Not the root, or inside a forward or backward.
        """
        state = _root_state(self, "reset_iter_state")
        _check_idle(self, state, "reset_iter_state")
        if state.root is not None:
            state.root.scheduler.abandon_step(always=True)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward's gathers wait for an event, and not for the whole current stream; root only.

        Record it after the optimizer step, anew for each step: it is used once. On the CPU, where a step has ended
        when it returns, nothing waits.

        Raises:
            UsageError: Not the root.
            ConfigError: ``event`` is no event of torch.
        """
        state = _root_state(self, "set_post_optim_event")
        device = state.grid.shard.device
        if not isinstance(event, (torch.Event, torch.get_device_module(device).Event)):
            raise _refused(self, f"set_post_optim_event got {described(event)}", fix="pass a recorded torch.Event")
        if device.type != "cpu":
            state.settings.post_optim_event = event

    # What this library has no use for

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take False only: what is sent and received lies in memory of torch's allocator.

        Raises:
            ConfigError: ``enable`` is True.
        """
        method = "set_allocate_memory_from_process_group_for_comm"
        _check(self, method, enable=enable)
        if enable:
            raise _refused(
                self,
                f"{method}(True): parameters are gathered where they are used, in torch's memory, not staged",
                fix="leave the call out",
            )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Refuse: parameters are gathered where they are used, in torch's memory, not in symmetric memory.

        Raises:
            ConfigError: Always.
        """
        managed(self)
        raise _refused(
            self,
            f"set_symm_mem_for_comm({described(backend)}): parameters are gathered in torch's memory, not staged",
            fix="leave the call out",
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Take False only: gathers run, and allocate, on a stream of their own."""
        _check(self, "_set_unshard_async_op", async_op=async_op)
        if async_op:
            raise _refused(
                self,
                "_set_unshard_async_op(True): gathers run on a stream of their own, and allocate there",
                fix="leave the call out; set_keep_unsharded_storage(True) keeps memory from moving",
            )


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let several roots, such as the stages of a pipeline, gather and reduce on the same streams of their device.

    Memory that one has freed can then serve another. On the CPU there are no streams to share, and
    nothing changes. Deep copies have streams of their own.

    Raises:
        ConfigError: ``modules`` is no list of fully sharded modules, or they live on several devices.
        UsageError: One is not a root, or in the middle of a step.
    """
    if not isinstance(modules, Sequence) or isinstance(modules, str | nn.Module):
        raise ConfigError(f"share_comm_ctx got {described(modules)}", at=place_of_rank(), fix="pass a list of modules")
    for module in modules:
        if not isinstance(module, FSDPSettings):
            raise ConfigError(
                f"share_comm_ctx got {described(module)}, which is not fully sharded",
                at=place_of_rank(),
                fix="pass modules that fully_shard annotated",
            )
    states = list(dict.fromkeys(_root_state(module, "share_comm_ctx") for module in modules))
    devices = {state.grid.shard.device for state in states}
    if len(devices) > 1:
        raise ConfigError(
            f"share_comm_ctx got modules on {', '.join(sorted(map(str, devices)))}",
            at=place_of_rank(),
            fix="call it for the modules of each device",
        )
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


def managed(module: object) -> tuple[nn.Module, FullyShardState]:
    """Return a module and the state that manages it.

    Raises:
        UsageError: None does any more.
    """
    assert isinstance(module, nn.Module)
    state = sharded_state_of(module)
    if state is None:
        raise UsageError(
            "the module is no longer annotated", at=describe_module(module), fix="call fully_shard on it again"
        )
    return module, state


def handles_of(module: object, *, recurse: bool) -> list[Handle]:
    """Return the handles of ``module``, with ``recurse`` also those below it, in DFS order."""
    own, _ = managed(module)
    found: dict[Handle, None] = {}
    for submodule in own.modules() if recurse else (own,):
        handle = handle_of_module(submodule)
        if handle is not None:
            found[handle] = None
    return list(found)


def roots_of(module: object, *, recurse: bool) -> list[Root]:
    """Return the roots, as far as they are decided, of ``module``, with ``recurse`` also of those below it."""
    own, _ = managed(module)
    states = [sharded_state_of(submodule) for submodule in (own.modules() if recurse else (own,))]
    roots = [state.root for state in states if state is not None and state.root is not None]
    return list(dict.fromkeys(roots))


def _check(module: object, method: str, **switches: object) -> None:
    """Raise ``ConfigError`` unless each of ``switches`` is a bool."""
    managed(module)
    for name, value in switches.items():
        if not isinstance(value, bool):
            what = f"{name} is {described(value)}, not a bool, in {method}"
            raise _refused(module, what, fix="pass True or False")


def _checked(module: object, method: str, *, recurse: bool, **switches: object) -> list[Handle]:
    """Return the handles that a setter is for; its switches are bools."""
    _check(module, method, **switches, recurse=recurse)
    return handles_of(module, recurse=recurse)


def _root_state(module: object, method: str) -> FullyShardState:
    """Return the state of ``module``, which is the root.

    Raises:
        UsageError: It is not.
    """
    own, state = managed(module)
    outer = state.outermost()
    if state is not outer or own not in state.modules:
        names = ", ".join(map(describe_module, outer.modules))
        raise _untimely(own, f"{method} is for the root, where forward starts", fix=f"call it on {names}")
    return state


def _check_idle(module: object, state: FullyShardState, method: str) -> None:
    running = {one for own in state.modules for one in own.modules()} & {*modules_in_call()}
    if running or in_backward():
        what = f"{method} inside a {'forward' if running else 'backward'}"
        raise _untimely(module, what, fix="call it after backward, outside of any forward")


def _refused(module: object, what: str, *, fix: str) -> ConfigError:
    return ConfigError(what, at=f"{place_of_rank()}, {describe_module(managed(module)[0])}", fix=fix)


def _untimely(module: object, what: str, *, fix: str) -> UsageError:
    return UsageError(what, at=f"{place_of_rank()}, {describe_module(managed(module)[0])}", fix=fix)


def _prefetched(module: object, modules: Sequence[object], setter: str) -> tuple[Handle, ...]:
    managed(module)
    if not isinstance(modules, Sequence):
        raise _refused(module, f"{setter} got {type(modules).__name__}", fix="pass a list of modules")
    ahead: list[Handle] = []
    for other in modules:
        if not isinstance(other, FSDPSettings):
            raise _refused(
                module,
                f"{setter} got {type(other).__name__}, which is not fully sharded",
                fix="pass modules that fully_shard annotated or its policy picked",
            )
        ahead += handles_of(other, recurse=False)
    return tuple(ahead)
