"""The state of an annotated module, and its root."""

import functools
import logging
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import _traversal_utils
from composable.annotation.checks import check_on_device, check_values
from composable.annotation.states import AnnotationState, has_parts, states_below
from composable.comm import (
    AnnotationStatus,
    Grid,
    ModelRanks,
    Ranks,
    Started,
    Transport,
    Tree,
    calling,
    host_transport_of,
    notice_tree,
    part_of,
    settle_transport_for,
    transport_class,
    transport_of,
)
from composable.engine import (
    Agreement,
    Handle,
    HandleChoices,
    HandleStep,
    NestedReplica,
    Replicas,
    Rider,
    Riders,
    RootSettings,
    Scheduler,
    Step,
    attach,
    steps_of,
    streams_for,
)
from composable.errors import ComposableError, UsageError, place_of_rank, warn_once
from composable.features import move_buffers
from composable.ground.casts import LentBuffer
from composable.ground.contract import is_parallel, managing_state
from composable.ground.names import class_name, count_text, module_text
from composable.ground.ownership import HeldWeakly
from composable.ground.torch_hooks import at_end_of_backward, put_outermost
from composable.planning import ShardPlan, managed_modules, name_modules

_LOG = logging.getLogger("composable")
_COMPARISON = "the comparison of plans before the first forward"


