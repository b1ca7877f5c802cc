"""Notices what is added below annotated modules after their annotation, and wrappers of torch that are put around them.

torch calls a hook when a module or parameter is registered, which is rare, and the hook counts those below an
annotation. Who remembers the count sees at its next forward whether to look. ``ModuleList.insert`` and others write
to a module's dicts, of which torch tells nobody: ``Contents`` remembers what is in them.
"""

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.claims import is_managed, is_sharded
from composable.errors import UsageError, place_of_rank
from composable.frames import is_load, modules_in_call
from composable.rivals import WRAPPER, averaged_twice, averaged_twice_in, keep_one, rival_on
from composable.torch_hooks import before_every_registration
from composable.torch_private import opaque

__all__ = [
    "Contents",
    "check_callers",
    "count_registrations",
    "is_left_alone",
    "leave_alone",
    "take_charge",
    "watch_registrations",
]


class _Count:
    value = 0


_COUNT = _Count()
# By id: what is registered in may be anybody's module, whose own hash need not work yet.
_WATCHED: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()
_LEFT: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()
_REGISTERED: list[RemovableHandle] = []


class Contents:
    """What is in modules, to see in each forward whether that has changed: some 100 ns for each of them.

    Args:
        modules: The modules.
        of_params: ``dict.values``, or ``dict.keys`` where each name holds one parameter or another.
    """

    __slots__ = ("_before", "_leaves", "_of_params", "_params", "_parents")

    def __init__(self, modules: Iterable[nn.Module], of_params: Callable[[Any], Iterable[object]]) -> None:
        found = list(modules)
        # Some containers may be given another dict, when what is in them is deleted.
        self._parents = [one for one in found if one._modules or isinstance(one, _CONTAINERS)]
        self._leaves = [one._modules for one in found if not one._modules]
        self._params = [one._parameters for one in found if one._parameters]
        self._of_params = of_params
        self._before = self._look()

    def have_changed(self) -> bool:
        """Say whether a module or a parameter was added, put in the place of another one, or taken away."""
        now = self._look()
        return any(self._leaves) or len(now) != len(self._before) or not all(map(is_, now, self._before))

    def _look(self) -> list[object]:
        children = map(dict.values, map(_CHILDREN, self._parents))
        params = map(self._of_params, self._params)
        return list(chain(chain.from_iterable(children), chain.from_iterable(params)))


_CHILDREN: Callable[[nn.Module], dict[str, object]] = attrgetter("_modules")
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


def watch_registrations(modules: Iterable[nn.Module]) -> None:
    """Count what is registered in any of ``modules`` from now on."""
    if not _REGISTERED:
        _REGISTERED.extend(before_every_registration(_before_module, _before_parameter))
    _WATCHED.update((id(module), module) for module in modules)


def take_charge(modules: Iterable[nn.Module]) -> None:
    """Note that an annotation manages what ``modules`` hold themselves, and watch them."""
    taken = list(modules)
    _no_longer_left(taken)
    watch_registrations(taken)


def leave_alone(modules: Iterable[nn.Module]) -> None:
    """Note that the annotation of ``modules`` was undone, which is no mistake where another one is around them."""
    _LEFT.update((id(module), module) for module in modules)


def is_left_alone(module: nn.Module) -> bool:
    """Say whether the annotation of ``module`` was undone, and it was put nowhere else since."""
    return _LEFT.get(id(module)) is module


def count_registrations() -> int:
    """Return how many modules and parameters were registered in watched modules so far."""
    return _COUNT.value


def check_callers() -> None:
    """Refuse a forward inside a wrapper of torch that takes care of parameters which an annotation manages.

    Raises:
        UsageError: The wrapper is older than the annotation, so only a forward shows it.
    """
    for module in modules_in_call():
        both = averaged_twice(module)
        if both is not None:
            raise _two_averages(*both)


def _two_averages(rival: str, fqn: str) -> UsageError:
    """Return the error for a parameter that ``rival``, which is torch's, takes care of as well."""
    return UsageError(
        f"two things average these gradients: an annotation of this library and {rival}",
        at=f"{place_of_rank()}, parameter {fqn!r}",
        fix=keep_one(rival),
    )


def _is_watched(module: nn.Module) -> bool:
    return _WATCHED.get(id(module)) is module


def _no_longer_left(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        _LEFT.pop(id(module), None)


@opaque
def _before_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if _is_watched(parent):
        _COUNT.value += 1
        if child is not None:
            _no_longer_left(child.modules())
    rival = rival_on(parent)
    if rival is not None and child is not None:
        both = averaged_twice_in(rival, child)
        if both is not None:
            raise _two_averages(*both)


@opaque
def _before_parameter(parent: nn.Module, name: str, param: nn.Parameter) -> None:
    # Annotations themselves place parameters in modules that watch assignments: those are managed.
    if is_managed(param):
        return
    if is_sharded(parent._parameters.get(name)) and is_load():
        param._composable_loaded = True  # type: ignore[attr-defined]  # read in engine/handle.py
    if _is_watched(parent):
        _COUNT.value += 1
        if hasattr(param, "_st_info"):
            # What the wrapper, or torch's replicate on it, makes of a sharded parameter that it takes over.
            raise _two_averages(WRAPPER, name)
