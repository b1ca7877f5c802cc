"""The hooks of a sharded module.

Its forward hooks run outside all others, so that activation checkpointing and user hooks see
unsharded parameters; the one after forward also runs when forward raises, so that nothing stays
unsharded.
"""

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.annotation.checks import Additions, check_views
from composable.annotation.root import FullyShardState, handle_of_module, sharded_state_of
from composable.engine import (
    Handle,
    HandleStep,
    ParamView,
    Scheduler,
    attach,
    check_held,
    handle_of,
    leaves_side_loss,
    lies_in_buffer,
    misplaced,
    tensors_in_attributes,
    written_too_early,
)
from composable.errors import DesyncError, UsageError
from composable.ground.casts import CastBuffers, CastInputs, LendHook, cast_floats, moved_to
from composable.ground.frames import run_as_call
from composable.ground.modes import is_watched, outside_modes, unseen
from composable.ground.names import describe_module
from composable.ground.torch_hooks import GradientHook, around_forward, differentiable_tensors, on_gradient, tensors_in
from composable.ground.torch_private import (
    current_graph_task_id,
    dispatch_modes,
    function_modes,
    next_node_number,
    opaque,
    outside_transforms,
    running_transform,
    tree_map,
)
from composable.planning import NO_CASTS

T = TypeVar("T")


def register_fully_shard_hooks(
    module: nn.Module, state: FullyShardState, handle: Handle | None
) -> list[RemovableHandle]:
    """Let ``module`` unshard before and reshard after its forward and its backward.

    It is fully sharded, or annotated without parameters of its own, and then its ``handle`` is ``None``.
    """
    hooks = _hooks_of(module, state, handle)
    return around_forward(module, hooks.pre_forward, hooks.post_forward)


