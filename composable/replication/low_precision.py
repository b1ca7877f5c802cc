"""Copies of parameters in low precision, which a replicated module holds while it runs.

They are cast anew in every forward that is not inside another, and kept for what runs again in backward until
that ends. A module's copies are waited for, or made, when one of its parameters is first read. Autograd takes the
gradient of a copy to its parameter, in the dtype that the gradient rests in: so hooks on parameters, and
``param.grad``, are what they are without copies. What autograd has saved of the copies lives as long as the graph
does; between steps nothing is left.

On a device with streams they are cast ahead, in the order of the last forward, on a stream of their own, which
allocates the copies. It waits for what the current stream was given before, an optimizer's step and the last readers
of copies that were freed; who reads a copy waits for an event recorded after it; and before the parameters may be
written to again the current stream has waited for all casts. ``record_stream`` is not used; docs/notes/streams.md.
On the CPU there is nothing to run ahead on.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from composable.ground.casts import Lending
from composable.ground.torch_private import (
    alias_of,
    foreach_copy_,
    has_compiled,
    outside_transforms,
    replace_flat_weights,
    running_transform,
)

__all__ = ["DeviceCasts", "HostCasts", "LowPrecisionParams", "ParamSlot", "Unread"]

# Every so many forwards the host casts nothing ahead, to see what is still read. Such a forward took 6 ms longer, of a
# step of 155 ms, with 388 modules.
_LOOKS_AGAIN = 64
# A tensor and the dtype of its copy, one group for each module.
_Groups: TypeAlias = Sequence[Sequence[tuple[torch.Tensor, torch.dtype]]]


class HostCasts:
    """Casts that have run when they return.

    Attributes:
        is_lazy: Copies may be made, or waited for, when they are first read.
        runs_ahead: They are worth making before that.
    """

    runs_ahead = False

    def __init__(self, *, is_lazy: bool = True) -> None:
        self.is_lazy = is_lazy

    def begin(self) -> None:
        """Let casts see what the current stream was given so far."""

    def fill(self, groups: _Groups) -> list[tuple[Sequence[torch.Tensor], Any]]:
        """Return new tensors with the values of others, in other dtypes, and an event after them, group by group.

        Without an event nobody has to wait.
        """
        rest = iter(_copies_of([pair for group in groups for pair in group]))
        return [([next(rest) for _ in group], None) for group in groups]

    def wait_for(self, event: Any) -> bool:
        """Let the current stream wait for an event; returns whether that holds for all who read later."""
        return True

    def end(self) -> None:
        """Let the current stream wait for all casts: parameters may be written to from now on."""


class DeviceCasts(HostCasts):
    """Casts on a stream beside those that compute.

    Args:
        device: The module of torch for the device type, such as ``torch.cuda``: what is used of it is
            ``Stream``, ``current_stream`` and ``stream``, and the events of streams.

    Attributes:
        names: Name of each stream by its id, for debugging.
    """

    runs_ahead = True

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self._casts = device.Stream(priority=-1)
        # Where the forward started whose casts run; `None`: none do.
        self._home: Any = None
        # Whether another stream has ever read a copy; and whether a forward went by in which none did.
        self._has_branches = False
        self._is_alone = False
        self.names = {device.current_stream().stream_id: "default", self._casts.stream_id: "casts"}

    def begin(self) -> None:
        current = self._device.current_stream()
        if self._home is None:
            self._home = current
        self._casts.wait_stream(current)

    def fill(self, groups: _Groups) -> list[tuple[Sequence[torch.Tensor], Any]]:
        with self._device.stream(self._casts):
            return [(_copies_of(group), self._casts.record_event()) for group in groups]

    def wait_for(self, event: Any) -> bool:
        current = self._device.current_stream()
        current.wait_event(event)
        is_home = bool(current == self._home)
        self._has_branches |= not is_home
        # A stream that branched off before this waits for nothing that this one does, and may read the same copy next.
        return is_home and self._is_alone

    def end(self) -> None:
        if self._home is not None:
            self._device.current_stream().wait_stream(self._casts)
            self._home = None
            self._is_alone = not self._has_branches


def _copies_of(group: Sequence[tuple[torch.Tensor, torch.dtype]]) -> list[torch.Tensor]:
    with torch.no_grad():
        copies = [torch.empty_like(own, dtype=dtype, requires_grad=False) for own, dtype in group]
        if copies:
            foreach_copy_(copies, [own for own, _ in group])
    return copies


_ON_HOST = HostCasts()
# On the stream that is current when a forward starts: all that reads copies comes after it anyway.
_AT_ONCE = HostCasts(is_lazy=False)


def _casts_for(params: Iterable[torch.Tensor]) -> HostCasts:
    """Return what casts ``params``: those on the current device run ahead, those on others on the current stream."""
    devices = {param.device for param in params}
    if all(device.type in ("cpu", "meta") for device in devices):
        return _ON_HOST
    device = devices.pop()
    found = None if devices or device.type in ("cpu", "meta") else torch.get_device_module(device)
    return DeviceCasts(found) if found is not None and found.current_device() == device.index else _AT_ONCE


class Unread(dict[str, Any]):
    """What stands for the dict of a module's parameters, which is made ready when somebody looks at one of them.

    So a copy is made, or waited for, when it is first used, whoever uses it: the module itself, one around it that
    reads ``self.out.weight``, or a loop over ``parameters()``.

    Empty itself: what looks into a dict without asking it finds no parameter, rather than one that is not ready.

    Args:
        held: The dict.
        read: Makes it ready. What changes it calls this too, so that it changes what a reader would have seen.
    """

    __slots__ = ("_held", "_read")

    def __init__(self, held: dict[str, Any], read: Callable[[], None]) -> None:
        super().__init__()
        self._held = held
        self._read = read

    # Modules ask for names whenever an attribute of theirs is read, also a submodule.

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._held)

    def keys(self) -> Any:
        return self._held.keys()


def _ready(name: str) -> Callable[..., Any]:
    def call(self: Unread, *args: Any, **kwargs: Any) -> Any:
        self._read()
        return getattr(self._held, name)(*args, **kwargs)

    return call


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__"),
    *("__reduce_ex__", "clear", "copy", "get", "items", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(Unread, _name, _ready(_name))


@dataclass(frozen=True, slots=True, eq=False)
class ParamSlot:
    """Where a parameter hangs, and what it is computed with.

    Attributes:
        module: That holds it.
        name: Its name there.
        dtype: Of its copies.
    """

    module: nn.Module
    name: str
    dtype: torch.dtype

    @property
    def is_to_cast(self) -> bool:
        """The parameter has another dtype."""
        param = self.module._parameters.get(self.name)
        return param is not None and param.dtype is not self.dtype


class _Copy(NamedTuple):
    """What is in a place, what is put there, and the version of that: writing counts it up."""

    slot: ParamSlot
    own: Any
    copied: torch.Tensor
    version: int


@dataclass(slots=True, eq=False, repr=False)
class _Unit:
    """The places of one module.

    Attributes:
        module: That holds them.
        slots: All of them.
        held: The module's dict of parameters, while copies are lent; ``None``: they are not.
        unread: What stands for that dict until it is first read.
        copies: Of this forward, kept for backward; ``None``: there are none yet.
        event: Comes after they were made; ``None``: nobody has to wait.
        is_lent: The dict holds them.
    """

    module: nn.Module
    slots: list[ParamSlot] = field(default_factory=list)
    held: dict[str, Any] | None = None
    unread: Unread | None = None
    copies: list[_Copy] | None = None
    event: Any = None
    is_lent: bool = False

    @property
    def is_flat(self) -> bool:
        """The module keeps a list of its parameters beside the dict, which is read as it is."""
        return isinstance(self.module, nn.RNNBase)

    @property
    def is_plain(self) -> bool:
        """It holds parameters that one operation casts: none that a functional call lent, no DTensor."""
        params = self.module.__dict__["_parameters"]
        return all(type(params.get(slot.name)) in (nn.Parameter, type(None)) for slot in self.slots)


class LowPrecisionParams(Lending):
    """Lets modules hold copies of their parameters in another dtype.

    Args:
        slots: All places of the parameters, also of tied ones.

    Attributes:
        casts: Decides on which stream they are made; ``None``: not known before the first forward.
    """

    __slots__ = ("_ahead", "_forwards", "_is_lent", "_lock", "_read", "_tied", "_units", "casts")

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        super().__init__()
        units: dict[nn.Module, _Unit] = {}
        for slot in slots:
            units.setdefault(slot.module, _Unit(slot.module)).slots.append(slot)
        self._units = list(units.values())
        self.casts: HostCasts | None = None
        self._is_lent = False
        # A forward may run modules in threads, which read a copy at the same time.
        self._lock = threading.RLock()
        # One copy serves all places of a tied parameter.
        self._tied: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        # Units as this forward reads them, and what of that is expected of the next one.
        self._read: dict[_Unit, None] = {}
        self._ahead = dict.fromkeys(self._units)
        self._forwards = 0

    def enter(self, modules: Sequence[nn.Module], *, is_outermost: bool) -> None:
        """Lend copies, made anew if this is the outermost call and no backward runs it again."""
        if is_outermost and not self.is_in_backward:
            self._depth = 0
            self._restore()
            # Optimizers may write by ways that no version counts: a step is noticed by nothing.
            self._drop()
            self._read = {}
        super().enter(modules, is_outermost=is_outermost)

    def leave(self) -> None:
        """Undo ``enter``; after the outermost call it is known what the next one will read, and in which order."""
        super().leave()
        if not self._is_lent and self.casts is not None:
            # On the host what was cast ahead is held at once, and nobody sees whether it is read.
            is_whole = self.casts.runs_ahead or not self._forwards % _LOOKS_AGAIN
            self._ahead = self._read if is_whole else {**self._ahead, **self._read}
            self._read = {}
            self._forwards += 1

    def forget(self) -> None:
        """Drop the copies that were kept for backward, if they are not in use."""
        if not self._is_lent:
            self._drop()

    def written(self) -> ParamSlot | None:
        """Return the place of a copy that was written to, if there is one."""
        copies = (copy for unit in self._units for copy in unit.copies or ())
        return next((slot for slot, _, copied, version in copies if copied._version != version), None)

    def put_back(self) -> None:
        """Let the modules hold their own, as ``Lending`` does, and keep no copies."""
        super().put_back()
        self.forget()

    def _leave_backward(self, held: object) -> None:
        super()._leave_backward(held)
        self.forget()

    def _drop(self) -> None:
        for unit in self._units:
            unit.copies = None
        self._tied = {}

    def _lend(self, modules: Sequence[nn.Module]) -> None:
        if self._is_lent:
            return
        # Noted first: an exception on the way leaves none behind.
        self._is_lent = True
        if self.casts is None:
            held = (unit.module._parameters.get(slot.name) for unit in self._units for slot in unit.slots)
            self.casts = _casts_for(param for param in held if param is not None)
        casts = self.casts
        # Where the compiler reads parameters, nobody is asked; a copy that is made in a transform is part of it.
        is_lazy = casts.is_lazy and not has_compiled() and running_transform() is None
        casts.begin()
        runs_ahead = is_lazy and casts.runs_ahead
        if not is_lazy:
            self._cast(self._units, _AT_ONCE)
        else:
            self._cast((unit for unit in self._units if unit.is_flat or (runs_ahead and not unit.is_plain)), _AT_ONCE)
            if runs_ahead or self._forwards % _LOOKS_AGAIN:
                self._cast(self._ahead, casts)
        for unit in self._units:
            unit.held, unit.is_lent = unit.module.__dict__["_parameters"], False
            if unit.copies is not None and unit.event is None:
                _hold(unit)
            else:
                unit.unread = Unread(unit.held, partial(self._use, unit))
                unit.module.__dict__["_parameters"] = unit.unread
        self._replace_flat_weights({id(own): copied for _, own, copied, _ in self._flat_copies()})

    def _use(self, unit: _Unit) -> None:
        """Make the copies of a module ready: somebody is about to read one."""
        with self._lock:
            casts = self.casts
            if not self._is_lent or unit.unread is None or casts is None:
                return  # Somebody has kept what stood for the dict of a forward that is over.
            if unit.copies is None:
                with outside_transforms() if running_transform() is not None else nullcontext():
                    casts.begin()
                    self._cast([unit], casts)
            is_settled = unit.event is None or casts.wait_for(unit.event)
            _hold(unit)
            if is_settled and unit.module.__dict__["_parameters"] is unit.unread:
                unit.module.__dict__["_parameters"] = unit.held
            if not self.is_in_backward:
                self._read[unit] = None

    def _restore(self) -> None:
        if not self._is_lent:
            return
        flat = {id(copied): own for _, own, copied, _ in self._flat_copies()}
        for unit in self._units:
            if unit.unread is not None and unit.module.__dict__["_parameters"] is unit.unread:
                unit.module.__dict__["_parameters"] = unit.held
            params = unit.module._parameters
            for slot, own, copied, _ in unit.copies or ():
                # What was assigned meanwhile is the user's.
                if params.get(slot.name) is copied:
                    params[slot.name] = own
            unit.held = unit.unread = unit.event = None
        self._replace_flat_weights(flat)
        if self.casts is not None:
            self.casts.end()
        self._is_lent = False

    def _flat_copies(self) -> Sequence[_Copy]:
        return [copy for unit in self._units if unit.is_flat for copy in unit.copies or ()]

    def _replace_flat_weights(self, others: dict[int, Any]) -> None:
        if others:
            for unit in self._units:
                replace_flat_weights(unit.module, others)

    def _cast(self, units: Iterable[_Unit], casts: HostCasts) -> None:
        """Make copies for those of ``units`` that have none; one for all places of a tied parameter.

        Streams: memory comes from that of ``casts``, which fills it; what autograd notes belongs to the current
        one, on which it will run the backward of that.
        """
        tied, seen = self._tied, set(self._tied)
        found: list[tuple[_Unit, list[tuple[ParamSlot, Any]], list[tuple[Any, torch.dtype]]]] = []
        # Inside a forward without gradients there may be a part with them.
        with torch.inference_mode(mode=False), torch.enable_grad():
            is_transformed = running_transform() is not None
            for unit in units:
                if unit.copies is not None:
                    continue
                places: list[tuple[ParamSlot, Any]] = []
                plain: list[tuple[Any, torch.dtype]] = []
                found.append((unit, places, plain))
                params = unit.held if unit.held is not None else unit.module.__dict__["_parameters"]
                for slot in unit.slots:
                    own, dtype = params.get(slot.name), slot.dtype
                    if own is None or own.dtype is dtype or not own.is_floating_point():
                        continue
                    places.append((slot, own))
                    if (id(own), dtype) in seen:
                        continue
                    seen.add((id(own), dtype))
                    if is_transformed or type(own) is not nn.Parameter:
                        # What a functional call lends, a DTensor, an instance of a user's class: as they cast.
                        tied[id(own), dtype] = own.to(dtype)
                    else:
                        plain.append((own, dtype))
            filled = casts.fill([plain for _, _, plain in found])
            for (unit, places, plain), (values, event) in zip(found, filled, strict=True):
                for (own, dtype), value in zip(plain, values, strict=True):
                    copied = alias_of(own, value) if own.requires_grad else value
                    copied._is_param = True
                    tied[id(own), dtype] = copied
                unit.event = event
                held = [(slot, own, tied[id(own), slot.dtype]) for slot, own in places]
                unit.copies = [_Copy(slot, own, copied, copied._version) for slot, own, copied in held]


def _hold(unit: _Unit) -> None:
    """Put the copies in their places, but for those that hold something else by now, in backward say."""
    if not unit.is_lent and unit.held is not None:
        for slot, own, copied, _ in unit.copies or ():
            if unit.held.get(slot.name) is own:
                unit.held[slot.name] = copied
        unit.is_lent = True
