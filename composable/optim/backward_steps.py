"""Optimizer steps inside backward.

An optimizer may step each parameter as soon as its averaged gradient is there. Then the gradient is dropped, so that
memory holds the gradients of one bucket or handle, and not of the whole model. ``engine/stepping.py`` and
``replication/reducer.py`` call the functions that step.

Source: fusing the step into backward, arXiv 2306.09782.
"""

import inspect
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn

from composable.annotation import ReducingUnit, model_ranks_of, params_of, unit_of
from composable.comm import Ranks, compare_in_each
from composable.engine import ELEMENT_WISE, Handle, has_torch_optimizer, mark_stepped, stepper_of, unmark_stepped
from composable.errors import ComposableError, ConfigError, UsageError, made_alike
from composable.ground.frames import in_backward
from composable.ground.modes import unseen
from composable.ground.names import check_optimizer
from composable.ground.torch_hooks import after_step, before_step
from composable.optim.local_step import LocalStep
from composable.optim.rebind import CHECKS_ITSELF, check_replaced
from composable.replication import Reducer, check_steppable

_Groups: TypeAlias = list[dict[str, Any]]
_Narrowed: TypeAlias = tuple[_Groups, _Groups, list[list[nn.Parameter]]]


def step_in_backward(optimizer: torch.optim.Optimizer) -> "BackwardSteps":
    """Let ``optimizer`` step each of its parameters inside backward, as soon as its averaged gradient is there.

    The gradient is dropped then: ``param.grad`` is ``None`` after backward, and memory holds the gradients of at most
    two buckets or handles. Backwards in ``no_sync`` add gradients up as usual, and the backward that synchronises
    steps.

    All parameters of a bucket or a handle are stepped in one call of ``optimizer.step``, with the options that their
    param groups have then; hooks on the optimizer's steps run in each call. ``optimizer.step()`` by hand is an error.
    A copy of the model, or of the optimizer, does not step in backward.

    Collective: all ranks of the annotations, same order, between two steps, after annotating.

    Args:
        optimizer: Has annotated parameters only. Its step treats each parameter by itself and needs no closure.

    Returns:
        An object whose ``remove()`` ends the steps inside backward; as a context manager, it ends them when left.

    Raises:
        ConfigError: ``optimizer`` is no optimizer, or cannot step a part of its parameters, or has a parameter that is
            not annotated; on this rank or another one.
        UsageError: An optimizer steps these parameters inside backward already; or they have a communication hook; or
            an annotation has replaced them; or a backward is running.
        DesyncError: The ranks differ in optimizer or parameters.
    """
    check_optimizer("optimizer", optimizer)
    units = dict(found for param in _params_of(optimizer) if (found := unit_of(param)) is not None)
    made_alike(lambda: _check(optimizer, units), lambda _, failure: _agree(optimizer, units, failure))
    return BackwardSteps(optimizer, list(units))


