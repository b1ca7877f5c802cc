"""How bytes travel where users choose: communication hooks, divisors, torch's ``Comm``, all-reduce hooks.

A communication hook is registered on a module, and holds for the handles at and below it that no nearer registration
holds for. What functions of users give is looked at before it is used.
"""

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from composable.comm import DONE, Pending, Transport, wait_for_work
from composable.engine.paths import Around, Gather, GradientPath, Reduction, Whole, divided_before
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.ground.frames import modules_of_copy
from composable.ground.names import describe_module, described

__all__ = [
    "DEFAULT_COMMS",
    "CommGather",
    "CommScatterPath",
    "Comms",
    "HookFunction",
    "HookPath",
    "Registration",
    "ThenHookPath",
    "copied_registrations",
    "nearest",
    "reduced_otherwise",
    "stage",
]


HookFunction: TypeAlias = Callable[..., Any]


class Registration:
    """A communication hook and the module that it was registered on.

    Args:
        module: The module.
        state: Handed to ``function``.
        function: The hook.
        takes_bucket: It is called with a bucket of ``replicate``, as torch's ddp_comm_hooks are, not with gradients.

    Attributes:
        state: The same.
        function: The same.
        takes_bucket: The same.
    """

    def __init__(self, module: nn.Module, state: Any, function: HookFunction, *, takes_bucket: bool = False) -> None:
        self._module: weakref.ref[nn.Module] | None = weakref.ref(module)
        self.state = state
        self.function = function
        self.takes_bucket = takes_bucket
        self._is_copy_to_place = False

    @property
    def module(self) -> nn.Module | None:
        """Where it was registered; ``None``: outside of what was copied, or the module is gone."""
        return None if self._module is None else self._module()

    @property
    def name(self) -> str:
        """What messages call the hook, the same on all ranks."""
        hook: Any = self.function
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        return f"{getattr(hook, '__module__', '')}.{name} with {type(self.state).__qualname__}"

    def reaches(self, module: nn.Module) -> bool:
        """Say whether ``module`` is at or below the registration's module."""
        own = self.module
        return own is None or module in own.modules()

    def __deepcopy__(self, memo: dict[Any, Any]) -> "Registration":
        twin = memo[id(self)] = copy.copy(self)
        twin.state, twin.function = _copy_hook(self.state, self.function, memo)
        twin._is_copy_to_place = True
        return twin

    def place_copy(self, memo: dict[Any, Any]) -> None:
        """Let a copy know the copy of its module, once modules are copied; one outside stays outside."""
        if self._is_copy_to_place:
            self._is_copy_to_place = False
            module = self.module
            is_inside = module is not None and module in modules_of_copy(memo)
            self._module = weakref.ref(copy.deepcopy(module, memo)) if is_inside and module is not None else None


def _copy_hook(state: Any, function: HookFunction, memo: dict[int, Any]) -> tuple[Any, HookFunction]:
    """Return a deep copy of a hook and its state that talks in the same process groups."""
    groups = {
        name: value
        for name in (*getattr(state, "__slots__", ()), *getattr(state, "__dict__", ()))
        if isinstance(value := getattr(state, name, None), dist.ProcessGroup)
    }
    for group in (state, *groups.values()):
        if isinstance(group, dist.ProcessGroup):
            memo[id(group)] = group
    copied: tuple[Any, HookFunction] = copy.deepcopy((state, function), memo)
    for name, group in groups.items():
        # States that can be pickled, such as that of PowerSGD, leave their group behind.
        setattr(copied[0], name, group)
    return copied


def nearest(registrations: Sequence[Registration]) -> Registration | None:
    """Return the registration that holds, of those that reach a handle: the one on the innermost module.

    Raises:
        ConfigError: Neither of two modules is inside the other.
    """
    found: Registration | None = None
    for one in registrations:
        if found is None or (one.module is not None and found.reaches(one.module)):
            found = one
    for one in registrations:
        if found is not None and one is not found and found.module is not None and not one.reaches(found.module):
            raise ConfigError(
                "two communication hooks reach the same parameters, and neither is the nearer",
                at=" and ".join(
                    describe_module(module) for each in (one, found) if (module := each.module) is not None
                ),
                fix="register on the module that owns the parameters",
            )
    return found


def copied_registrations(registrations: Sequence[Registration], memo: dict[int, Any]) -> list[Registration]:
    """Return deep copies, the nearest first: the modules of some may be left behind, and with them what is nearer."""
    ordered = sorted(
        registrations, key=lambda one: sum(one is not other and _is_inside(one, other) for other in registrations)
    )
    return [copy.deepcopy(one, memo) for one in reversed(ordered)]


def _is_inside(one: Registration, other: Registration) -> bool:
    return one.module is not None and other.reaches(one.module)


