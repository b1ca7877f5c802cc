"""Communication hooks: how gradients are reduced, by a function of the user's or by one of these.

``hook(state, grad, output)`` gets this rank's gradients, flat and not divided, and fills ``output`` with this rank's
slice of their mean over the ranks. ``hook(state, grad)`` averages ``grad`` in place, for ranks that all keep the
whole. ``register_comm_hook`` puts a hook in place.

Sources: the sharded hooks of torch 2.0 (pytorch/pytorch#83254) and the wrappers of its DDP hooks.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from composable.arguments import described
from composable.collectives import all_reduce_in, reduce_scatter_in
from composable.errors import ConfigError, place_of_rank

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "check_hook",
    "check_state",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "reduce_scatter_hook",
    "takes_arguments",
    "takes_bucket",
]

_Hook: TypeAlias = Callable[..., Any]

_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"


class DefaultState:
    """What the hooks of this file need: the ranks, and by what to divide before and after they add up.

    The two factors are near each other, so that neither a gradient nor a sum leaves the range of its dtype.

    Args:
        process_group: The ranks whose gradients are averaged: those of the annotation.

    Attributes:
        process_group: The same.
        world_size: Ranks in it.
        gradient_predivide_factor: The first power of two that does not divide the number of ranks, or whose square
            is not below it.
        gradient_postdivide_factor: The rest: the two multiply to the number of ranks.

    Raises:
        ConfigError: ``process_group`` is no process group of which this rank is a member.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise ConfigError(
                f"process_group is {described(process_group)}, not a ProcessGroup that this rank is in",
                at=place_of_rank(),
                fix="pass dist.group.WORLD, or the group of the mesh",
            )
        self.process_group = process_group
        self.world_size = process_group.size()
        self.gradient_predivide_factor = _predivide_factor(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """The state of hooks that send gradients in a dtype of few bits.

    Args:
        process_group: The ranks.
        parameter_type: What gradients are cast to in the end; ``None``: what they were before.

    Raises:
        ConfigError: One of them is none.
    """

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype | None = torch.float32) -> None:
        super().__init__(process_group)
        if parameter_type is not None and not (
            isinstance(parameter_type, torch.dtype) and parameter_type.is_floating_point
        ):
            raise ConfigError(
                f"parameter_type is {described(parameter_type)}",
                at=place_of_rank(),
                fix="pass the dtype of the parameters, such as torch.float32, or None",
            )
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average ``grad`` [N] over the ranks, in place. Collective."""
    _divide(grad, state.gradient_predivide_factor)
    all_reduce_in(state.process_group, grad)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Fill ``output`` [S] with this rank's slice of the mean of ``grad`` [W * S], which is overwritten. Collective."""
    _divide(grad, state.gradient_predivide_factor)
    reduce_scatter_in(state.process_group, grad, output)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Send gradients as float16: the mean goes to ``output`` [S], or in place of ``grad`` without one. Collective."""
    _compress(_default_hook, torch.float16, state.parameter_type, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Send gradients as bfloat16: the mean goes to ``output`` [S], or in place of ``grad`` without one. Collective."""
    _compress(_default_hook, torch.bfloat16, state.parameter_type, state, grad, output)


def fp16_compress_wrapper(hook: _Hook) -> _Hook:
    """Return a hook that lets ``hook`` reduce gradients as float16, and casts the result back.

    Args:
        hook: Called as ``hook(state, grad, output)``, or ``hook(state, grad)`` where there is no output.

    Raises:
        ConfigError: ``hook`` is no function, or one of ``DistributedDataParallel``.
    """
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: _Hook) -> _Hook:
    """Return a hook that lets ``hook`` reduce gradients as bfloat16, and casts the result back.

    Args:
        hook: Called as ``hook(state, grad, output)``, or ``hook(state, grad)`` where there is no output.

    Raises:
        ConfigError: ``hook`` is no function, or one of ``DistributedDataParallel``.
    """
    return _wrapped(hook, torch.bfloat16)


def check_state(hook: object, state: object) -> None:
    """Raise ``ConfigError`` unless ``state`` has what ``hook`` reads, if that is one of this file, wrapped or not."""
    hook = getattr(hook, "_inner", hook)
    for hooks, needed in (
        ((allreduce_hook, reduce_scatter_hook), DefaultState),
        ((fp16_compress_hook, bf16_compress_hook), LowPrecisionState),
    ):
        names = ["process_group", "gradient_predivide_factor", "gradient_postdivide_factor"]
        names += ["parameter_type"] if needed is LowPrecisionState else []
        # Whatever has the attributes: also the states of torch.
        if any(hook is one for one in hooks) and not all(hasattr(state, name) for name in names):
            raise ConfigError(
                f"{getattr(hook, '__name__', '')} got {described(state)} as its state",
                fix=f"pass a composable.{needed.__name__}",
            )