class FullyShardState(AnnotationState):
    """State of one ``fully_shard`` annotation.

    Attributes:
        plan: What the annotation decided.
        mesh: 1-D mesh of the shard group; the grid has the ranks of its replicas too.
        transport_choice: The transport of the handles that the user chose.
        ignored_modules: Modules that the annotation ignores, with all modules below.
        ignored_slots: (module, held weakly, and name) of the ignored parameters in other modules.
        skipped_modules: Modules that keep their dtype under the mixed precision policy.
        follows_parent: Handles follow the handle around them; ``None``: if they are on fewer ranks than the root.
        number: From 1 on, which one it is of the annotations with this plan that this rank has made in its group.
        _handles: Handles of this annotation, left to right, depth first.
        settings: The settings of the root, used if this is the root's state.
        root: The root of the tree that this state is in; ``None`` until lazy init.
        listeners: Hear of each event of the root, also of one that is decided later.
        around: States of modules annotated around these modules: a later one is further out.
    """

    skipped_modules = HeldWeakly[nn.Module]()

    def __init__(self) -> None:
        super().__init__()
        self.skipped_modules = ()
        self.plan: ShardPlan
        self.mesh: DeviceMesh
        self.transport_choice = "auto"
        self.ignored_modules: frozenset[nn.Module] = frozenset()
        self.ignored_slots: set[tuple[weakref.ref[nn.Module], str]] = set()
        self.follows_parent: bool | None = None
        self.number = 0
        self._handles: list[Handle] = []
        self._module_to_handle: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()
        self.settings = RootSettings()
        self.root: Root | None = None
        self.around: list[weakref.ref[FullyShardState]] = []

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the outermost annotation; ``None`` until lazy init."""
        return None if self.root is None else self.root.find_state() is self

    def count(self) -> None:
        """Take the number: ranks that run models of equal plans in different orders would mix their parameters."""
        self.number = self.grid.shard.count(self.plan.digest())

    @property
    def is_joined(self) -> bool:
        return self.root is not None and self.root.is_joined

    @property
    def _all_handles(self) -> list[Handle]:
        """Every handle of the tree, left to right, depth first; of a root state only."""
        return self._as_root().handles

    @property
    def _all_states(self) -> "Sequence[FullyShardState]":
        """Every state of the tree, in the same order; of a root state only."""
        return self._as_root().states

    def _as_root(self) -> "Root":
        if self.root is None or self.root.find_state() is not self:
            raise AttributeError("only the outermost module's state knows the tree, and only after a forward")
        return self.root

    def modules_around(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that a fully sharded module runs: itself and the modules below it.

        Left out, with all below them: other fully sharded modules, and modules that the annotation ignores or skips.
        """
        found: dict[nn.Module, None] = {}
        stack = [module]
        while stack:
            visited = stack.pop()
            is_other = visited is not module and (
                visited in self._module_to_handle or is_parallel(visited) or visited in self.ignored_modules
            )
            if visited not in found and not is_other and visited not in self.skipped_modules:
                found[visited] = None
                stack += visited.children()
        return list(found)

    def lazy_init(self) -> "Root":
        """Decide the root, on the first forward or the first call that needs it.

        The outermost module annotated on the same ranks is the root, even if a part of it runs first: otherwise the
        forwards and gradients before the first call of the whole module would belong to another scheduler.
        Collective over the shard group if there is no root yet: ranks compare their plans.

        Raises:
            DesyncError: The ranks annotated different plans.
            UsageError: A parameter or buffer is still on the meta device, on any rank.
        """
        if self.root is not None:
            return self.root
        return Root.adopt(self.outermost())

    def begin(self) -> "Root":
        """Decide the root, and check the values once, before the first forward. Collective, as ``lazy_init``.

        Not in ``lazy_init``: a load or an ``unshard_params`` that gives values decides the root too.
        """
        root = self.lazy_init()
        if not root.has_begun and all(handle.held_with is None for handle in root.handles):
            check_values(root.states, name_modules(root.modules), root.models)
            root.has_begun = True
        return root

    def enclose(self) -> None:
        """Register this annotation with the annotations below it, which were made before."""
        for state in _states_below(self.modules):
            if state is not self:
                state.around.append(weakref.ref(self))

    def outermost(self) -> "FullyShardState":
        """Return the state of the root, or the state that will be the root's if nothing changes. Not collective."""
        if self.root is not None:
            return self.root.find_state() or self
        for around in reversed(self.around):
            state = around()
            if state is not None and state.modules and state.grid.everyone == self.grid.everyone:
                below = _states_below(state.modules)
                # Modules may have been moved away since, and annotations undone.
                if state in below and self in below:
                    return state
        return self

    def connect(self, replicas: dict[tuple[Ranks, str], Replicas]) -> None:
        """Connect the handles to their transports; adds to ``replicas``. Collective, after plans were compared."""
        shard, copies = self.grid.shard, self.grid.replicas
        name = settle_transport_for(shard, self.transport_choice)
        if name != self.plan.transport:
            self.plan = replace(self.plan, transport=name)
        transport = transport_of(shard.process_group, name)
        between: Replicas | None = None
        if copies is not None:
            if transport_class(name).maps_memory:
                name = settle_transport_for(copies)  # They may be on other hosts.
            if (copies, name) not in replicas:
                replicas[copies, name] = Replicas(transport_of(copies.process_group, name))
            between = replicas[copies, name]
        parts: dict[int | None, Transport | None] = {None: None}
        for handle in self._handles:
            # The size in the plan, which all ranks have compared, and not a setting made since.
            size = handle.plan.secondary_ranks
            if size is not None and size not in parts:
                part = part_of(shard, size)
                parts[size] = transport_of(part.process_group, settle_transport_for(part, self.transport_choice))
            for flat in handle.buffers:
                flat.routes.connect(transport, self.grid.divisor, between, parts[size])

    def states_on_same_ranks(self) -> "list[FullyShardState]":
        """Return the states of this root that lie on the same ranks as this one, which is the first."""
        found = [state for state in _states_below(self.modules) if state.grid.everyone == self.grid.everyone]
        return list(dict.fromkeys([self, *found]))

    def move_to(self, mesh: DeviceMesh, grid: Grid) -> None:
        """Lie on the ranks of ``grid`` from now on, with ``states_on_same_ranks``; the ranks of before are not asked.

        The next forward decides the root anew. A step that was cut short is forgotten; no step is running.
        """
        states, is_other = self.states_on_same_ranks(), mesh is not self.mesh
        if self.root is not None:
            self.root.scheduler.leave_ranks()
            self.root.close()
        for state in states:
            state.mesh, state.grid, state.settings.riders = mesh, grid, ()
            replicas = 1 if grid.replicas is None else grid.replicas.size
            state.plan = replace(state.plan, replicas=replicas, hosts=grid.hosts, left_out="")
            for handle in state._handles:
                handle.grid = grid
                handle.loads = -math.inf  # Ranks that come back load alone.
                for flat in handle.buffers if is_other else ():
                    flat.move_to(mesh)

    @property
    def riders(self) -> Sequence[Rider]:
        return self.lazy_init().scheduler.step.settings.riders

    def carry(self, *riders: Rider) -> None:
        root = self.lazy_init()
        step, model = root.scheduler.step, root.models.get(root.grid.everyone)
        found = [one for one in step.finalizer.agreements if model is not None and one.ranks == model.everyone]
        if not found:
            what = "no parameter lies on all ranks, so no message of all ranks ends a backward"
            raise UsageError(what, at=root._class_name, fix="annotate a module with parameters on all ranks")
        Riders(riders).compare(found[0].ranks)
        found[0].carry(riders)
        step.settings.riders = riders

    def unit_of_module(self, module: nn.Module) -> Handle | None:
        return self._module_to_handle.get(module)

    def abandon_step(self) -> None:
        if self.root is not None:
            self.root.scheduler.abandon_step()


