"""What users put in place of a reduction, or behind it: communication hooks, torch's ``Comm``, all-reduce hooks.

What these give is looked at before it is used. Ranks that wait know this file by its name: what waits in a call
from here waits in code of the user's.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from composable.arguments import described
from composable.collectives import Transport, wait_for_work
from composable.errors import ConfigError
from composable.storage.comms import Registration
from composable.storage.gradient_path import Around, GradientPath, Reduced, Reduction, Whole, divided_before
from composable.storage.staging import stage

__all__ = ["CommScatterPath", "HookPath", "ThenHookPath", "reduced_otherwise"]


class HookPath(Whole):
    """What a communication hook makes of the gradients: it reduces and divides.

    Attributes:
        transport: Allocates; nothing goes through it.
        failure: What is wrong with the last result, if anything; who reads it forgets it.

    Args:
        transport: Of the ranks that share the shard.
        hook: With its state.
        dtype: Of the result.
    """

    __slots__ = ("_dtype", "_hook", "failure", "transport")

    def __init__(self, transport: Transport, hook: Registration, dtype: torch.dtype) -> None:
        self.transport = transport
        self.failure: ConfigError | None = None
        self._hook = hook
        self._dtype = dtype

    def begin(self, source: torch.Tensor) -> Reduction:
        hook, transport, dtype = self._hook, self.transport, self._dtype
        output = transport.empty(source.numel() // transport.world_size, source)
        like = output.view(-1)
        if output.is_floating_point() or output.is_complex():
            # What a hook leaves unwritten is to be seen, not to be what memory held before.
            output.fill_(math.nan)
        # Another object: hooks may give it other data, and the memory is used again.
        returned = hook.function(hook.state, source.view(-1), output)
        what = _what_is_wrong(returned, output, like, dtype)
        if what:
            # The ranks have met in the hook: they go on, and are told at the end of backward.
            self.failure = ConfigError(
                f"the communication hook {what}",
                fix="fill `output` in place, with the mean of this rank's slice, in the dtype that it has, as hooks of "
                "LowPrecisionState(..., parameter_type=None) do; return None",
            )
            return Reduced(like.new_zeros(like.shape, dtype=dtype))
        return Reduced(output if output.dtype is dtype else output.to(dtype))


class CommScatterPath(Whole):
    """A reduce-scatter of the user's: torch's ``Comm``, which adds up; the path divides.

    Attributes:
        transport: Allocates; nothing goes through it.

    Args:
        transport: Of the ranks that share the shard.
        comm: Of the user.
        group: Of these ranks.
        divisor: Of the sum.
        dtype: Of the result.
        fqn: Of a parameter of the buffer.
    """

    __slots__ = ("_comm", "_divisor", "_dtype", "_fqn", "_group", "transport")

    def __init__(
        self, transport: Transport, comm: Any, group: dist.ProcessGroup, divisor: float, dtype: torch.dtype, fqn: str
    ) -> None:
        self.transport = transport
        self._comm = comm
        self._group = group
        self._fqn = fqn
        self._divisor = divisor
        self._dtype = dtype

    def begin(self, source: torch.Tensor) -> Reduction:
        world_size = self.transport.world_size
        shard = self.transport.empty(source.numel() // world_size, source, self._dtype)
        if world_size == 1:
            shard.copy_(source)
            return Reduced(shard.div_(self._divisor))
        left = divided_before(source, self._divisor)
        sent = stage(self._comm, source.numel(), source, self._fqn)
        sent.copy_(source)
        output = stage(self._comm, shard.numel(), source, self._fqn)
        work = self._comm(
            output_tensor=output, input_tensor=sent, group=self._group, op=dist.ReduceOp.SUM, async_op=False
        )
        wait_for_work(work, self._group)
        # The user's memory may be used again by the next call.
        shard.copy_(output)
        return Reduced(shard.div_(left))


class ThenHookPath(Around):
    """Another path, then a function of the user's on the shard that it gives.

    Args:
        inner: The other path.
        hook: Called with the reduced shard, which it may change.
        stream: Where it runs; ``None``: on the current one.
    """

    __slots__ = ("_hook", "_own_failure", "_stream")

    def __init__(self, inner: GradientPath, hook: Callable[[torch.Tensor], object], stream: Any) -> None:
        super().__init__(inner)
        self._own_failure: ConfigError | None = None
        self._hook = hook
        self._stream = stream

    def begin(self, source: torch.Tensor) -> Reduction:
        return self._then_hook(self.inner.begin(source))

    def resume(self) -> Reduction:
        return self._then_hook(self.inner.resume())

    def _then_hook(self, reduction: Reduction) -> Reduction:
        # To its end: hooks that communicate run in one order on all ranks, and never for a step that was abandoned.
        shard = reduction.finish()
        if shard is None:
            return Reduced(None)
        if self._stream is None:
            self._check(self._hook(shard), shard)
            return Reduced(shard)
        module = torch.get_device_module(shard.device)
        current = module.current_stream()
        self._stream.wait_stream(current)
        try:
            with module.stream(self._stream):
                self._check(self._hook(shard), shard)
        finally:
            current.wait_stream(self._stream)
        return Reduced(shard)

    @property
    def failure(self) -> ConfigError | None:
        """What is wrong with the last result of the other path, or of the function."""
        return super().failure or self._own_failure

    @failure.setter
    def failure(self, failure: ConfigError | None) -> None:
        self._own_failure = failure
        if super().failure is not None:
            self.inner.failure = None  # type: ignore[attr-defined]  # it has one

    def _check(self, returned: object, shard: torch.Tensor) -> None:
        """Note what the function returned: a shard of its own would be lost, and a ``Work`` not waited for."""
        if returned is not None and returned is not shard:
            wait = getattr(returned, "wait", None)
            if callable(wait):
                wait()
            # The ranks may have met in the function: they go on, and are told at the end of backward.
            self._own_failure = ConfigError(
                f"the all-reduce hook returned {described(returned)}",
                fix="change the shard in place, wait for what that starts, and return None",
            )


def reduced_otherwise(hook: Registration, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ConfigError | None]:
    """Let a communication hook average ``gradients`` [N] over ranks that all keep the whole of it.

    Returns:
        The averages, in the same memory or not; or what is wrong with them.
    """
    averaged = gradients.view(-1)
    what = _what_is_wrong(hook.function(hook.state, averaged), averaged, gradients, gradients.dtype)
    if what:
        fix = (
            "average the gradients in place, in the dtype that they have, as hooks of "
            "LowPrecisionState(..., parameter_type=None) do; return None"
        )
        return None, ConfigError(f"the communication hook {what}", fix=fix)
    return averaged, None


def _what_is_wrong(returned: object, output: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> str:
    """Say what a hook did to ``output`` that it should not have; empty: nothing."""
    if returned is not None and returned is not output:
        wait = getattr(returned, "wait", None)
        if callable(wait):
            wait()  # It writes to memory that is about to be freed.
        return f"returned {described(returned)}"
    if output.shape != like.shape:
        return f"left a result of shape {list(output.shape)}, where {list(like.shape)} is due"
    if output.dtype not in {like.dtype, dtype}:
        return f"left a result of {str(output.dtype)[6:]}, where {str(like.dtype)[6:]} is due"
    if output.device != like.device:
        return f"left a result on {output.device}, where {like.device} is due"
    return ""
