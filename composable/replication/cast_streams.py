"""On which stream parameters are cast, and what waits for that.

On a device with streams they are cast ahead, on a stream of their own, which allocates the copies. It waits for
what the current stream was given before, an optimizer's step and the last readers of copies that were freed; who
reads a copy waits for an event recorded after it; and before the parameters may be written to again the
current stream has waited for all casts. ``record_stream`` is not used; docs/notes/streams.md.

On the CPU there is nothing to run ahead on: each module's are cast when one of them is first read.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from composable.torch_private import foreach_copy_

__all__ = ["AtOnce", "CastStreams", "DeviceCasts", "Filled", "HostCasts", "casts_for"]


class Filled(NamedTuple):
    """Copies of a group, and what comes after they were made; ``None``: nobody has to wait."""

    copies: Sequence[torch.Tensor]
    event: Any


class CastStreams(Protocol):
    """What copies of parameters ask of a device.

    Attributes:
        is_lazy: Copies may be made, or waited for, when they are first read.
        runs_ahead: They are worth making before that.
    """

    is_lazy: bool
    runs_ahead: bool

    def begin(self) -> None:
        """Let casts see what the current stream was given so far."""
        ...

    def fill(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.dtype]]]) -> list[Filled]:
        """Return new tensors with the values of others, in other dtypes, group by group in this order."""
        ...

    def wait_for(self, event: Any) -> bool:
        """Let what reads now wait; returns whether that holds for all who read later."""
        ...

    def end(self) -> None:
        """Let the current stream wait for all casts: parameters may be written to from now on."""
        ...


class HostCasts:
    """No streams: casts have run when they return."""

    is_lazy = True
    runs_ahead = False

    def begin(self) -> None:
        pass

    def fill(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.dtype]]]) -> list[Filled]:
        rest = iter(_copies_of([pair for group in groups for pair in group]))
        return [Filled([next(rest) for _ in group], None) for group in groups]

    def wait_for(self, event: Any) -> bool:
        return True

    def end(self) -> None:
        pass


class AtOnce(HostCasts):
    """The stream that is current when a forward starts: all that reads copies comes after it anyway."""

    is_lazy = False


class DeviceCasts:
    """A stream beside those that compute.

    Args:
        device: The module of torch for the device type, such as ``torch.cuda``: what is used of it is
            ``Stream``, ``current_stream`` and ``stream``, and the events of streams.

    Attributes:
        names: Name of each stream by its id, for debugging.
    """

    is_lazy = True
    runs_ahead = True

    def __init__(self, device: Any) -> None:
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

    def fill(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.dtype]]]) -> list[Filled]:
        with self._device.stream(self._casts):
            return [Filled(_copies_of(group), self._casts.record_event()) for group in groups]

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
_AT_ONCE = AtOnce()


def casts_for(params: Iterable[torch.Tensor]) -> CastStreams:
    """Return what casts ``params``: those on the current device run ahead, those on others on the current stream."""
    devices = {param.device for param in params}
    if all(device.type in ("cpu", "meta") for device in devices):
        return _ON_HOST
    device = devices.pop()
    found = None if devices or device.type in ("cpu", "meta") else torch.get_device_module(device)
    return DeviceCasts(found) if found is not None and found.current_device() == device.index else _AT_ONCE