@dataclass(frozen=True)
class RootPlan:
    """What lies below a module that is to be a root; made without a message to other ranks, and nothing is changed.

    Attributes:
        modules: Those of the outermost annotation; users may have let go of them, and kept some that a policy picked.
        names: The FQNs of all modules below.
        states: Every state of the tree, left to right, depth first; the first is the outermost annotation's.
        handles: Every handle of the tree, in the same order.
    """

    modules: tuple[nn.Module, ...]
    names: Mapping[nn.Module, str]
    states: list[FullyShardState]
    handles: list[Handle]

    @staticmethod
    def of(state: FullyShardState) -> "RootPlan":
        """Return the plan of everything below the modules of ``state``."""
        modules = tuple(state.modules or state._module_to_handle)
        handles = (one for module in modules for one in _traversal_utils._get_fsdp_handles(module))
        states = list(dict.fromkeys([state, *_states_below(modules)]))
        return RootPlan(modules, name_modules(modules), states, list(dict.fromkeys(handles)))


class Root:
    """A tree of annotated modules, with the scheduler that runs its handles.

    Making one connects the handles of ``plan`` to their transports: collective. Then they belong to this root.
    ``models`` has the ranks of each handle together with those of tensor parallelism.
    """

    states = HeldWeakly[FullyShardState]()
    modules = HeldWeakly[nn.Module]()

    def __init__(self, plan: RootPlan, models: Mapping[Ranks, ModelRanks]) -> None:
        state = plan.states[0]
        replicas: dict[tuple[Ranks, str], Replicas] = {}
        for found in plan.states:
            found.connect(replicas)
            put_outermost(found.hook_handles)
            if any(handle.rests_elsewhere for handle in found._handles):
                # ``to_empty`` has made the buffers where the parameters rest.
                managed = managed_modules(found.modules, found.ignored_modules)
                move_buffers(dict.fromkeys(managed, ""), found.grid.shard.device)
        # Gives the outermost annotation's state; ``None``: users let go of its modules, and kept inner ones.
        self.find_state = weakref.ref(state)
        # The ranks and the modules of the outermost annotation.
        self.grid, self.modules = state.grid, state.modules
        self._class_name = state.plan.class_names[0]
        self.handles = plan.handles  # Every handle of the tree, left to right, depth first.
        self.states = plan.states  # Every state of the tree, in the same order.
        self.models = models
        # By id of a buffer, the copies that modules hold in its place while they run.
        self.lent_buffers: dict[int, LentBuffer] = {}
        self.has_looked_at_views = False  # A forward has ended, and buffers that look into old parameters were refused.
        self.has_begun = False  # All has values, and copies of shards are equal.
        # Read from another thread, for ranks that wait; empty once the root is closed.
        self._flats = [(handle, flat) for handle in plan.handles for flat in handle.buffers if not flat.is_empty]
        # In the same order on all ranks that share them.
        found_below = dict.fromkeys(one for _, one in states_below(plan.modules) if isinstance(one, NestedReplica))
        fewer = [one for one in found_below if one.grid.everyone.size < state.grid.everyone.size]
        nested = sorted(fewer, key=lambda one: one.grid.everyone.order)
        for replica in nested:
            replica.begin_to_follow()
        steps = steps_of(plan.handles, _find_leaders(state, plan.states))
        agreements = _make_agreements(plan.states, models, steps)
        streams = state.settings.streams or streams_for(state.grid.shard.device)
        step = Step(steps, streams, state.grid.everyone, state.settings, agreements)
        self.scheduler = Scheduler(step, at_end_of_backward)  # Runs the handles.
        step.listeners.add(*nested, *(one for found in plan.states for one in found.listeners.members))
        # Backward starts with the root's parameters, so freeing them after forward only costs a gather.
        own = state._module_to_handle.get(plan.modules[0])
        for handle in plan.handles:
            option = handle.settings.reshard_option
            handle.settings.reshard_after_forward = handle is not own if option is None else bool(option)
        notice_tree(self)
        # Set last, the root's own state after all others: if this is cut short, the next forward does it again.
        for found in [*(one for one in plan.states if one is not state), state]:
            found.listeners.root, found.root = step.listeners, self

    @property
    def is_joined(self) -> bool:
        """A ``Join`` has the model: ranks without inputs follow it, as it was when the ``Join`` was made."""
        return self.scheduler.step.listeners.forbid_changes

    @staticmethod
    @calling(_COMPARISON)
    def adopt(state: FullyShardState) -> "Root":
        """Make ``state`` the root of everything below its modules. Collective; see ``lazy_init``."""
        plan = RootPlan.of(state)
        for handle in plan.handles:
            known = list(zip(handle.modules, handle.module_fqns, strict=False))
            if len(known) == len(handle.module_fqns):  # Of several, users may have let go of some.
                handle.module_fqns = tuple(plan.names.get(module, fqn) for module, fqn in known)
        models = model_ranks_of(plan.handles)
        _compare_plans(plan.states, models, _find_failure(state, plan.states, plan.names))
        parted = has_parts(plan.modules, state.grid.everyone)
        for handle in plan.handles:
            handle.has_parts = parted and handle.grid.everyone == state.grid.everyone
        for found in plan.states:
            if found.root is not None:
                found.root.scheduler.let_go(found._handles)
                for handle in found._handles:
                    # Graphs of forwards below either root may read the parameters: the last graph's end is unknown.
                    handle.is_shared |= found.root.find_state() not in plan.states
        root = Root(plan, models)
        if state.grid.everyone.rank == 0 and state.grid.everyone.size > 1:
            # Warn for a root only: a later annotation may still come around any other.
            for warning in state.plan.warnings:
                warn_once(f"{warning}\n  at:  {place_of_rank()}, module {' + '.join(state.plan.class_names)}")
            groups = count_text(len(root.groups()), "process group")
            _LOG.info("%s: %d handles use %s", root._class_name, len(root.handles), groups)
        return root

    def groups(self) -> list[str]:
        """Return the names of the process groups of all collectives, as many whatever the number of handles."""
        transports = self.scheduler.step.finalizer.transports()
        transports.update(*(flat.routes.transports() for _, flat in self._flats))
        return sorted({group.group_name for transport in transports for group in transport.groups})

    # Progress, for ranks that wait; read from another thread, so no record is kept for it

    def tell(self, *, in_backward: bool) -> AnnotationStatus | None:
        """Return how far the modules are in their step; ``None`` where nothing is sharded."""
        if not self._flats:
            return None
        path, step = self._flats[0][1].routes.gather_path, self.scheduler.step
        if not path.transport.groups:
            return None
        is_backward = step.is_backward
        is_last = is_backward or step.backward_id > step.backwards_before
        tree = Tree(
            self._class_name,
            step.forward_id,
            step.backward_id,
            is_inside=bool(step.running) or (is_last and in_backward),
            is_backward=is_last,
            failure=step.failure,
        )
        key = f"{path.transport.groups[0].group_name} {path.key}"
        return AnnotationStatus(key, tree, path.transport, tuple(self.groups()))

    def name_of(self, started: Started) -> str | None:
        """Return a text that names a collective and its handle; ``None``: the collective is not this root's."""
        for handle, flat in self._flats:
            what = flat.routes.name_of(started)
            if what is not None:
                return f"the {what} of {handle.described}"
        return None

    def close(self) -> None:
        """Undo ``adopt``, so that the next forward decides the root anew; that is collective again."""
        self.scheduler.close()
        self._flats = []
        for hear in self.scheduler.step.listeners.removed:
            hear()
        for state in self.states:
            state.root = state.listeners.root = None


