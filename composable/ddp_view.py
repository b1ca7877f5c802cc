"""A replicated module as what torch's algorithms want of ``DistributedDataParallel``: hooks, overlap, uneven inputs.

Nothing is wrapped: ``as_ddp`` gives an object beside the module, to be handed to functions of
``torch.distributed.algorithms``.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from composable.annotation import sharded_state_of
from composable.arguments import check_bool
from composable.collectives import wait_for_work
from composable.contract import get_registry
from composable.engine import HookFunction
from composable.errors import UsageError, place_of_rank
from composable.fqns import describe_module
from composable.hook_registration import register_comm_hook as register
from composable.replication import ReplicateState, check_replicated

__all__ = ["DDPView", "as_ddp"]

# What a rank tells the others of its forward.
_RUNS, _BROADCASTS, _SYNCHRONISES = 1, 2, 4


def as_ddp(module: nn.Module) -> "DDPView":
    """Return an object that fits where an algorithm of torch wants its wrapper around ``module``.

    For ``register_ddp_comm_hook``, ``register_ddp`` of overlapped optimizers, ``hook_with_zero_step``, and
    ``Join``. Train with ``module`` as before: the object is not called. No communication.

    Args:
        module: Annotated by ``replicate``, alone.

    Raises:
        ConfigError: ``module`` is no module.
        UsageError: It is not replicated, or shares its buckets with other modules.
    """
    state = check_replicated(module, "as_ddp")
    if len(state.modules) > 1:
        raise UsageError(
            "as_ddp of a module that shares buckets with others",
            at=", ".join([place_of_rank(), *map(describe_module, state.modules)]),
            fix="replicate the module around them",
        )
    if not isinstance(state.view, DDPView):
        # Kept: torch's hooks refer to it weakly.
        state.view = DDPView(module, state)
    return state.view


class DDPView(Joinable):
    """The result of ``as_ddp``; a ``Joinable`` for ``torch.distributed.algorithms.Join``.

    Attributes:
        module: The replicated module.
    """

    def __init__(self, module: nn.Module, state: ReplicateState) -> None:
        super().__init__()
        self.module = module
        self._state = state
        self._divides_by_all = True
        self._told_to_synchronise = False
        self._hook: weakref.ref[JoinHook] | None = None

    @property
    def device(self) -> torch.device:
        """Where its gradients are averaged."""
        return self._state.grid.everyone.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that average."""
        return self._state.grid.everyone.process_group

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Do what ``composable.register_comm_hook`` does, for good. Collective."""
        register(self.module, state, hook)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return those of the module."""
        return self.module.parameters()

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """The buckets of this backward are those of all later ones; asked by ``hook_with_zero_step``."""
        return self._state.reducer.is_rebuilt

    # Uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what stands in for this rank once it has no inputs left; called by ``Join``.

        Args:
            **kwargs: ``divide_by_initial_world_size``: whether sums of gradients are divided by the number of all
                ranks, the default, or of those that still have inputs; and what is for other joinables.

        Raises:
            ConfigError: ``divide_by_initial_world_size`` is no bool.
            UsageError: Something below the module communicates by itself: it is annotated. Or it has
                ``static_graph=True``.
        """
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        check_bool("divide_by_initial_world_size", divides_by_all)
        for below in self.module.modules():
            if below is not self.module and (sharded_state_of(below) or "replicate" in get_registry(below)):
                raise UsageError(
                    "uneven inputs of a module with an annotated one below, which communicates by itself",
                    at=f"{place_of_rank()}, {describe_module(below)}",
                    fix="pass joinable(model, step=...) to Join in its place",
                )
        if self._state.reducer.options.static_graph:
            raise UsageError(
                "uneven inputs of a module with static_graph=True: a rank without inputs has no graph",
                at=f"{place_of_rank()}, {describe_module(self.module)}",
                fix="replicate without static_graph, or give every rank as many inputs",
            )
        self._divides_by_all = divides_by_all
        self._state.uneven, self._state.reducer.teller = self, None
        self._state.reducer.count_anew()
        hook = _Shadow(self)
        # ``Join`` does not say when an exception ends it: its hooks are gone then.
        self._hook = weakref.ref(hook)
        return hook

    def is_live(self) -> bool:
        """Say whether the context of a ``Join`` lasts."""
        return self._hook is not None and self._hook() is not None and bool(self._join_config.enable)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` counts the ranks that still have inputs."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that ``Join`` counts."""
        return self.process_group

    def begin_forward(self, module: nn.Module, *, broadcasts: bool) -> None:
        """Meet the ranks without inputs, at the start of a forward. Collective.

        Raises:
            RuntimeError: A rank has no inputs left, and ``Join`` was told to throw then.
        """
        if not self._join_config.enable:
            self._end()
            self._broadcast(0, broadcasts=broadcasts)
            return
        work = Join.notify_join_context(self)
        wait_for_work(work, self.process_group, "Join")
        reducer = self._state.reducer
        self._told_to_synchronise = reducer.synchronises
        reducer.before_round = self._check_told
        self._meet(_RUNS + _BROADCASTS * broadcasts + _SYNCHRONISES * reducer.synchronises)

    def _check_told(self, synchronises: bool) -> None:
        if synchronises is not self._told_to_synchronise:
            raise UsageError(
                "a backward inside of Join is not what its forward has told ranks without inputs: "
                f"gradients {'are' if synchronises else 'are not'} averaged",
                at=f"{place_of_rank()}, {describe_module(self.module)}",
                fix="enter no_sync around forward and backward alike, also set_is_last_backward",
            )

    def _meet(self, told: int) -> int:
        """Tell the other ranks of a forward, choose the divisor, and broadcast buffers; returns what they tell."""
        reducer = self._state.reducer
        numbers = [int(number) for number in reducer.share(told)]
        running = [rank for rank, number in enumerate(numbers) if number & _RUNS]
        reducer.divide_by(None if self._divides_by_all else len(running))
        reducer.expect(running)
        self._broadcast(running[-1], broadcasts=any(number & _BROADCASTS for number in numbers))
        return numbers[running[-1]]

    def _broadcast(self, source_rank: int, *, broadcasts: bool) -> None:
        if broadcasts and self._state.buffers is not None:
            self._state.buffers.broadcast(source_rank)

    def _shadow(self) -> None:
        """Do on this rank, which has no inputs, what forward and backward of the others wait for."""
        state = self._state
        with torch.no_grad():
            state.transport.connect()
            state.reducer.prepare()
            if self._meet(0) & _SYNCHRONISES:
                state.reducer.shadow()

    def _finish(self, *, is_last: bool) -> None:
        """Give every rank parameters and buffers of the last one that had inputs. Collective."""
        state = self._state
        with torch.no_grad():
            state.transport.connect()
            state.reducer.prepare()
            source = max(rank for rank, number in enumerate(state.reducer.share(is_last)) if number)
            state.broadcast_all(source)
        self._end()

    def _end(self) -> None:
        """The context is over."""
        self._state.uneven = None
        self._state.reducer.count_anew()
        self._state.reducer.before_round = None
        self._state.reducer.divide_by(None)
        self._state.reducer.expect(None)


class _Shadow(JoinHook):
    """What ``Join`` calls on a rank without inputs."""

    def __init__(self, view: DDPView) -> None:
        self._view = view
        self._put_back: Callable[[], None] | None = None

    def main_hook(self) -> None:
        # The averages stay until the end: a joinable after this one may step by them.
        self._put_back = self._put_back or self._view._state.reducer.put_aside()
        self._view._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._view._finish(is_last=is_last_joiner)
        if self._put_back is not None:
            self._put_back()
