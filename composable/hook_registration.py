"""Puts communication hooks on annotated modules, and takes them off: on all ranks, or on none.

A hook holds for every handle of ``fully_shard`` and every ``replicate`` at or below its module, but where another one
is registered on a module that is nearer.
"""

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from composable.annotation import handle_of_module, sharded_state_of
from composable.arguments import check_module, described
from composable.collectives import Ranks, compare_in_each
from composable.comm_hooks import DefaultState, check_hook, check_state, takes_arguments, takes_bucket
from composable.contract import get_registry
from composable.engine import Handle, HookFunction, Registration, nearest
from composable.errors import ComposableError, ConfigError, SignatureError, UsageError, located, place_of_rank
from composable.fqns import describe_module
from composable.frames import in_backward
from composable.replication import Reducer, ReplicateState, check_memory
from composable.wording import class_name

__all__ = ["CommHookHandle", "register_comm_hook"]

# What has gradients to reduce, with the ranks that do.
_Unit: TypeAlias = Handle | Reducer


class CommHookHandle:
    """The result of ``register_comm_hook``."""

    def __init__(self, module: nn.Module, registration: Registration) -> None:
        self._module = weakref.ref(module)
        self._registration = registration

    def remove(self) -> None:
        """Take the hook off again; what is registered further out holds then. No error if it is off already.

        Collective: all ranks that registered it, same order.

        Raises:
            UsageError: A backward is running.
            DesyncError: The ranks remove different hooks.
        """
        module = self._module()
        if module is None:
            return
        found = _units_below(module)
        changed = {
            unit: [one for one in unit.comm_hooks if one is not self._registration]
            for unit in found
            if self._registration in unit.comm_hooks
        }
        if changed:
            _agree(module, {unit: found[unit] for unit in changed}, "CommHookHandle.remove", self._registration, None)
            for unit, left in changed.items():
                unit.register_comm_hooks(left)


def register_comm_hook(module: nn.Module, state: object, hook: HookFunction) -> CommHookHandle:
    """Let ``hook`` reduce the gradients of ``module`` and of what is below it, and divide them.

    It holds for what is annotated there now. The registration on the module nearest to the parameters counts,
    whichever came first. A copy of the module has the hook too, with a copy of its state.

    Collective: all ranks of every annotation at or below ``module``, same order, with the same hook.

    Args:
        module: Annotated, or around annotated modules, or picked by a policy.
        state: Handed to ``hook``.
        hook: ``hook(state, grad, output)`` gets the gradients of a flat buffer [W * S], as this rank has them, and
            fills ``output`` [S] with this rank's slice of their mean. Replicated modules call ``hook(state, grad)``,
            which averages in place. On replicated modules alone, ``hook(state, bucket)`` is a hook for
            ``DistributedDataParallel``; two arguments of which the second is called ``grad`` are one of gradients.
            Ranks call hooks in the same order. When a hook returns, its result is there, or queued on the current
            stream of the device.

    Returns:
        What takes it off again.

    Raises:
        ConfigError: ``hook`` cannot be called so, on any rank; or its state has another process group than a module,
            or is none that a hook of this library can use.
        UsageError: Nothing there is annotated; the module has a hook already; a parameter has another way to reduce;
            or a backward is running.
        DesyncError: The ranks register different hooks.
    """
    check_module("module", module)
    with located(place_of_rank()):
        units = _units_below(module)
        if not units:
            raise UsageError(
                "register_comm_hook found no annotated module",
                at=describe_module(module),
                fix="call fully_shard or replicate first",
            )
        failure: ComposableError | None = None
        one: Registration | None = None
        try:
            one = Registration(module, state, hook, takes_bucket=_takes_bucket(hook, units))
            check_hook(hook)
            check_state(hook, state)
            _check(module, state, units)
            callers = [unit for unit in units if isinstance(unit, Reducer)]
            check_memory(state, [unit for unit in callers if nearest([*unit.comm_hooks, one]) is one])
            for unit in units:
                unit.check_comm_hooks([*unit.comm_hooks, one])
        except ComposableError as error:
            # The other ranks are about to communicate: they must hear of it first.
            failure = error
        _agree(module, units, "register_comm_hook", one, failure)
    assert one is not None, "a failure has been raised"
    for unit in units:
        unit.register_comm_hooks([*unit.comm_hooks, one])
    return CommHookHandle(module, one)


def _units_below(module: nn.Module) -> dict[_Unit, Ranks]:
    """Return what reduces gradients at or below ``module``, left to right, with the ranks of each."""
    found: dict[_Unit, Ranks] = {}
    for visited in module.modules():
        handle, state = handle_of_module(visited), sharded_state_of(visited)
        if handle is not None and state is not None:
            found[handle] = state.grid.everyone
        for annotation in get_registry(visited).values():
            if isinstance(annotation.state, ReplicateState):
                found[annotation.state.reducer] = annotation.state.grid.everyone
    return found


