"""Marks of the annotation that manages a parameter.

``replicate`` marks a parameter with a ``Claim``. A handle of ``fully_shard`` sets its own mark on the sharded and the
unsharded parameter; this file only reads it. Wrappers of torch that average gradients too are recognised by class
names, without an import. torch calls a hook when a module or parameter is registered, which is rare. The hook counts
registrations below annotations: if the count has changed, the next forward checks the modules. ``ModuleList.insert``
and others write to a module's dicts without that hook: ``Contents`` compares what the dicts hold.
"""

import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any, Generic, Literal, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.errors import UsageError, warn_once
from composable.ground.frames import is_running, modules_in_call
from composable.ground.names import list_text
from composable.ground.torch_hooks import before_every_registration
from composable.ground.torch_private import module_load, opaque

_AVERAGED = "_composable_averaged"
_IGNORED = "_composable_ignored"
_SHARDED = "_composable_managed"  # set in engine/handle.py
_T = TypeVar("_T")


class HeldWeakly(Generic[_T]):
    """A tuple of objects that own its holder, as modules do: without cycles, what users let go of is freed at once."""

    def __set_name__(self, cls: type, name: str) -> None:
        self._key = f"{name}, held weakly"

    def __get__(self, holder: object, cls: object = None) -> tuple[_T, ...]:
        return tuple([one for find in vars(holder)[self._key] if (one := find()) is not None])

    def __set__(self, holder: object, values: Iterable[_T]) -> None:
        vars(holder)[self._key] = tuple(map(weakref.ref, values))


class Claim:
    """The mark of ``replicate`` on a parameter."""

    __slots__ = ("_holder", "_owner", "fqn")

    def __init__(self, fqn: str, owner: object, holder: int) -> None:
        self.fqn = fqn  # The parameter's name below the annotated module.
        self._owner = weakref.ref(owner)
        self._holder = holder

    @property
    def owner(self) -> object | None:
        """The state of the annotation; ``None`` once the state is freed."""
        return self._owner()

    def holds_for(self, param: object) -> bool:
        """Say whether the mark was made for ``param``: ``copy.copy`` of a tensor copies its marks too."""
        return self._holder == id(param) and self.owner is not None

    def __reduce__(self) -> tuple[object, ...]:
        # In another process no annotation manages the parameter. `torch.load(weights_only=True)` accepts this type.
        return (OrderedDict, ())


def claim(param: nn.Parameter, fqn: str, owner: object) -> None:
    """Mark ``param``, of any shape and named ``fqn``, as averaged by ``owner``, the state of a ``replicate``."""
    setattr(param, _AVERAGED, Claim(fqn, owner, id(param)))


def release(params: Iterable[nn.Parameter]) -> None:
    """Remove the marks of ``claim`` from parameters of any shapes."""
    for param in params:
        vars(param).pop(_AVERAGED, None)


def claim_of(param: object) -> Claim | None:
    """Return the mark of the ``replicate`` that manages ``param``."""
    found = getattr(param, _AVERAGED, None)
    return found if isinstance(found, Claim) and found.holds_for(param) else None


def mark_of(param: object) -> Any:
    """Return the mark of ``fully_shard`` on a parameter, or on a parameter in its place; ``None`` if there is none."""
    return getattr(param, _SHARDED, None)


def is_sharded(param: object) -> bool:
    """Say whether ``fully_shard`` manages ``param``: a parameter of a handle, or one that replaces it for a while."""
    mark = mark_of(param)
    return mark is not None and mark.handle() is not None


def is_managed(param: object) -> bool:
    """Say whether any annotation manages ``param``."""
    return is_sharded(param) or claim_of(param) is not None


def ignore(params: Iterable[object]) -> None:
    """Mark parameters of any shapes whose gradients are not the business of annotations."""
    for param in params:
        setattr(param, _IGNORED, True)


def is_forgotten(param: object) -> bool:
    """Say whether ``param`` is a plain parameter that no annotation manages and no ``ignored_*`` names."""
    return type(param) is nn.Parameter and not hasattr(param, _IGNORED) and not is_managed(param)


FORGOTTEN_FIX = (
    "annotate the module around all of them too, as by fully_shard(model); or, where you average these gradients "
    "yourself or ranks may differ, name them in ignored_params= of an annotation"
)

# Wrappers and annotations of torch that average gradients too

_WRAPPER = "DistributedDataParallel"
_SHARDS = "torch's fully_shard"
# The module and the name of each class, and its name in messages.
_CLASSES = {
    ("torch.nn.parallel.distributed", _WRAPPER): _WRAPPER,
    ("torch.distributed._composable.replicate_with_fsdp", "ReplicateModule"): "torch's replicate",
    ("torch.distributed.fsdp", "FSDPModule"): _SHARDS,
}
# The file of torch with the key under which a module keeps torch's annotations; without them it is not imported.
_CONTRACT, _KEY = "torch.distributed._composable.contract", "REGISTRY_KEY"


def rival_on(module: nn.Module) -> str | None:
    """Return the name of torch's wrapper or annotation that averages all gradients of ``module``; or ``None``."""
    for base in type(module).__mro__:
        found = _CLASSES.get((base.__module__, base.__qualname__))
        if found is not None:
            return found
    key = getattr(sys.modules.get(_CONTRACT), _KEY, None)
    return "torch's replicate" if key in vars(module) and "replicate" in vars(module)[key] else None


