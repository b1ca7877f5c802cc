"""On which stream gathers and reductions run, and which events order them.

All-gathers run on the unshard stream and reduce-scatters on the reduce stream; each allocates
what it writes, so a block's owner stream is always the writer. Memory freed by the host while
kernels still read it is safe because its next writer first waits for an event recorded after
those kernels. ``record_stream`` is not used. The rules, and how they are checked: docs/notes/streams.md.

On the CPU there are no streams: what a device orders by events, the host orders by waiting.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from composable.engine.gradients import GradientBuffer
from composable.engine.handle import Handle
from composable.engine.reduce_paths import GradientPath, Reduction

__all__ = ["DeviceStreams", "HostStreams", "Streams", "streams_for"]


class Streams(Protocol):
    """What the runtime asks of a device.

    Attributes:
        names: Name of each stream by its id, for debugging.
    """

    names: Mapping[int, str]

    def shards_written(self) -> None:
        """The current stream wrote the shards that gathers will read, say in an optimizer step."""
        ...

    def shards_written_at(self, event: Any) -> None:
        """They are written once ``event`` is reached, and what the current stream did since does not matter."""
        ...

    def begin_unshard(self, handle: Handle) -> None:
        """Start to fill the buffers of ``handle``. Collective."""
        ...

    def wait_for_unshard(self, handle: Handle) -> None:
        """Wait until the buffers of ``handle`` are full: the thread, or the current stream."""
        ...

    def keep_secondary(self, handle: Handle) -> None:
        """Copy secondary shards out of the buffers of ``handle``, which are in use on the current stream."""
        ...

    def resharded(self) -> None:
        """The current stream has queued the last reader of a buffer that the host freed."""
        ...

    def meet(self) -> None:
        """Let every stream that used unsharded parameters in this step wait for all the others.

        Before and after a handle is completed: its gradients may come from another stream than the current one.
        """
        ...

    def end_backward(self) -> None:
        """A backward ends, also one that was cut short: the current stream waits for all the others."""
        ...

    def begin_reduction(
        self, path: GradientPath, gradient: GradientBuffer | None, *, to_host: bool = False
    ) -> Reduction:
        """Start to reduce what the current stream has put into ``gradient``. Collective.

        Args:
            path: Of the flat buffer.
            gradient: Its gradients; ``None``: none but what the path has kept.
            to_host: The result lies in host memory: whoever finishes waits until it is there.
        """
        ...

    def wait_for_copies(self) -> None:
        """Wait until gathers have read the shards that rest on the host: from now on the host may write them."""
        ...


class HostStreams:
    """No streams: the thread itself waits."""

    names: Mapping[int, str] = {}

    def shards_written(self) -> None:
        pass

    def shards_written_at(self, event: Any) -> None:
        raise AssertionError("there is no event on the CPU: the setter refuses it")

    # As they are: a function around each would cost as much as it does.
    begin_unshard = staticmethod(Handle.begin_unshard)
    wait_for_unshard = staticmethod(Handle.finish_gathers)
    keep_secondary = staticmethod(Handle.keep_secondary)

    def resharded(self) -> None:
        pass

    def meet(self) -> None:
        pass

    def end_backward(self) -> None:
        pass

    def begin_reduction(
        self, path: GradientPath, gradient: GradientBuffer | None, *, to_host: bool = False
    ) -> Reduction:
        return path.resume() if gradient is None else path.begin(gradient.source)

    def wait_for_copies(self) -> None:
        pass


class DeviceStreams:
    """Two streams beside the one that computes.

    Args:
        device: The module of torch for the device type, such as ``torch.cuda``: what is used of it is
            ``Stream``, ``current_stream`` and ``stream``, and the events of streams.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._unshard = device.Stream(priority=-1)
        self._reduce = device.Stream(priority=-1)
        self._full: dict[Handle, Any] = {}
        # By stream: a later event of one stream stands for its earlier ones, but not for those of others.
        self._before_unshard: dict[int, Any] = {}
        self._users: dict[int, Any] = {}
        # After the last gather from the host; of one stream, so it stands for all.
        self._copied: Any = None
        self.names: Mapping[int, str] = {
            device.current_stream().stream_id: "default",
            self._unshard.stream_id: "unshard",
            self._reduce.stream_id: "reduce",
        }

    def shards_written(self) -> None:
        current = self._device.current_stream()
        self._before_unshard[current.stream_id] = current.record_event()

    def shards_written_at(self, event: Any) -> None:
        # Beside that of the current stream, if any: it stands for readers of memory that was freed.
        self._before_unshard[-1] = event

    def begin_unshard(self, handle: Handle) -> None:
        self._begin_on_unshard()
        try:
            with self._device.stream(self._unshard):
                handle.begin_unshard()
                handle.finish_gathers()
                self._full[handle] = self._unshard.record_event()
            if handle.is_offloaded:
                self._copied = self._full[handle]
        except BaseException:
            # Nobody will wait for what was queued, and the shard may be written next.
            self._device.current_stream().wait_stream(self._unshard)
            if handle.is_offloaded:
                self._copied = self._unshard.record_event()
            raise

    def wait_for_unshard(self, handle: Handle) -> None:
        current = self._device.current_stream()
        self._users[current.stream_id] = current
        full = self._full.pop(handle, None)
        if full is not None:
            current.wait_event(full)
            return
        # An exception cut the beginning short, or this wait.
        current.wait_stream(self._unshard)
        handle.finish_gathers()

    def _begin_on_unshard(self) -> None:
        """Let the unshard stream wait until shards are written, and readers of buffers freed so far have run."""
        if self._before_unshard:
            for event in self._before_unshard.values():
                self._unshard.wait_event(event)
            self._before_unshard.clear()

    def keep_secondary(self, handle: Handle) -> None:
        # From the pool that buffers come from and go to: what gathers read may be freed by the host at any time.
        self._begin_on_unshard()
        # A forward may have written its parameters. The next gather comes after all that in any case.
        self._unshard.wait_stream(self._device.current_stream())
        with self._device.stream(self._unshard):
            handle.keep_secondary()

    def resharded(self) -> None:
        current = self._device.current_stream()
        self._before_unshard[current.stream_id] = current.record_event()

    def meet(self) -> None:
        if len(self._users) > 1:
            current = self._come_after_users()
            event = current.record_event()
            for user in self._users.values():
                if user != current:
                    user.wait_event(event)

    def end_backward(self) -> None:
        self._come_after_users()
        self._users.clear()
        self.wait_for_copies()

    def begin_reduction(
        self, path: GradientPath, gradient: GradientBuffer | None, *, to_host: bool = False
    ) -> Reduction:
        self._reduce.wait_stream(self._device.current_stream())
        try:
            with self._device.stream(self._reduce):
                shard = (path.resume() if gradient is None else path.begin(gradient.source))()
                reduced = self._reduce.record_event()
        except BaseException:
            # Nobody will wait for what was queued, and the gradient buffer is freed.
            self._device.current_stream().wait_stream(self._reduce)
            raise

        def finish() -> torch.Tensor | None:
            self._device.current_stream().wait_event(reduced)
            if to_host:
                reduced.synchronize()
            return shard

        return finish

    def wait_for_copies(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def _come_after_users(self) -> Any:
        current = self._device.current_stream()
        for user in self._users.values():
            if user != current:
                current.wait_stream(user)
        return current


def streams_for(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(torch.get_device_module(device))
