"""Communication hooks: functions that reduce gradients.

``hook(state, grad, output)`` gets this rank's gradients, flat and not divided, and fills ``output`` with this rank's
slice of their mean over the ranks. ``hook(state, grad)`` averages ``grad`` in place, for modules that keep whole
gradients. ``register_comm_hook`` registers a hook, on all ranks or on none, for every handle of ``fully_shard`` and
every ``replicate`` at or below a module; a hook on a nearer module takes precedence.

Sources: the sharded hooks of torch 2.0 (pytorch/pytorch#83254) and the wrappers of its DDP hooks.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, get_type_hints

import torch
import torch.distributed as dist
from torch import nn

from composable.annotation import ReducingUnit, nothing_annotated, params_of, units_of
from composable.comm import Ranks, all_reduce_in, compare_in_each, reduce_scatter_in
from composable.engine import Handle, HookFunction, Registration, nearest
from composable.errors import ComposableError, ConfigError, SignatureError, UsageError, made_alike
from composable.ground.frames import in_backward
from composable.ground.names import check_module, class_name, describe_module, described, list_text
from composable.replication import Reducer

_Hook: TypeAlias = Callable[..., Any]
_BUCKET: Any = dist.GradBucket  # type: ignore[attr-defined]  # defined in C++


class DefaultState:
    """The state that the hooks of this library need: the ranks, and the factors that gradients are divided by.

    Gradients are divided by one factor before the ranks add them up and by the other after it, so that neither very
    large nor very small numbers leave the range of float16.

    Args:
        process_group: The ranks whose gradients are averaged: the ranks of the annotation.

    Attributes:
        process_group: The ranks.
        world_size: How many ranks are in it.
        gradient_predivide_factor: The smallest power of two that does not divide the number of ranks, or whose square
            is at least that number.
        gradient_postdivide_factor: The number of ranks divided by the other factor.

    Raises:
        ConfigError: ``process_group`` is no process group of which this rank is a member.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise ConfigError(
                f"process_group is {described(process_group)}, not a ProcessGroup that this rank is in",
                fix="pass dist.group.WORLD, or the group of the mesh",
            )
        self.process_group = process_group
        self.world_size = process_group.size()
        factor = 1
        while self.world_size % factor == 0 and self.world_size / factor > factor:
            factor *= 2
        self.gradient_predivide_factor = float(factor)
        self.gradient_postdivide_factor = self.world_size / factor


class LowPrecisionState(DefaultState):
    """The state of hooks that send gradients in a dtype of few bits.

    Args:
        process_group: The ranks.
        parameter_type: The dtype of the resulting gradients; ``None``: the dtype that they had before.

    Raises:
        ConfigError: ``process_group`` is no process group, or ``parameter_type`` no floating-point dtype.
    """

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype | None = torch.float32) -> None:
        super().__init__(process_group)
        if parameter_type is not None and not (
            isinstance(parameter_type, torch.dtype) and parameter_type.is_floating_point
        ):
            raise ConfigError(
                f"parameter_type is {described(parameter_type)}",
                fix="pass the dtype of the parameters, such as torch.float32, or None",
            )
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average gradients over the ranks, in place: the hook of modules that keep whole gradients. Collective.

    Args:
        state: The ranks and the factors.
        grad: Gradients ``[N]`` of this rank, not divided.
    """
    _divide(grad, state.gradient_predivide_factor)
    all_reduce_in(state.process_group, grad)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Average gradients over the ranks, and give each rank its slice: the hook of sharded modules. Collective.

    Args:
        state: The ranks and the factors.
        grad: Gradients ``[W * S]`` of this rank, not divided, for W ranks; they are overwritten.
        output: The slice ``[S]`` of the mean that belongs to this rank, in the dtype of ``grad``.
    """
    _divide(grad, state.gradient_predivide_factor)
    reduce_scatter_in(state.process_group, grad, output)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average gradients that travel as float16, and cast the mean to ``state.parameter_type``. Collective.

    Args:
        state: The ranks, the factors and the dtype of the result.
        grad: Gradients ``[W * S]`` of this rank, or ``[N]`` without ``output``, replaced by their mean.
        output: The slice ``[S]`` of the mean that belongs to this rank; ``None`` for modules that keep whole gradients.
    """
    _compress(_default_hook, torch.float16, state.parameter_type, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average gradients ``[N]`` that travel as bfloat16; otherwise like ``fp16_compress_hook``. Collective."""
    _compress(_default_hook, torch.bfloat16, state.parameter_type, state, grad, output)