def keep_one(rival: str) -> str:
    """Return the fix for an error about ``rival``, a name from ``rival_on``."""
    if rival == _WRAPPER:
        return "keep one of them: docs/works_with.md says how to keep a trainer from wrapping the model"
    return f"keep one of them: import {rival.partition(' ')[2]} from composable everywhere, not from torch"


def names_left_alone(module: nn.Module) -> Collection[str]:
    """Return the names of parameters and buffers in ``module`` that users told DistributedDataParallel to ignore."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", None) or ()


def _averaged_twice(rival: str | None, wrapped: nn.Module) -> UsageError | None:
    """Return the error if ``rival`` of torch averages an annotated parameter of ``wrapped`` too; else ``None``."""
    if rival is None or rival == _SHARDS:
        return None  # torch's fully_shard may have been told to ignore these parameters.
    left = names_left_alone(wrapped)
    averaged = {fqn: param for fqn, param in wrapped.named_parameters() if param.requires_grad and fqn not in left}
    ignore(averaged.values())
    return next((_two_averages(rival, fqn) for fqn, param in averaged.items() if is_managed(param)), None)


def _two_averages(rival: str, fqn: str) -> UsageError:
    return UsageError(
        f"two things average these gradients: an annotation of this library and {rival}",
        at=f"parameter {fqn!r}",
        fix=keep_one(rival),
    )


# Changes after an annotation


class _Changes:
    """A number for each kind of change in this process: while it stays the same, an earlier check is still valid.

    Ranks may be threads: no two changes give the same number.

    Attributes:
        hooks: Changes of hooks on gradients of sharded parameters.
        choices: Choices of users for handles, which ranks compare.
        marks: New marks on replaced parameters.
        registrations: New modules and parameters in watched modules.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.hooks = self.choices = self.marks = self.registrations = 0

    def note(self, what: Literal["hooks", "choices", "marks", "registrations"]) -> None:
        """Give the number of ``what`` a new value: something of this kind has changed."""
        setattr(self, what, next(self._numbers))


CHANGES = _Changes()


class _Registrations:
    """The modules of this process that annotations manage, or managed before.

    By id: torch calls the hook for modules of any library, also before their own hash works.

    Attributes:
        watched: The modules in which registrations count.
        left: Modules whose annotation was undone, and that were put into no module since.
    """

    __slots__ = ("_hooks", "left", "watched")

    def __init__(self) -> None:
        self.watched: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self.left: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._hooks: list[RemovableHandle] = []

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Count registrations in any of ``modules`` from now on."""
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
        """Note that ``modules`` are annotated again, or put into another module."""
        for module in modules:
            self.left.pop(id(module), None)


_REGISTRATIONS = _Registrations()
watch_registrations = _REGISTRATIONS.watch


def mark_managed(modules: Iterable[nn.Module]) -> None:
    """Note that an annotation manages the own parameters of ``modules``, and watch these modules."""
    taken = list(modules)
    _REGISTRATIONS.no_longer_left(taken)
    _REGISTRATIONS.watch(taken)


def leave_alone(modules: Iterable[nn.Module]) -> None:
    """Note that the annotation of ``modules`` was undone: an annotation around them then raises no error for them."""
    _REGISTRATIONS.left.update((id(module), module) for module in modules)
    CHANGES.note("registrations")  # It warns at its next forward.


def check_added(
    caller: str, added: Iterable[tuple[str, nn.Parameter]], left: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Raise ``UsageError`` if a parameter of any shape that came after ``caller`` is trained; warn of those ``left``.

    These are in modules that were left alone, and nothing averages their gradients.
    """
    if names := [fqn for fqn, param in added if param.requires_grad]:
        raise UsageError(
            f"parameters were added after {caller} was called, and nothing averages their gradients",
            at=list_text(names),
            fix=f"add modules first; or call {caller} on the added module too; or unannotate, and annotate anew",
        )
    if names := [fqn for fqn, param in left if param.requires_grad]:
        warn_once(
            "unannotate has ended the annotation of parameters inside an annotated module, and nothing averages their "
            f"gradients: {list_text(names)}; to average them, annotate their modules again, or unannotate and annotate "
            "the module around"
        )


def is_left_alone(module: nn.Module) -> bool:
    """Say whether the annotation of ``module`` was undone, and the module was put into no other module since."""
    return _REGISTRATIONS.left.get(id(module)) is module


def check_callers() -> None:
    """Refuse a forward inside a wrapper of torch that averages gradients of annotated parameters too.

    Such a wrapper is older than the annotation, so only a forward shows it: ``UsageError``.
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
    # Annotations themselves assign parameters in modules that watch assignments: these parameters are managed.
    if is_managed(param):
        # A parametrization sets the parameter that it gets to its own values first.
        handle = None if (mark := mark_of(param)) is None else mark.handle()
        if handle is not None:
            handle.forgive_idle_writes()
        return
    if is_sharded(parent._parameters.get(name)) and is_running(module_load.__code__):
        param._composable_loaded = True  # type: ignore[attr-defined]  # read in engine/edited.py
    if _REGISTRATIONS.note(parent) and hasattr(param, "_st_info"):
        # The wrapper, or torch's replicate, which uses it, replaces a sharded parameter by one with this attribute.
        raise _two_averages(_WRAPPER, name)