def model_ranks_of(handles: Iterable[Handle]) -> dict[Ranks, ModelRanks]:
    """Return, for the ranks of each handle, the same ranks together with the ranks of tensor parallelism.

    Collective over all of these ranks, if there is tensor parallelism. Raises ``ConfigError`` on all if they are no
    grid.
    """
    beside: dict[Ranks, dict[tuple[int, ...], Ranks]] = {}
    seen: set[tuple[Ranks, DeviceMesh]] = set()
    for handle in handles:
        ranks = handle.grid.everyone
        others = beside.setdefault(ranks, {})
        for layout in (param.layout for param in handle.params):
            if layout.mesh.ndim > 1 and (ranks, layout.mesh) not in seen:
                seen.add((ranks, layout.mesh))
                along = [Ranks.of_mesh(layout.mesh, dim) for dim in range(layout.mesh.ndim) if dim != layout.mesh_dim]
                others.update({one.numbers: one for one in along})
    ordered = sorted(beside.items(), key=lambda item: item[0].order)
    return {ranks: ModelRanks.of(ranks, list(others.values())) for ranks, others in ordered}


def _make_agreements(
    states: Sequence[FullyShardState], models: Mapping[Ranks, ModelRanks], steps: Mapping[Handle, HandleStep]
) -> list[Agreement]:
    """Return one agreement for each group of ranks that shares handles. Collective over these ranks."""
    found: dict[Ranks, tuple[str, list[Handle]]] = {}
    for state in states:
        # Modules may have been taken out of the tree since.
        if any(handle in steps for handle in state._handles):
            found.setdefault(state.grid.everyone, (state.plan.transport, []))[1].extend(state._handles)
    made: list[Agreement] = []
    for ranks, (name, handles) in sorted(found.items(), key=lambda item: models[item[0]].everyone.order):
        model = models[ranks]
        if model.others or transport_class(name).maps_memory:
            name = settle_transport_for(model.everyone)
        ledgers = [ledger for handle in handles if handle in steps for ledger in steps[handle].ledgers]
        made.append(Agreement(model, host_transport_of(model.everyone, name), ledgers, handles))
        made[-1].carry(states[0].settings.riders if ranks == states[0].grid.everyone else ())
    return made