def _check(module: nn.Module, state: object, units: Mapping[_Unit, Ranks]) -> None:
    if in_backward():
        raise UsageError("a backward is running", at=describe_module(module), fix="register hooks between two steps")
    if any(one.module is module for unit in units for one in unit.comm_hooks):
        raise UsageError(
            "a communication hook is registered already",
            at=describe_module(module),
            fix="register one hook on a module; remove the first with what registering it returned",
        )
    if isinstance(state, DefaultState):
        numbers = Ranks.of(state.process_group, torch.device("cpu")).numbers
        for unit, ranks in units.items():
            # Slices go to the ranks in their order; whole gradients have none.
            own = unit.grid.shard.numbers if isinstance(unit, Handle) else ranks.numbers
            is_same = numbers == own if isinstance(unit, Handle) else {*numbers} == {*own}
            if not is_same:
                raise ConfigError(
                    f"the state of the hook has ranks {list(numbers)}, the module {list(own)}",
                    at=describe_module(module),
                    fix="make the state with the process group of the module's mesh",
                )


def _takes_bucket(hook: object, units: Mapping[_Unit, Ranks]) -> bool:
    """Say whether ``hook`` is one of ``DistributedDataParallel``.

    Raises:
        ConfigError: It is none that these modules could call.
    """
    if not callable(hook):
        fix = "pass a function of a state, gradients and an output"
        if type(hook).__name__ == "BuiltinCommHookType":
            fix = "pass allreduce_hook and a DefaultState, or fp16_compress_hook and a LowPrecisionState"
        raise SignatureError(f"hook is {described(hook)}", fix=fix)
    if str(getattr(hook, "__module__", None)).endswith(".ddp_comm_hooks.mixed_precision_hooks"):
        fix = "leave it out, and annotate with replicate(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))"
        raise ConfigError("the hook is a part of DistributedDataParallel's own mixed precision", fix=fix)
    try:
        signature = inspect.signature(hook)
    except (ValueError, TypeError):
        raise ConfigError(
            f"hook is {described(hook)}, whose arguments are not known", fix="pass a function of Python"
        ) from None
    # torch's hook that quantises by channels has a third argument, which is no output.
    has_output = takes_arguments(signature, 3) and not takes_bucket(signature)
    has_none = takes_arguments(signature, 2)
    if not (has_output or has_none):
        raise ConfigError(
            f"the hook cannot be called with a state and gradients: its arguments are {signature}",
            fix="write it as hook(state, grad, output=None)",
        )
    sharded = [unit for unit in units if isinstance(unit, Handle)]
    if sharded and not has_output:
        second = "a bucket" if takes_bucket(signature) else "gradients"
        raise ConfigError(
            f"the hook takes a state and {second} only, and a sharded module keeps no whole gradients: "
            "it needs a place for this rank's slice",
            at=sharded[0].described,
            fix="write it as hook(state, grad, output=None); such hooks serve replicated modules too",
        )
    if len(sharded) < len(units) and not has_none:
        raise ConfigError(
            "the hook needs an output, and a replicated module keeps the whole of its gradients",
            fix="write it as hook(state, grad, output=None), and average in place without an output",
        )
    returned = signature.return_annotation
    # What is no class, such as Future[torch.Tensor] or a string, says too little.
    if takes_bucket(signature) and returned in (int, float, bool, str, torch.Tensor, None):
        raise ConfigError(
            f"the hook is annotated to return {getattr(returned, '__name__', returned)}, and a bucket needs a future",
            fix="return a torch.futures.Future[torch.Tensor] of the averages, and annotate it so or not at all",
        )
    return takes_bucket(signature)


def _agree(
    module: nn.Module,
    units: Mapping[_Unit, Ranks],
    caller: str,
    registration: Registration | None,
    failure: ComposableError | None,
) -> None:
    """Go on only if every rank does the same with the same hook. Collective.

    Raises:
        ComposableError: ``failure``, or that of another rank.
        DesyncError: The ranks differ.
    """
    first = f"{caller} of {'a wrong hook' if registration is None else registration.name} on {class_name(module)}"
    # Parts first, so that the whole hears of their failures; of what only they have they know.
    lines = {ranks: [first] for ranks in sorted(units.values(), key=lambda ranks: ranks.order)}
    for unit, ranks in units.items():
        lines[ranks].append(f"for {_params(unit)}")
    compare_in_each(
        {ranks: "\n".join(own) for ranks, own in lines.items()},
        failure,
        what="the ranks register or remove different communication hooks",
        fix="do the same on every rank",
    )


def _params(unit: _Unit) -> Sequence[str]:
    if isinstance(unit, Handle):
        return [unit.fqn_of(param) for param in unit.params]
    return [item.fqn for item in unit.params]
