"""Puts annotated models onto the recording device: their streams and what their transports move."""

from typing import NamedTuple

import torch

from composable.annotation.root import Root
from composable.comm import Pending, Transport
from composable.engine import RootSettings, Step, steps_of
from composable.engine.scheduler import Scheduler
from composable.engine.unsharded import DeviceStreams
from composable.ground.torch_hooks import at_end_of_backward
from tools.streams.recording import Event, Recorder

__all__ = ["REAL", "RecordedTransport", "Runtime", "put_on_device"]


class Runtime(NamedTuple):
    """The classes under test, or broken ones."""

    streams: type[DeviceStreams]
    scheduler: type[Scheduler]


REAL = Runtime(DeviceStreams, Scheduler)


def step_on(root: Root, streams: DeviceStreams) -> Step:
    """Return a new state for the steps of ``root`` on ``streams``; no rank compares what it does."""
    return Step(steps_of(root.handles, {}), streams, root.grid.everyone, RootSettings(), [])


def put_on_device(root: Root, recorder: Recorder, runtime: Runtime = REAL) -> None:
    """Let the handles of ``root``, which has not run yet, run on the streams of ``recorder``."""
    streams = runtime.streams(recorder)
    root.scheduler = runtime.scheduler(step_on(root, streams), at_end_of_backward)
    for state in root.states:
        state.listeners.root = root.scheduler.step.listeners
    recorder.take_names(streams.names)
    for handle in root.handles:
        for index, flat in enumerate(handle.buffers):
            name = repr(handle.fqn) if len(handle.buffers) == 1 else f"{handle.fqn!r} [{index}]"
            if flat.home.is_elsewhere:
                recorder.call(flat.shard, f"the shard of {name}")
            routes = flat.routes
            for path in (routes.gather_path, routes.gradient_path, getattr(routes, "secondary_path", None)):
                while hasattr(path, "inner"):
                    path = path.inner
                if path is not None:
                    path.transport = RecordedTransport(path.transport, recorder, name)


class RecordedTransport(Transport):
    """Says which memory a collective reads and writes, and on which stream it would on a device.

    All-gathers and reduce-scatters run on the current stream, the others beside it; ``collectives/base.py``.
    """

    def __init__(self, inner: Transport, recorder: Recorder, name: str) -> None:
        self.name, self.rank, self.world_size = inner.name, inner.rank, inner.world_size
        self._inner = inner
        self._recorder = recorder
        self._name = name

    def allocate_key(self) -> int:
        return self._inner.allocate_key()

    def empty(self, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._inner.empty(numel, like, dtype)

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        # In this order: a shard that was copied is a part of the buffer.
        self._recorder.call(shard, f"the shard of {self._name}")
        self._recorder.call(buffer, f"the buffer of {self._name}")
        with self._recorder.quiet():
            pending = self._inner.begin_all_gather(buffer, shard, key)
        self._recorder.access("all_gather", reads=[shard], writes=[buffer])
        return _Here(pending, self._recorder, None)

    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        self._recorder.call(source, f"the gradient buffer of {self._name}")
        self._recorder.call(shard, f"the reduced shard of {self._name}")
        with self._recorder.quiet():
            pending = self._inner.begin_reduce_scatter(source, shard, key, scale=scale)
        self._recorder.access("reduce_scatter", writes=[source, shard])
        return _Here(pending, self._recorder, shard)

    def begin_all_reduce(self, tensor: torch.Tensor, key: int, *, scale: float = 1.0) -> Pending:
        with self._recorder.quiet():
            pending = self._inner.begin_all_reduce(tensor, key, scale=scale)
        return self._beside("all_reduce", tensor, pending)

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        with self._recorder.quiet():
            pending = self._inner.begin_broadcast(tensor, source_rank, key)
        return self._beside("broadcast", tensor, pending)

    def _beside(self, op: str, tensor: torch.Tensor, pending: Pending) -> Pending:
        beside = self._recorder.Stream(name="the transport's own stream")
        beside.wait_stream(self._recorder.current_stream())
        with self._recorder.stream(beside):
            self._recorder.access(op, writes=[tensor])
        return _Beside(pending, self._recorder, beside.record_event())


class _Here:
    """A collective on the stream where it was started; what scales its result comes with ``finish``."""

    def __init__(self, pending: Pending, recorder: Recorder, scaled: torch.Tensor | None) -> None:
        self._pending = pending
        self._recorder = recorder
        self._scaled = scaled

    def finish(self) -> None:
        with self._recorder.quiet():
            self._pending.finish()
        if self._scaled is not None:
            self._recorder.access("scale", writes=[self._scaled])
            self._scaled = None

    def is_over(self) -> bool:
        return True


class _Beside:
    def __init__(self, pending: Pending, recorder: Recorder, event: Event) -> None:
        self._pending = pending
        self._recorder = recorder
        self._event = event

    def finish(self) -> None:
        with self._recorder.quiet():
            self._pending.finish()
        self._recorder.current_stream().wait_event(self._event)

    def is_over(self) -> bool:
        return True