def _find_leaders(root: FullyShardState, states: Sequence[FullyShardState]) -> dict[Handle, list[Handle]]:
    """Return the leaders of handles that follow: the nearest handles around, on the root's ranks, that do not follow.

    If no module around has parameters of its own, a handle has no leader.
    """
    everyone = root.grid.everyone
    follows = {
        handle: state.follows_parent if state.follows_parent is not None else state.grid.everyone != everyone
        for state in states
        for handle in state._handles
    }
    leaders: dict[Handle, dict[Handle, None]] = {handle: {} for handle, is_led in follows.items() if is_led}
    if not leaders:
        return {}
    reachable = {below for module in root.modules for below in _traversal_utils._get_modules(module)}
    seen: set[tuple[nn.Module, Handle | None]] = set()
    stack: list[tuple[nn.Module, Handle | None]] = [(module, None) for module in reversed(root.modules)]
    while stack:
        visited = module, leader = stack.pop()
        if visited in seen or module not in reachable:
            continue
        seen.add(visited)
        handle = handle_of_module(module)
        if handle in leaders:
            if leader is not None:
                leaders[handle][leader] = None
        elif handle in follows and handle.grid.everyone == everyone:
            leader = handle
        stack += [(child, leader) for child in reversed(module._modules.values()) if child is not None]
    asked = [state for state in states if state.follows_parent and not any(map(leaders.get, state._handles))]
    if asked and everyone.rank == 0:
        names = ", ".join(handle.described for state in asked for handle in state._handles)
        warn_once(
            f"follows_parent=True has no effect on {names}: no module around has parameters that it "
            "gathers itself, so it is gathered when it is called, on every rank; annotate the module around it"
        )
    return {handle: list(found) for handle, found in leaders.items() if found}


