"""On which stream gathers and reductions run, and which events order them.

All-gathers run on the unshard stream and reduce-scatters on the reduce stream; each allocates
what it writes, so a block's owner stream is always the writer. Memory freed by the host while
kernels still read it is safe because its next writer first waits for an event recorded after
those kernels. ``record_stream`` is not used.

On the CPU there are no streams: what a device orders by events, the host orders by waiting.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from composable.storage import GradientBuffer, GradientPath, Handle, Reduction

__all__ = ["DeviceStreams", "HostStreams", "Streams", "streams_for"]


class Streams(Protocol):
    """What the scheduler asks of a device.

    Attributes:
        names: Name of each stream by its id, for debugging.
    """

    names: Mapping[int, str]

    def shards_written(self) -> None:
        """The current stream wrote the shards that gathers will read, say in an optimizer step."""
        ...

    def begin_unshard(self, handle: Handle) -> None:
        """Start to fill the buffers of ``handle``. Collective."""
        ...

    def wait_for_unshard(self, handle: Handle) -> None:
        """Wait until the buffers of ``handle`` are full: the thread, or the current stream."""
        ...

    def resharded(self) -> None:
        """The current stream has queued the last reader of a buffer that the host freed."""
        ...

    def begin_reduction(self, path: GradientPath, gradient: GradientBuffer) -> Reduction:
        """Start to reduce what the current stream has put into ``gradient``. Collective."""
        ...


class HostStreams:
    """No streams: the thread itself waits."""

    names: Mapping[int, str] = {}

    def shards_written(self) -> None:
        pass

    def begin_unshard(self, handle: Handle) -> None:
        handle.begin_unshard()

    def wait_for_unshard(self, handle: Handle) -> None:
        handle.finish_gathers()

    def resharded(self) -> None:
        pass

    def begin_reduction(self, path: GradientPath, gradient: GradientBuffer) -> Reduction:
        return path.begin(gradient.source)


class DeviceStreams:
    """Two streams beside the one that computes.

    Args:
        device: The module of torch for the device type, such as ``torch.cuda``: what is used of it is
            ``Stream``, ``current_stream`` and ``stream``.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._unshard = device.Stream(priority=-1)
        self._reduce = device.Stream(priority=-1)
        self._full: dict[Handle, Any] = {}
        self._before_unshard: Any = None
        self.names: Mapping[int, str] = {
            device.current_stream().stream_id: "default",
            self._unshard.stream_id: "unshard",
            self._reduce.stream_id: "reduce",
        }

    def shards_written(self) -> None:
        self._before_unshard = self._device.current_stream().record_event()

    def begin_unshard(self, handle: Handle) -> None:
        if self._before_unshard is not None:
            # The shards are written, and the kernels that read the buffers freed so far have run.
            self._unshard.wait_event(self._before_unshard)
            self._before_unshard = None
        try:
            with self._device.stream(self._unshard):
                handle.begin_unshard()
                handle.finish_gathers()
                self._full[handle] = self._unshard.record_event()
        except BaseException:
            # Nobody will wait for what was queued, and the shard may be written next.
            self._device.current_stream().wait_stream(self._unshard)
            raise

    def wait_for_unshard(self, handle: Handle) -> None:
        self._device.current_stream().wait_event(self._full.pop(handle))

    def resharded(self) -> None:
        self._before_unshard = self._device.current_stream().record_event()

    def begin_reduction(self, path: GradientPath, gradient: GradientBuffer) -> Reduction:
        self._reduce.wait_stream(self._device.current_stream())
        try:
            with self._device.stream(self._reduce):
                shard = path.begin(gradient.source).finish()
                return _Reduced(self._device, shard, self._reduce.record_event())
        except BaseException:
            # Nobody will wait for what was queued, and the gradient buffer is freed.
            self._device.current_stream().wait_stream(self._reduce)
            raise


class _Reduced:
    """A reduction that the reduce stream has queued to its end."""

    __slots__ = ("_device", "_event", "_shard")

    def __init__(self, device: Any, shard: torch.Tensor, event: Any) -> None:
        self._device = device
        self._shard = shard
        self._event = event

    def finish(self) -> torch.Tensor:
        self._device.current_stream().wait_event(self._event)
        return self._shard


def streams_for(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(torch.get_device_module(device))
