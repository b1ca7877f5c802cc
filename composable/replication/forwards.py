"""Copies of parameters in low precision, which a replicated module holds while it runs.

They are cast anew in every forward that is not inside another, and kept for what runs again in backward until
that ends. Autograd takes the gradient of a copy to its parameter, in the dtype that the gradient rests in: so hooks on
parameters, and ``param.grad``, are what they are without copies. What autograd has saved of the copies lives as long as
the graph does; between steps nothing is left.

Streams: all copies are made on the stream that is current when a forward starts; what reads them comes after it.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.errors import ConfigError, UsageError, place_of_rank
from composable.ground.casts import CastBuffers, Lending, cast_floats, keep_dtype
from composable.ground.contract import get_registry
from composable.ground.frames import in_backward, is_called_again, modules_in_call
from composable.ground.names import describe_module, dtype_text
from composable.ground.ownership import claim_of
from composable.ground.torch_hooks import (
    GradientHook,
    around_forward,
    around_state_dict,
    before_forward,
    beside_forward,
    differentiable_tensors,
    on_gradient,
)
from composable.ground.torch_private import (
    alias_of,
    foreach_copy_,
    opaque,
    replace_flat_weights,
    running_transform,
    tree_map,
)
from composable.planning import NO_CASTS, MixedPrecisionPolicy, ParamDtypes, skipped_modules
from composable.replication.tensors import ManagedTensors, ReducedParam, grad_dtype_of, own_modules

__all__ = [
    "NO_PRECISION",
    "LowPrecisionParams",
    "ParamSlot",
    "Precision",
    "PrecisionPlan",
    "move_inputs",
    "plan_precision",
    "register_replicate_hooks",
]


@dataclass(frozen=True, slots=True, eq=False)
class ParamSlot:
    """Where a parameter hangs, and what it is computed with.

    Attributes:
        module: That holds it.
        name: Its name there.
        dtype: Of its copies.
    """

    module: nn.Module
    name: str
    dtype: torch.dtype

    @property
    def is_to_cast(self) -> bool:
        """The parameter has another dtype."""
        param = self.module._parameters.get(self.name)
        return param is not None and param.dtype is not self.dtype


class _Copy(NamedTuple):
    """What is in a place, what is put there, and the version of that: writing counts it up."""

    slot: ParamSlot
    own: Any
    copied: torch.Tensor
    version: int


class LowPrecisionParams(Lending):
    """Lets modules hold copies of their parameters in another dtype.

    Args:
        slots: All places of the parameters, also of tied ones.
    """

    __slots__ = ("_copies", "_is_lent", "_slots")

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        super().__init__()
        self._slots = tuple(slots)
        self._copies: list[_Copy] = []
        self._is_lent = False

    def enter(self, modules: Sequence[nn.Module], *, is_outermost: bool) -> None:
        """Lend copies, made anew if this is the outermost call and no backward runs it again."""
        if is_outermost and not self.is_in_backward:
            self._depth = 0
            self._restore()
            # Optimizers may write by ways that no version counts: a step is noticed by nothing.
            self._copies = []
        super().enter(modules, is_outermost=is_outermost)

    def forget(self) -> None:
        """Drop the copies that were kept for backward, if they are not in use."""
        if not self._is_lent:
            self._copies = []

    def written(self) -> ParamSlot | None:
        """Return the place of a copy that was written to, if there is one."""
        return next((slot for slot, _, copied, version in self._copies if copied._version != version), None)

    def put_back(self) -> None:
        """Let the modules hold their own, as ``Lending`` does, and keep no copies."""
        super().put_back()
        self.forget()

    def _leave_backward(self, held: object) -> None:
        super()._leave_backward(held)
        self.forget()

    def _lend(self, modules: Sequence[nn.Module]) -> None:
        if self._is_lent:
            return
        # Noted first: an exception on the way leaves none behind.
        self._is_lent = True
        if not self._copies:
            self._copies = _copies_of(self._slots)
        for slot, own, copied, _ in self._copies:
            params: dict[str, Any] = slot.module._parameters
            # What holds something else by now, in backward say, keeps it.
            if params.get(slot.name) is own:
                params[slot.name] = copied
        self._replace_flat_weights({id(own): copied for _, own, copied, _ in self._copies})

    def _restore(self) -> None:
        if not self._is_lent:
            return
        for slot, own, copied, _ in self._copies:
            params = slot.module._parameters
            # What was assigned meanwhile is the user's.
            if params.get(slot.name) is copied:
                params[slot.name] = own
        self._replace_flat_weights({id(copied): own for _, own, copied, _ in self._copies})
        self._is_lent = False

    def _replace_flat_weights(self, others: dict[int, Any]) -> None:
        """Exchange parameters in the lists that recurrent modules keep beside their dicts."""
        for module in {slot.module: None for slot in self._slots if isinstance(slot.module, nn.RNNBase)}:
            replace_flat_weights(module, others)


def _copies_of(slots: Sequence[ParamSlot]) -> list[_Copy]:
    """Return copies of what is in ``slots`` and has another dtype; one for all places of a tied parameter."""
    found: list[tuple[ParamSlot, Any]] = []
    made: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    plain: list[tuple[nn.Parameter, torch.Tensor]] = []
    is_transformed = running_transform() is not None
    # Inside a forward without gradients there may be a part with them.
    with torch.inference_mode(mode=False), torch.enable_grad():
        for slot in slots:
            own, dtype = slot.module._parameters.get(slot.name), slot.dtype
            if own is None or own.dtype is dtype or not own.is_floating_point():
                continue
            found.append((slot, own))
            if (id(own), dtype) in made:
                continue
            if is_transformed or type(own) is not nn.Parameter:
                # What a functional call lends, a DTensor, an instance of a user's class: as they cast.
                made[id(own), dtype] = own.to(dtype)
            else:
                value = torch.empty_like(own, dtype=dtype, requires_grad=False)
                plain.append((own, value))
                made[id(own), dtype] = value
        with torch.no_grad():
            if plain:
                foreach_copy_([value for _, value in plain], [own for own, _ in plain])
        for own, value in plain:
            copied = alias_of(own, value) if own.requires_grad else value
            copied._is_param = True  # as modules ask of their parameters
            made[id(own), value.dtype] = copied
    held = [(slot, own, made[id(own), slot.dtype]) for slot, own in found]
    return [_Copy(slot, own, copied, copied._version) for slot, own, copied in held]


def register_replicate_hooks(
    module: nn.Module,
    before_forward: Callable[[nn.Module], None],
    after_forward: Callable[[BaseException | None], None],
    before_backward: Callable[[], None],
) -> list[RemovableHandle]:
    """Call ``before_forward`` before ``module`` runs, ``before_backward`` when the gradient of an output arrives.

    ``after_forward`` gets what the forward raised, if anything. Activation checkpointing runs a module again inside
    backward: that is no forward here. A deep copy of the module gets deep copies of the three: pass bound methods,
    not closures.
    """
    hooks = _ReplicateHooks(before_forward, after_forward, before_backward)
    return beside_forward(module, hooks.pre_forward, hooks.post_forward)


def move_inputs(module: nn.Module, device: torch.device) -> list[RemovableHandle]:
    """Let the forward of ``module`` find the tensors among its arguments on ``device``."""
    return [before_forward(module, partial(_on_device, device))]


@opaque
def _on_device(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    return tree_map(move, (args, kwargs))


@dataclass(eq=False, repr=False)
class _ReplicateHooks:
    """The hooks of one replicated module."""

    before_forward: Callable[[nn.Module], None]
    after_forward: Callable[[BaseException | None], None]
    before_backward: Callable[[], None]

    @opaque
    def pre_forward(self, module: nn.Module, *_: Any) -> None:
        if not in_backward():
            self.before_forward(module)

    @opaque
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not in_backward():
            self.after_forward(sys.exc_info()[1] if output is None else None)
        if torch.is_grad_enabled():
            hook = _ReplicaOutputHook(self.before_backward)
            for tensor in differentiable_tensors(output):
                on_gradient(tensor, hook)


def _nothing(_: "_ReplicaOutputHook", grad: torch.Tensor) -> None:
    """Do nothing: in a graph there are no rounds, and where parameters are lent its first gradient is refused."""


class _ReplicaOutputHook(GradientHook):
    """Runs when the gradient of an output arrives; equal to those of the module's other calls."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    @partial(opaque, traced=_nothing)
    def __call__(self, grad: torch.Tensor) -> None:
        self._run()

    def __eq__(self, other: object) -> bool:
        return type(other) is _ReplicaOutputHook and other._run == self._run

    def __hash__(self) -> int:
        return hash(self._run)


