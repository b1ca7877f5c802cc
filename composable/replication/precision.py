"""Mixed precision of a replicated module."""

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn

from composable.errors import UsageError
from composable.ground.casts import CastBuffers, CastInputs, Lending, LowPrecisionParams, Owners, ParamSlot, cast_floats
from composable.ground.contract import is_parallel
from composable.ground.frames import is_called_again, modules_in_call
from composable.ground.names import describe_module, dtype_text, join_fqn
from composable.ground.ownership import claim_of
from composable.planning import MixedPrecisionPolicy, ParamDtypes, managed_modules, name_modules, skipped_modules
from composable.replication.managed import ManagedTensors, grad_dtype_of


@dataclass(frozen=True)
class PrecisionPlan:
    """The dtypes that a mixed precision policy gives to the modules of one annotation."""

    policy: MixedPrecisionPolicy  # The user's policy.
    # The parameters in use, of this annotation and of annotations inside, of any shapes, with their dtypes.
    params: Mapping[nn.Parameter, ParamDtypes]
    # Modules that keep their dtype, each with the outermost such module around it.
    skipped: Mapping[nn.Module, nn.Module]
    lines: Sequence[str] = ()  # The policy, and one text for each parameter that is cast, to compare between ranks.

    def reduce_dtype(self, param: nn.Parameter) -> torch.dtype | None:
        """Return the dtype in which the gradient of ``param``, of any shape, is sent; ``None``: the parameter's."""
        found = self.params[param].reduce
        return None if found is param.dtype else found


def plan_precision(
    roots: Sequence[nn.Module], ignored: Iterable[nn.Module], managed: ManagedTensors, policy: MixedPrecisionPolicy
) -> PrecisionPlan | None:
    """Return the dtypes under ``policy`` of managed parameters, and of used parameters of annotations inside.

    Raises ``ConfigError`` if ``param_dtype_override_fn`` raised or returned no dtype.
    """
    if not str(policy):
        return None
    modules, names = [*managed_modules(roots, frozenset(ignored))], name_modules(roots)
    skipped, fqns = skipped_modules(modules, policy), {id(one.param): one.fqn for one in managed.params}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    keeps: set[int] = set()
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and (id(param) in fqns or claim_of(param) is not None):
                found.setdefault(id(param), (fqns.get(id(param)) or join_fqn(names[module], name), param))
                if module in skipped:
                    keeps.add(id(param))
    params, lines = {}, [f"precision: {policy}"]
    for key, (fqn, param) in found.items():
        chosen = policy.dtypes_of(param, fqn, is_skipped=key in keeps)
        params[param] = chosen
        if chosen != (param.dtype, param.dtype):
            lines.append(f"{fqn!r} as {dtype_text(chosen.compute)} reduced in {dtype_text(chosen.reduce)}")
    return PrecisionPlan(policy, params, skipped, lines)


