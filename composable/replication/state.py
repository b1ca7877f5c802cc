"""What a replicated module remembers."""

import copy
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.collectives import Grid, OwnTransport
from composable.errors import UsageError, place_of_rank
from composable.fqns import describe_module
from composable.replication.broadcasts import BufferSync
from composable.replication.reducer import Reducer
from composable.storage import modules_of_copy
from composable.torch_hooks import after_gradients

__all__ = ["ReplicateState"]


class ReplicateState:
    """State of one ``replicate`` annotation.

    Attributes:
        modules: The annotated module, or the list of modules of one call.
        reducer: Averages the gradients.
        buffers: Makes the buffers equal before a forward; ``None`` if there are none or it was not asked for.
        frozen: Parameters that did not require a gradient, with their FQNs.
        grid: The ranks, which all hold every parameter.
        transport: In a group of its own; a copied state makes it at its first forward that a backward may follow.
        hook_handles: Remove them, and the modules run as plain ones again.
    """

    modules: tuple[nn.Module, ...]
    reducer: Reducer
    grid: Grid
    transport: OwnTransport
    buffers: "BufferSync | None"
    frozen: list[tuple[str, nn.Parameter]]

    def __init__(self) -> None:
        self.modules = ()
        self.buffers = None
        self.frozen = []
        self.hook_handles: list[RemovableHandle] = []

    def before_forward(self, module: nn.Module) -> None:
        """Prepare a forward of ``module`` that a backward may follow.

        Raises:
            UsageError: A parameter that was frozen at annotation requires a gradient now.
        """
        if not torch.is_grad_enabled():
            return
        for fqn, param in self.frozen:
            if param.requires_grad:
                raise UsageError(
                    "a parameter was frozen when replicate was called and requires a gradient now",
                    at=f"{place_of_rank()}, parameter {fqn!r}",
                    fix="call replicate after unfreezing",
                )
        self.transport.connect()
        self.reducer.prepare()
        if self.buffers is not None and module.training and self.reducer.requires_gradient_sync:
            self.buffers.broadcast()

    def before_backward(self, index: int) -> None:
        """Note that the gradient of an output of the annotated module ``index`` arrives."""
        self.reducer.arm(index)

    def use(self, grid: Grid) -> None:
        """Choose the ranks; the transport between them is made when it is needed."""
        self.grid = grid
        self.transport = OwnTransport(grid.everyone)

    def abandon_step(self) -> None:
        """Put things right after a backward that an exception stopped; see ``Reducer.prepare``."""
        self.reducer.prepare()

    def close(self) -> None:
        """Make the modules plain ones again. Collective; no forward or backward is running."""
        self.transport.connect()
        self.reducer.close()
        for hook in self.hook_handles:
            hook.remove()
        self.hook_handles = []
        self.transport.close()

    def __deepcopy__(self, memo: dict[Any, Any]) -> "ReplicateState":
        modules = modules_of_copy(memo)
        if not all(module in modules for module in self.modules):
            names = " and ".join(describe_module(module) for module in self.modules)
            raise UsageError(
                "only some of the modules that share buckets are to be copied",
                at=f"{place_of_rank()}, replicate of {names}",
                fix=f"deep-copy {names} or a module around, in one call",
            )
        twin = memo[id(self)] = ReplicateState()
        twin.use(self.grid)
        for item in self.reducer.params:
            copied = copy.deepcopy(item.param, memo)
            if item.param.grad is not None and self.reducer.has_sound_gradients:
                copied.grad = item.param.grad.detach().clone()
        params = [replace(item, param=memo[id(item.param)]) for item in self.reducer.params]
        twin.reducer = self.reducer.copied(params, twin.transport, memo)
        twin.frozen = copy.deepcopy(self.frozen, memo)
        if self.buffers is not None:
            slots = [(copy.deepcopy(owner, memo), name) for owner, name in self.buffers.slots]
            twin.buffers = BufferSync(slots, twin.transport, self.grid.everyone.device)
        twin.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        of_modules = self.hook_handles[len(params) :]
        twin.hook_handles = [
            *after_gradients([item.param for item in params], twin.reducer.arrivals()),
            *(copy.deepcopy(hook, memo) for hook in of_modules),
        ]
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a replicated module cannot be pickled as a whole",
            at=", ".join([place_of_rank(), *(describe_module(module) for module in self.modules)]),
            fix="save its state_dict(); copy.deepcopy copies it",
        )
