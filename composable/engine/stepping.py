"""Optimizers that step inside backward.

Handles and reducers have *steppers*: functions that get parameters with whole, averaged gradients, step the parameters
of their own optimizer, and drop these gradients. One runs the optimizers of torch's ``_apply_optimizer_in_backward``,
whose own hooks would step on this rank's own gradients, or, on sharded parameters, never run.
"""

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from composable.errors import UsageError
from composable.ground.torch_hooks import in_backward_of_function
from composable.ground.torch_private import optimizers_in_backward

Stepper: TypeAlias = Callable[[Sequence[nn.Parameter]], None]

# Optimizers that compute an element's update from its own parameter, gradient and state alone.
ELEMENT_WISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

_MARK = "_composable_stepped"
_OF_TORCH = "_in_backward_optimizers"  # set by torch.distributed.optim._apply_optimizer_in_backward
# torch's own environment variable: "0" keeps the gradients after a step.
_DROPS_GRADIENTS = "DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE"


class _Mark:
    """The mark on a parameter that an optimizer steps inside backward."""

    __slots__ = ("holder", "stepper")

    def __init__(self, stepper: object, holder: int) -> None:
        self.stepper = weakref.ref(stepper)
        self.holder = holder

    def __reduce__(self) -> tuple[object, ...]:
        # Nothing steps a copy. `torch.load(weights_only=True)` accepts this type.
        return (OrderedDict, ())


def mark_stepped(param: nn.Parameter, stepper: object) -> None:
    """Note that ``stepper`` steps ``param``, of any shape, inside backward."""
    setattr(param, _MARK, _Mark(stepper, id(param)))


def unmark_stepped(params: Iterable[nn.Parameter]) -> None:
    """Undo ``mark_stepped`` for parameters of any shapes."""
    for param in params:
        vars(param).pop(_MARK, None)


def stepper_of(param: object) -> object | None:
    """Return the stepper of ``step_in_backward`` that steps ``param`` inside backward, if there is one."""
    mark = getattr(param, _MARK, None)
    return mark.stepper() if isinstance(mark, _Mark) and mark.holder == id(param) else None


def steps_alone(param: torch.Tensor) -> bool:
    """Say whether optimizers can step ``param`` [full shape] in backward without other ranks, also if it is sharded."""
    optimizers = [*getattr(param, _OF_TORCH, ())]
    stepper = stepper_of(param)
    if stepper is not None:
        optimizers.append(getattr(stepper, "optimizer"))  # noqa: B009
    return all(type(optimizer) in ELEMENT_WISE for optimizer in optimizers)


def has_torch_optimizer(param: torch.Tensor) -> bool:
    """Say whether ``_apply_optimizer_in_backward`` of torch was called for ``param``, of any shape."""
    return bool(getattr(param, _OF_TORCH, None))


def forget_torch_hooks(params: Iterable[torch.Tensor]) -> bool:
    """Remove ``_apply_optimizer_in_backward``'s hooks from ``params`` of any shapes; returns whether any had one."""
    known = optimizers_in_backward()
    found = False
    for param in params if known else ():
        if param in known:
            found = True
            for hook in known[param]:
                hook.remove()
            del known[param]
    return found


def has_stepped(param: torch.Tensor) -> bool:
    """Say whether torch's optimizers in backward have a state of ``param``, which fits no other shape."""
    return any(optimizer.state for optimizer in getattr(param, _OF_TORCH, ()))


def give_torch_optimizers(old: nn.Parameter, new: nn.Parameter) -> bool:
    """Let the optimizers of ``old``, which have not stepped, step ``new`` [same shape]; say whether there are any."""
    if not has_torch_optimizer(old):
        return False
    forget_torch_hooks([old])
    for optimizer in getattr(old, _OF_TORCH):
        for group in optimizer.param_groups:
            group["params"][:] = [new if param is old else param for param in group["params"]]
    for name in (_OF_TORCH, "_optimizer_classes", "_optimizer_kwargs"):
        if name in vars(old):
            setattr(new, name, vars(old).pop(name))
    return True


def step_torch_optimizers(params: Sequence[nn.Parameter]) -> None:
    """Step each parameter, of any shape, by the optimizers that ``_apply_optimizer_in_backward`` gave it."""
    for param in params:
        optimizers = getattr(param, _OF_TORCH, ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers and os.environ.get(_DROPS_GRADIENTS, "1") != "0":
            param.grad = None


def refuse_steppers(steppers: Sequence[Stepper], fqn: str) -> None:
    """Raise ``UsageError`` if an optimizer steps the parameters in backward: they can have no communication hook."""
    if steppers:
        raise UsageError(
            "an optimizer steps these parameters inside backward, so they cannot have a communication hook",
            at=f"parameter {fqn!r}",
            fix="step after backward, or leave the hook out",
        )


def refuse_graph_of_backward(fqn: str) -> UsageError:
    """Return the error for a backward with ``create_graph=True`` in which an optimizer changes parameters."""
    return UsageError(
        "a backward with create_graph=True cannot run while an optimizer steps inside it",
        at=f"parameter {fqn!r}",
        fix="call remove() on the result of step_in_backward, and step after the last backward",
    )


def check_backward(fqn: str) -> None:
    """Raise ``UsageError`` if an optimizer cannot step the parameter ``fqn``, and others, in the backward that begins.

    A backward that makes a graph, or runs inside of another one, goes on after the step, and a forward that is run
    again would read new values.
    """
    if torch.is_grad_enabled():
        raise refuse_graph_of_backward(fqn)
    if in_backward_of_function():
        raise UsageError(
            "an optimizer cannot step in a backward that runs inside of another one, as of a reentrant checkpoint",
            at=f"parameter {fqn!r}",
            fix="checkpoint with use_reentrant=False, annotate a module around the checkpoint, or step after backward",
        )
