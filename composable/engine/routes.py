"""The paths of one flat buffer.

A communication hook is registered on a module. It holds for the handles at and below that module that have no nearer
registration. Results of users' functions are checked before use.

Paths are chosen when the root is known, by the plan's dtypes, the shard's resting place and the user's choices; again
when the user changes a choice. No code here moves bytes.
"""

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from composable.comm import Started, Transport, wait_for_hook
from composable.engine.paths import (
    AllReducePath,
    CopyGather,
    Gather,
    GradientPath,
    KeptShards,
    Reduction,
    Replicas,
    RestingPlace,
    ScatterPath,
    SumPath,
    ThenPath,
    Whole,
)
from composable.errors import ConfigError, UsageError
from composable.ground.names import describe_module, described

HookFunction: TypeAlias = Callable[..., Any]


class Registration:
    """A user's hook and the module that it was registered on."""

    def __init__(self, module: nn.Module, state: Any, function: HookFunction, *, takes_bucket: bool = False) -> None:
        self._module: weakref.ref[nn.Module] | None = weakref.ref(module)
        self.state = state  # Passed to ``function``.
        self.function = function  # The hook.
        # It is called with a bucket of ``replicate``, as torch's ddp_comm_hooks are, not with gradients.
        self.takes_bucket = takes_bucket

    @property
    def module(self) -> nn.Module | None:
        """The module it was registered on; ``None``: the module is gone."""
        return None if self._module is None else self._module()

    @property
    def name(self) -> str:
        """Name of the hook in messages, the same on all ranks."""
        hook: Any = self.function
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        return f"{getattr(hook, '__module__', '')}.{name} with {type(self.state).__qualname__}"

    def reaches(self, module: nn.Module) -> bool:
        """Say whether ``module`` is at or below the registration's module."""
        own = self.module
        return own is None or module in own.modules()


def nearest(registrations: Sequence[Registration]) -> Registration | None:
    """Return the registration that holds for a handle: of all that reach it, the one on the innermost module.

    Raises ``ConfigError`` if neither of two modules is inside the other.
    """
    found: Registration | None = None
    for one in registrations:
        if found is None or (one.module is not None and found.reaches(one.module)):
            found = one
    for one in registrations:
        if found is not None and one is not found and found.module is not None and not one.reaches(found.module):
            raise ConfigError(
                "two communication hooks reach the same parameters, and neither one's module is inside the other's",
                at=" and ".join(
                    describe_module(module) for each in (one, found) if (module := each.module) is not None
                ),
                fix="register one hook, on the module that owns the parameters",
            )
    return found


@dataclass(frozen=True, eq=False)
class Comms:
    """The user's choices for the collectives of a handle; equal on all ranks.

    Raises ``UsageError`` if there is a communication hook beside a choice that it would replace.
    """

    hook: Registration | None = None  # The registration that holds.
    divide_factor: float | None = None  # Divisor of sums of gradients, instead of the number of ranks.
    sums_only: bool = False  # Collectives add up, and the division is a separate step.
    all_reduce_hook: Callable[[torch.Tensor], object] | None = None  # Called with each reduced shard.
    all_reduce_stream: Any = None  # The stream that hook runs on; ``None``: the stream of the reductions.

    def __post_init__(self) -> None:
        if self.hook is not None and (self.sums_only or self.divide_factor is not None):
            name = "sums forced" if self.sums_only else "a gradient divide factor"
            raise UsageError(
                f"a module cannot have {name} and a communication hook, which reduces and divides by itself",
                fix="keep one of the two",
            )

    def compared_text(self) -> str:
        """Return the choices as text, which has to be equal on all ranks; empty: there are none."""
        own = {
            f"communication hook {'' if self.hook is None else self.hook.name}": self.hook,
            f"gradient divide factor {self.divide_factor}": self.divide_factor,
            "sums forced": self.sums_only,
            "an all-reduce hook": self.all_reduce_hook,
        }
        return ", ".join(text for text, chosen in own.items() if chosen is not None and chosen is not False)


DEFAULT_COMMS = Comms()


