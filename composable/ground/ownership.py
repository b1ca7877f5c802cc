"""Marks of the annotation that manages a parameter.

``replicate`` marks with a ``Claim``; ``fully_shard`` has a mark of its own on both faces of a parameter, the handle's,
which is only read here. What of torch averages too is known by the names of classes: nothing of it is imported. torch
calls a hook when a module or parameter is registered, which is rare, and the hook counts those below an annotation: who
remembers the count sees at its next forward whether to look. ``ModuleList.insert`` and others write to a module's
dicts, of which torch tells nobody: ``Contents`` remembers what is in them.
"""

import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.errors import UsageError, place_of_rank
from composable.ground.frames import is_load, modules_in_call
from composable.ground.torch_hooks import before_every_registration
from composable.ground.torch_private import opaque

__all__ = [
    "CHANGES",
    "Claim",
    "check_callers",
    "claim",
    "claim_of",
    "is_left_alone",
    "is_managed",
    "is_sharded",
    "keep_one",
    "leave_alone",
    "mark_managed",
    "mark_of",
    "names_left_alone",
    "release",
    "rival_on",
    "watch_registrations",
]


_AVERAGED = "_composable_averaged"
_SHARDED = "_composable_managed"  # set in engine/handle.py


class Claim:
    """The mark of ``replicate`` on a parameter.

    Attributes:
        fqn: Its name below the annotated module.
    """

    __slots__ = ("_holder", "_owner", "fqn")

    def __init__(self, fqn: str, owner: object, holder: int) -> None:
        self.fqn = fqn
        self._owner = weakref.ref(owner)
        self._holder = holder

    @property
    def owner(self) -> object | None:
        """The state of the annotation; ``None`` once that is gone."""
        return self._owner()

    def holds_for(self, param: object) -> bool:
        """Say whether the mark was made for ``param``: ``copy.copy`` takes the marks of a tensor along."""
        return self._holder == id(param) and self.owner is not None

    def __reduce__(self) -> tuple[object, ...]:
        # In another process nobody manages the parameter. A type that `torch.load(weights_only=True)` takes.
        return (OrderedDict, ())


def claim(param: nn.Parameter, fqn: str, owner: object) -> None:
    """Note that ``owner``, the state of a ``replicate``, averages ``param``, of any shape, and calls it ``fqn``."""
    setattr(param, _AVERAGED, Claim(fqn, owner, id(param)))


def release(params: Iterable[nn.Parameter]) -> None:
    """Undo ``claim`` for parameters of any shapes."""
    for param in params:
        vars(param).pop(_AVERAGED, None)


def claim_of(param: object) -> Claim | None:
    """Return the mark of the ``replicate`` that manages ``param``."""
    found = getattr(param, _AVERAGED, None)
    return found if isinstance(found, Claim) and found.holds_for(param) else None


def mark_of(param: object) -> Any:
    """Return the mark of ``fully_shard`` on a parameter, or on what stands in for it; ``None``: there is none."""
    return getattr(param, _SHARDED, None)


def is_sharded(param: object) -> bool:
    """Say whether ``fully_shard`` manages ``param``: its sharded face, or what stands in for that for a while."""
    mark = mark_of(param)
    return mark is not None and mark.handle() is not None


def is_managed(param: object) -> bool:
    """Say whether any annotation manages ``param``."""
    return is_sharded(param) or claim_of(param) is not None


# What of torch averages gradients too

_WRAPPER = "DistributedDataParallel"
_SHARDS = "torch's fully_shard"
# Where a class is defined, what it is called, and how messages call it.
_CLASSES = {
    ("torch.nn.parallel.distributed", _WRAPPER): _WRAPPER,
    ("torch.distributed._composable.replicate_with_fsdp", "ReplicateModule"): "torch's replicate",
    ("torch.distributed.fsdp", "FSDPModule"): _SHARDS,
}
# Where torch's own annotations have the key under which a module keeps their names; who uses none has not imported it.
_CONTRACT, _KEY = "torch.distributed._composable.contract", "REGISTRY_KEY"


def rival_on(module: nn.Module) -> str | None:
    """Return what of torch averages the gradients of ``module`` and all below it, in words; or ``None``."""
    for base in type(module).__mro__:
        found = _CLASSES.get((base.__module__, base.__qualname__))
        if found is not None:
            return found
    key = getattr(sys.modules.get(_CONTRACT), _KEY, None)
    return "torch's replicate" if key in vars(module) and "replicate" in vars(module)[key] else None


def keep_one(rival: str) -> str:
    """Return what to do about a rival."""
    if rival == _WRAPPER:
        return "keep one of them: docs/works_with.md says how to keep a trainer from wrapping the model"
    return f"keep one of them: import {rival.partition(' ')[2]} from composable everywhere, not from torch"


