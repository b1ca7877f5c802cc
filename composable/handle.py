"""A handle owns the parameters of one fully sharded module: unshard, reshard, reduce.

A handle has one flat buffer per (dtype, requires_grad) class of its parameters. It knows
its own state and swaps the modules' parameters between their two faces; the scheduler
decides when each call is made.
"""

from collections.abc import Sequence

from torch import nn

from composable.collectives.base import Pending
from composable.flat_buffer import FlatBuffer
from composable.plan import HandlePlan
from composable.sharded_param import ShardedParam, has_own_setattr

__all__ = ["Handle"]


class Handle:
    """The parameters that are unsharded and resharded together, and where they are in a step.

    Attributes:
        plan: What was decided before anything was built.
        fqn: Name of the fully sharded module from the root; set when the root is known.
        modules: The fully sharded module, or several that share the handle.
        is_gathering: An unshard was started and is not in use yet.
        is_unsharded: The modules hold the unsharded parameters.
        held_with: Options of the context that shows full parameters to the user; ``reshard`` has to wait.
        is_lent: That context shows them in a way that forward and backward cannot use.
        reshard_option: What the user asked for; ``None``: free between forward and backward unless root.
        reshard_after_forward: What that means now that the root is known.
        requires_gradient_sync: Reduce gradients at the end of this handle's backward.
        has_unsynced_gradients: A backward without synchronisation left gradients on the leaves.
        first_pre: Clock of the first forward call since the last backward; -1: none.
        forward_prefetch: Handles to unshard after this one in forward, or ``None``: as recorded.
        backward_prefetch: The same for backward.
        next_forward: Handle that followed in the latest forward, a hint.
        previous_forward: Handle that went before in the latest forward, a hint.
        next_backward: Handle that followed in the latest backward, a hint.
    """

    def __init__(self, plan: HandlePlan, modules: Sequence[nn.Module], buffers: Sequence[FlatBuffer]) -> None:
        self.plan = plan
        self.fqn = plan.module_fqns[0]
        self.modules = tuple(modules)
        self.buffers = tuple(buffers)
        self.is_gathering = False
        self.is_unsharded = False
        self.held_with: object | None = None
        self.is_lent = False
        self.reshard_option = plan.reshard_after_forward
        self.reshard_after_forward = True
        self.requires_gradient_sync = True
        self.has_unsynced_gradients = False
        self.first_pre = -1
        self.entered_at = -1
        self.backward_id = -1
        self.completed_id = -1
        self.is_late = False
        self.modules_left: set[nn.Module] = set()
        self.forward_prefetch: tuple[Handle, ...] | None = None
        self.backward_prefetch: tuple[Handle, ...] | None = None
        self.next_forward: Handle | None = None
        self.previous_forward: Handle | None = None
        self.next_backward: Handle | None = None
        self._gathers: list[Pending] = []
        self._plain_owners: list[tuple[nn.Module, str, ShardedParam]] = []
        self._swaps: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] | None = None
        self._watched: list[ShardedParam] = []
        for param in self.params:
            param.place(param.sharded)
            if any(has_own_setattr(module) for module, _ in param.owners):
                self._watched.append(param)
            else:
                self._plain_owners += [(module, name, param) for module, name in param.owners]

    def attach(self) -> None:
        """Bring back what torch replaced: parameters that a load assigned, and memory that it gave to parameters.

        Their values stay; parameters are the same objects as before. Not collective.

        Raises:
            UsageError: A parameter has another dtype or shape now.
        """
        if self.is_unsharded or self.held_with is not None:
            return
        for param in self.params:
            for module, name in param.owners:
                held = module._parameters.get(name)
                if held is not None and held is not param.sharded:
                    param.take(held)
            param.place(param.sharded)
        for flat in self.buffers:
            flat.attach()

    @property
    def params(self) -> list[ShardedParam]:
        """Every parameter of the handle, buffer by buffer."""
        return [param for flat in self.buffers for param in flat.params]

    @property
    def is_trainable(self) -> bool:
        """Some parameter requires a gradient now."""
        return any(flat.is_trainable for flat in self.buffers)

    @property
    def _fqns(self) -> list[str]:
        """FQNs of the parameters, prefixed from the fully sharded module."""
        return [param.fqn for param in self.params]

    def begin_unshard(self) -> None:
        """Start filling the buffers. Collective: all ranks of the shard group, same order."""
        for flat in self.buffers:
            if flat.is_empty:
                flat.make_leaves()
            else:
                self._gathers.append(flat.begin_unshard())
        self.is_gathering = True

    def finish_gathers(self) -> None:
        """Wait for the all-gathers: the thread on CPU, the current stream on CUDA."""
        for gather in self._gathers:
            gather.finish()

    def use_unsharded(self) -> None:
        """Make the modules hold the unsharded parameters; the gathers are finished."""
        self._gathers = []
        self.is_gathering = False
        self.is_unsharded = True
        if self._swaps is None:
            self._swaps = [(module, name, param.sharded, param.leaf()) for module, name, param in self._plain_owners]
        for module, name, sharded, leaf in self._swaps:
            trainable = sharded.requires_grad
            if leaf.requires_grad is not trainable:
                leaf.requires_grad_(trainable)
            module._parameters[name] = leaf
        for param in self._watched:
            param.leaf().requires_grad_(param.sharded.requires_grad)
            param.place(param.leaf())

    def reshard(self) -> None:
        """Make the modules hold the sharded parameters and free the buffers."""
        self._gathers = []
        self.is_gathering = False
        self.is_unsharded = False
        for module, name, param in self._plain_owners:
            module._parameters[name] = param.sharded
        for param in self._watched:
            param.place(param.sharded)
        for flat in self.buffers:
            flat.free_buffer()

    def has_gradients(self) -> bool:
        """Say whether any unsharded parameter holds a gradient."""
        return any(flat.has_gradients() for flat in self.buffers)

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced."""
        self.has_unsynced_gradients = False
        for flat in self.buffers:
            flat.drop_gradients()

    def __repr__(self) -> str:
        return f"Handle({self.fqn!r}, {len(self.params)} parameters)"