@dataclass(eq=False)
class _HookPath(Whole):
    """A path through a communication hook, which reduces and divides; no bytes go through the transport."""

    transport: Transport  # Between the ranks of the shard group; allocates memory.
    _hook: Registration  # The hook with its state.
    _dtype: torch.dtype  # Dtype of the result.
    _complain: Callable[[ConfigError], None]  # Called with the error if a result is wrong.

    def begin(self, source: torch.Tensor) -> Reduction:
        hook, transport, dtype = self._hook, self.transport, self._dtype
        output = transport.empty(source.numel() // transport.world_size, source)
        like = output.view(-1)
        if output.is_floating_point() or output.is_complex():
            # Elements that a hook leaves unwritten show as NaN, not as old content of the memory.
            output.fill_(math.nan)
        # The hook gets another object, since it may set its `data`, and the memory is used again.
        returned = hook.function(hook.state, source.view(-1), output)
        what = _what_is_wrong(returned, output, like, dtype)
        if what:
            # The hook has run its collectives: the ranks go on, and get the error at the end of backward.
            self._complain(
                ConfigError(
                    f"the communication hook {what}",
                    fix="fill `output` in place, with the mean of this rank's slice, in the dtype that it has, as "
                    "hooks of LowPrecisionState(..., parameter_type=None) do; return None",
                )
            )
            output = like.new_zeros(like.shape, dtype=dtype)
        shard = output if output.dtype is dtype else output.to(dtype)
        return lambda: shard  # It has ended, or it is queued on the current stream of a device.


def _run_hook(
    hook: Callable[[torch.Tensor], object], stream: Any, complain: Callable[[ConfigError], None], shard: torch.Tensor
) -> torch.Tensor:
    """Run the user's all-reduce hook, which changes a reduced shard [S] in place, and return the shard.

    It runs on ``stream``; ``None``: the current one. If its result is wrong, ``complain`` gets the error: the hook may
    have run collectives, so the ranks go on.
    """
    if stream is None:
        returned = hook(shard)
    else:
        module = torch.get_device_module(shard.device)
        current = module.current_stream()
        stream.wait_stream(current)
        try:
            with module.stream(stream):
                returned = hook(shard)
        finally:
            current.wait_stream(stream)
    # A work's ``wait()`` returns a bool, which users pass on.
    if returned is not None and returned is not shard and not isinstance(returned, bool):
        wait = getattr(returned, "wait", None)
        if callable(wait):
            wait()
        complain(
            ConfigError(
                f"the all-reduce hook returned {described(returned)}",
                fix="change the shard in place, wait for all work that the hook started, and return None",
            )
        )
    return shard


def reduced_otherwise(hook: Registration, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ConfigError | None]:
    """Let a communication hook average ``gradients`` [N] over ranks that each keep all of them.

    Returns the averages, in the same memory or not, or ``None``; and the error if they are wrong.
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
    """Return the fault of a hook's ``output``, as text after ``the hook``; empty: none."""
    if returned is not None and returned is not output:
        wait = getattr(returned, "wait", None)
        if callable(wait):
            with suppress(ConfigError):  # Nobody sets it.
                wait_for_hook(returned, "the communication hook")  # It writes to memory that is about to be freed.
        return f"returned {described(returned)}"
    if output.shape != like.shape:
        return f"left a result of shape {list(output.shape)}, where {list(like.shape)} is due"
    if output.dtype not in {like.dtype, dtype}:
        return f"left a result of {str(output.dtype)[6:]}, where {str(like.dtype)[6:]} is due"
    if output.device != like.device:
        return f"left a result on {output.device}, where {like.device} is due"
    return ""


class _Leg(NamedTuple):
    """One collective of a path: its transport, and its key there."""

    transport: Transport
    key: int

    @staticmethod
    def by(transport: Transport) -> "_Leg":
        return _Leg(transport, transport.allocate_key())


class Routes:
    """The paths of one flat buffer between ranks; call ``connect`` before any collective.

    ``home`` is the resting place of the shard and its gradient. Gradients are reduced in ``reduce_dtype``, and are in
    ``gradient_dtype`` then. ``casts_params``: the buffer has another dtype than the shard.
    """

    def __init__(
        self, home: RestingPlace, gradient_dtype: torch.dtype, reduce_dtype: torch.dtype, *, casts_params: bool
    ) -> None:
        self.home = home
        self.comms = DEFAULT_COMMS  # The user's choices.
        self.kept = KeptShards()  # Shards that wait for their all-reduce over copies.
        # Error for a wrong result of a user's function, if any; its reader resets it.
        self.failure: ConfigError | None = None
        self.gather_path: Gather  # Fills the buffer from the shards.
        self.secondary_path: Gather  # Fills the buffer from the secondary shards of a smaller group, if there are any.
        self.gradient_path: GradientPath  # Reduces the gradients to this rank's shard of their mean.
        self.carries_values = True  # See ``Transport``.
        self._dtypes = gradient_dtype, reduce_dtype
        self._casts_params = casts_params
        self._ranks = self._divisor = 0
        self._copies: Replicas | None = None
        # Collectives by their names in hang messages; for the first one the kind of message says the name.
        self._legs: dict[str, _Leg] = {}

    def unconnected(self) -> "Routes":
        """Return routes for a copy of the buffer, with the same choices of the user, not connected yet."""
        twin = Routes(self.home, *self._dtypes, casts_params=self._casts_params)
        twin.comms = self.comms
        twin.kept.defers = self.kept.defers
        return twin

    def connect(
        self, transport: Transport, ranks: int, copies: Replicas | None = None, part: Transport | None = None
    ) -> None:
        """Choose the transports. All ranks of the shard group, the copies and the part, same order.

        ``transport`` is between the ranks of the shard group, ``part`` between those that gather from secondary shards;
        ``copies`` hold copies of the shard. Gradients are averaged over so many ``ranks``.
        """
        others = {
            "": transport,
            "all-reduce over copies": None if copies is None else copies.transport,
            "all-gather of secondary shards": part,
        }
        legs = {name: self._leg(name, one) for name, one in others.items() if one is not None}
        if legs != self._legs or copies is not self._copies:
            self._ranks, self._copies = ranks, copies
            self.carries_values = transport.carries_values
            self._choose_paths(legs)
            # Set last: a call that was cut short is done again.
            self._legs = legs

    def _leg(self, name: str, transport: Transport) -> _Leg:
        """Return a leg by ``transport``; in groups that stay it has the key that it had, as new copies of shards do."""
        old = self._legs.get(name)
        if old is not None and old.transport.groups == transport.groups:
            return _Leg(transport, old.key)
        weakref.finalize(self, transport.free_memory).atexit = False
        return _Leg.by(transport)

    def divide_by(self, divisor: int | None) -> None:
        """Divide sums of gradients by ``divisor``, unless the user chose another; ``None``: by the number of ranks.

        After ``connect``, from the next reduction on. Every rank alike.
        """
        if (divisor or 0) != self._divisor:
            self._divisor = divisor or 0
            self._choose_paths(self._legs)

    def communicate_by(self, comms: Comms) -> None:
        """Let bytes travel as the user chose, from the next collective on. Every rank alike."""
        self.comms = comms
        if self._legs:
            self._choose_paths(self._legs)

    def _choose_paths(self, legs: Mapping[str, _Leg]) -> None:
        casts = self._casts_params or self.home.is_elsewhere
        leg = legs[""]
        self.gather_path = CopyGather(*leg, self.home) if casts else Gather(*leg)
        if "all-gather of secondary shards" in legs:
            # Secondary shards lie where the buffer does, in its dtype.
            self.secondary_path = Gather(*legs["all-gather of secondary shards"])
        self.gradient_path = self._gradient_path(legs)

    def _gradient_path(self, legs: Mapping[str, _Leg]) -> GradientPath:
        comms, leg = self.comms, legs[""]
        gradient_dtype, reduce_dtype = self._dtypes
        # Both legs carry the same dtype.
        dtype = gradient_dtype if self._copies is None else reduce_dtype
        divisor = comms.divide_factor or self._divisor or self._ranks
        path: GradientPath
        if comms.hook is not None:
            path = _HookPath(leg.transport, comms.hook, dtype, self._complain)
        else:
            path = (SumPath if comms.sums_only else ScatterPath)(*leg, divisor, dtype)
        if self._copies is not None:
            # The user's hook has divided by the ranks that it knows.
            scale = 1.0 if comms.hook is None else 1.0 / self._copies.transport.world_size
            key = legs["all-reduce over copies"].key
            path = AllReducePath(path, self._copies, self.kept, key, gradient_dtype, scale=scale)
        if comms.all_reduce_hook is not None:
            hook = functools.partial(_run_hook, comms.all_reduce_hook, comms.all_reduce_stream, self._complain)
            path = ThenPath(path, hook, at_once=True)
        return ThenPath(path, self.home.copy) if self.home.is_elsewhere else path

    def _complain(self, failure: ConfigError) -> None:
        self.failure = self.failure or failure

    # Hang messages and recovery

    def name_of(self, started: Started) -> str | None:
        """Return the name of a started collective, if it is one of this buffer; else ``None``."""
        key, is_reduction = divmod(started.tag, 2)
        for name, leg in self._legs.items():
            if key == leg.key and started.transport is leg.transport:
                return name or ("reduce-scatter" if is_reduction else "all-gather")
        return None

    def transports(self) -> set[Transport]:
        """Return the transports that move bytes of the buffer."""
        return {leg.transport for leg in self._legs.values()}

    def settle(self) -> None:
        """Wait for all collectives that the transports have started, also where an exception cut the start short."""
        for transport in self.transports():
            transport.settle()