def check_hook(hook: object) -> None:
    """Raise ``ConfigError`` if ``hook`` is a wrapper of torch, which hands a bucket on, around a hook of gradients."""
    if not getattr(hook, "__module__", "").startswith(_HOOKS_OF_TORCH) or not inspect.isfunction(hook):
        return
    for inner in inspect.getclosurevars(hook).nonlocals.values():
        check_hook(inner)
        signature = _signature_of(inner)
        if signature is not None and not takes_bucket(signature):
            raise ConfigError(
                f"{hook.__qualname__.partition('.')[0]} of torch got a hook of gradients, {_name_of(inner)}",
                fix="wrap it by composable.fp16_compress_wrapper or composable.bf16_compress_wrapper",
            )


def takes_arguments(signature: inspect.Signature, count: int) -> bool:
    """Say whether what has ``signature`` can be called with so many arguments."""
    with suppress(TypeError):
        signature.bind(*[None] * count)
        return True
    return False


def takes_bucket(signature: inspect.Signature) -> bool:
    """Say whether a hook of two arguments or three is one of ``DistributedDataParallel``."""
    second = list(signature.parameters)[1:2]
    return second == ["bucket"] or (not takes_arguments(signature, 3) and second != ["grad"])


def _signature_of(hook: object) -> inspect.Signature | None:
    """Return the signature of a function; ``None``: it is none, or a builtin without one."""
    with suppress(TypeError, ValueError):
        return inspect.signature(hook) if callable(hook) else None
    return None


def _name_of(hook: object) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def _predivide_factor(world_size: int) -> float:
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)


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
        raise ConfigError(f"hook is {described(hook)}", at=place_of_rank(), fix="pass a communication hook")
    signature = _signature_of(hook)
    if signature is not None and takes_arguments(signature, 2) and takes_bucket(signature):
        raise ConfigError(
            f"{_name_of(hook)} takes a bucket, as hooks of DistributedDataParallel do, and the wrapper gives gradients",
            at=place_of_rank(),
            fix="wrap it by torch's wrapper in ddp_comm_hooks.default_hooks; if it takes gradients, call them grad",
        )

    # A copy of it in place of a closure would not be told apart from others when ranks compare.
    @functools.wraps(hook)
    def compress(state: Any, grad: torch.Tensor, output: torch.Tensor | None = None) -> Any:
        return _compress(hook, dtype, None, state, grad, output)

    compress.__qualname__ = f"{str(dtype)[6:]} around {_name_of(hook)}"
    del compress.__wrapped__  # The signature is this one.
    compress._inner = getattr(hook, "_inner", hook)  # type: ignore[attr-defined]  # read by check_state
    return compress


def _compress(
    hook: _Hook,
    dtype: torch.dtype,
    parameter_type: torch.dtype | None,
    state: Any,
    grad: torch.Tensor,
    output: torch.Tensor | None,
) -> Any:
    """Let ``hook`` reduce ``grad`` as ``dtype``; complex numbers as pairs.

    Returns:
        What the hook returned, if that is an error to be seen by who called.
    """
    sent = _real(grad).to(dtype)
    if output is None:
        returned, result, target = hook(state, sent), sent, grad
    else:
        result = torch.empty_like(_real(output), dtype=dtype)
        if result.is_floating_point():
            result.fill_(float("nan"))  # To be seen where the hook leaves it so.
        returned, target = hook(state, sent, result), output
    _decompress(result, target, parameter_type)
    return None if returned is result else returned


def _decompress(result: torch.Tensor, target: torch.Tensor, parameter_type: torch.dtype | None) -> None:
    """Give ``target`` the values of ``result``, in ``parameter_type``; ``None``: in its own dtype."""
    place = _real(target)
    dtype = place.dtype if parameter_type is None or target.is_complex() else parameter_type
    if place.shape != result.shape or place.dtype is not dtype:
        target.data = result if place.shape != result.shape else result.to(dtype)
    else:
        place.copy_(result)
    if result.device.type != "cpu":
        # The cast is queued, and the memory is not to be given to another stream before it has run.
        result.record_stream(torch.get_device_module(result.device).current_stream())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
