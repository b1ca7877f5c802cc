"""Gives a module that is annotated the methods of a mixin, by another class, and takes them away again."""

import weakref
from typing import Any, NoReturn

from torch import nn

from composable.errors import ConfigError, place_of_rank
from composable.fqns import describe_module

__all__ = ["ClassSwap", "original_class"]


class ClassSwap:
    """Swaps the classes of modules for subclasses that have a mixin in front.

    Args:
        mixin: What is gained.
        prefix: In front of the names of the classes.
    """

    def __init__(self, mixin: type, prefix: str) -> None:
        self._mixin = mixin
        self._prefix = prefix
        # Weakly: torch.fx makes a class for each module.
        self._classes: weakref.WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, module: nn.Module) -> None:
        """Give ``module`` the mixin, unless it has it."""
        if not isinstance(module, self._mixin):
            module.__class__ = self._class_for(type(module))

    def remove(self, module: nn.Module) -> None:
        """Undo ``add``."""
        if isinstance(module, self._mixin):
            module.__class__ = original_class(type(module))

    def _class_for(self, cls: type[nn.Module]) -> type[nn.Module]:
        known = self._classes.get(cls)
        found = None if known is None else known()
        if found is None:
            # Messages name the class that users know.
            members: dict[str, Any] = {"__module__": cls.__module__, "_composable_class_name": cls.__name__}
            if not hasattr(cls, "join_hook"):
                members["join_hook"] = _join_hook
            found = type(f"{self._prefix}{cls.__name__}", (self._mixin, cls), members)
            self._classes[cls] = weakref.ref(found)
        return found


def _join_hook(module: nn.Module, **_: object) -> NoReturn:
    """Refuse: ``Join`` asks what it is given for this, as torch's ``DistributedDataParallel`` has it."""
    raise ConfigError(
        "Join got an annotated module itself",
        at=f"{place_of_rank()}, {describe_module(module)}",
        fix="pass joinable(model, step=...), as in docs/uneven_inputs.md; or as_ddp(model), if it is replicated alone",
    )


def original_class(cls: type) -> Any:
    """Return the class that a module of class ``cls`` had before ``ClassSwap.add``."""
    return cls.__bases__[1]