@dataclass(frozen=True)
class PrecisionPlan:
    """What a policy asks of the parameters of one annotation.

    Attributes:
        policy: The user's.
        dtypes: Of each parameter, by id.
        skipped: Modules that keep their dtype, each with the outermost of them around it.
        lines: The policy, and one text for each parameter that is cast, to compare between ranks.
    """

    policy: MixedPrecisionPolicy = NO_CASTS
    dtypes: Mapping[int, ParamDtypes] = field(default_factory=dict)
    skipped: Mapping[nn.Module, nn.Module] = field(default_factory=dict)
    lines: Sequence[str] = ()

    def reduce_dtype(self, param: nn.Parameter) -> torch.dtype | None:
        """Return the dtype in which a gradient travels, if it is not the parameter's."""
        found = self.dtypes.get(id(param))
        return None if found is None or found.reduce is param.dtype else found.reduce

    @property
    def casts_at_border(self) -> bool:
        """Whether a forward has anything to do."""
        policy = self.policy
        return any(dtype is not None for dtype in (policy.param_dtype, policy.buffer_dtype, policy.output_dtype)) or (
            policy.param_dtype_override_fn is not None
        )


NO_PRECISION = PrecisionPlan()


def plan_precision(
    modules: Sequence[nn.Module], ignored: Iterable[nn.Module], managed: ManagedTensors, policy: MixedPrecisionPolicy
) -> PrecisionPlan:
    """Return what ``policy`` asks of what is managed, and of what annotations inside manage that is used here too.

    Raises:
        ConfigError: ``param_dtype_override_fn`` raised or returned no dtype, or a module computes in C++.
    """
    if not str(policy):
        return NO_PRECISION
    skipped = skipped_modules(managed.modules, policy)
    names = {id(param): fqn for fqn, param, _ in managed.params}
    keeps: set[int] = set()
    found: dict[int, tuple[str, nn.Parameter]] = {}
    left = frozenset(ignored)
    for root in modules:
        for path, visited in own_modules(root, left, modules):
            if isinstance(visited, torch.jit.ScriptModule) and visited not in skipped:
                raise ConfigError(
                    "a scripted module computes with parameters that cannot be lent in another dtype",
                    at=f"module {path!r}",
                    fix="add torch.jit.ScriptModule to skipped_module_classes, or script nothing",
                )
            for name, param in visited._parameters.items():
                if param is not None and (id(param) in names or claim_of(param) is not None):
                    found.setdefault(id(param), (names.get(id(param)) or f"{path}.{name}".strip("."), param))
                    if visited in skipped:
                        keeps.add(id(param))
    dtypes, lines = {}, [f"precision: {policy}"]
    for key, (fqn, param) in found.items():
        chosen = policy.dtypes_of(param, fqn, is_skipped=key in keeps)
        dtypes[key] = chosen
        if chosen != (param.dtype, param.dtype):
            lines.append(f"{fqn!r} as {dtype_text(chosen.compute)} reduced in {dtype_text(chosen.reduce)}")
    return PrecisionPlan(policy, dtypes, skipped, lines)