class BackwardSteps:
    """The result of ``step_in_backward``. ``remove``, or leaving it as a context, ends the steps inside backward.

    Attributes:
        optimizer: The optimizer that steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[ReducingUnit]) -> None:
        self.optimizer = optimizer
        self._units = units
        self._group_of = {id(param): i for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
        self._params = list(_params_of(optimizer))
        self._lock = threading.Lock()
        self._is_stepping = False
        # Element-wise optimizers step sharded parameters as plain tensors.
        self._local = LocalStep(type(optimizer)) if type(optimizer) in ELEMENT_WISE else None
        # While the optimizer steps a part of its parameters: all groups, the groups of the step, their full lists.
        self._narrowed: _Narrowed | None = None
        self._hooks: list[Any] = []
        try:
            self._hooks = [before_step(optimizer, self._before_step), after_step(optimizer, self._end_local)]
            for param in self._params:
                mark_stepped(param, self)
            for unit in units:
                unit.step_by([*unit.steppers, self._step])
        except BaseException:
            # Ctrl-C: the caller has no object yet that could remove the hooks.
            self._let_go()
            raise

    def remove(self) -> None:
        """End the steps inside backward; no error if they have ended. Call it on every rank, between two steps.

        Raises:
            UsageError: A backward is running.
        """
        if not self._units:
            return
        if in_backward():
            raise UsageError("a backward is running", fix="call remove() between two steps")
        self._let_go()

    def _let_go(self) -> None:
        self._widen()
        for hook in self._hooks:
            hook.remove()
        unmark_stepped(self._params)
        for unit in self._units:
            unit.step_by([one for one in unit.steppers if one != self._step])
        # A backward that was stopped steps the rest, as on the other ranks, in the next forward: `_group_of` stays.
        self._units, self._params, self._hooks = [], [], []

    def __enter__(self) -> "BackwardSteps":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _step(self, params: Sequence[nn.Parameter]) -> None:
        """Step the parameters among ``params`` that are the optimizer's, and drop their gradients."""
        group_of = self._group_of
        chosen: dict[int, list[nn.Parameter]] = {}
        for param in params:
            index = group_of.get(id(param))
            if index is not None:
                chosen.setdefault(index, []).append(param)
        if not chosen:
            return
        with self._lock:  # Each device has a thread of its own in backward.
            self._step_groups(chosen)
        for several in chosen.values():
            for param in several:
                param.grad = None

    def _step_groups(self, chosen: dict[int, list[nn.Parameter]]) -> None:
        self._widen()
        optimizer = self.optimizer
        groups = optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(group_of := self._group_of):
            raise UsageError(
                f"the optimizer has {sum(len(group['params']) for group in groups)} parameters, and had "
                f"{len(group_of)} when step_in_backward was called",
                fix="call remove() on the result of step_in_backward, then step_in_backward again",
            )
        # The groups are the optimizer's own dicts: schedulers, and the step itself, write to them.
        stepped = [groups[index] for index in chosen]
        self._narrowed = (groups, stepped, [group["params"] for group in stepped])
        try:
            self._is_stepping = True
            optimizer.param_groups = stepped
            for group, several in zip(stepped, chosen.values(), strict=True):
                group["params"] = several
            optimizer.step()
        finally:
            self._is_stepping = False
            self._end_local()
            self._widen()

    def _widen(self) -> None:
        """Give the optimizer all of its parameters back, also if Ctrl-C cut an earlier step short."""
        if self._narrowed is not None:
            groups, stepped, whole = self._narrowed
            for group, params in zip(stepped, whole, strict=True):
                group["params"] = params
            self.optimizer.param_groups = groups
            self._narrowed = None

    @unseen
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Refuse a step by hand; inside backward, let the ``LocalStep`` step in place of the optimizer."""
        if not self._is_stepping:
            if all(group.get("lr") == 0 for group in optimizer.param_groups):
                # Such a step changes nothing; torch's state dicts of an optimizer without state begin with one.
                return None
            raise UsageError(
                "step() of an optimizer that steps inside backward",
                fix="leave the call out, with scaling and clipping of gradients: backward has stepped already; "
                "or call remove() on the result of step_in_backward",
            )
        if self._local is None or not self._local.takes(optimizer):
            return None
        return self._local.begin(optimizer, args, kwargs)

    @unseen
    def _end_local(self, *_: Any) -> None:
        """End the ``LocalStep``; after a step, so that the hooks that follow see its results."""
        if self._local is not None:
            self._local.end()


def _params_of(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _check(optimizer: torch.optim.Optimizer, units: Iterable[ReducingUnit]) -> None:
    check_replaced(optimizer)
    for param in _params_of(optimizer):
        if unit_of(param) is None:
            raise ConfigError(
                f"a parameter of shape {list(param.shape)} of the optimizer is not annotated",
                fix="call fully_shard or replicate first; give other parameters an optimizer of their own",
            )
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is closure.empty
    if isinstance(optimizer, torch.optim.LBFGS) or needs_closure:
        raise ConfigError(
            f"the step of {kind.__name__} needs a closure that runs backward", fix="step it by hand, after backward"
        )
    if kind.__module__.startswith("torch.distributed."):
        raise ConfigError(
            f"{kind.__name__} steps or communicates for all of its parameters together",
            fix="pass the optimizer inside of it, or step by hand, after backward",
        )
    if CHECKS_ITSELF in vars(optimizer):
        raise ConfigError(
            "the optimizer is accelerated for steps on all of its parameters", fix="leave accelerate_optimizer out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError("the optimizer is differentiable", fix="step it by hand, after backward")
    for param in _params_of(optimizer):
        if stepper_of(param) is not None or has_torch_optimizer(param):
            raise UsageError(
                "an optimizer steps inside backward on one of the parameters already",
                at=f"parameter of shape {list(param.shape)}",
                fix="call step_in_backward once for each parameter",
            )
    if in_backward():
        raise UsageError("a backward is running", fix="call step_in_backward between two steps")
    for unit in units:
        if isinstance(unit, Reducer):
            check_steppable(unit.params)
        if unit.comm_hooks:
            raise UsageError(
                "a communication hook reduces these gradients, so no optimizer can step inside backward",
                at=f"parameter {params_of(unit)[0]!r}",
                fix="remove() the hook, or step after backward",
            )


def _agree(optimizer: torch.optim.Optimizer, units: dict[ReducingUnit, Ranks], failure: ComposableError | None) -> None:
    """Raise ``failure``, of this rank or another, or an error if ranks make different calls. Collective."""
    # Some ranks may have parameters that other ranks lack, such as experts.
    lines = {ranks: [f"step_in_backward of {type(optimizer).__name__}"] for ranks in units.values()}
    for unit, ranks in units.items():
        lines[ranks] += [f"steps {fqn}" for fqn in params_of(unit)]
    for param in _params_of(optimizer):
        if (found := unit_of(param)) is not None:
            lines[found[1]].append(f"with a parameter {list(param.shape)}")
    what, fix = "the ranks let different optimizers step inside backward", "call step_in_backward alike on every rank"
    try:
        compare_in_each(lines, failure, what=what, fix=fix)
    except ComposableError as error:
        failure = error
    models = model_ranks_of(unit for unit in units if isinstance(unit, Handle)).values()
    compare_in_each({model.everyone: () for model in models if model.others}, failure, what=what, fix=fix)