def fp16_compress_wrapper(hook: _Hook) -> _Hook:
    """Return a hook that lets ``hook`` reduce gradients as float16, and casts the result back.

    Args:
        hook: Called as ``hook(state, grad, output)``, or ``hook(state, grad)`` where there is no output.

    Raises:
        ConfigError: ``hook`` is no function, or is a hook for ``DistributedDataParallel``.
    """
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: _Hook) -> _Hook:
    """Return a hook that lets ``hook`` reduce gradients as bfloat16; otherwise like ``fp16_compress_wrapper``."""
    return _wrapped(hook, torch.bfloat16)


def _argument_of(hook: object) -> Any:
    """Return the class of the second argument of ``hook``, from its annotation, else from the argument's name.

    A hook that shows neither, as many of torch, takes gradients if it can take an output, else a bucket.
    """
    name, declared = _declared(hook, 1)
    if declared in (torch.Tensor, _BUCKET) or hasattr(declared, "call_hook"):
        return declared
    if name in ("grad", "bucket"):
        return torch.Tensor if name == "grad" else _BUCKET
    return torch.Tensor if _takes_arguments(hook, 3) else _BUCKET


def _declared(hook: object, index: int) -> tuple[str, Any]:
    """Return name and annotation of an argument of ``hook``; empty and ``None`` if it has none there."""
    signature = _signature_of(hook)
    for argument in [*signature.parameters.values()][index : index + 1] if signature is not None else ():
        declared = argument.annotation
        if isinstance(declared, str):
            with suppress(Exception):  # evaluating annotations of users may raise anything
                declared = get_type_hints(hook)[argument.name]
        return argument.name, declared
    return "", None


def _state_for(hook: Any, state: object, units: Mapping[ReducingUnit, Ranks]) -> object:
    """Return the state for ``hook``: for hooks of this library one of the annotation's ranks, if it is ``None``.

    Raises ``ConfigError`` for a hook of this library or of torch that cannot use ``state``.
    """
    if str(getattr(hook, "__module__", None)).endswith(".ddp_comm_hooks.mixed_precision_hooks"):
        fix = "leave it out, and annotate with replicate(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))"
        raise ConfigError("the hook is a part of DistributedDataParallel's own mixed precision", fix=fix)
    while isinstance(hook, partial) and hook.func in (_call, _compress):
        hook = hook.args[hook.func is _call]  # inside of a wrapper
    kind = _declared(hook, 0)[1]
    if state is None and kind in (DefaultState, LowPrecisionState):
        unit, ranks = next(iter(units.items()))
        state = LowPrecisionState((unit.grid.shard if isinstance(unit, Handle) else ranks).process_group, None)
    is_known = isinstance(kind, type) and (issubclass(kind, DefaultState) or kind.__module__.startswith("torch."))
    # torch's hooks take no group for the default one.
    if is_known and not isinstance(state, (kind, type(None)) if kind is dist.ProcessGroup else kind):
        raise ConfigError(
            f"the state of the hook is {described(state)}, not a {kind.__name__}",
            fix=f"pass a {kind.__name__}{' of the ranks, or None' if issubclass(kind, DefaultState) else ''}",
        )
    return state