class Precision:
    """What the modules of one annotation do in mixed precision.

    Args:
        plan: What is asked.
        modules: The annotated modules.
        ignored: Modules that are left alone.
        params: Whose gradients are averaged.

    Attributes:
        parts: What is lent, for each module; none if a forward has nothing to do.
    """

    def __init__(
        self,
        plan: PrecisionPlan,
        modules: Sequence[nn.Module],
        ignored: Iterable[nn.Module],
        params: Sequence[ReducedParam],
    ) -> None:
        self._policy = plan.policy
        self._skipped = tuple(dict.fromkeys(plan.skipped.values()))
        left = frozenset(ignored)
        self.parts = [_part_of(plan, root, left, modules) for root in modules] if plan.casts_at_border else []
        self._rest_grads(params)

    def copied(self, params: Sequence[ReducedParam], memo: dict[int, Any]) -> "Precision":
        """Return the precision of a copy of the modules, whose parameters are ``params``."""
        twin = copy.copy(self)
        twin._skipped = tuple(copy.deepcopy(module, memo) for module in self._skipped)
        twin.parts = [copy.deepcopy(part, memo) for part in self.parts]
        twin._rest_grads(params)
        return twin

    def register(
        self,
        module: nn.Module,
        index: int,
        before_forward: Callable[[nn.Module], None],
        after_forward: Callable[[BaseException | None], None],
        before_backward: Callable[[], None],
    ) -> list[RemovableHandle]:
        """Do what ``register_replicate_hooks`` does for the annotated module ``index``, and cast."""
        if not self.parts:
            return register_replicate_hooks(module, before_forward, after_forward, before_backward)
        hooks = _CastingReplicateHooks(before_forward, after_forward, before_backward, self.parts[index], self._policy)
        # Outside of all others, which run between the casts.
        return [
            *around_forward(module, hooks.pre_forward, hooks.post_forward),
            *around_state_dict(module, before_save=[hooks.before_state_dict], before_load=[hooks.before_state_dict]),
        ]

    def keep_skipped(self) -> list[RemovableHandle]:
        """Let skipped modules run in their own dtype."""
        return [handle for module in self._skipped for handle in keep_dtype(module)]

    def put_back(self) -> None:
        """Let modules hold their own after a forward that was cut short."""
        for part in self.parts:
            part.put_back()

    def close(self) -> None:
        """Let gradients rest in their parameters' dtypes, as those of plain parameters."""
        self.put_back()
        for item in self._params:
            _rest_grad_in(item.param, item.param.dtype)

    def _rest_grads(self, params: Sequence[ReducedParam]) -> None:
        self._params = params
        if self._policy.keep_low_precision_grads:
            for item in params:
                if item.reduce_dtype is not None:
                    _rest_grad_in(item.param, item.reduce_dtype)