def call_as_forward(module: nn.Module, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Return ``function(*args, **kwargs)``, run between the forward hooks of ``module``."""
    state = sharded_state_of(module)
    if state is None:
        return function(*args, **kwargs)
    hooks = _hooks_of(module, state, handle_of_module(module))

    def run_between_hooks() -> T:
        output: Any = None
        changed = hooks.pre_forward(module, args, kwargs)
        own_args, own_kwargs = (args, kwargs) if changed is None else changed
        try:
            output = function(*own_args, **own_kwargs)
        finally:
            changed = hooks.post_forward(module, args, output)
        return output if changed is None else changed  # type: ignore[no-any-return]  # what the function returned

    return run_as_call(module, run_between_hooks)


def sharded_face(param: nn.Parameter) -> nn.Parameter:
    """Return the sharded parameter for an unsharded one, of full shape, and any other parameter as it is."""
    handle = handle_of(param)
    return next((one.sharded for one in handle.params if one.unsharded is param), param) if handle else param


class _ModuleHooks:
    """The hooks of one module. A deep copy refers to the copied state and handle; a closure would not."""

    __slots__ = ("_additions", "_handle", "_state")

    def __init__(self, state: FullyShardState, handle: Handle | None) -> None:
        self._state = state
        self._handle = handle
        self._additions = Additions()

    @opaque
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if running_transform() is not None or ((dispatch_modes() or function_modes()) and is_watched()):
            with outside_transforms(), outside_modes():
                return _ModuleHooks.pre_forward(self, module, args, kwargs)
        state, handle = self._state, self._handle
        root = state.root
        if root is None:
            _check_not_traced(module, ())
            root = state.lazy_init()
        if not root.has_begun:
            state.begin()
        scheduler = root.scheduler
        forwards, step = scheduler.forwards, scheduler.step
        is_outermost = not step.running and current_graph_task_id() == -1
        if is_outermost and (torch.compiler.is_exporting() or torch.jit.is_tracing()):  # type: ignore[no-untyped-call,attr-defined]
            _check_not_traced(module, root.handles)
        if handle is not None:
            if handle.view is ParamView.UNSHARDED or not handle.faces.are_sharded():
                _take_assigned(handle, scheduler)
            for follower in step.steps[handle].followers:
                _take_assigned(follower.handle, scheduler)
        if is_outermost and torch.is_grad_enabled():
            self._additions.check(module, root)
        forwards.enter_forward(module)
        if handle is not None:
            forwards.pre_forward(handle)
        if is_outermost and state.mesh.device_type != "cpu":
            return moved_to(state.grid.shard.device, (args, kwargs))
        return None

    @opaque
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if (dispatch_modes() or function_modes()) and is_watched():
            with outside_modes():
                return _ModuleHooks.post_forward(self, module, args, output)
        handle = self._handle
        root = self._state.root
        running = () if root is None else root.scheduler.step.running
        if root is None or not running or running[-1] is not module:
            # pre_forward raised, or a user's hook before it.
            return None
        scheduler = root.scheduler
        forwards, has_failed = scheduler.forwards, False
        if output is None and (error := sys.exc_info()[1]) is not None:
            forwards.note_failure(error, handle)
            if isinstance(error, DesyncError):
                # No message that is under way will arrive: the error of the forward already says why.
                with suppress(DesyncError):
                    if handle is not None:
                        forwards.post_forward(handle, module, is_differentiable=False)
                with suppress(DesyncError):
                    forwards.exit_forward(has_failed=True)
                return None
            has_failed = True
        changed = None
        if handle is not None:
            # In the common case the output of an operation is neither a view nor a leaf, and needs no search.
            if type(output) is not torch.Tensor or output.grad_fn is None or output._base is not None:
                changed = _without_own_memory(output, handle)
            found = output if changed is None else changed
            tensors: list[torch.Tensor] = []
            leaks, first_node = False, scheduler.step.first_nodes[-1]
            if torch.is_grad_enabled():
                if not isinstance(found, torch.Tensor):
                    tensors = list(differentiable_tensors(found))
                elif found.requires_grad:
                    tensors = [found]
                if first_node >= 0:
                    # Tensors that a forward puts into attributes of its module, such as a loss, count as outputs.
                    if torch.Tensor in map(type, vars(module).values()):
                        tensors += tensors_in_attributes(module, first_node)
                    # In the common case the output's node is the youngest.
                    node = tensors[0].grad_fn if len(tensors) == 1 else None
                    is_youngest = node is not None and node._sequence_nr() == next_node_number() - 1
                    leaks = not is_youngest and leaves_side_loss(tensors, first_node)
            # Without outputs, what the call has made may be in a loss that lies elsewhere.
            clock = forwards.post_forward(handle, module, is_differentiable=bool(tensors) or leaks, leaks=leaks)
            if tensors and first_node >= 0:
                own = scheduler.step.steps[handle]
                hook = _OutputHook(scheduler, own, clock)
                for tensor in tensors:
                    if tensor.grad_fn is None:
                        on_gradient(tensor, _LeafHook(scheduler, own))
                    else:
                        own.output = weakref.ref(hook.first or hook)
                        on_gradient(tensor, hook)
        if len(running) == 1 and torch.is_grad_enabled():
            scheduler.backwards.side_losses.note_outputs(output if changed is None else changed)
        forwards.exit_forward(has_failed=has_failed)
        if not (root.has_looked_at_views or running or has_failed):
            root.has_looked_at_views = True
            check_views(root.modules)
        return changed


class _CastingHooks(_ModuleHooks):
    """The hooks of one module that has a mixed precision policy."""

    __slots__ = ("_buffers", "_inputs", "_is_annotated", "_owners")

    def __init__(self, state: FullyShardState, handle: Handle | None, *, is_annotated: bool) -> None:
        super().__init__(state, handle)
        self._is_annotated = is_annotated  # itself, not picked by a policy
        dtype = state.plan.mp_policy.buffer_dtype
        self._buffers = None if dtype is None else CastBuffers(dtype)
        self._owners: list[dict[str, Any]] | None = None
        self._inputs = CastInputs()

    @unseen
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        changed = super().pre_forward(module, args, kwargs)
        if self._shows_full(module):
            return changed
        state = self._state
        root = state.lazy_init()  # Decided above.
        is_root = self._is_annotated and root.find_state() is state
        dtype = state.plan.mp_policy.casts_inputs(is_root=is_root)
        if dtype is not None:
            args, kwargs = (args, kwargs) if changed is None else changed
            self._inputs.leave(keeps=root.scheduler.step.running.count(module) - 1)  # Of calls that were cut short.
            changed = self._inputs.enter(args, kwargs, dtype)
        if self._buffers is not None:
            if self._owners is None:
                self._owners = [one._buffers for one in state.modules_around(module)]
            is_outermost = root.scheduler.step.running.count(module) == 1
            self._buffers.take_from(root.lent_buffers)
            self._buffers.enter(self._owners, is_outermost=is_outermost)
        return changed

    @unseen
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        root = self._state.root
        if root is None or root.scheduler.step.running[-1:] != [module] or self._shows_full(module):
            return super().post_forward(module, args, output)
        self._inputs.leave(keeps=root.scheduler.step.running.count(module) - 1)
        if self._buffers is not None:
            self._buffers.leave()
        # Modules that a policy has picked hand their outputs on to modules that compute in `param_dtype`.
        dtype, cast = self._state.plan.mp_policy.output_dtype, output
        if dtype is not None and output is not None and self._is_annotated:
            try:
                cast = cast_floats(output, dtype)
            except BaseException:
                super().post_forward(module, args, None)
                raise
        changed = super().post_forward(module, args, cast)
        found = cast if changed is None else changed
        if self._buffers is not None and self._owners is not None and torch.is_grad_enabled():
            hook = LendHook(self._buffers, self._owners)
            for tensor in differentiable_tensors(found):
                if tensor.grad_fn is not None:
                    on_gradient(tensor, hook)
        return None if found is output else found

    def _shows_full(self, module: nn.Module) -> bool:
        """Say whether ``unshard_params`` shows the full parameters: then the module runs like a plain one."""
        if self._handle is not None:
            return self._handle.held_with is not None
        root = self._state.root
        if root is None or all(handle.held_with is None for handle in root.handles):
            return False
        # A module without parameters of its own counts as shown if all handles below it are shown.
        below = [handle for inner in module.modules() if (handle := handle_of_module(inner)) is not None]
        return bool(below) and all(handle.held_with is not None for handle in below)


def _hooks_of(module: nn.Module, state: FullyShardState, handle: Handle | None) -> _ModuleHooks:
    if state.plan.mp_policy == NO_CASTS or module in state.skipped_modules:
        return _ModuleHooks(state, handle)
    return _CastingHooks(state, handle, is_annotated=module in state.modules)


class _OutputHook(GradientHook):
    """Runs when the gradient of an output of one forward call arrives.

    A call may have several outputs, and another module may return the same output;
    only the first gradient in a backward counts.
    """

    __slots__ = ("__weakref__", "_backwards", "_clock", "_gathers", "_handle", "_met_in", "_step", "_version", "first")

    def __init__(self, scheduler: Scheduler, own: HandleStep, clock: float) -> None:
        handle = own.handle
        self._backwards = scheduler.backwards
        self._step = scheduler.step
        self._handle = handle
        self._clock = clock
        # The setting of the forward counts: autograd may have saved parameters since then.
        self._gathers = handle.settings.unshard_in_backward
        self._version = handle.versions.gathered
        self._met_in = -1
        first = own.output()
        # The hook of the step's first call lives as long as that of any later one.
        self.first = first if isinstance(first, _OutputHook) and first._clock > own.first_forward else None

    @opaque
    def __call__(self, grad: torch.Tensor) -> None:
        if running_transform() is not None or ((dispatch_modes() or function_modes()) and is_watched()):
            with outside_transforms(), outside_modes():
                self(grad)
            return
        step = self._step
        if not (step.is_backward and step.backward_id == self._met_in):
            self._met_in = self._backwards.pre_backward(self._handle, self._clock, gathers=self._gathers)
            if self._version != self._handle.versions.gathered and self._gathers and type(self) is _OutputHook:
                raise written_too_early(self._handle)
            for hear in step.listeners.backward_reached:
                hear(self._handle)


class _LeafHook(_OutputHook):
    """The hook of an output that is a leaf: a leaf outlives the call, so one hook serves all calls.

    Autograd accumulates the gradient of a leaf as soon as it can, so it does not show how far backward is.
    """

    __slots__ = ()

    def __init__(self, scheduler: Scheduler, own: HandleStep) -> None:
        super().__init__(scheduler, own, math.inf)
        self._gathers = True

    def __eq__(self, other: object) -> bool:
        return type(other) is _LeafHook and other._handle is self._handle and other._step is self._step

    def __hash__(self) -> int:
        return hash(self._handle)


def _take_assigned(handle: Handle, scheduler: Scheduler) -> None:
    """Copy parameters that were assigned since the last forward, such as by a load of a part, into the shards.

    Raises ``UsageError`` if a parameter has another shape or dtype, and as ``check_held``.
    """
    found = misplaced(handle)
    if not found:
        return
    check_held(handle)
    # A gather in flight reads the shards: it ends here.
    scheduler.reshard(handle)
    handle.drop_secondary()
    for module, name, _, held in (one for one in found if one.is_unknown):
        module._parameters[name] = held
    attach(handle)
    scheduler.step.streams.shards_written()


def _check_not_traced(module: nn.Module, handles: Sequence[Handle]) -> None:
    """Refuse to trace or export a forward that gathers: a graph would hold the messages of this run, or none."""
    is_tracing: bool = torch.jit.is_tracing()  # type: ignore[no-untyped-call,attr-defined]
    # Parameters inside `unshard_params` need no gather, but an export would not find them in the module.
    if torch.compiler.is_exporting() or (is_tracing and all(handle.held_with is None for handle in handles)):
        raise UsageError(
            "a sharded module is traced or exported, and a graph cannot hold its gathers",
            at=describe_module(module),
            fix="do it after unannotate(model), or on a plain model that has loaded full_state_dict(model)",
        )


def _without_own_memory(output: Any, handle: Handle) -> Any:
    """Return the output with copies of the tensors that are views of the handle's buffers; ``None``: there are none.

    A module that returns a parameter, or part of one, would return memory that is freed and filled again. Raises
    ``UsageError`` if such a tensor lies in an object of an unknown class.
    """
    if isinstance(output, torch.Tensor):
        tensors = [output]
    else:
        tensors = list(tensors_in(output))
    if not any(lies_in_buffer(handle, tensor) for tensor in tensors):
        return None

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and lies_in_buffer(handle, value) else value

    changed: Any = tree_map(copy, output)
    if any(lies_in_buffer(handle, tensor) for tensor in tensors_in(changed)):
        raise UsageError(
            f"forward returns a parameter, or a view of one, in a {type(output).__name__}",
            at=handle.described,
            fix="return a copy of it (clone()), or return tensors in tuples, lists and dicts",
        )
    return changed
