"""A model of which a part runs on a stream of its own, in forward and in backward."""

from typing import Any

import torch
from torch import nn

from tests.models import MLP, make_model, seeded
from tools.streams.recording import Recorder

__all__ = ["Branches"]


class Enter(torch.autograd.Function):
    """Goes on on the side stream; backward returns from it. Autograd runs each node on the stream of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, branches: "Branches", is_first: bool) -> torch.Tensor:
        ctx.branches, ctx.is_first = branches, is_first
        if is_first:
            branches.side.wait_stream(branches.home)
        branches.recorder.set_stream(branches.side)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad * 1
        if ctx.is_first:
            ctx.branches.home.wait_stream(ctx.branches.side)
        ctx.branches.recorder.set_stream(ctx.branches.home)
        return grad, None, None


class Leave(torch.autograd.Function):
    """Goes on on the first stream, which does not wait; backward waits for what made the gradient alone."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, branches: "Branches") -> torch.Tensor:
        ctx.branches = branches
        y = y * 1
        branches.recorder.set_stream(branches.home)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        branches = ctx.branches
        if branches.grad_made is not None:
            branches.side.wait_event(branches.grad_made)
            branches.grad_made = None
        branches.recorder.set_stream(branches.side)
        return grad * 1, None


class Join(torch.autograd.Function):
    """Adds what the streams made."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, z: torch.Tensor, branches: "Branches") -> torch.Tensor:
        ctx.branches = branches
        branches.home.wait_stream(branches.side)
        return y + z

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.branches.grad_made = ctx.branches.home.record_event()
        return grad, grad, None


class Branches(nn.Module):
    """A chain of blocks on the first stream, beside one on a stream of its own that starts earlier and ends later."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.first, self.last = make_model("mlp"), make_model("mlp", seed=1)
        self.beside = seeded(lambda: MLP(layers=1), 2)
        self.recorder = recorder
        self.home = recorder.current_stream()
        self.side = recorder.Stream(name="side")
        self.grad_made: Any = None
        self.example_inputs = self.first.example_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Every node of the chain needs a gradient, so that backward comes back.
        y = Enter.apply(x.detach().requires_grad_(), self, True)
        y = Leave.apply(self.first(y), self)
        z = self.beside(x)
        y = Leave.apply(self.last(Enter.apply(y, self, False)), self)
        return Join.apply(y, z, self)