def names_left_alone(module: nn.Module) -> Collection[str]:
    """Return the parameters and buffers below ``module`` that users told DistributedDataParallel to leave alone."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", None) or ()


def _averaged_twice(rival: str | None, wrapped: nn.Module) -> UsageError | None:
    """Return the error for a parameter of ``wrapped`` that ``rival``, of torch, takes care of as an annotation does."""
    if rival is None or rival == _SHARDS:
        return None  # What torch shards may have been told to ignore any of them.
    left = names_left_alone(wrapped)
    for fqn, param in wrapped.named_parameters():
        if param.requires_grad and fqn not in left and is_managed(param):
            return _two_averages(rival, fqn)
    return None


def _two_averages(rival: str, fqn: str) -> UsageError:
    return UsageError(
        f"two things average these gradients: an annotation of this library and {rival}",
        at=f"{place_of_rank()}, parameter {fqn!r}",
        fix=keep_one(rival),
    )


# What is added or chosen later


class _Changes:
    """Other numbers after each change in this process: while one stays, what was looked at need not be again.

    Ranks may be threads: no two changes give the same number.

    Attributes:
        hooks: On gradients of sharded parameters.
        choices: Of users, for handles, which ranks compare.
        marks: On parameters that were replaced.
        registrations: Of modules and parameters in modules that are watched.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.hooks = self.choices = self.marks = self.registrations = 0

    def note(self, what: Literal["hooks", "choices", "marks", "registrations"]) -> None:
        """Something has changed."""
        setattr(self, what, next(self._numbers))


CHANGES = _Changes()


class _Registrations:
    """The modules of the process below annotations.

    By id: what is registered in may be anybody's module, whose own hash need not work yet.

    Attributes:
        watched: The modules in which registrations count.
        left: Modules whose annotation was undone, put nowhere else since.
    """

    __slots__ = ("_hooks", "left", "watched")

    def __init__(self) -> None:
        self.watched: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self.left: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._hooks: list[RemovableHandle] = []

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Count what is registered in any of ``modules`` from now on."""
        if not self._hooks:
            self._hooks = before_every_registration(_before_module, _before_parameter)
        self.watched.update((id(module), module) for module in modules)

    def note(self, parent: nn.Module) -> bool:
        """Note a registration if ``parent`` is watched, and say whether it is."""
        is_watched = self.watched.get(id(parent)) is parent
        if is_watched:
            CHANGES.note("registrations")
        return is_watched

    def no_longer_left(self, modules: Iterable[nn.Module]) -> None:
        """Note that ``modules`` are annotated, or put somewhere, again."""
        for module in modules:
            self.left.pop(id(module), None)


_REGISTRATIONS = _Registrations()
watch_registrations = _REGISTRATIONS.watch


def mark_managed(modules: Iterable[nn.Module]) -> None:
    """Note that an annotation manages what ``modules`` hold themselves, and watch them."""
    taken = list(modules)
    _REGISTRATIONS.no_longer_left(taken)
    _REGISTRATIONS.watch(taken)


def leave_alone(modules: Iterable[nn.Module]) -> None:
    """Note that the annotation of ``modules`` was undone, which is no mistake where another one is around them."""
    _REGISTRATIONS.left.update((id(module), module) for module in modules)


def is_left_alone(module: nn.Module) -> bool:
    """Say whether the annotation of ``module`` was undone, and it was put nowhere else since."""
    return _REGISTRATIONS.left.get(id(module)) is module


def check_callers() -> None:
    """Refuse a forward inside a wrapper of torch that takes care of parameters which an annotation manages.

    Raises:
        UsageError: The wrapper is older than the annotation, so only a forward shows it.
    """
    for module in modules_in_call():
        error = _averaged_twice(rival_on(module), module._modules.get("module") or module)
        if error is not None:
            raise error


@opaque
def _before_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if _REGISTRATIONS.note(parent) and child is not None:
        _REGISTRATIONS.no_longer_left(child.modules())
    error = None if child is None else _averaged_twice(rival_on(parent), child)
    if error is not None:
        raise error


@opaque
def _before_parameter(parent: nn.Module, name: str, param: nn.Parameter) -> None:
    # Annotations themselves place parameters in modules that watch assignments: those are managed.
    if is_managed(param):
        return
    if is_sharded(parent._parameters.get(name)) and is_load():
        param._composable_loaded = True  # type: ignore[attr-defined]  # read in engine/handle.py
    if _REGISTRATIONS.note(parent) and hasattr(param, "_st_info"):
        # What the wrapper, or torch's replicate on it, makes of a sharded parameter that it takes over.
        raise _two_averages(_WRAPPER, name)
