"""The class swap, ``no_sync``, ``reduce_gradients`` and the check between steps, for sharded and replicated modules."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.nn.utils import parametrize

from composable.annotation import (
    AnnotationState,
    FullyShardState,
    KeptGradients,
    ReducingUnit,
    nothing_annotated,
    states_of,
    units_of,
)
from composable.errors import ConfigError, UsageError
from composable.ground.frames import in_backward, modules_in_call
from composable.ground.names import check_bool, check_module, describe_module
from composable.replication import Reducer

# The mixins are put on modules only: the module's class, which comes after them, has the methods of ``nn.Module``.
if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object


class AnnotatedModule(_Module):
    """Mixin of every module whose class an annotation has swapped."""

    _composable_kind = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `sequential[:2]` builds `type(sequential)(...)`: the slice is a plain container again.
        return original_class(cls)(*args, **kwargs)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether the next backwards reduce gradients, or keep them unsharded for a later one.

        While it is off, gradients stay in full size on every rank.

        Args:
            requires_gradient_sync: Reduce in each backward.
            recurse: Also in fully sharded and replicated modules below.

        Raises:
            UsageError: The module is no longer annotated.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        check_bool("recurse", recurse)
        if not states_of([self]):
            raise no_longer_annotated(self)
        units = units_of(self.modules() if recurse else (self,))
        changed = [unit for unit in units if unit.requires_gradient_sync is not requires_gradient_sync]
        for unit in changed:
            unit.requires_gradient_sync = requires_gradient_sync
        if changed and requires_gradient_sync:
            KeptGradients.note(states_of(self.modules()))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            f"a {self._composable_kind} module cannot be pickled as a whole",
            at=describe_module(self),
            fix="save its state_dict(); copy.deepcopy copies it; unannotate makes it a plain module",
        )

    def __prepare_scriptable__(self) -> NoReturn:  # torch.jit.script asks for it
        raise UsageError(
            f"a {self._composable_kind} module cannot be scripted, since a script cannot hold its messages",
            at=describe_module(self),
            fix="script it after unannotate(model), or a plain model that has loaded full_state_dict(model)",
        )


class ClassSwap:
    """A swap of a module's class for a subclass, whose name begins with ``prefix``, with the methods of ``mixin``."""

    def __init__(self, mixin: type[AnnotatedModule], prefix: str) -> None:
        self._mixin = mixin
        self._prefix = prefix
        # Weak references: torch.fx makes a class for each module.
        self._classes: weakref.WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, module: nn.Module) -> None:
        """Give ``module`` the mixin, unless it has it."""
        if isinstance(module, self._mixin):
            return
        cls = type(module)
        known = self._classes.get(cls)
        found = None if known is None else known()
        if found is None:
            # Messages name the class that users know.
            members: dict[str, Any] = {"__module__": cls.__module__, "_composable_class_name": cls.__name__}
            if not hasattr(cls, "join_hook"):
                members["join_hook"] = _join_hook
            kind: Any = type(cls)
            if parametrize.is_parametrized(module):
                kind = type("Parametrized", (kind,), {"__delattr__": _refuse_removal})
            found = kind(f"{self._prefix}{cls.__name__}", (self._mixin, cls), members)
            self._classes[cls] = weakref.ref(found)
        module.__class__ = found

    def remove(self, module: nn.Module) -> None:
        """Undo ``add``."""
        if isinstance(module, self._mixin):
            module.__class__ = original_class(type(module))


def original_class(cls: type) -> Any:
    """Return the class that a module of class ``cls`` had before ``ClassSwap.add``."""
    return cls.__bases__[1]


def check_idle(what: str, states: Iterable[AnnotationState], involved: Iterable[nn.Module] = ()) -> None:
    """Refuse the call ``what`` in a forward of ``states`` or of ``involved``, in a backward, or before its last part.

    Raises ``UsageError`` if a step is running, or its gradients wait for the last backward.
    """
    sharded = [state for state in states if isinstance(state, FullyShardState)]
    known = set(involved)
    for state in sharded:
        for other in (state,) if state.root is None else state.root.states:
            known.update(other.modules, other._module_to_handle)
    running = [module for module in modules_in_call() if module in known]
    if running or in_backward():
        raise UsageError(
            f"{what} inside a {'forward' if running else 'backward'}",
            at=", ".join(map(describe_module, running[:1])),
            fix="call it between two steps",
        )
    for state in sharded:
        if state.root is not None and state.root.scheduler.step.finalizer.is_deferred:
            raise UsageError(
                f"{what} while gradients wait for the last backward",
                at=describe_module(state.modules[0]),
                fix="call finalize_backward(), or reset_iter_state() to drop them",
            )