@dataclass(eq=False, repr=False)
class _Part:
    """What is lent while one annotated module runs.

    Attributes:
        module: The annotated module.
        slots: The places of the parameters that are cast.
        spare: Of those that have the dtype already: they are cast once ``module.to(dtype)`` gave them another one.
        buffer_dtype: Of buffers meanwhile; ``None``: their own.
        modules: Whose buffers.
        params: Lends the copies of parameters.
        buffers: Lends the copies of buffers, if they are cast.
        calls: How many are running.
    """

    module: nn.Module
    slots: Sequence[ParamSlot]
    spare: Sequence[ParamSlot]
    buffer_dtype: torch.dtype | None
    modules: Sequence[nn.Module]
    params: LowPrecisionParams = field(init=False)
    buffers: Sequence[CastBuffers] = field(init=False)
    calls: int = 0

    def __post_init__(self) -> None:
        self.params = LowPrecisionParams(self.slots)
        self.buffers = [] if self.buffer_dtype is None else [CastBuffers(self.buffer_dtype)]

    @property
    def _lendings(self) -> Sequence[Lending]:
        return [self.params, *self.buffers]

    def enter(self) -> None:
        """Lend for a call."""
        is_outermost = not self.calls or not is_called_again(self.module)
        if is_outermost:
            self.calls = 0
            if self.spare and self.spare[0].is_to_cast:
                self.slots, self.spare = [*self.slots, *self.spare], ()
                self.params = LowPrecisionParams(self.slots)
        self.calls += 1
        for lending in self._lendings:
            lending.enter(self.modules, is_outermost=is_outermost)

    def leave(self) -> None:
        """Undo ``enter``."""
        if self.calls:
            self.calls -= 1
            for lending in self._lendings:
                lending.leave()

    def check_not_written(self) -> None:
        """Refuse what a forward wrote to a copy.

        Raises:
            UsageError: It would be lost.
        """
        slot = self.params.written()
        if slot is not None:
            raise UsageError(
                f"a forward wrote to a parameter, of which it held a copy in {dtype_text(slot.dtype)}",
                at=f"{place_of_rank()}, parameter {slot.name!r} of {describe_module(slot.module)}",
                fix="write to it between two steps, or add the class of its module to skipped_module_classes",
            )

    def enter_backward(self) -> None:
        """Lend for the running backward, in which parts of forward may run again."""
        for lending in self._lendings:
            lending.enter_backward(self.modules)

    def put_back(self) -> None:
        """Let the modules hold their own, unless the module is running."""
        if self.module not in modules_in_call():
            self.calls = 0
            for lending in self._lendings:
                lending.put_back()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Part":
        slots, spare = (
            [ParamSlot(copy.deepcopy(slot.module, memo), slot.name, slot.dtype) for slot in several]
            for several in (self.slots, self.spare)
        )
        modules = [copy.deepcopy(module, memo) for module in self.modules]
        return _Part(copy.deepcopy(self.module, memo), slots, spare, self.buffer_dtype, modules)