def _states_below(modules: Sequence[nn.Module]) -> list[FullyShardState]:
    """Return the states at or below ``modules``, each once."""
    found = (state for module in modules for state in _traversal_utils._get_fsdp_states(module))
    return list(dict.fromkeys(found))


def sharded_state_of(module: nn.Module) -> FullyShardState | None:
    """Return the state that manages ``module``, annotated itself or picked by a policy further up."""
    state = managing_state(module, "fully_shard")
    return state if isinstance(state, FullyShardState) else None


def handle_of_module(module: nn.Module) -> Handle | None:
    """Return the handle that ``module``, fully sharded, unshards and reshards; ``None`` where it has none."""
    state = sharded_state_of(module)
    return None if state is None else state._module_to_handle.get(module)


def _compare_plans(
    states: Sequence[FullyShardState], models: Mapping[Ranks, ModelRanks], failure: UsageError | None
) -> None:
    """Raise on every rank unless all ranks annotated the same plans, and none has a failure.

    Ranks of tensor parallelism with other blocks have other plans: they only share failures. A ``DesyncError`` has the
    first line in which a rank differs.
    """
    members: dict[Ranks, list[FullyShardState]] = {}
    for state in states:
        members.setdefault(state.grid.everyone, []).append(state)
    for model in models.values():
        members.setdefault(model.everyone, [])
    found: ComposableError | None = failure
    for ranks, own in sorted(members.items(), key=lambda item: item[0].order):
        choices = HandleChoices([handle for state in own for handle in state._handles])
        number = states[0].number if states[0] in own else 0  # Of the root, which other groups need not know.
        try:
            if not own:
                ranks.compare("", found, call=_COMPARISON)
                continue
            ranks.compare(
                "".join([str(number), *(f"{one.plan.digest()} {one.follows_parent}" for one in own), choices.text()]),
                found,
                shown=functools.partial(_shown, own, choices, number),
                what="the ranks annotated different plans",
                fix="build the same model and call fully_shard with the same arguments on every rank; annotate "
                "modules that differ by rank, such as experts, on the ranks that share them; annotate and run models "
                "of equal plans in one order",
                call=_COMPARISON,
            )
        except ComposableError as error:
            # It may be of some experts: the groups around them pass it on to all other ranks.
            found = error
    if found is not None:
        raise found


def _shown(states: Sequence[FullyShardState], choices: HandleChoices, number: int) -> str:
    last = f"{' + '.join(states[0].plan.class_names)}, number {number} of the models with this plan annotated here"
    return "\n".join([*(state.plan.compared_text() for state in states), choices.shown(), *[last] * bool(number)])


def _find_failure(
    root: FullyShardState, states: Sequence[FullyShardState], names: Mapping[nn.Module, str]
) -> UsageError | None:
    """Return the error that keeps this rank from training: tensors without values, or settings of another root."""
    try:
        for state in states:
            if state is not root and state.settings != RootSettings():
                raise UsageError(
                    "the root's settings were made on a module that is now inside a later annotation",
                    at=module_text(names.get(state.modules[0], ""), class_name(state.modules[0])),
                    fix="annotate all modules, then make the settings on the outermost one; undo them on this one",
                )
            for handle in state._handles:
                attach(handle)
        check_on_device(states, names)
    except UsageError as error:
        return error
    return None
