"""What an annotated module remembers, and what only a root remembers besides."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

import _traversal_utils
from composable.collectives.choose import transport_of
from composable.collectives.mesh import device_of
from composable.collectives.ranks import compare_ranks
from composable.errors import UsageError, located, place_of_rank
from composable.planning.shard_plan import ShardPlan
from composable.runtime.readiness import check_ready, name_modules
from composable.runtime.scheduler import Scheduler
from composable.storage.handle import Handle
from composable.torch_private import queue_callback

__all__ = ["FullyShardState", "RootState"]


class FullyShardState:
    """State of one ``fully_shard`` annotation.

    Attributes:
        modules: The annotated module, or the list of modules of one call.
        plan: What the annotation decided.
        mesh: 1-D mesh of the shard group.
        transport_name: How the handles' bytes travel.
        ignored_modules: What the annotation leaves alone, with all below.
        marked_buffers: (module, name) of buffers that may hold the mark of memory that nobody has written to.
        _handles: Handles of this annotation, left to right, depth first.
        _is_root: Whether forward starts here; ``None`` until lazy init.
        hook_handles: Remove them, and the modules run as plain ones again.
        root: State of the root, ``None`` until lazy init.
    """

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.plan: ShardPlan
        self.mesh: DeviceMesh
        self.transport_name = ""
        self.ignored_modules: frozenset[nn.Module] = frozenset()
        self.marked_buffers: list[tuple[nn.Module, str]] = []
        self._handles: list[Handle] = []
        self._module_to_handle: dict[nn.Module, Handle] = {}
        self.hook_handles: list[RemovableHandle] = []
        self._is_root: bool | None = None
        self.root: RootState | None = None

    def mark_handles(self) -> None:
        """Note that parameters may hold the mark of memory that nobody has written to."""
        for handle in self._handles:
            for flat in handle.buffers:
                flat.is_marked = True

    def lazy_init(self, module: nn.Module | None = None) -> "RootState":
        """Decide the root, on the first forward or the first call that needs it.

        Collective over the shard group when no root is known yet: ranks compare their plans.

        Args:
            module: Where forward starts; default: the annotated module. Every state below
                it, also one that was a root of its own so far, shares this root.

        Raises:
            DesyncError: The ranks annotated different plans.
            UsageError: A parameter or buffer is still on the meta device, or nothing has filled it, on any rank.
        """
        if self.root is not None:
            return self.root
        return RootState.adopt(self, self.modules if module is None or module in self.modules else (module,))

    def end_broken_step(self) -> None:
        """Forget a step that an exception or Ctrl-C cut short. Nothing is running."""
        if self.root is not None:
            self.root.scheduler.end_broken_step()

    def forget_root(self) -> None:
        """Leave the root to the next forward. No step is running."""
        self.__class__ = FullyShardState
        self.root = self._is_root = None
        for name in ("scheduler", "_all_handles", "_all_states"):
            self.__dict__.pop(name, None)


class RootState(FullyShardState):
    """A state where forward starts; a ``FullyShardState`` becomes one at lazy init.

    Attributes:
        _all_handles: Every handle of the tree, left to right, depth first.
        _all_states: Every state of the tree, in the same order.
        scheduler: Runs the handles.
    """

    _all_handles: list[Handle]
    _all_states: list[FullyShardState]
    scheduler: Scheduler

    @staticmethod
    def adopt(state: FullyShardState, modules: Sequence[nn.Module]) -> "RootState":
        """Make ``state`` the root of everything below ``modules``."""
        states: list[FullyShardState] = []
        names = name_modules(modules)
        for module in modules:
            states += [found for found in _traversal_utils._get_fsdp_states(module) if found not in states]
        handles: list[Handle] = list(
            dict.fromkeys(handle for module in modules for handle in _traversal_utils._get_fsdp_handles(module))
        )
        for handle in handles:
            handle.fqn = names.get(handle.modules[0], handle.fqn)
        _compare_plans(states, _find_failure(states, names))
        for found in states:
            if found.root is not None:
                found.root.scheduler.retire(found._handles)
        for found in states:
            transport = transport_of(found.mesh.get_group(), found.transport_name)
            for handle in found._handles:
                for flat in handle.buffers:
                    flat.connect(transport)
        root = state
        root.__class__ = RootState
        assert isinstance(root, RootState)
        root.scheduler = Scheduler(handles, device_of(state.mesh), queue_callback)
        root._all_handles = handles
        root._all_states = states
        for found in states:
            found.root = root
            found._is_root = found is root
        # Backward starts with the root's parameters, so freeing them after forward only costs a gather.
        own = state._module_to_handle.get(modules[0])
        for handle in handles:
            option = handle.reshard_option
            handle.reshard_after_forward = handle is not own if option is None else option
        return root

    def dissolve(self) -> None:
        """Undo ``adopt``, so that the next forward decides the root anew; that is collective again."""
        scheduler, states = self.scheduler, self._all_states
        scheduler.retire_for_good()
        for state in states:
            state.forget_root()


def _compare_plans(states: Sequence[FullyShardState], failure: UsageError | None) -> None:
    """Raise on every rank unless all ranks annotated the same plans, and none has a failure.

    Raises:
        DesyncError: With the first line in which a rank differs.
        UsageError: ``failure``, or that of another rank.
    """
    groups: dict[dist.ProcessGroup, list[FullyShardState]] = {}
    for state in states:
        groups.setdefault(state.mesh.get_group(), []).append(state)
    for group, members in groups.items():
        compare_ranks(
            "".join(state.plan.digest() for state in members),
            failure,
            group,
            device_of(members[0].mesh),
            shown="\n".join(str(state.plan) for state in members),
            what="the ranks annotated different plans",
            fix="build the same model and call fully_shard with the same arguments on every rank",
        )


def _find_failure(states: Sequence[FullyShardState], names: Mapping[nn.Module, str]) -> UsageError | None:
    """Return what keeps this rank from training: parameters or buffers without values."""
    try:
        with located(place_of_rank()):
            for state in states:
                for handle in state._handles:
                    handle.attach()
            check_ready(states, names)
    except UsageError as error:
        return error
    return None
