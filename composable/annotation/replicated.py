"""The state and hooks of a replicated module."""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from composable.annotation.states import AnnotationState, refuse_running, take_over_optimizers
from composable.comm import AnnotationStatus, Grid, OwnTransport, Started, Tree, described, notice_tree
from composable.engine import NestedReplica, Rider, Riders
from composable.errors import UsageError
from composable.ground.casts import moved_to
from composable.ground.contract import managing_state
from composable.ground.frames import in_backward, in_split_backward, is_functional_call, modules_of_copy
from composable.ground.modes import unseen
from composable.ground.names import check_module, class_name, describe_module
from composable.ground.ownership import (
    CHANGES,
    check_added,
    check_callers,
    claim,
    is_left_alone,
    leave_alone,
    mark_managed,
    release,
    watch_registrations,
)
from composable.ground.torch_hooks import (
    Contents,
    GradientHook,
    after_gradients,
    around_forward,
    around_state_dict,
    before_forward,
    beside_forward,
    differentiable_tensors,
    on_gradient,
)
from composable.ground.torch_private import current_graph_task_id, optimizers_in_backward, split_backward_code
from composable.planning import managed_modules
from composable.replication import (
    BufferSync,
    Ignored,
    ModulePrecision,
    Phase,
    Reducer,
    broadcast_params,
    keep_grad_in,
    unmanaged_params,
)


def _nothing(_: "_ReplicaOutputHook", grad: torch.Tensor) -> None:
    """Do nothing: a compiled graph has no rounds, and refuses the gradients of modules that are lent copies."""


@dataclass(slots=True, unsafe_hash=True, repr=False)
class _ReplicaOutputHook(GradientHook):
    """Runs when the gradient of an output arrives; equal to the hooks of the module's other calls."""

    state: "ReplicateState"
    index: int

    @partial(unseen, traced=_nothing)
    def __call__(self, grad: torch.Tensor) -> None:
        self.state.before_backward(self.index)