def _as_hook_of_gradients(hook: HookFunction) -> HookFunction:
    """Return a hook that takes gradients or a bucket: ``hook``, wrapped if its argument is of another class."""
    argument = _argument_of(hook)
    return _named(partial(_call, argument, hook), hook) if hasattr(argument, "call_hook") else hook


def _call(argument: Any, hook: _Hook, state: Any, grad: torch.Tensor, output: torch.Tensor | None = None) -> Any:
    """Let ``hook``, whose second argument is of the class ``argument``, reduce ``grad``."""
    return argument.call_hook(hook, state, grad, output)


def _named(called: "partial[Any]", hook: _Hook, prefix: str = "") -> _Hook:
    """Give a call of ``hook`` its name, by which ranks compare hooks. A partial: its copy has a copy of ``hook``."""
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    vars(called).update(__qualname__=f"{prefix}{name}", __module__=str(getattr(hook, "__module__", "")))
    return called


def _takes_arguments(hook: object, count: int) -> bool:
    """Say whether ``hook`` can be called with ``count`` arguments; true if its signature is not known."""
    signature = _signature_of(hook)
    if signature is None:
        return True
    with suppress(TypeError):
        signature.bind(*[None] * count)
        return True
    return False


def _signature_of(hook: object) -> inspect.Signature | None:
    """Return the signature of ``hook``; ``None``: it is no function, or a builtin without a signature."""
    with suppress(TypeError, ValueError):
        return inspect.signature(hook) if callable(hook) else None
    return None


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor != 1:
        tensor.div_(factor)


def _default_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    if output is None:
        allreduce_hook(state, grad)
    else:
        reduce_scatter_hook(state, grad, output)


def _wrapped(hook: _Hook, dtype: torch.dtype) -> _Hook:
    if not callable(hook):
        raise ConfigError(f"hook is {described(hook)}", fix="pass a communication hook")
    if _argument_of(hook) is _BUCKET:
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise ConfigError(
            f"{name} takes a bucket, as hooks of DistributedDataParallel do, and the wrapper gives gradients",
            fix="use torch's wrapper in ddp_comm_hooks.default_hooks; if it takes gradients, name its argument grad",
        )
    called = _as_hook_of_gradients(hook)
    return _named(partial(_compress, called, dtype, None), hook, f"{str(dtype)[6:]} around ")


def _compress(
    hook: _Hook,
    dtype: torch.dtype,
    parameter_type: torch.dtype | None,
    state: Any,
    grad: torch.Tensor,
    output: torch.Tensor | None = None,
) -> Any:
    """Let ``hook`` reduce ``grad`` as ``dtype``, complex numbers as pairs, then cast to ``parameter_type``, or back.

    Returns what the hook returned, for the caller to check; ``None`` if that is its result.
    """
    sent = _real(grad).to(dtype)
    if output is None:
        returned, result, target = hook(state, sent), sent, grad
    else:
        result = torch.empty_like(_real(output), dtype=dtype)
        if result.is_floating_point():
            result.fill_(float("nan"))  # NaN shows which elements the hook did not write.
        returned, target = hook(state, sent, result), output
    place = _real(target)
    cast_to = place.dtype if parameter_type is None or target.is_complex() else parameter_type
    if place.shape != result.shape or place.dtype is not cast_to:
        target.data = result if place.shape != result.shape else result.to(cast_to)
    else:
        place.copy_(result)
    if result.device.type != "cpu":
        # The cast is queued: until it has run, the allocator must not give the memory to another stream.
        result.record_stream(torch.get_device_module(result.device).current_stream())
    return None if returned is result else returned


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


