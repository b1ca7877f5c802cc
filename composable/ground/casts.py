"""Casts around the forward of a module.

A replicated module holds copies of its parameters in low precision while it runs. Each outermost forward makes new
copies, and keeps them until backward ends, for parts of forward that run again there. Autograd sends the gradient of a
copy to its parameter, in the dtype of ``param.grad``: so hooks on parameters, and ``param.grad``, are the same as
without copies. Copies that autograd has saved live as long as the graph; between steps no copy is left. Sharded
parameters are cast on their way through the collectives.

Streams: all copies are made on the stream that is current when a forward starts; their readers run after that.
"""

import copy
import dataclasses
import operator
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from composable.ground.modes import unseen
from composable.ground.torch_hooks import GradientHook, around_forward, at_end_of_backward, next_ending_number
from composable.ground.torch_private import (
    alias_of,
    foreach_copy_,
    replace_flat_weights,
    running_transform,
    tree_map,
)

_PLAIN = (bool, int, float, complex, str, bytes)


# A container of the caller, the key, index or name in it, the tensor that it held, and the cast one that it holds now.
_Swap = tuple[Any, Any, Any, Any]


def moved_to(device: torch.device, value: Any) -> Any:
    """Return ``value`` with its tensors, of any shapes, on ``device``; copies out of pinned memory are queued."""
    return tree_map(lambda one: one.to(device, non_blocking=True) if isinstance(one, torch.Tensor) else one, value)


