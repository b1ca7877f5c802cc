"""The only file that registers hooks: on modules, tensors, parameters and optimizers.

What the hooks do is the business of who registers them; when they run, and in which order with
those of others, is said here.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from composable.torch_private import queue_callback

__all__ = [
    "after_gradients",
    "around_forward",
    "around_optimizer",
    "around_state_dict",
    "at_end_of_backward",
    "before_every_step",
    "beside_forward",
    "differentiable_tensors",
    "on_gradient",
]

at_end_of_backward = queue_callback


def around_forward(module: nn.Module, before: Callable[..., Any], after: Callable[..., None]) -> list[RemovableHandle]:
    """Call ``before(module, args, kwargs)`` and ``after(module, args, output)`` around the hooks that are there.

    So activation checkpointing and users' hooks run between them; of those that are registered later,
    a forward hook runs after ``after``. ``after`` also runs when forward raises. ``before`` may return
    other (args, kwargs).
    """
    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, prepend=False, always_call=True),
    ]


def beside_forward(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[RemovableHandle]:
    """Call ``before(module, args)`` and ``after(module, args, output)`` in their turn among other forward hooks."""
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call ``hook`` when the gradient of ``tensor`` arrives; also after an in-place change of it as a view."""
    tensor.register_hook(hook)
    base = tensor._base
    if base is not None and base.grad_fn is not None:
        # An in-place change gives a view another grad_fn, and the hook on it would never run.
        base.register_hook(hook)


def after_gradients(
    params: Iterable[nn.Parameter], arrivals: Iterable[Callable[[torch.Tensor], None]]
) -> list[RemovableHandle]:
    """Call each parameter's function whenever a backward has accumulated its gradient."""
    return [param.register_post_accumulate_grad_hook(arrive) for param, arrive in zip(params, arrivals, strict=True)]


def around_state_dict(
    module: nn.Module,
    *,
    before_save: Iterable[Callable[..., None]] = (),
    before_load: Iterable[Callable[..., None]] = (),
    after_load: Iterable[Callable[..., None]] = (),
) -> list[RemovableHandle]:
    """Call functions before ``state_dict()`` and around ``load_state_dict()`` of ``module``, each list in order."""
    hooks: list[RemovableHandle] = [module.register_state_dict_pre_hook(hook) for hook in before_save]
    hooks += [module.register_load_state_dict_pre_hook(hook) for hook in before_load]
    return hooks + [module.register_load_state_dict_post_hook(hook) for hook in after_load]


def before_every_step(check: Callable[..., None]) -> RemovableHandle:
    """Call ``check(optimizer, args, kwargs)`` before each step of every optimizer of the process."""
    registered: RemovableHandle = register_optimizer_step_pre_hook(check)
    return registered


def around_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    before_step: Callable[..., Any],
    after_step: Callable[..., None],
    before_state_dict: Callable[..., None],
    after_state_dict: Callable[..., dict[str, Any]],
    after_load: Callable[..., None],
) -> list[RemovableHandle]:
    """Call a function before and after each step and ``state_dict()``, and after ``load_state_dict()``.

    ``before_step`` may return other (args, kwargs), of which the first is what steps, and
    ``after_state_dict`` another dict.
    """
    return [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
        optimizer.register_state_dict_pre_hook(before_state_dict),
        optimizer.register_state_dict_post_hook(after_state_dict),
        optimizer.register_load_state_dict_post_hook(after_load),
    ]


def differentiable_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that require grad in nested tuples, lists, dicts, dataclasses and plain objects."""
    stack = [value]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            if item.requires_grad:
                yield item
        elif (
            item is None
            or isinstance(item, (bool, int, float, complex, str, bytes, torch.Size, type, nn.Module))
            or id(item) in seen
        ):
            continue
        else:
            seen.add(id(item))
            if isinstance(item, dict):
                stack.extend(reversed(list(item.values())))
            elif isinstance(item, (tuple, list, set, frozenset)):
                stack.extend(reversed(list(item)))
            elif dataclasses.is_dataclass(item):
                stack.extend(getattr(item, field.name, None) for field in reversed(dataclasses.fields(item)))
            elif hasattr(item, "__dict__"):
                stack.extend(reversed(list(vars(item).values())))