class ReplicateState(AnnotationState, NestedReplica):
    """State of one ``replicate`` annotation; another thread reads its progress for ranks that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reducer: Reducer  # Averages the gradients. The modules own it, and the buckets, by this state.
        # In a group of its own; a copied state makes the group at its first forward with gradients enabled.
        self.transport: OwnTransport
        self.ignored = Ignored()  # Modules and tensors that the annotation ignores.
        # Broadcasts the buffers before a forward; ``None`` if there are none or it was not asked for.
        self.buffers: BufferSync | None = None
        self.precision: tuple[ModulePrecision, ...] = ()  # Of each module; empty: they have no policy.
        # Parameters that did not require a gradient when they were last checked, with their FQNs.
        self.frozen: list[tuple[str, nn.Parameter]] = []
        self.compared = ""  # The arguments of the annotation, as a text that ranks compare.
        self.view: object = None  # The object that ``as_ddp`` has returned.
        # follows: A sharded module around, on more ranks, decides when the ranks communicate.
        # has_parts: On some of the ranks, modules inside are annotated on only a part of the ranks.
        # is_of_several: The modules of one call share the state: a rank may call only some of them.
        self.follows = self.has_parts = self.is_of_several = False
        self._seen = (-1, 0)
        self._contents: dict[int, Contents] = {}  # By the id of each annotated module.
        # For ranks that wait: forwards so far; backwards before the last forward; whether that runs; what it raised.
        self._forwards = self._rounds_before = 0
        self._is_forward = False
        self._failure = ""

    @property
    def is_joined(self) -> bool:
        return self.listeners.forbid_changes

    def unit_of_module(self, module: nn.Module) -> Reducer:
        return self.reducer

    def outermost(self) -> "ReplicateState":
        return self

    # Hooks around forward and backward

    def register(self, device: torch.device) -> None:
        """Register hooks around the modules; one of them moves input tensors to ``device``, unless it is the CPU."""
        self.hook_handles = after_gradients([item.param for item in self.reducer.params], self.reducer.arrivals())
        for index, module in enumerate(self.modules):
            if not self.precision:
                after = partial(self.post_forward, index)
                self.hook_handles += beside_forward(module, self.pre_forward, after)
            else:
                before, after = partial(self.casting_pre_forward, index), partial(self.casting_post_forward, index)
                # Outside of all other hooks, which run between the casts.
                self.hook_handles += around_forward(module, before, after)
                put_back = partial(self.put_back, index)
                self.hook_handles += around_state_dict(module, before_save=[put_back], before_load=[put_back])
            if device.type != "cpu":
                self.hook_handles.append(before_forward(module, partial(_move_inputs, device)))

    @unseen
    def pre_forward(self, module: nn.Module, *_: Any) -> None:
        """Prepare a forward of ``module``; when activation checkpointing runs it again in backward, do nothing.

        Raises ``UsageError`` if a parameter was unfrozen or added after the annotation; something else averages
        gradients too; or an optimizer steps in backward although there is a communication hook.
        """
        if current_graph_task_id() != -1:
            return
        self._forwards += 1
        self._rounds_before = self.reducer.rounds
        self._is_forward, self._failure = True, ""
        if not torch.is_grad_enabled():
            return
        contents = self._contents.get(id(module))
        counts = (CHANGES.registrations, len(optimizers_in_backward()))
        is_as_before = contents is not None and self._seen == counts and not contents.have_changed()
        # While a graph is exported, modules hold other parameters, which the user did not add.
        if not is_as_before and not torch.compiler.is_exporting():
            self._look_again(module)
        for fqn, param in self.frozen:
            if param.requires_grad:
                raise UsageError(
                    "a parameter was frozen when replicate was called and requires a gradient now",
                    at=f"parameter {fqn!r}",
                    fix="unfreeze before replicate; or call unannotate(model), then replicate again",
                )
        if not self.follows:
            self._meet(module)

    @unseen
    def post_forward(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        """Note the end of a forward of the annotated module ``index``, or its error; put hooks on its outputs."""
        if current_graph_task_id() == -1:
            error = sys.exc_info()[1] if output is None else None
            self._is_forward, self._failure = False, "" if error is None else described(error)
        if torch.is_grad_enabled():
            hook = _ReplicaOutputHook(self, index)
            for tensor in differentiable_tensors(output):
                on_gradient(tensor, hook)

    @unseen
    def casting_pre_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run ``pre_forward``, lend modules their copies, and return the inputs in the dtype of the policy."""
        # Buffers are broadcast before they are cast.
        self.pre_forward(module)
        return self.precision[index].enter(module, args, kwargs)

    @unseen
    def casting_post_forward(self, index: int, module: nn.Module, args: Any, output: Any) -> Any:
        """Run ``post_forward``; return the output in the policy's dtype. ``UsageError``: forward wrote to a copy."""
        found, precision = None, self.precision[index]
        try:
            precision.leave()
            if output is not None or sys.exc_info()[1] is None:
                found = precision.cast_output(output)
        finally:
            self.post_forward(index, module, args, found)
            if not torch.is_grad_enabled() or next(differentiable_tensors(found), None) is None:
                precision.forget()
        return None if found is output else found

    @unseen
    def put_back(self, index: int, *_: Any) -> None:
        """Give a module its own tensors back, before its state dict is read or loaded."""
        self.precision[index].put_back()

    def _meet(self, module: nn.Module) -> None:
        """Connect, recover a backward that was stopped, and broadcast buffers before a forward. Collective."""
        if self.reducer.synchronises:  # In ``no_sync`` a rank may call modules that others leave out.
            self.transport.connect()
        self.reducer.prepare()
        if not self.is_of_several:
            self.reducer.round.forwards += 1
        broadcasts = self.buffers is not None and module.training and self.reducer.requires_gradient_sync
        for hear in self.reducer.listeners.forward_begins:
            hear(module, broadcasts=broadcasts)
        if self.buffers is not None and broadcasts:
            self.buffers.broadcast(self.reducer.exchange.source)

    def begin_to_follow(self) -> None:
        """Communicate when a sharded module around begins a forward or backward, even if nothing here is called."""
        self.transport.connect()
        self.follows = True

    def removed(self) -> None:
        """Communicate when these modules themselves are called, as before ``begin_to_follow``."""
        self.follows = False

    def forward_begins(self, module: nn.Module, *, broadcasts: bool) -> None:
        """Communicate at a forward of the root around that a backward may follow. Collective."""
        if self.follows and torch.is_grad_enabled():
            self._meet(self.modules[0])

    def backward_begins(self, *, averages: bool) -> None:
        """Average at the end of a backward of the root around."""
        if self.follows:
            self.reducer.follow()

    def gradients_come(self) -> None:
        """Average what backwards without synchronisation left, where the user ends backwards of the root around."""
        if self.follows and not in_backward() and self.reducer.synchronises and self.reducer.round.kept > 0:
            self.reducer.average_kept_gradients()

    def broadcast_all(self) -> None:
        """Give every rank the parameters and buffers of the rank that had inputs last. Collective, between steps."""
        ranks, source = self.grid.everyone, self.reducer.exchange.source
        params = [*(item.param for item in self.reducer.params), *(param for _, param in self.frozen)]
        broadcast_params(params, ranks, sorted(ranks.numbers)[source])
        if self.buffers is not None:
            self.buffers.broadcast(source)

    def before_backward(self, index: int) -> None:
        """Note that the gradient of an output of the annotated module ``index`` arrives."""
        if split_backward_code() is not None and in_split_backward():
            # It writes gradients to parameters itself: nothing averages them.
            raise UsageError(
                "a pipeline's stage computes gradients of parameters in a step of its own (zero bubble), where "
                "replicate cannot average them",
                at=describe_module(self.modules[0]),
                fix="use a schedule without zero bubble, or fully_shard with ShardedStage as in "
                "examples/clients/pipelining.py",
            )
        self.reducer.arm(index)
        if self.precision:
            self.precision[index].enter_backward()
        for hear in self.reducer.listeners.backward_reached:
            hear(self.modules[index])

    # Progress, for ranks that wait

    def tell(self, *, in_backward: bool) -> AnnotationStatus | None:
        """Return how far the modules are in their step; ``None`` before they communicate."""
        if not self.transport.groups:
            return None
        phase, rounds = self.reducer.round.phase, self.reducer.rounds
        is_last = phase is Phase.OPEN or rounds > self._rounds_before
        tree = Tree(
            " + ".join(map(class_name, self.modules)),
            self._forwards,
            rounds,
            is_inside=self._is_forward or phase is Phase.OPEN or (is_last and in_backward),
            is_backward=is_last,
            failure=self._failure,
        )
        return AnnotationStatus(self.transport.groups[0].group_name, tree, self.transport)

    def name_of(self, started: Started) -> str | None:
        """Return a text that names a collective of this annotation; ``None``: it is another annotation's."""
        own = self.transport.groups
        return self.reducer.exchange.name_of(started.tag // 2) if own and started.transport.groups == own else None

    # Managed modules and parameters

    def watch(self) -> None:
        """Mark the managed parameters and modules; from now on notice added modules, and answer ranks that wait."""
        self._claim()
        mark_managed(self._own_modules())
        notice_tree(self)

    def _own_modules(self) -> list[nn.Module]:
        return list(managed_modules(self.modules, self.ignored.modules))

    def _claim(self) -> None:
        for fqn, param in [*((item.fqn, item.param) for item in self.reducer.params), *self.frozen]:
            claim(param, fqn, self)

    def _look_again(self, module: nn.Module) -> None:
        """Check the modules as they are now: ``module`` has changed or runs for the first time."""
        if is_functional_call():
            return  # Parameters that are lent for one call were not added.
        check_callers()
        added = list(unmanaged_params(self.modules, self.ignored, is_left=False))
        check_added("replicate", added, unmanaged_params(self.modules, self.ignored, is_left=True))
        take_over_optimizers(self.reducer)
        self.frozen += added
        self._claim()
        watch_registrations(self._own_modules())
        # Modules may hold copies in low precision where one of several is called inside another.
        of_params = dict.keys if self.precision else dict.values
        self._contents[id(module)] = Contents(managed_modules([module], self.ignored.modules), of_params, owner=module)
        self._seen = (CHANGES.registrations, len(optimizers_in_backward()))

    @property
    def riders(self) -> Sequence[Rider]:
        return self.reducer.exchange.flag_block.riders.members

    def carry(self, *riders: Rider) -> None:
        own, failure = Riders(riders, sorted(self.grid.everyone.numbers)), None
        if not self.reducer.params:
            failure = UsageError(
                "there are no parameters, so no backward averages", fix="pass a module with parameters"
            )
        elif self.reducer.exchange.flag_block.is_captured:
            what = "a CUDA graph averages gradients, whose memory has to stay as it is"
            failure = UsageError(what, fix="leave the backward out of the graph")
        own.compare(self.grid.everyone, failure)
        self.transport.connect()
        self.reducer.prepare()
        self.reducer.exchange.carry(own)

    def use(self, grid: Grid) -> None:
        """Set the ranks; the transport between them is made when it is needed."""
        self.grid = grid
        self.transport = OwnTransport(grid.everyone)

    def move_to(self, grid: Grid) -> None:
        """Average over the ranks of ``grid`` from now on. Collective over these; the earlier ranks are not asked."""
        self.use(grid)
        self.transport.connect()
        self.reducer.move_to(self.transport, grid)
        if self.buffers is not None:
            self.buffers = BufferSync(self.buffers.slots, self.transport, grid.everyone.device)

    def abandon_step(self) -> None:
        """Recover from a backward that an exception stopped; see ``Reducer.prepare``."""
        self.reducer.prepare()
        for one in self.precision:
            one.put_back()

    def close(self) -> None:
        """Make the modules plain ones again. Collective; no forward or backward is running."""
        self.follows = False
        self.transport.connect()
        self.reducer.close()
        for one in self.precision:
            one.put_back()
        for item in self.reducer.params if self.precision else ():
            keep_grad_in(item.param, item.param.dtype)
        release([*(item.param for item in self.reducer.params), *(param for _, param in self.frozen)])
        leave_alone(self._own_modules())
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
                at=f"replicate of {names}",
                fix=f"deep-copy {names} or a module around, in one call",
            )
        refuse_running(self, [self.reducer])
        twin = memo[id(self)] = ReplicateState()
        twin.compared, twin.has_parts, twin.is_of_several = self.compared, self.has_parts, self.is_of_several
        twin.use(self.grid)
        params = [replace(item, param=copy.deepcopy(item.param, memo)) for item in self.reducer.params]
        for item, known in zip(params, self.reducer.params, strict=True):
            if item.param.grad_dtype is not known.param.grad_dtype:
                item.param.grad_dtype = known.param.grad_dtype
            if known.param.grad is not None and self.reducer.round.phase is Phase.AT_REST:
                item.param.grad = known.param.grad.detach().clone()
        # It learns the order of gradients anew.
        twin.reducer = Reducer(params, twin.transport, self.grid, self.reducer.options)
        twin.reducer.requires_gradient_sync = self.reducer.requires_gradient_sync
        twin.reducer.is_last_backward = self.reducer.is_last_backward
        twin.listeners = twin.reducer.listeners
        twin.frozen, twin.modules, twin.ignored = copy.deepcopy((self.frozen, list(self.modules), self.ignored), memo)
        if self.buffers is not None:
            slots = [(copy.deepcopy(owner, memo), name) for owner, name in self.buffers.slots]
            twin.buffers = BufferSync(slots, twin.transport, self.grid.everyone.device)
        twin.precision = tuple(one.copied(memo) for one in self.precision)
        hooks = after_gradients([item.param for item in params], twin.reducer.arrivals())
        twin.hook_handles = [*hooks, *copy.deepcopy(self.hook_handles[len(params) :], memo)]
        twin._claim()
        notice_tree(twin)
        leave_alone(copy.deepcopy(module, memo) for module in self._own_modules() if is_left_alone(module))
        return twin


@unseen
def _move_inputs(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return moved_to(device, (args, kwargs))


def replicate_state_of(module: nn.Module) -> ReplicateState | None:
    """Return the state of the annotation on ``module`` itself; ``None``: it has none."""
    state = managing_state(module, "replicate")
    return state if isinstance(state, ReplicateState) else None


def check_replicated(module: object, caller: str) -> ReplicateState:
    """Return the state of the annotation on ``module``; ``ConfigError``: no module, ``UsageError``: no annotation."""
    check_module("module", module)
    assert isinstance(module, nn.Module), "checked above"
    state = replicate_state_of(module)
    if state is None:
        raise UsageError(
            f"{caller} found no replicate on this module",
            at=describe_module(module),
            fix="call it on the module that replicate was called on",
        )
    return state