@dataclass(frozen=True, eq=False)
class Comms:
    """What the user chose for a handle; equal on all ranks.

    Attributes:
        hook: The registration that holds.
        divide_factor: What sums of gradients are divided by, instead of the number of ranks.
        sums_only: Collectives add up, and the division is a step of its own.
        all_reduce_hook: Called with each reduced shard.
        all_reduce_stream: Where it runs; ``None``: on that of the reductions.
        all_gather: In place of the transport's: ``Comm`` of torch.
        reduce_scatter: The same.

    Raises:
        UsageError: A communication hook meets what it would replace.
    """

    hook: Registration | None = None
    divide_factor: float | None = None
    sums_only: bool = False
    all_reduce_hook: Callable[[torch.Tensor], object] | None = None
    all_reduce_stream: Any = None
    all_gather: Any = None
    reduce_scatter: Any = None

    def __post_init__(self) -> None:
        if self.hook is not None:
            names = {
                "a gradient divide factor": self.divide_factor is not None,
                "sums forced": self.sums_only,
                "a reduce-scatter of its own": self.reduce_scatter is not None,
            }
            for name, is_set in names.items():
                if is_set:
                    raise UsageError(
                        f"a module cannot have {name} and a communication hook, which reduces and divides by itself",
                        fix="keep one of the two",
                    )

    @property
    def has_hooks(self) -> bool:
        """A function of the user's sees the gradients."""
        return self.hook is not None or self.all_reduce_hook is not None

    def compared_text(self) -> str:
        """Return what has to be equal on all ranks; empty: nothing was chosen."""
        own = {
            f"communication hook {'' if self.hook is None else self.hook.name}": self.hook,
            f"gradient divide factor {self.divide_factor}": self.divide_factor,
            "sums forced": self.sums_only,
            "an all-reduce hook": self.all_reduce_hook,
            "an all-gather of its own": self.all_gather,
            "a reduce-scatter of its own": self.reduce_scatter,
        }
        return ", ".join(text for text, chosen in own.items() if chosen is not None and chosen is not False)


DEFAULT_COMMS = Comms()


def stage(comm: Any, numel: int, like: torch.Tensor, fqn: str) -> torch.Tensor:
    """Return [numel] of what ``comm`` allocates, of the dtype and on the device of ``like``.

    Args:
        comm: Of the user.
        numel: Elements.
        like: What it is for.
        fqn: Of a parameter whose collective it is.

    Raises:
        ConfigError: It gave something else.
    """
    found = comm.allocate((numel,), dtype=like.dtype, device=like.device)
    if (
        not isinstance(found, torch.Tensor)
        or found.shape != (numel,)
        or found.dtype is not like.dtype
        or found.device != like.device
    ):
        is_tensor = isinstance(found, torch.Tensor)
        shown = f"{list(found.shape)} {str(found.dtype)[6:]} on {found.device}" if is_tensor else described(found)
        raise ConfigError(
            f"{type(comm).__name__}.allocate returned {shown}",
            at=f"{place_of_rank()}, buffer of parameter {fqn!r}",
            fix=f"return a tensor [{numel}] {str(like.dtype)[6:]} on {like.device}",
        )
    return found


class CommGather(Gather):
    """An all-gather of the user's: torch's ``Comm``. The buffer's memory is ours, so what it fills is copied.

    Args:
        transport: Of the ranks; nothing goes through it.
        key: Of the buffer.
        comm: Of the user.
        group: Of these ranks.
        fqn: Of a parameter of the buffer.
    """

    def __init__(self, transport: Transport, key: int, comm: Any, group: dist.ProcessGroup, fqn: str) -> None:
        super().__init__(transport, key)
        self._comm = comm
        self._group = group
        self._fqn = fqn

    def begin(self, buffer: torch.Tensor, shard: torch.Tensor) -> Pending:
        # Through `data`, so that parameters which view the buffer do not count as modified.
        buffer = buffer.data
        if self.transport.world_size == 1:
            buffer.copy_(shard)
            return DONE
        own = stage(self._comm, shard.numel(), buffer, self._fqn)
        own.copy_(shard)
        output = stage(self._comm, buffer.numel(), buffer, self._fqn)
        work = self._comm(output_tensor=output, input_tensor=own, group=self._group, async_op=False)
        wait_for_work(work, self._group)
        # At once: the user's memory may be used again by the next call.
        buffer.copy_(output)
        return DONE


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
            return _reduced(like.new_zeros(like.shape, dtype=dtype))
        return _reduced(output if output.dtype is dtype else output.to(dtype))


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
            return _reduced(shard.div_(self._divisor))
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
        return _reduced(shard.div_(left))


class ThenHookPath(Around):
    """Another path, then a function of the user's on the shard that it gives.

    Args:
        inner: The other path.
        hook: Called with the reduced shard, which it may change.
        stream: Where it runs; ``None``: on the current one.
    """

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
        shard = reduction()
        if shard is None:
            return _reduced(None)
        if self._stream is None:
            self._check(self._hook(shard), shard)
            return _reduced(shard)
        module = torch.get_device_module(shard.device)
        current = module.current_stream()
        self._stream.wait_stream(current)
        try:
            with module.stream(self._stream):
                self._check(self._hook(shard), shard)
        finally:
            current.wait_stream(self._stream)
        return _reduced(shard)

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


def _reduced(shard: torch.Tensor | None) -> Reduction:
    """Return a reduction to ``shard`` that is over, or that the current stream of a device has queued to its end."""
    return lambda: shard


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
