"""What a replicated module does around its forward and its backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.frames import in_backward
from composable.torch_hooks import beside_forward, differentiable_tensors, on_gradient

__all__ = ["register_replicate_hooks"]


def register_replicate_hooks(
    module: nn.Module, before_forward: Callable[[nn.Module], None], before_backward: Callable[[], None]
) -> list[RemovableHandle]:
    """Call ``before_forward`` before ``module`` runs, ``before_backward`` when the gradient of an output arrives.

    Activation checkpointing runs a module again inside backward: that is no forward here. A deep
    copy of the module gets deep copies of the two: pass bound methods, not closures.
    """
    hooks = _ReplicateHooks(before_forward, before_backward)
    return beside_forward(module, hooks.pre_forward, hooks.post_forward)


class _ReplicateHooks:
    """The hooks of one replicated module."""

    __slots__ = ("_before_backward", "_before_forward")

    def __init__(self, before_forward: Callable[[nn.Module], None], before_backward: Callable[[], None]) -> None:
        self._before_forward = before_forward
        self._before_backward = before_backward

    def pre_forward(self, module: nn.Module, *_: Any) -> None:
        if not in_backward():
            self._before_forward(module)

    def pre_backward(self, _: torch.Tensor) -> None:
        self._before_backward()

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in differentiable_tensors(output):
                on_gradient(tensor, self.pre_backward)
