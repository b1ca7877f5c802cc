"""What an annotated module remembers, and what the root of a tree of them has besides."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

import _traversal_utils
from composable.collectives import Grid, Ranks, transport_of
from composable.contract import managing_state
from composable.errors import UsageError, located, place_of_rank
from composable.planning import ShardPlan, name_modules
from composable.runtime.readiness import check_ready
from composable.runtime.scheduler import Scheduler
from composable.runtime.streams import streams_for
from composable.storage import Handle
from composable.torch_hooks import at_end_of_backward

__all__ = ["FullyShardState", "Root", "handle_of_module", "sharded_state_of"]


class FullyShardState:
    """State of one ``fully_shard`` annotation.

    Attributes:
        modules: The annotated module, or the list of modules of one call.
        plan: What the annotation decided.
        mesh: 1-D mesh of the shard group.
        grid: The ranks of the mesh.
        transport_name: How the handles' bytes travel.
        ignored_modules: What the annotation leaves alone, with all below.
        marked_buffers: (module, name) of buffers that may hold the mark of memory that nobody has written to.
        _handles: Handles of this annotation, left to right, depth first.
        hook_handles: Remove them, and the modules run as plain ones again.
        root: What runs the tree that this state is in; ``None`` until lazy init.
    """

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.plan: ShardPlan
        self.mesh: DeviceMesh
        self.grid: Grid
        self.transport_name = ""
        self.ignored_modules: frozenset[nn.Module] = frozenset()
        self.marked_buffers: list[tuple[nn.Module, str]] = []
        self._handles: list[Handle] = []
        self._module_to_handle: dict[nn.Module, Handle] = {}
        self.hook_handles: list[RemovableHandle] = []
        self.root: Root | None = None

    @property
    def _is_root(self) -> bool | None:
        """Whether forward starts here; ``None`` until lazy init."""
        return None if self.root is None else self.root.state is self

    @property
    def _all_handles(self) -> list[Handle]:
        """Every handle of the tree, left to right, depth first; of a root state only."""
        return self._as_root().handles

    @property
    def _all_states(self) -> "list[FullyShardState]":
        """Every state of the tree, in the same order; of a root state only."""
        return self._as_root().states

    def _as_root(self) -> "Root":
        if self.root is None or self.root.state is not self:
            raise AttributeError("only the state where forward starts knows the whole tree, from the first forward on")
        return self.root

    def mark_handles(self) -> None:
        """Note that parameters may hold the mark of memory that nobody has written to."""
        for handle in self._handles:
            for flat in handle.buffers:
                flat.is_marked = True

    def lazy_init(self, module: nn.Module | None = None) -> "Root":
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
        return Root.adopt(self, self.modules if module is None or module in self.modules else (module,))

    def abandon_step(self) -> None:
        """Forget a step that an exception or Ctrl-C cut short. Nothing is running."""
        if self.root is not None:
            self.root.scheduler.abandon_step()


class Root:
    """A tree of annotated modules in which forward starts at one of them.

    Attributes:
        state: Of the annotation where forward starts.
        handles: Every handle of the tree, left to right, depth first.
        states: Every state of the tree, in the same order.
        scheduler: Runs the handles.
    """

    def __init__(
        self, state: FullyShardState, handles: list[Handle], states: list[FullyShardState], scheduler: Scheduler
    ) -> None:
        self.state = state
        self.handles = handles
        self.states = states
        self.scheduler = scheduler

    @staticmethod
    def adopt(state: FullyShardState, modules: Sequence[nn.Module]) -> "Root":
        """Make ``state`` the root of everything below ``modules``. Collective; see ``lazy_init``."""
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
                found.root.scheduler.let_go(found._handles)
        for found in states:
            transport = transport_of(found.grid.shard.process_group, found.transport_name)
            for handle in found._handles:
                for flat in handle.buffers:
                    flat.connect(transport, found.grid.divisor)
        scheduler = Scheduler(handles, streams_for(state.grid.shard.device), at_end_of_backward)
        root = Root(state, handles, states, scheduler)
        for found in states:
            found.root = root
        # Backward starts with the root's parameters, so freeing them after forward only costs a gather.
        own = state._module_to_handle.get(modules[0])
        for handle in handles:
            option = handle.reshard_option
            handle.reshard_after_forward = handle is not own if option is None else option
        return root

    def close(self) -> None:
        """Undo ``adopt``, so that the next forward decides the root anew; that is collective again."""
        self.scheduler.close()
        for state in self.states:
            state.root = None


def sharded_state_of(module: nn.Module) -> FullyShardState | None:
    """Return the state that manages ``module``, annotated itself or picked by a policy further up."""
    state = managing_state(module, "fully_shard")
    return state if isinstance(state, FullyShardState) else None


def handle_of_module(module: nn.Module) -> Handle | None:
    """Return the handle that ``module``, fully sharded, unshards and reshards; ``None`` where it has none."""
    state = sharded_state_of(module)
    return None if state is None else state._module_to_handle.get(module)


def _compare_plans(states: Sequence[FullyShardState], failure: UsageError | None) -> None:
    """Raise on every rank unless all ranks annotated the same plans, and none has a failure.

    Raises:
        DesyncError: With the first line in which a rank differs.
        UsageError: ``failure``, or that of another rank.
    """
    members: dict[Ranks, list[FullyShardState]] = {}
    for state in states:
        members.setdefault(state.grid.everyone, []).append(state)
    for ranks, own in members.items():
        ranks.compare(
            "".join(state.plan.digest() for state in own),
            failure,
            shown="\n".join(str(state.plan) for state in own),
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
