"""How a handle's bytes travel where users choose: a communication hook, a divisor, collectives of their own.

A communication hook is registered on a module, and holds for the handles at and below it that no nearer
registration holds for.
"""

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from composable.errors import ConfigError, UsageError
from composable.fqns import describe_module
from composable.storage.copy_reach import modules_of_copy

__all__ = ["CHOICES", "DEFAULT_COMMS", "Comms", "HookFunction", "Registration", "copied_registrations", "nearest"]

HookFunction: TypeAlias = Callable[..., Any]


class _Choices:
    """Tells who compares between ranks what users chose for handles when to look again.

    Attributes:
        made: Another number after each choice; ranks may be threads.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.made = 0

    def note(self) -> None:
        """Something was chosen."""
        self.made = next(self._numbers)


CHOICES = _Choices()


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
