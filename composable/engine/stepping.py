"""What steps parameters inside backward, as soon as their reduced gradients are there.

Handles and reducers have *steppers*: each gets parameters that have whole, averaged gradients, steps those that are
its own, and drops their gradients. Here are also those of torch's ``_apply_optimizer_in_backward``, taken over: its
hooks would step on this rank's own gradients, or, on sharded parameters, never run.
"""

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from composable.errors import UsageError, place_of_rank
from composable.ground.frames import in_backward_of_function
from composable.ground.torch_private import optimizers_in_backward

__all__ = [
    "ELEMENT_WISE",
    "Stepper",
    "check_backward",
    "forget_torch_hooks",
    "give_torch_optimizers",
    "has_stepped",
    "has_torch_optimizer",
    "mark_stepped",
    "refuse_graph_of_backward",
    "refuse_steppers",
    "step_torch_optimizers",
    "stepper_of",
    "steps_alone",
    "unmark_stepped",
]


Stepper: TypeAlias = Callable[[Sequence[nn.Parameter]], None]

# Each computes an element's update from the element's own parameter, gradient and state alone.
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
# torch's own switch: "0" leaves the gradients.
_DROPS_GRADIENTS = "DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE"


class _Mark:
    """The mark on a parameter that an optimizer steps inside backward."""

    __slots__ = ("holder", "stepper")

    def __init__(self, stepper: object, holder: int) -> None:
        self.stepper = weakref.ref(stepper)
        self.holder = holder

    def __reduce__(self) -> tuple[object, ...]:
        # Copies are stepped by nobody. A type that `torch.load(weights_only=True)` takes.
        return (OrderedDict, ())


def mark_stepped(param: nn.Parameter, stepper: object) -> None:
    """Note that ``stepper`` steps ``param``, of any shape, inside backward."""
    setattr(param, _MARK, _Mark(stepper, id(param)))


def unmark_stepped(params: Iterable[nn.Parameter]) -> None:
    """Undo ``mark_stepped`` for parameters of any shapes."""
    for param in params:
        vars(param).pop(_MARK, None)


def stepper_of(param: object) -> object | None:
    """Return what steps ``param`` inside backward, by ``step_in_backward``."""
    mark = getattr(param, _MARK, None)
    return mark.stepper() if isinstance(mark, _Mark) and mark.holder == id(param) else None


def steps_alone(param: torch.Tensor) -> bool:
    """Say whether what steps ``param`` [full shape] in backward needs no other rank, also where it is sharded."""
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
    """Say whether such an optimizer of ``param`` has a state, which belongs to the tensor of this shape."""
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
    """Raise if something steps the parameters inside backward, beside which there is no communication hook.

    Raises:
        UsageError: It does.
    """
    if steppers:
        raise UsageError(
            "an optimizer steps these parameters inside backward, which goes with no communication hook",
            at=f"{place_of_rank()}, parameter {fqn!r}",
            fix="step after backward, or leave the hook out",
        )


def refuse_graph_of_backward(fqn: str) -> UsageError:
    """Return the error for a backward that is to be differentiated, and would change what it reads."""
    return UsageError(
        "backward with create_graph=True, while an optimizer steps inside of it",
        at=f"{place_of_rank()}, parameter {fqn!r}",
        fix="remove() what step_in_backward returned, and step after the last backward",
    )


def check_backward(fqn: str) -> None:
    """Raise if an optimizer cannot step the parameter ``fqn``, and others, in the backward that begins.

    Raises:
        UsageError: It is to be differentiated, or runs inside of another one: its end is not that of the step, and a
            forward that runs again after it would read new values.
    """
    if torch.is_grad_enabled():
        raise refuse_graph_of_backward(fqn)
    if in_backward_of_function():
        raise UsageError(
            "a backward inside of another one, as a reentrant checkpoint runs it, while an optimizer steps inside",
            at=f"{place_of_rank()}, parameter {fqn!r}",
            fix="checkpoint with use_reentrant=False, annotate a module around the checkpoint, or step after backward",
        )