class CommHookHandle:
    """The result of ``register_comm_hook``, which can remove the hook again."""

    def __init__(self, module: nn.Module, registration: Registration) -> None:
        self._module = weakref.ref(module)
        self._registration = registration

    def remove(self) -> None:
        """Remove the hook; a hook registered further out takes its place. A second call does nothing.

        Collective: all ranks that registered it, same order.

        Raises:
            UsageError: A backward is running.
            DesyncError: The ranks remove different hooks.
        """
        module = self._module()
        if module is None:
            return
        units = units_of(module.modules())
        changed = {unit: ranks for unit, ranks in units.items() if self._registration in unit.comm_hooks}
        if changed:
            _agree(module, changed, "CommHookHandle.remove", self._registration, None)
            for unit in changed:
                unit.register_comm_hooks([one for one in unit.comm_hooks if one is not self._registration])


# Id of a state that remembers buckets -> the reducer that uses it. By id: states of PowerSGD allow no weak references.
_SERVED: "weakref.WeakValueDictionary[int, Reducer]" = weakref.WeakValueDictionary()


def register_comm_hook(module: nn.Module, state: object, hook: HookFunction) -> CommHookHandle:
    """Let ``hook`` reduce and divide the gradients of ``module`` and of all modules below it.

    It holds for the modules that are annotated now. Of several hooks around a parameter, the one on the nearest module
    runs, whichever was registered first. A copy of the module has the hook too, with a copy of its state.

    Collective: all ranks of every annotation at or below ``module``, same order, with the same hook.

    Args:
        module: Annotated, or around annotated modules, or picked by a policy.
        state: Handed to ``hook``. ``None``, for hooks of this library and wrappers around them: a ``LowPrecisionState``
            of the annotation's ranks, which keeps the dtype of gradients.
        hook: ``hook(state, grad, output)`` gets the gradients of a flat buffer [W * S], as this rank has them, and
            fills ``output`` [S], of the same dtype, with this rank's slice of their mean. Replicated modules call
            ``hook(state, grad)``, which averages in place. Where all modules are replicated, it may be a hook for
            ``DistributedDataParallel``, ``hook(state, bucket)``. The annotation of the second argument decides:
            ``torch.Tensor``, ``dist.GradBucket`` or a class with a static ``call_hook(hook, state, grad, output)`` that
            reduces as a hook of gradients does; else its name, ``grad`` or ``bucket``; else a hook of two arguments
            takes a bucket. Ranks call hooks in the same order. When a hook returns, its result is computed, or queued
            on the current stream of the device.

    Returns:
        The handle that removes the hook.

    Raises:
        ConfigError: On any rank, ``hook`` cannot be called as above, or with ``state``, or its state has other ranks
            than a module.
        UsageError: No module there is annotated; ``module`` has a hook already; a parameter is reduced in another way;
            or a backward is running.
        DesyncError: The ranks register different hooks.
    """
    check_module("module", module)
    units = units_of(module.modules())
    if not units:
        raise nothing_annotated("register_comm_hook", module)

    def callers_of(one: Registration) -> set[Reducer]:
        return {unit for unit in units if isinstance(unit, Reducer) and nearest([*unit.comm_hooks, one]) is one}

    def check() -> Registration:
        called = _as_hook_of_gradients(hook)
        _check_hook(called, units)
        used = _state_for(hook, state, units)
        one = Registration(module, used, called, takes_bucket=_argument_of(called) is _BUCKET)
        _check_free(module, used, units)
        _check_memory(used, callers_of(one))
        for unit in units:
            unit.check_comm_hooks([*unit.comm_hooks, one])
        return one

    one = made_alike(check, lambda one, failure: _agree(module, units, "register_comm_hook", one, failure))
    if _remembers_buckets(one.state):
        _SERVED.update((id(one.state), caller) for caller in callers_of(one))
    for unit in units:
        unit.register_comm_hooks([*unit.comm_hooks, one])
    return CommHookHandle(module, one)


def _remembers_buckets(state: object) -> bool:
    return any(cls.__name__ == "PowerSGDState" for cls in type(state).__mro__)


