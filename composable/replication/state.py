"""What a replicated module remembers."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.comm import AnnotationStatus, Grid, OwnTransport, Started, Transport, Tree, described, notice_tree
from composable.engine import StepEvent, forget_torch_hooks, has_torch_optimizer, refuse_steppers, step_torch_optimizers
from composable.errors import UsageError, place_of_rank
from composable.ground.contract import get_registry
from composable.ground.frames import in_split_backward, is_functional_call, modules_of_copy
from composable.ground.names import check_module, class_name, describe_module, list_text
from composable.ground.ownership import (
    CHANGES,
    check_callers,
    claim,
    is_left_alone,
    leave_alone,
    mark_managed,
    release,
    watch_registrations,
)
from composable.ground.torch_hooks import Contents, after_gradients
from composable.ground.torch_private import optimizers_in_backward
from composable.replication.forwards import Precision
from composable.replication.outside_buckets import BufferSync, broadcast_tensors
from composable.replication.reducer import Reducer
from composable.replication.rounds import Phase
from composable.replication.tensors import Ignored, check_steppable, local_of, own_modules, unmanaged_params

__all__ = ["ReplicateState", "check_replicated", "replicate_state_of"]


@dataclass(eq=False, repr=False)
class ReplicaProgress:
    """Tells ranks that wait where the replicated modules of one annotation are; read from another thread.

    Attributes:
        name: What the modules are called.
        reducer: Averages their gradients.
        transport: Of their ranks.
        forwards: How many there were, the running one included.
        rounds_before: How many backwards there were before the last forward.
        is_forward: It is running.
        failure: What it raised.
    """

    name: str
    reducer: Reducer
    transport: Transport
    forwards: int = 0
    rounds_before: int = 0
    is_forward: bool = False
    failure: str = ""

    def __post_init__(self) -> None:
        notice_tree(self)

    def enter_forward(self) -> None:
        """Note that a forward begins."""
        self.forwards += 1
        self.rounds_before = self.reducer.rounds
        self.is_forward, self.failure = True, ""

    def exit_forward(self, failure: str) -> None:
        """Note that a forward ends; ``failure``: what it raised."""
        self.is_forward, self.failure = False, failure

    def tell(self, *, in_backward: bool) -> AnnotationStatus | None:
        """Return where they are; ``None`` before they talk."""
        reducer, transport = self.reducer, self.transport
        if not transport.groups:
            return None
        phase = reducer.round.phase
        is_last = phase is Phase.OPEN or reducer.rounds > self.rounds_before
        tree = Tree(
            self.name,
            self.forwards,
            reducer.rounds,
            is_inside=self.is_forward or phase is Phase.OPEN or (is_last and in_backward),
            is_backward=is_last,
            failure=self.failure,
        )
        return AnnotationStatus(transport.groups[0].group_name, tree, transport)

    def name_of(self, started: Started) -> str | None:
        """Return what is exchanged."""
        own = self.transport.groups
        return self.reducer.exchange.name_of(started.tag // 2) if own and started.transport.groups == own else None


class JoinListener(Protocol):
    """What is to be told of each forward that a backward may follow."""

    def begin_forward(self, module: nn.Module, *, broadcasts: bool) -> None:
        """Meet the ranks without inputs, at a forward of ``module``; ``broadcasts``: buffers are to be made equal."""
        ...

    def is_live(self) -> bool:
        """Say whether the context lasts: it has not ended, also not by an exception."""
        ...


@dataclass(eq=False, repr=False)
class ReplicateState:
    """State of one ``replicate`` annotation.

    Attributes:
        modules: The annotated module, or the list of modules of one call.
        reducer: Averages the gradients.
        ignored: What the annotation leaves alone.
        buffers: Makes the buffers equal before a forward; ``None`` if there are none or it was not asked for.
        precision: What its mixed precision policy asks for; ``None``: nothing.
        frozen: Parameters that did not require a gradient when they were last looked at, with their FQNs.
        compared: What the annotation was given, as ranks compare it.
        grid: The ranks, which all hold every parameter.
        transport: In a group of its own; a copied state makes it at its first forward that a backward may follow.
        hook_handles: Remove them, and the modules run as plain ones again.
        standing: Tells other ranks that wait where the modules are.
        view: What ``as_ddp`` has made.
        follows: A sharded module around, on more ranks, says when ranks meet.
        has_parts: On some of the ranks, modules inside are annotated on a part of them.
        uneven: AnnotationStatus of each forward, while ranks may run out of inputs; ``None``: they do not.
    """

    reducer: Reducer = field(init=False)
    grid: Grid = field(init=False)
    transport: OwnTransport = field(init=False)
    standing: ReplicaProgress = field(init=False)
    modules: tuple[nn.Module, ...] = ()
    ignored: Ignored = field(default_factory=Ignored)
    buffers: BufferSync | None = None
    precision: Precision | None = None
    frozen: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    compared: str = ""
    hook_handles: list[RemovableHandle] = field(default_factory=list)
    view: object = None
    follows: bool = False
    has_parts: bool = False
    uneven: JoinListener | None = None
    _seen: tuple[int, int] = (-1, 0)
    _contents: dict[nn.Module, Contents] = field(default_factory=dict)

    @property
    def is_joined(self) -> bool:
        """The modules are inside of a ``Join``: ranks without inputs follow them as they were when that was made."""
        return self.uneven is not None and self.uneven.is_live()

    def before_forward(self, module: nn.Module) -> None:
        """Prepare a forward of ``module`` that a backward may follow.

        Raises:
            UsageError: A parameter that was frozen at annotation requires a gradient now, or was added since; or
                something else averages gradients, or an optimizer in backward is beside a hook.
        """
        self.progress.enter_forward()
        if not torch.is_grad_enabled():
            return
        contents = self._contents.get(module)
        counts = (CHANGES.registrations, len(optimizers_in_backward()))
        is_as_before = contents is not None and self._seen == counts and not contents.have_changed()
        # While a graph is exported, parameters are others, which were not added.
        if not is_as_before and not torch.compiler.is_exporting():
            self._look_again(module)
        for fqn, param in self.frozen:
            if param.requires_grad:
                raise UsageError(
                    "a parameter was frozen when replicate was called and requires a gradient now",
                    at=f"{place_of_rank()}, parameter {fqn!r}",
                    fix="call replicate after unfreezing",
                )
        if not self.follows:
            self._meet(module)

    def _meet(self, module: nn.Module) -> None:
        """Do what the ranks do together before a forward. Collective."""
        self.transport.connect()
        self.reducer.prepare()
        if len(self.modules) == 1:  # Of several, ranks may call some.
            self.reducer.round.forwards += 1
        broadcasts = self.buffers is not None and module.training and self.reducer.requires_gradient_sync
        if self.uneven is not None:
            self.uneven.begin_forward(module, broadcasts=broadcasts)
        elif self.buffers is not None and broadcasts:
            self.buffers.broadcast()

    def begin_to_follow(self) -> None:
        """Meet when a sharded module around begins a forward or backward, whether these modules are called or not."""
        self.transport.connect()
        self.follows = True

    def end_to_follow(self) -> None:
        """Meet when these modules are called, again."""
        self.follows = False

    @property
    def has_idle_ranks(self) -> bool:
        """Whoever tells ranks without inputs knows, see ``uneven``."""
        return False

    def on(self, event: StepEvent, subject: object = None, detail: object = None) -> None:
        """Hear of the root around: meet at its forwards, and take part in averaging at the end of its backwards.

        Collective where a forward begins that a backward may follow.
        """
        if event is StepEvent.FORWARD and self.follows and torch.is_grad_enabled():
            self._meet(self.modules[0])
        elif event is StepEvent.BACKWARD and self.follows:
            self.reducer.follow()

    def broadcast_all(self, source_rank: int) -> None:
        """Give every rank the parameters and buffers of one rank of the transport. Collective; nothing is running."""
        tensors: list[torch.Tensor] = [local_of(item.param) for item in self.reducer.params]
        tensors += [local_of(param) for _, param in self.frozen]
        slots = [] if self.buffers is None else self.buffers.slots
        tensors += [buffer for owner, name in slots if (buffer := owner[name]) is not None]
        broadcast_tensors(tensors, self.transport, self.grid.everyone.device, source_rank)

    def after_forward(self, error: BaseException | None) -> None:
        """Note that a forward has ended, or what it raised."""
        self.progress.exit_forward("" if error is None else described(error))

    def before_backward(self, index: int) -> None:
        """Note that the gradient of an output of the annotated module ``index`` arrives.

        Raises:
            UsageError: See ``refuse_split_backward``.
        """
        if in_split_backward():
            self.refuse_split_backward()
        self.reducer.arm(index)

    def refuse_split_backward(self) -> NoReturn:
        """Raise, as a stage of torch's pipelines writes gradients to parameters by itself, where nothing averages them.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "a pipeline's stage takes gradients of inputs and of parameters apart, and replicate averages those that "
            "a backward leaves",
            at=f"{place_of_rank()}, {describe_module(self.modules[0])}",
            fix="take a schedule without zero bubble, or fully_shard with ShardedStage as in "
            "examples/clients/pipelining.py",
        )

    def watch(self) -> None:
        """Mark what the annotation manages, and notice what is added to its modules from now on."""
        self._claim()
        mark_managed(self._own_modules())

    def _own_modules(self) -> list[nn.Module]:
        return [module for root in self.modules for _, module in own_modules(root, self.ignored.modules, self.modules)]

    def _claim(self) -> None:
        for fqn, param in [*((item.fqn, item.param) for item in self.reducer.params), *self.frozen]:
            claim(param, fqn, self)

    def _look_again(self, module: nn.Module) -> None:
        """Look at the modules as they are now: ``module`` has changed or runs for the first time."""
        if is_functional_call():
            self.reducer.is_lent = True
            return  # What is lent for one call was not added.
        check_callers()
        added = list(unmanaged_params(self.modules, self.ignored))
        if names := [fqn for fqn, param in added if param.requires_grad]:
            raise UsageError(
                "parameters were added after replicate was called, and nothing averages their gradients",
                at=f"{place_of_rank()}, {list_text(names)}",
                fix="add modules first; or call replicate on the added module too; or unannotate, and annotate anew",
            )
        self.take_over_optimizers()
        self.frozen += added
        self._claim()
        watch_registrations(self._own_modules())
        # Modules may hold copies in low precision where one of several is called inside another.
        of_params = dict.values if self.precision is None else dict.keys
        self._contents[module] = Contents(
            (one for _, one in own_modules(module, self.ignored.modules, self.modules)), of_params
        )
        self._seen = (CHANGES.registrations, len(optimizers_in_backward()))

    def take_over_optimizers(self) -> None:
        """Step where the averages arrive, by the optimizers of ``_apply_optimizer_in_backward``.

        Raises:
            UsageError: There is a communication hook.
            ConfigError: See ``check_steppable``.
        """
        reducer = self.reducer
        if any(has_torch_optimizer(item.param) for item in reducer.params):
            check_steppable(reducer.params)
        if forget_torch_hooks(item.param for item in reducer.params) and step_torch_optimizers not in reducer.steppers:
            if reducer.comm_hooks:
                refuse_steppers([step_torch_optimizers], reducer.params[0].fqn)
            reducer.step_by([*reducer.steppers, step_torch_optimizers])

    def use(self, grid: Grid) -> None:
        """Choose the ranks; the transport between them is made when it is needed."""
        self.grid = grid
        self.transport = OwnTransport(grid.everyone)

    def move_to(self, grid: Grid) -> None:
        """Let other ranks average. Collective over those of ``grid``; the ranks of before are not asked."""
        self.use(grid)
        self.transport.connect()
        self.reducer.move_to(self.transport, grid)
        if self.buffers is not None:
            self.buffers = BufferSync(self.buffers.slots, self.transport, grid.everyone.device)
        self.follow()

    def follow(self) -> None:
        """Let other ranks that wait ask where the modules are."""
        name = " + ".join(class_name(module) for module in self.modules)
        self.progress = ReplicaProgress(name, self.reducer, self.transport)

    def abandon_step(self) -> None:
        """Put things right after a backward that an exception stopped; see ``Reducer.prepare``."""
        self.reducer.prepare()
        if self.precision is not None:
            self.precision.put_back()

    def close(self) -> None:
        """Make the modules plain ones again. Collective; no forward or backward is running."""
        self.end_to_follow()
        self.transport.connect()
        self.reducer.close()
        if self.precision is not None:
            self.precision.close()
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
                at=f"{place_of_rank()}, replicate of {names}",
                fix=f"deep-copy {names} or a module around, in one call",
            )
        twin = memo[id(self)] = ReplicateState()
        twin.compared = self.compared
        twin.has_parts = self.has_parts
        twin.use(self.grid)
        for item in self.reducer.params:
            copied = copy.deepcopy(item.param, memo)
            if copied.grad_dtype is not item.param.grad_dtype:
                copied.grad_dtype = item.param.grad_dtype
            if item.param.grad is not None and self.reducer.round.phase is Phase.AT_REST:
                copied.grad = item.param.grad.detach().clone()
        params = [replace(item, param=memo[id(item.param)]) for item in self.reducer.params]
        twin.reducer = self.reducer.copied(params, twin.transport, memo)
        twin.frozen = copy.deepcopy(self.frozen, memo)
        if self.buffers is not None:
            slots = [(copy.deepcopy(owner, memo), name) for owner, name in self.buffers.slots]
            twin.buffers = BufferSync(slots, twin.transport, self.grid.everyone.device)
        twin.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        if self.precision is not None:
            twin.precision = self.precision.copied(params, memo)
        for hook in twin.reducer.comm_hooks:
            hook.place_copy(memo)
        twin.ignored = self.ignored.copied(modules, memo)
        twin.follow()
        of_modules = self.hook_handles[len(params) :]
        twin.hook_handles = [
            *after_gradients([item.param for item in params], twin.reducer.arrivals()),
            *(copy.deepcopy(hook, memo) for hook in of_modules),
        ]
        twin._claim()
        leave_alone(copy.deepcopy(module, memo) for module in self._own_modules() if is_left_alone(module))
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a replicated module cannot be pickled as a whole",
            at=", ".join([place_of_rank(), *(describe_module(module) for module in self.modules)]),
            fix="save its state_dict(); copy.deepcopy copies it",
        )


def replicate_state_of(module: nn.Module) -> ReplicateState | None:
    """Return the state of the annotation on ``module`` itself; ``None``: it has none."""
    annotation = get_registry(module).get("replicate")
    state = None if annotation is None else annotation.state
    return state if isinstance(state, ReplicateState) else None


def check_replicated(module: object, caller: str) -> ReplicateState:
    """Return the state of the annotation on ``module``.

    Raises:
        ConfigError: ``module`` is no module.
        UsageError: It is not annotated.
    """
    check_module("module", module)
    assert isinstance(module, nn.Module), "checked above"
    state = replicate_state_of(module)
    if state is None:
        raise UsageError(
            f"{caller} found no replicate on this module",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call it on the module that replicate was called on",
        )
    return state
