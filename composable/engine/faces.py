"""Which of its two faces each parameter of a handle shows, the sharded or the unsharded one, and what it is called."""

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import nn

from composable.comm import Grid, Ranks
from composable.engine.param import ShardedParam, has_own_setattr
from composable.ground.names import class_name, module_text

__all__ = ["Faces", "Lent", "Misplaced", "ParamLabel", "ParamView"]


class ParamView(enum.Enum):
    """What there is of a handle's unsharded parameters, and whether modules hold them.

    SHARDED: nothing; modules hold the sharded ones, as in the next two. GATHERING: an unshard was started and is not
    in use yet. HIDDEN: they are there all the same. UNSHARDED: modules hold them.
    """

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    HIDDEN = enum.auto()
    UNSHARDED = enum.auto()


class Lent(enum.Enum):
    """How a context shows parameters to the user in a way that forward and backward cannot use.

    WHOLE: every module holds a copy of its whole parameters, with which it can run where nothing is to have a gradient.
    OTHER: copies of some ranks only, on the host, or with gradients.
    """

    WHOLE = enum.auto()
    OTHER = enum.auto()


class Misplaced(NamedTuple):
    """What a module holds where a handle gave it a face of a parameter: the other face, another tensor or none."""

    module: nn.Module
    name: str
    param: ShardedParam
    held: nn.Parameter | None

    @property
    def is_stranger(self) -> bool:
        """It is neither face."""
        return not self.param.has_face(self.held)


class _LabelledHandle(Protocol):
    """What a label asks of the handle of its parameter."""

    grid: Grid
    has_parts: bool

    @property
    def fqn(self) -> str: ...

    def from_root(self, fqn: str) -> str: ...


class ParamLabel:
    """Who a sharded parameter is.

    Attributes:
        key: Equal on all ranks, and another one for each parameter of the same ranks.
    """

    __slots__ = ("_fqn", "_handle", "_kind", "key")

    def __init__(self, annotation: int, param: ShardedParam, handle: _LabelledHandle) -> None:
        self._fqn = param.fqn
        self._kind = class_name(param.owners[0][0])
        # What the handle is called changes when the root is known.
        self._handle = weakref.ref(handle)
        self.key = f"{annotation} {handle.fqn} {param.fqn}"

    def __str__(self) -> str:
        handle = self._handle()
        return self._fqn if handle is None else handle.from_root(self._fqn)

    @property
    def everyone(self) -> Ranks | None:
        """All ranks that hold pieces of it, or copies of pieces; ``None``: it is gone."""
        handle = self._handle()
        return None if handle is None else handle.grid.everyone

    @property
    def has_parts(self) -> bool:
        """On some of these ranks, modules inside the same root lie on a part of them."""
        handle = self._handle()
        return handle is not None and handle.has_parts

    @property
    def module(self) -> str:
        """What messages call the module that owns it."""
        return module_text(str(self).rpartition(".")[0], self._kind)


class Faces:
    """The places of a handle's parameters, which show the sharded faces from now on.

    Args:
        params: Of the handle.
    """

    __slots__ = ("_places", "_plain_places", "_swaps", "_watched")

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        for param in params:
            param.place(param.sharded)
        # Modules with a way of their own to take a parameter are asked.
        self._watched = [param for param in params if any(has_own_setattr(module) for module, _ in param.owners)]
        self._places = [(module, name, param) for param in params for module, name in param.owners]
        self._plain_places = [place for place in self._places if place[2] not in self._watched]
        self._swaps: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] | None = None

    def are_sharded(self) -> bool:
        """Say whether every module holds the sharded parameters."""
        # Before each gather: a generator costs as much again.
        for module, name, param in self._places:  # noqa: SIM110
            if module._parameters.get(name) is not param.sharded:
                return False
        return True

    def misplaced(self, view: ParamView) -> list[Misplaced]:
        """Return what modules hold in place of the face that they were given."""
        found = []
        for module, name, param in self._places:
            held = module._parameters.get(name)
            if held is not (param.unsharded if view is ParamView.UNSHARDED else param.sharded):
                found.append(Misplaced(module, name, param, held))
        return found

    def show_unsharded(self, refuse: Callable[[], None]) -> None:
        """Let the modules hold the unsharded parameters, which are full; calls ``refuse`` where one has neither."""
        if self._swaps is None:
            self._swaps = [(module, name, param.sharded, param.leaf()) for module, name, param in self._plain_places]
        for module, name, sharded, leaf in self._swaps:
            trainable = sharded.requires_grad
            if leaf.requires_grad is not trainable:
                leaf.requires_grad_(trainable)
            params = module._parameters
            held = params.get(name)
            if held is not sharded and held is not leaf:
                refuse()
            params[name] = leaf
        for param in self._watched:
            if not (param.is_placed(param.sharded) or param.is_placed(param.leaf())):
                refuse()
            param.leaf().requires_grad_(param.sharded.requires_grad)
            param.place(param.leaf())

    def show_sharded(self) -> None:
        """Let the modules hold the sharded parameters."""
        for module, name, param in self._plain_places:
            module._parameters[name] = param.sharded
        for param in self._watched:
            param.place(param.sharded)