def cast_floats(value: Any, dtype: torch.dtype, swaps: list[_Swap] | None = None) -> Any:
    """Return ``value`` with its floating-point tensors, of any shapes, cast to ``dtype`` by differentiable operations.

    It looks into tuples, lists, dicts, dataclasses and all other containers of torch's pytrees; a value with nothing
    to cast stays the same object. With ``swaps``, containers that can be written to stay the same objects, and what was
    written is added there.
    """
    if isinstance(value, torch.Tensor):
        return value if value.dtype is dtype or not value.is_floating_point() else value.to(dtype)
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        parts = [cast_floats(part, dtype, swaps) for part in value]
        if all(map(operator.is_, parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    is_record = False
    if isinstance(value, dict):
        held = list(value.items())
    elif isinstance(value, (list, deque)):
        held = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [(one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value)]
        is_record = True
    else:
        return _cast_in_pytree(value, dtype, swaps)
    casts = [cast_floats(part, dtype, swaps) for _, part in held]
    if all(map(operator.is_, casts, [part for _, part in held])):
        return value
    if is_record and value.__dataclass_params__.frozen:
        swaps = None
    found = value
    if swaps is None:
        # torch.compile cannot trace `copy.copy` of a list or dict.
        found = value.copy() if type(value) in (list, dict) else copy.copy(value)
    for (key, part), cast in zip(held, casts, strict=True):
        if swaps is not None:
            if cast is part:
                continue
            swaps.append((value, key, part, cast))
        if not is_record:
            found[key] = cast
        elif swaps is not None:
            setattr(found, key, cast)
        else:
            object.__setattr__(found, key, cast)
    return found


def _cast_in_pytree(value: Any, dtype: torch.dtype, swaps: list[_Swap] | None) -> Any:
    is_changed = False

    def cast(leaf: Any) -> Any:
        nonlocal is_changed
        changed = leaf if leaf is value else cast_floats(leaf, dtype, swaps)
        is_changed |= changed is not leaf
        return changed

    found = tree_map(cast, value)
    return found if is_changed else value


class CastInputs:
    """Casts the inputs of calls of a module; lists, dicts and objects that blocks may fill stay the caller's own.

    While a call runs they hold cast tensors in place of those in another dtype.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[list[_Swap]] = []

    def enter(self, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        """Return the inputs of a call that begins, with floating-point tensors in ``dtype``."""
        swaps: list[_Swap] = []
        self._calls.append(swaps)
        return cast_floats(args, dtype, swaps), {name: cast_floats(one, dtype, swaps) for name, one in kwargs.items()}

    def leave(self, *, keeps: int | None = None) -> None:
        """End the last call, or calls until ``keeps`` are left: their containers hold their own tensors again."""
        left = len(self._calls) - 1 if keeps is None else keeps
        while len(self._calls) > max(left, 0):
            for container, key, own, cast in reversed(self._calls.pop()):
                if isinstance(container, (list, deque)):
                    # The call may have moved it.
                    for place in (place for place, one in enumerate(container) if one is cast):
                        container[place] = own
                elif isinstance(container, dict):
                    if container.get(key) is cast:
                        container[key] = own
                elif getattr(container, key, None) is cast:
                    setattr(container, key, own)


class LentBuffer:
    """One buffer and its copies, which the modules of a tree hold while they run.

    Modules that share a buffer share its copies: a write of one module is visible to the others when it has run.
    """

    __slots__ = ("_copies", "_own", "_settled", "_users")

    def __init__(self, own: torch.Tensor) -> None:
        self._own = own
        self._copies: dict[torch.dtype, torch.Tensor] = {}
        # Sets, since a step that Ctrl-C has interrupted is done again.
        self._users: defaultdict[torch.dtype, set[object]] = defaultdict(set)
        # The tensors, with their versions when all had the same values.
        self._settled: list[tuple[torch.Tensor, int]] = []

    def take(self, dtype: torch.dtype, user: object) -> torch.Tensor:
        """Lend ``user`` the copy [any] in ``dtype``; a copy that is lent already serves all users."""
        self.settle()
        if dtype not in self._copies:
            # The first forward may run in inference mode, and a tensor made there could never be written to later.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._copies[dtype] = self._own.to(dtype)
        self._note()
        self._users[dtype].add(user)
        return self._copies[dtype]

    def give_back(self, dtype: torch.dtype, user: object) -> bool:
        """Undo every ``take`` of ``user``: the buffer has the values written to the copy; is a copy still lent?"""
        self.settle()
        self._users[dtype].discard(user)
        if not self._users[dtype]:
            self._copies.pop(dtype, None)
            self._note()
        return bool(self._copies)

    def settle(self) -> None:
        """Give the buffer and all copies the values written to one of them since; the buffer's own values come last."""
        written = [one for one, version in self._settled if _version_of(one) != version]
        if not self._copies or (running_transform() is not None and not written):
            return
        with torch.no_grad():
            values = self._values(written)
            for one in (*self._copies.values(), self._own):
                if one is not values:
                    one.resize_(values.shape)
                    # A write that raises the version lets autograd refuse saved values of this tensor too.
                    tells = bool(written) and all(one is not other for other in written)
                    (one if tells else one.data).copy_(values)
        self._note()

    def _values(self, written: list[torch.Tensor]) -> torch.Tensor:
        own = self._own
        if written and (written[0] is own or running_transform() is not None):
            return written[0]
        resized = next((one for one in self._copies.values() if one.shape != own.shape), None)
        if resized is not None:
            return resized
        # Versions do not show all writes: `F.batch_norm` and writes to `.data` change none. Element by element, so
        # that elements without a write keep their precision, and no host has to wait for a result.
        values = own
        for one in self._copies.values():
            values = torch.where(one == own.to(one.dtype), values, one.to(own.dtype))
        return values

    def _note(self) -> None:
        self._settled = [(one, _version_of(one)) for one in (*self._copies.values(), self._own)]


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


Owners: TypeAlias = Sequence[dict[str, Any]]


class Lending(ABC):
    """Puts other tensors into modules while one of the modules runs, forward or backward; else they hold their own.

    Attributes:
        number: The number of an ``Ending``.
        untraceable: Why a graph of compiled autograd cannot do this.
    """

    untraceable = "nothing tells modules when to hold their own tensors again (mp_policy)"
    __slots__ = ("__weakref__", "_depth", "_end", "number")

    def __init__(self) -> None:
        self.number = next_ending_number()
        self._depth = 0
        self._end: Callable[[], object] = lambda: None

    def enter(self, owners: Owners, *, is_outermost: bool) -> None:
        """Put the other tensors into modules for a call.

        ``owners`` has the dicts of buffers: modules own this object, which holds none. ``is_outermost``: no other call
        of the modules is running; an interrupted call is over.
        """
        if is_outermost:
            self._depth = 0
            self._restore_idle()
        self._depth += 1
        self._lend(owners)

    def leave(self) -> None:
        """Undo ``enter``."""
        # A hook before `enter` may have raised.
        self._depth = max(self._depth - 1, 0)
        self._restore_idle()

    def enter_backward(self, owners: Owners) -> None:
        """Lend until the running backward ends, also by an exception: checkpointing runs parts of forward in it."""
        if self._end() is None:
            # No local variable holds the callback that autograd holds: the traceback of Ctrl-C keeps frames alive.
            self._end = weakref.ref(at_end_of_backward(self), self._leave_backward)
            self._lend(owners)

    def put_back(self) -> None:
        """Put the modules' own tensors back after an interrupted call; while a backward runs, the others stay."""
        self._depth = 0
        self._restore_idle()

    def start(self) -> None:
        """Do nothing: a lending starts no collective."""

    def finish(self) -> None:
        """Put the modules' own tensors back; if Ctrl-C interrupts this, ``_leave_backward`` does it again."""
        if not self._depth:
            self._restore()

    def _leave_backward(self, _: object) -> None:
        self._end = lambda: None
        self._restore_idle()

    def _restore_idle(self) -> None:
        if not self._depth and self._end() is None:
            self._restore()

    @abstractmethod
    def _lend(self, owners: Owners) -> None:
        """Put the other tensors into modules; do nothing if they are there already."""

    @abstractmethod
    def _restore(self) -> None:
        """Put the modules' own tensors back."""


class CastBuffers(Lending):
    """Puts copies of floating-point buffers, in ``dtype``, into modules while one runs, forward or backward.

    Before and after, modules hold their own buffers, with the values that the computation wrote into the copies:
    code that reads a model between steps sees no copy.
    """

    __slots__ = ("_dtype", "_lender", "_lent")

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._lender: dict[int, LentBuffer] = {}
        self._lent: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []

    def take_from(self, lender: dict[int, LentBuffer]) -> None:
        """Take the copies from ``lender``, by ids of buffers, which serves all modules of a tree."""
        if not self._lent:
            self._lender = lender

    def _lend(self, owners: Owners) -> None:
        if self._lent:
            return
        for buffers in owners:
            for name, own in buffers.items():
                if own is None or isinstance(own, DTensor) or is_lazy(own):
                    continue
                if own.is_floating_point() and own.dtype is not self._dtype:
                    shared = self._lender.setdefault(id(own), LentBuffer(own))
                    self._lent.append((buffers, name, own, shared.take(self._dtype, self)))
        for buffers, name, _, lent in self._lent:
            buffers[name] = lent

    def _restore(self) -> None:
        own_of = {id(lent): own for _, _, own, lent in self._lent}
        for buffers, name, own, _ in self._lent:
            held = buffers.get(name)
            if held is not None and id(held) not in own_of and held.dtype is self._dtype:
                # A new tensor, computed from the copy and assigned: cast it to the dtype of the buffer it replaces.
                own_of[id(held)] = held.to(own.dtype)
            if held is not None:
                buffers[name] = own_of.get(id(held), held)
            shared = self._lender.get(id(own))
            if shared is not None and not shared.give_back(self._dtype, self):
                del self._lender[id(own)]
        self._lent = []


class ParamSlot(NamedTuple):
    """The place of a parameter and the dtype of the copies that are put there: a module, its parameters, a name."""

    find_module: weakref.ref[nn.Module]
    params: dict[str, Any]
    name: str
    dtype: torch.dtype


class _Copy(NamedTuple):
    """A place, its own parameter, the copy that is put there, and the copy's version, which each write raises."""

    slot: ParamSlot
    own: Any
    copied: torch.Tensor
    version: int


class LowPrecisionParams(Lending):
    """Puts copies of parameters, in another dtype, into modules while one of them runs, forward or backward.

    ``slots`` are all their places, also of tied ones. A parameter that has the dtype already stays.
    """

    __slots__ = ("_copies", "_is_lent", "_recurrent", "_slots")

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        super().__init__()
        self._slots = tuple(slots)
        # Recurrent modules keep parameters in lists too, beside their dicts.
        self._recurrent = {one.find_module: None for one in slots if isinstance(one.find_module(), nn.RNNBase)}
        self._copies: list[_Copy] = []
        self._is_lent = False

    def enter(self, owners: Owners, *, is_outermost: bool) -> None:
        """Lend copies, made anew if this is the outermost call and no backward runs it again."""
        if is_outermost and self._end() is None:
            self._depth = 0
            self._restore()
            # Optimizers may write in ways that raise no version, so nothing shows that a step has run.
            self._copies = []
        super().enter(owners, is_outermost=is_outermost)

    def forget(self) -> None:
        """Drop the copies that were kept for backward, if they are not in use."""
        if not self._is_lent:
            self._copies = []

    def written(self) -> ParamSlot | None:
        """Return the place of a copy that was written to, if there is one."""
        return next((slot for slot, _, copied, version in self._copies if copied._version != version), None)

    def put_back(self) -> None:
        """Put the modules' own parameters back, as ``Lending`` does, and drop the copies."""
        super().put_back()
        self.forget()

    def _leave_backward(self, held: object) -> None:
        super()._leave_backward(held)
        self.forget()

    def _lend(self, owners: Owners) -> None:
        if self._is_lent:
            return
        # Set first, so that `_restore` removes all copies also after an exception on the way.
        self._is_lent = True
        if not self._copies:
            self._copies = _copies_of(self._slots)
        for slot, own, copied, _ in self._copies:
            # A module that holds another parameter by now, for example in backward, keeps it.
            if slot.params.get(slot.name) is own:
                slot.params[slot.name] = copied
        self._replace_flat_weights({id(own): copied for _, own, copied, _ in self._copies})

    def _restore(self) -> None:
        if not self._is_lent:
            return
        for slot, own, copied, _ in self._copies:
            # A parameter that was assigned meanwhile is the user's, and stays.
            if slot.params.get(slot.name) is copied:
                slot.params[slot.name] = own
        self._replace_flat_weights({id(copied): own for _, own, copied, _ in self._copies})
        self._is_lent = False

    def _replace_flat_weights(self, others: dict[int, Any]) -> None:
        for find in self._recurrent:
            if (module := find()) is not None:
                replace_flat_weights(module, others)


def _copies_of(slots: Sequence[ParamSlot]) -> list[_Copy]:
    """Return copies of the parameters in ``slots`` that have another dtype; one copy for all places of a tied one."""
    found: list[tuple[ParamSlot, Any]] = []
    made: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    plain: list[tuple[nn.Parameter, torch.Tensor]] = []
    is_transformed = running_transform() is not None
    # A forward without gradients may have a part with gradients inside.
    with torch.inference_mode(mode=False), torch.enable_grad():
        for slot in slots:
            own, dtype = slot.params.get(slot.name), slot.dtype
            if own is None or own.dtype is dtype or not own.is_floating_point():
                continue
            found.append((slot, own))
            if (id(own), dtype) in made:
                continue
            if is_transformed or type(own) is not nn.Parameter:
                # A parameter of a functional call, a DTensor, an instance of a user's class: by its own cast.
                made[id(own), dtype] = own.to(dtype)
            else:
                value = torch.empty_like(own, dtype=dtype, requires_grad=False)
                plain.append((own, value))
                made[id(own), dtype] = value
        with torch.no_grad():
            if plain:
                foreach_copy_([value for _, value in plain], [own for own, _ in plain])
        for own, value in plain:
            copied = alias_of(own, value) if own.requires_grad else value
            copied._is_param = True  # so that modules take it as a parameter
            made[id(own), value.dtype] = copied
    held = [(slot, own, made[id(own), slot.dtype]) for slot, own in found]
    return [_Copy(slot, own, copied, copied._version) for slot, own, copied in held]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class LendHook(GradientHook):
    """A hook on the gradient of an output: it lends for the rest of the backward."""

    _lending: Lending
    _owners: Owners

    @unseen
    def __call__(self, grad: torch.Tensor) -> None:
        self._lending.enter_backward(self._owners)


def keep_dtype(module: nn.Module) -> list[RemovableHandle]:
    """Make a module run in the dtype of its parameters or buffers: cast its inputs to it, and its outputs back."""
    tensors = [*module.parameters(), *module.buffers()]
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
    if dtype is None:
        return []
    hooks = _KeptDtype(dtype)
    return around_forward(module, hooks.pre_forward, hooks.post_forward)


class _KeptDtype:
    """The hooks of ``keep_dtype`` on one module."""

    __slots__ = ("_dtype", "_given", "_inputs")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._given: list[torch.dtype | None] = []
        self._inputs = CastInputs()

    @unseen
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        self._given.append(next((one.dtype for one in inputs if one.is_floating_point()), None))
        return self._inputs.enter(args, kwargs, self._dtype)

    @unseen
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._inputs.leave()
        given = self._given.pop() if self._given else None
        return None if given is None or output is None else cast_floats(output, given)