def _check_memory(state: object, callers: set[Reducer]) -> None:
    """Refuse a state that remembers buckets by their number, if more than one replicated module would use it."""
    served = _SERVED.get(id(state))
    if served is not None and (used := served.exchange.hook) is not None and used.state is state:
        callers = {*callers, served}
    if _remembers_buckets(state) and len(callers) > 1:
        names = sorted(one.params[0].fqn if one.params else "none" for one in callers)
        raise ConfigError(
            f"one {type(state).__name__} cannot serve {len(callers)} replicated modules: it remembers buckets by "
            "their number, and each module numbers its own",
            at=f"the modules of parameters {list_text(names)}",
            fix="call register_comm_hook on each replicated module, with a state of its own",
        )


def _check_free(module: nn.Module, state: object, units: Mapping[ReducingUnit, Ranks]) -> None:
    if in_backward():
        raise UsageError("a backward is running", at=describe_module(module), fix="register hooks between two steps")
    if any(one.module is module for unit in units for one in unit.comm_hooks):
        raise UsageError(
            "a communication hook is registered already",
            at=describe_module(module),
            fix="register one hook on a module; call remove() on what register_comm_hook returned",
        )
    if isinstance(state, DefaultState):
        numbers = Ranks.of(state.process_group, torch.device("cpu")).numbers
        for unit, ranks in units.items():
            # The order of ranks decides which slice each gets; for whole gradients it does not matter.
            own = unit.grid.shard.numbers if isinstance(unit, Handle) else ranks.numbers
            is_same = numbers == own if isinstance(unit, Handle) else {*numbers} == {*own}
            if not is_same:
                raise ConfigError(
                    f"the state of the hook has ranks {list(numbers)}, the module {list(own)}",
                    at=describe_module(module),
                    fix="make the state with the process group of the module's mesh",
                )


def _check_hook(hook: object, units: Iterable[ReducingUnit]) -> None:
    """Raise ``ConfigError`` unless all ``units`` can call ``hook``."""
    if not callable(hook):
        raise SignatureError(
            f"hook is {described(hook)}",
            fix="pass a function of a state, gradients and an output, such as allreduce_hook with a DefaultState, "
            "or fp16_compress_hook with a LowPrecisionState",
        )
    takes_bucket = _argument_of(hook) is _BUCKET
    # torch's hook that quantises by channels has a third argument, which is no output.
    has_output = not takes_bucket and _takes_arguments(hook, 3)
    has_none = _takes_arguments(hook, 2)
    if not (has_output or has_none):
        raise ConfigError(
            f"the hook cannot be called with a state and gradients: its arguments are {_signature_of(hook)}",
            fix="write it as hook(state, grad, output=None)",
        )
    sharded = [unit for unit in units if isinstance(unit, Handle)]
    if sharded and not has_output:
        raise ConfigError(
            f"the hook takes a state and {'a bucket' if takes_bucket else 'gradients'} only, and a sharded module "
            "keeps no whole gradients: its hook must write this rank's slice to an output",
            at=sharded[0].described,
            fix="write it as hook(state, grad, output=None); such hooks serve replicated modules too",
        )
    if not has_none and any(isinstance(unit, Reducer) for unit in units):
        raise ConfigError(
            "the hook requires an output, and a replicated module passes none",
            fix="write it as hook(state, grad, output=None), and average grad in place where output is None",
        )


def _agree(
    module: nn.Module,
    units: Mapping[ReducingUnit, Ranks],
    caller: str,
    registration: Registration | None,
    failure: ComposableError | None,
) -> None:
    """Raise unless every rank makes the same call with the same hook; ``failure`` is raised first. Collective."""
    first = f"{caller} of {'a wrong hook' if registration is None else registration.name} on {class_name(module)}"
    lines = {ranks: [first] for ranks in units.values()}
    for unit, ranks in units.items():  # Each group compares only its own units.
        lines[ranks].append(f"for {params_of(unit)}")
    what = "the ranks register or remove different communication hooks"
    compare_in_each(lines, failure, what=what, fix="do the same on every rank")