@dataclass(eq=False, repr=False)
class _CastingReplicateHooks(_ReplicateHooks):
    """The hooks of one replicated module that has a mixed precision policy."""

    part: _Part
    policy: MixedPrecisionPolicy

    @opaque
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Buffers are broadcast before they are cast.
        super().pre_forward(module)
        self.part.enter()
        policy = self.policy
        dtype = policy.casts_inputs(is_root=policy.cast_root_forward_inputs is not None and _is_root(module))
        if dtype is not None:
            return cast_floats(args, dtype), cast_floats(kwargs, dtype)
        return args, kwargs

    @opaque
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        part = self.part
        part.leave()
        has_failed = output is None and sys.exc_info()[1] is not None
        found = output
        if not has_failed:
            try:
                part.check_not_written()
            except UsageError:
                super().post_forward(module, args, None)  # It reads what is raised.
                part.params.forget()
                raise
            if self.policy.output_dtype is not None:
                found = cast_floats(output, self.policy.output_dtype)
        super().post_forward(module, args, found)
        has_graph = False
        if torch.is_grad_enabled() and not has_failed:
            hook = _ReplicaOutputHook(part.enter_backward)
            for tensor in differentiable_tensors(found):
                has_graph = True
                if tensor.grad_fn is not None:
                    on_gradient(tensor, hook)
        if not has_graph:
            part.params.forget()
        return None if found is output else found

    @opaque
    def before_state_dict(self, *_: Any) -> None:
        self.part.put_back()


def _part_of(plan: PrecisionPlan, root: nn.Module, ignored: frozenset[nn.Module], roots: Sequence[nn.Module]) -> _Part:
    slots, spare, modules = [], [], []
    for _, module in own_modules(root, ignored, roots):
        if module not in plan.skipped:
            modules.append(module)
            for name, param in module._parameters.items():
                chosen = None if param is None else plan.dtypes.get(id(param))
                if param is not None and chosen is not None:
                    slot = ParamSlot(module, name, chosen.compute)
                    if slot.is_to_cast:
                        slots.append(slot)
                    elif chosen.compute is plan.policy.param_dtype:
                        spare.append(slot)
    return _Part(root, slots, spare, plan.policy.buffer_dtype, modules)


def _is_root(module: nn.Module) -> bool:
    """Say whether the running call of ``module`` is in none of another annotated module."""
    return not any(get_registry(other) for other in modules_in_call() if other is not module)


def _rest_grad_in(param: nn.Parameter, dtype: torch.dtype) -> None:
    if grad_dtype_of(param) is not dtype:
        grad, param.grad = param.grad, None
        param.grad_dtype = dtype
        param.grad = None if grad is None else grad.to(dtype)
