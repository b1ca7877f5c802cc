"""What a replicated module does around its forward and its backward."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.frames import in_backward
from composable.torch_hooks import GradientHook, beside_forward, differentiable_tensors, on_gradient
from composable.torch_private import opaque

__all__ = ["ReplicateHooks", "register_replicate_hooks"]


def register_replicate_hooks(
    module: nn.Module,
    before_forward: Callable[[nn.Module], None],
    after_forward: Callable[[BaseException | None], None],
    before_backward: Callable[[], None],
) -> list[RemovableHandle]:
    """Call ``before_forward`` before ``module`` runs, ``before_backward`` when the gradient of an output arrives.

    ``after_forward`` gets what the forward raised, if anything. Activation checkpointing runs a module again inside
    backward: that is no forward here. A deep copy of the module gets deep copies of the three: pass bound methods,
    not closures.
    """
    hooks = ReplicateHooks(before_forward, after_forward, before_backward)
    return beside_forward(module, hooks.pre_forward, hooks.post_forward)


class ReplicateHooks:
    """The hooks of one replicated module."""

    __slots__ = ("_after_forward", "_before_backward", "_before_forward")

    def __init__(
        self,
        before_forward: Callable[[nn.Module], None],
        after_forward: Callable[[BaseException | None], None],
        before_backward: Callable[[], None],
    ) -> None:
        self._before_forward = before_forward
        self._after_forward = after_forward
        self._before_backward = before_backward

    @opaque
    def pre_forward(self, module: nn.Module, *_: Any) -> None:
        if not in_backward():
            self._before_forward(module)

    @opaque
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not in_backward():
            self._after_forward(sys.exc_info()[1] if output is None else None)
        if torch.is_grad_enabled():
            hook = _OutputHook(self._before_backward)
            for tensor in differentiable_tensors(output):
                on_gradient(tensor, hook)


def _nothing(_: "_OutputHook", grad: torch.Tensor) -> None:
    """In a graph there are no rounds: see ``traced.py``."""


class _OutputHook(GradientHook):
    """Runs when the gradient of an output arrives; equal to those of the module's other calls."""

    __slots__ = ("_before_backward",)

    def __init__(self, before_backward: Callable[[], None]) -> None:
        self._before_backward = before_backward

    @partial(opaque, traced=_nothing)
    def __call__(self, grad: torch.Tensor) -> None:
        self._before_backward()

    def __eq__(self, other: object) -> bool:
        return type(other) is _OutputHook and other._before_backward == self._before_backward

    def __hash__(self) -> int:
        return hash(self._before_backward)