def no_longer_annotated(module: nn.Module) -> UsageError:
    """Return the error of a method of ``module`` that was taken before its annotation was undone."""
    return UsageError("the module is no longer annotated", at=describe_module(module), fix="annotate it again")


def _refuse_removal(cls: Any, name: str) -> NoReturn:
    """Refuse ``remove_parametrizations``, which looks for the parameter in the class of the annotated module."""
    raise UsageError(
        f"the parametrization of {name!r} is to be removed from a module that is itself annotated",
        at=f"a {cls._composable_class_name}",
        fix="unannotate(model) first, then remove it and annotate again",
    )


def _join_hook(module: nn.Module, **_: object) -> NoReturn:
    """Refuse a module that is given to ``Join``, which calls this method, as ``DistributedDataParallel`` has it."""
    raise ConfigError(
        "Join got an annotated module itself",
        at=describe_module(module),
        fix="pass joinable(model, step=...), as in docs/uneven_inputs.md; or as_ddp(model), if it is replicated alone",
    )


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Keep gradients on their rank in the backwards of this context: gradient accumulation without communication.

    Gradients add up, in full size, until the next backward outside of the context synchronises all of them, including
    those of annotated modules that this backward leaves out, if the context covered them together with one that it
    reaches. If no backward comes, an optimizer's step on them is an error. It counts where the backward runs, not where
    its forward ran. The context covers every module at or below ``module`` that ``fully_shard`` or ``replicate``
    manages. All ranks must enter it alike; it does not communicate.

    Args:
        module: A module that is annotated, or has annotated modules below it.

    Raises:
        UsageError: No module at or below ``module`` is annotated.
        ConfigError: ``module`` is no module.
    """
    found = _synchronised_by(module, caller="no_sync")
    before = [(one, one.requires_gradient_sync, one.sync_after_context) for one in found]
    try:
        for one, syncs, after in before:
            one.sync_after_context = syncs if after is None else after
            one.requires_gradient_sync = False
        yield
        _restore(module, before)
    except BaseException:
        # Also if Ctrl-C interrupted the line above.
        _restore(module, before)
        raise


def reduce_gradients(module: nn.Module) -> None:
    """Synchronise the gradients that backwards in ``no_sync`` have left, without another backward.

    For loops that do not know which backward is the last, such as pipeline schedules: they run all backwards in
    ``no_sync``, and call this at the end. Gradients and parameters are then as after a backward that synchronised. It
    also ends reductions that ``set_is_last_backward(False)`` or ``set_manual_backward_finalization`` left under way. If
    nothing was left, nothing changes. Modules that ``set_requires_gradient_sync(False)`` excludes stay as they are; for
    a part of a fully sharded model the whole model takes part. Communication hooks of ``replicate`` do not run.

    Collective: all ranks of the meshes at or below ``module``.

    Args:
        module: A module that is annotated, or has annotated modules below it.

    Raises:
        UsageError: No module is annotated; the call is inside ``no_sync`` or torch's ``Join``; or a backward, or the
            forward of a sharded module, is running.
        ConfigError: ``module`` is no module.
    """
    found = _synchronised_by(module, caller="reduce_gradients")
    if any(one.sync_after_context is not None for one in found):
        raise _untimely(module, "inside of no_sync, which keeps gradients on their rank", "call it after the context")
    if any(isinstance(one, Reducer) and one.listeners.forbid_changes for one in found):
        what = "inside of Join, where ranks without inputs follow backwards only"
        raise _untimely(module, what, "leave the call out, and run the last backward of each step outside of no_sync")
    states = [state for state in states_of(module.modules()) if isinstance(state, FullyShardState)]
    schedulers = dict.fromkeys(state.root.scheduler for state in states if state.root is not None)
    if in_backward() or not all(scheduler.step.is_idle for scheduler in schedulers):
        raise _untimely(module, "while a forward or backward is running", "call it after the last backward")
    for scheduler in schedulers:
        scheduler.reduce_kept()
    for one in found:
        if isinstance(one, Reducer) and one.requires_gradient_sync:
            one.average_kept_gradients()


def _untimely(module: nn.Module, when: str, fix: str) -> UsageError:
    return UsageError(f"reduce_gradients {when}", at=describe_module(module), fix=fix)


def _synchronised_by(module: nn.Module, *, caller: str) -> list[ReducingUnit]:
    """Return the handles and reducers that synchronise gradients at or below ``module``; raise if there are none."""
    check_module("module", module)
    found = list(units_of(module.modules()))
    if not found:
        raise nothing_annotated(caller, module)
    return found


def _restore(module: nn.Module, before: Iterable[tuple[ReducingUnit, bool, bool | None]]) -> None:
    for one, syncs, after in before:
        one.requires_gradient_sync, one.sync_after_context = syncs, after
    KeptGradients.note(states_of(module.modules()))