class ModulePrecision:
    """The mixed precision of one annotated module, which holds cast tensors while it runs, forward or backward.

    ``owners`` are the buffers in it that are cast, to ``buffer_dtype`` of ``policy`` (``None``: they are not), and
    ``slots`` the places of the parameters.
    """

    def __init__(
        self, root: nn.Module, owners: Owners, slots: Sequence[ParamSlot], policy: MixedPrecisionPolicy
    ) -> None:
        self._find_module = weakref.ref(root)
        self._owners = owners
        self._slots = slots
        self._policy = policy
        self._params = LowPrecisionParams(slots)
        buffer_dtype = policy.buffer_dtype
        self._lendings: list[Lending] = [self._params, *([] if buffer_dtype is None else [CastBuffers(buffer_dtype)])]
        self._inputs = CastInputs()
        self._calls, self._thread = 0, get_ident()

    @staticmethod
    def of(plan: PrecisionPlan, root: nn.Module, ignored: frozenset[nn.Module]) -> "ModulePrecision":
        """Return the mixed precision of the annotated module ``root``, made from the plan of its annotation."""
        modules = [module for module in managed_modules([root], ignored) if module not in plan.skipped]
        slots = []
        for module in modules:
            for name, param in module._parameters.items():
                if param is not None and param in plan.params:
                    dtype = plan.params[param].compute
                    # A parameter that has the dtype now is cast after `module.to(dtype)` gives it another one.
                    if dtype is not param.dtype or dtype is plan.policy.param_dtype:
                        slots.append(ParamSlot(weakref.ref(module), module._parameters, name, dtype))
        return ModulePrecision(root, [module._buffers for module in modules], slots, plan.policy)

    def copied(self, memo: dict[int, Any]) -> "ModulePrecision":
        """Return the mixed precision of a deep copy of the annotated module."""
        slots = []
        for find, params, name, dtype in self._slots:
            module: Any = copy.deepcopy(find(), memo)  # may have no attributes yet
            slots.append(ParamSlot(weakref.ref(module), copy.deepcopy(params, memo), name, dtype))
        root: Any = copy.deepcopy(self._find_module(), memo)
        return ModulePrecision(root, copy.deepcopy(self._owners, memo), slots, self._policy)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Hold the cast tensors for one call of the module; return its inputs in the dtype of the policy."""
        is_outermost = not self._calls or not is_called_again(module)
        self._calls, self._thread = 1 if is_outermost else self._calls + 1, get_ident()
        self._inputs.leave(keeps=self._calls - 1)
        for lending in self._lendings:
            lending.enter(self._owners, is_outermost=is_outermost)
        # The root is a module that is not called inside of another annotated one.
        is_root = self._policy.cast_root_forward_inputs is not None and not any(
            is_parallel(other) for other in modules_in_call() if other is not module
        )
        dtype = self._policy.casts_inputs(is_root=is_root)
        return (args, kwargs) if dtype is None else self._inputs.enter(args, kwargs, dtype)

    def leave(self) -> None:
        """Undo ``enter``."""
        if self._calls:
            self._calls -= 1
            self._inputs.leave(keeps=self._calls)
            for lending in self._lendings:
                lending.leave()

    def cast_output(self, output: Any) -> Any:
        """Return the output of a call in the dtype of the policy.

        Raises ``UsageError`` if forward wrote to the copy of a parameter, whose values would be lost.
        """
        slot = self._params.written()
        if slot is not None and (module := slot.find_module()) is not None:
            raise UsageError(
                f"a forward wrote to a parameter of which it held a copy in {dtype_text(slot.dtype)}: it would be lost",
                at=f"parameter {slot.name!r} of {describe_module(module)}",
                fix="write to it between two steps, or add the class of its module to skipped_module_classes",
            )
        output_dtype = self._policy.output_dtype
        return output if output_dtype is None else cast_floats(output, output_dtype)

    def forget(self) -> None:
        """Drop the copies of parameters, if they are not in use: no backward follows."""
        self._params.forget()

    def enter_backward(self) -> None:
        """Hold the cast tensors for the running backward, in which parts of forward may run again."""
        for lending in self._lendings:
            lending.enter_backward(self._owners)

    def put_back(self) -> None:
        """Give the module its own tensors back, unless it runs; ``UsageError``: in another thread."""
        if self._calls and self._thread != get_ident():
            what = "state_dict() while another thread runs the module, which holds copies in low precision (mp_policy)"
            raise UsageError(what, fix="read it between steps, under a lock that these hold")
        if self._find_module() not in modules_in_call():
            self._calls = 0
            self._inputs.leave(keeps=0)
            for lending in self._lendings:
                lending.put_back()


def keep_grad_in(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Keep the gradient of ``param``, of any shape, in ``dtype``."""
    if grad_dtype_of(param) is not dtype:
        grad, param.grad = param.grad, None
        param.grad_dtype = dtype
        param.grad = None if grad is None else grad.to(dtype)
