"""What a fully sharded module does around its forward and its backward.

Its forward hooks run outside all others, so that activation checkpointing and user hooks see
unsharded parameters; the one after forward also runs when forward raises, so that nothing stays
unsharded.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.frames import in_backward
from composable.runtime.scheduler import Scheduler
from composable.runtime.state import FullyShardState
from composable.storage import Handle
from composable.torch_hooks import around_forward, differentiable_tensors, on_gradient
from composable.torch_private import tree_map

__all__ = ["register_fully_shard_hooks"]


def register_fully_shard_hooks(
    module: nn.Module, state: FullyShardState, handle: Handle | None
) -> list[RemovableHandle]:
    """Let ``module`` unshard before and reshard after its forward and its backward.

    Args:
        module: A fully sharded module, or an annotated module without parameters of its own.
        state: State of the annotation that manages it.
        handle: Its handle, ``None`` if it has none.
    """
    hooks = _ModuleHooks(state, handle)
    return around_forward(module, hooks.pre_forward, hooks.post_forward)


class _ModuleHooks:
    """The hooks of one module. A deep copy belongs to the copied state and handle; closures would stay."""

    __slots__ = ("_handle", "_state")

    def __init__(self, state: FullyShardState, handle: Handle | None) -> None:
        self._state = state
        self._handle = handle

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        state, handle = self._state, self._handle
        root = state.root
        if root is None:
            root = state.lazy_init(module)
        scheduler = root.scheduler
        is_outermost = scheduler.is_idle
        scheduler.enter_forward(module)
        if handle is not None:
            scheduler.pre_forward(handle)
        if is_outermost and state.mesh.device_type != "cpu":
            return _move_inputs(args, kwargs, state.grid.shard.device)
        return None

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        handle = self._handle
        root = self._state.root
        if root is None or not root.scheduler.is_running(module):
            # pre_forward raised, or a user's hook before it.
            return
        if handle is not None:
            _hook_outputs(output, root.scheduler, handle, module)
        root.scheduler.exit_forward()


class _OutputHook:
    """Runs when the gradient of an output of one forward call arrives.

    A call may have several outputs, and an output may also be one of another module's;
    only the first gradient in a backward counts.
    """

    __slots__ = ("_backward_id", "_clock", "_handle", "_scheduler")

    def __init__(self, scheduler: Scheduler, handle: Handle, clock: int) -> None:
        self._scheduler = scheduler
        self._handle = handle
        self._clock = clock
        self._backward_id = -1

    def __call__(self, grad: torch.Tensor) -> None:
        scheduler = self._scheduler
        if scheduler.is_backward and self._backward_id == scheduler.backward_id:
            return
        scheduler.pre_backward(self._handle, self._clock)
        self._backward_id = scheduler.backward_id


def _hook_outputs(output: Any, scheduler: Scheduler, handle: Handle, module: nn.Module) -> None:
    if not torch.is_grad_enabled():
        scheduler.post_forward(handle, module, is_differentiable=False)
        return
    if isinstance(output, torch.Tensor):
        tensors = [output] if output.requires_grad else []
    else:
        tensors = list(differentiable_tensors(output))
    clock = scheduler.post_forward(handle, module, is_differentiable=bool(tensors))
    if not tensors or in_backward():
        return
    hook = _OutputHook(scheduler, handle, clock)
    for tensor in tensors:
        on_gradient(tensor, hook)


def _move_inputs(args: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    moved: tuple[Any, Any] = tree_map(move, (args, kwargs))
    return moved
